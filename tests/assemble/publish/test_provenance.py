"""provenance.json against the files: one flipped bit anywhere is found and its file named; so is what is missing or extra."""

import json
import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from assemble.__main__ import app
from assemble.provenance import PROVENANCE, ProvenanceError, check_files, read_provenance
from quantize.runner import Outcome


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def names(outcome: Outcome) -> list[str]:
    return sorted(p.name for p in outcome.out.iterdir() if p.name != PROVENANCE)


def test_every_file_is_in_it_and_agrees(quantized: Outcome) -> None:
    record = read_provenance(quantized.out)
    assert record is not None
    assert sorted(record["files"]) == names(quantized)
    checked = check_files(quantized.out, record)
    assert not checked.findings
    assert dict(checked.digests) == record["files"]
    assert {name for name in record["inputs"] if name.startswith("model/")} >= {"model/config.json", "model/tokenizer.json"}


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_is_found_and_the_file_named(checkpoint: Path, quantized: Outcome, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    name = names(quantized)[seed % len(names(quantized))]
    data = bytearray((checkpoint / name).read_bytes())
    place = chance.randrange(len(data) * 8)
    data[place // 8] ^= 1 << place % 8
    (checkpoint / name).write_bytes(data)
    record = read_provenance(checkpoint)
    assert record is not None
    assert [(f.kind, f.name) for f in check_files(checkpoint, record).findings] == [("changed", name)]


def test_the_command_tells_all_of_it(checkpoint: Path) -> None:
    (checkpoint / "merges.txt").write_text("extra")
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "tokenizer_config.json").write_text("{}")
    (checkpoint / ".cache" / "huggingface").mkdir(parents=True)
    (checkpoint / ".cache" / "huggingface" / "x.metadata").touch()  # `hf download --local-dir` leaves these
    result = call("verify", checkpoint, "--provenance", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)["provenance"]
    assert {(f["kind"], f["file"]) for f in found["findings"]} == {
        ("extra", "merges.txt"), ("missing", "chat_template.jinja"), ("changed", "tokenizer_config.json"),
    }  # fmt: skip
    assert not found["ok"]


def test_without_one_there_is_nothing_to_compare_with(checkpoint: Path) -> None:
    (checkpoint / PROVENANCE).unlink()
    result = call("verify", checkpoint, "--provenance")
    assert result.exit_code == 2
    assert "nothing to compare with" in result.stderr


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside"])
def test_a_path_out_of_the_folder_is_not_followed(checkpoint: Path, name: str) -> None:
    record = json.loads((checkpoint / PROVENANCE).read_text())
    record["files"][name] = "0" * 64
    (checkpoint / PROVENANCE).write_text(json.dumps(record))
    with pytest.raises(ProvenanceError, match="outside the folder"):
        read_provenance(checkpoint)


def test_the_card_is_rendered_from_the_record_alone(checkpoint: Path, quantized: Outcome) -> None:
    for name in ("README.md", PROVENANCE):
        assert call("card", checkpoint).exit_code == 0
        assert (checkpoint / name).read_bytes() == (quantized.out / name).read_bytes()
    (checkpoint / "README.md").unlink()
    assert call("card", checkpoint).exit_code == 0
    assert (checkpoint / "README.md").read_bytes() == (quantized.out / "README.md").read_bytes()


def test_after_a_repair_the_card_says_so_and_no_more_than_is_so(checkpoint: Path, tiny: Path, tmp_path: Path) -> None:
    (checkpoint / "chat_template.jinja").unlink()
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.language_model.layers.0.mlp.up_proj")
    (checkpoint / "config.json").write_text(json.dumps(config))
    mended = tmp_path / "mended"
    assert call("repair", checkpoint, "--source", tiny, "--out", mended).exit_code == 0
    shutil.copyfile(tiny / "chat_template.jinja", mended / "chat_template.jinja")
    result = call("card", mended)
    assert result.exit_code == 0, result.output
    assert "facts from its files" in result.stdout
    card, record = (mended / "README.md").read_text(), read_provenance(mended)
    assert record is not None
    assert "The checkpoint was mended after it was made" in card
    assert "byte for byte" not in card
    assert "quantized with NVIDIA ModelOpt" in card
    assert not check_files(mended, record).findings
    assert call("verify", mended, "--provenance").exit_code == 0


def test_a_checkpoint_that_breaks_a_rule_gets_no_card(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (checkpoint / "config.json").write_text(json.dumps(config))
    before = (checkpoint / "README.md").read_bytes()
    result = call("card", checkpoint)
    assert result.exit_code == 1
    assert "not fit to serve" in result.stdout
    assert (checkpoint / "README.md").read_bytes() == before
