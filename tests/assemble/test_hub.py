"""A checkpoint on the Hub, verified without downloading it: the same findings, a few kilobytes, counted."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from assemble.__main__ import app
from assemble.checkpoint import INDEX, Checkpoint
from assemble.commands.examining import examine
from assemble.hub import HEADER_BYTES, open_mirror, remote_shards
from assemble.hub_errors import HubError
from assemble.reader import Span
from assemble.verify import verify
from quantize.runner import Outcome
from tests.loopback_hub import LoopbackHub, Request, loopback_hub

ID = "org/quantized"
TOKEN = "hf_thisTokenMustNeverBeSeen"  # noqa: S105 - not a secret
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(quantized: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A Hub that has our finished checkpoint, which this process is connected to."""
    with loopback_hub() as made:
        made.connect(monkeypatch, tmp_path / "home")
        made.add(ID, quantized.out)
        yield made


@pytest.fixture
def broken(hub: LoopbackHub, quantized: Outcome, tmp_path: Path) -> Path:
    """A copy of the checkpoint to break; `hub.add(ID, broken)` publishes it."""
    return Path(shutil.copytree(quantized.out, tmp_path / "broken"))


def contents(hub: LoopbackHub) -> list[Request]:
    """The requests for files' contents."""
    return [r for r in hub.requests if r.method == "GET" and "/resolve/" in r.path]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


def edit(path: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_sound_checkpoint_costs_its_headers(hub: LoopbackHub, quantized: Outcome) -> None:
    done = command(ID)
    assert done.exit_code == 0, done.output
    assert f"{ID}: sound" in done.stdout
    asked = contents(hub)
    assert all(r.range for r in asked)
    shards = [r for r in asked if r.path.endswith(".safetensors")]
    assert {r.path.rpartition("/")[2] for r in shards} == {FIRST, SECOND}
    assert sum(r.sent for r in shards) < 4 * HEADER_BYTES < sum(p.stat().st_size for p in quantized.out.glob("*.safetensors"))
    fetched = sum(r.sent for r in asked)
    total = sum(p.stat().st_size for p in quantized.out.iterdir())
    sizes = f"fetched {fetched} bytes ({fetched / 1e6:.2f} MB of {total / 1e6:.2f} MB) in {len(asked)} requests"
    assert f"commit {hub.repos['model', ID].refs['main']}: {sizes}" in done.stdout.replace("\n", " ")
    report = json.loads(command(ID, "--json").stdout)
    assert report["checkpoint"] == ID
    assert report["hub"]["fetched_bytes"] == fetched == sum(r.sent for r in contents(hub)[len(asked) :])


def test_the_tokenizer_is_looked_at_and_not_fetched(hub: LoopbackHub, broken: Path) -> None:
    path = broken / "tokenizer.json"
    path.write_bytes(path.read_bytes().rstrip()[:-1] + b" " * 20_000_000 + b"}")  # a real model's size
    hub.add(ID, broken)
    assert command(ID).exit_code == 0
    assert sum(r.sent for r in hub.sent("tokenizer.json")) == 128
    path.write_bytes(path.read_bytes()[:-100])
    hub.add(ID, broken)
    assert "cut off" in command(ID).stdout


def unequal_scales(root: Path) -> None:
    """gate_proj and up_proj of one layer get different tensor scales: four bytes that no header shows."""
    made = Checkpoint.open(root)
    tensor = made["model.language_model.layers.2.mlp.up_proj.weight_scale_2"]
    with made.path_of(tensor).open("rb+") as file:
        file.seek(tensor.start)
        file.write(b"\x00\x00\x80\x3f")


def no_shard(root: Path) -> None:
    (root / SECOND).unlink()


def no_head_in_index(root: Path) -> None:
    edit(root / INDEX, lambda index: [index["weight_map"].pop(n) for n in list(index["weight_map"]) if n.startswith("mtp.")])


def cut_shard(root: Path) -> None:
    with (root / FIRST).open("rb+") as file:
        file.truncate((root / FIRST).stat().st_size - 10)


def huge_header(root: Path) -> None:
    with (root / FIRST).open("rb+") as file:
        file.write((2**40).to_bytes(8, "little"))


def shard_outside(root: Path) -> None:
    edit(root / INDEX, lambda index: index["weight_map"].update({"mtp.fc.weight": "../outside.safetensors"}))


def no_kv_scheme(root: Path) -> None:
    edit(root / "config.json", lambda config: config["quantization_config"].pop("kv_cache_scheme"))


def broken_index(root: Path) -> None:
    (root / INDEX).write_text("{")


def a_file_of_another_kind(root: Path) -> None:
    (root / "consolidated.safetensors").write_bytes(b"\x00" * 100)


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        (unequal_scales, "Q-6"),
        (no_shard, "IDX-1"),
        (no_head_in_index, "IDX-2"),
        (cut_shard, "IDX-4"),
        (huge_header, "IDX-4"),
        (shard_outside, "IDX-2"),
        (no_kv_scheme, "CFG-8"),
        (broken_index, "IDX-2"),
        (a_file_of_another_kind, "IDX-5"),
    ],
)
def test_the_findings_are_those_of_the_directory(
    hub: LoopbackHub, broken: Path, fault: Callable[[Path], None], rule: str
) -> None:
    fault(broken)
    hub.add(ID, broken)
    found = examine(ID).report.findings
    assert rule in {f.rule for f in found}
    local = verify(broken).findings
    here = str(broken)
    assert found == tuple(
        dataclasses.replace(f, found=f.found.replace(here, ID), mend=f.mend.replace(here, "DIR")) for f in local
    )
    assert sum(r.sent for r in contents(hub)) < 600_000


def test_a_long_header_comes_in_two_requests(hub: LoopbackHub, broken: Path) -> None:
    path = broken / SECOND
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end]) | {"__metadata__": {"format": "pt", "note": "x" * 3 * HEADER_BYTES}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    commit = hub.add(ID, broken)
    assert remote_shards(ID, commit, [FIRST, SECOND]) == Checkpoint.open(broken).shards
    assert [r.range for r in hub.sent(SECOND)] == [f"bytes=0-{HEADER_BYTES - 1}", f"bytes={HEADER_BYTES}-{len(text) + 7}"]
    assert {r.path.rpartition("/")[2] for r in contents(hub)} == {FIRST, SECOND}


def test_values_are_fetched_once_and_neighbours_together(hub: LoopbackHub, quantized: Outcome) -> None:
    made = Checkpoint.open(quantized.out)
    far = sorted((t for t in made.values() if t.shard == FIRST and t.start > HEADER_BYTES), key=lambda t: t.start)
    spans = [Span.of(t) for t in (far[-1], far[0], far[1], far[-1])]
    with open_mirror(ID, None) as mirror:
        asked, before = len(contents(hub)), mirror.fetched_bytes
        assert mirror.read(spans) == [made.read(t.name) for t in (far[-1], far[0], far[1], far[-1])]
        assert len(contents(hub)) == asked + 2
        assert mirror.fetched_bytes - before == sum(r.sent for r in contents(hub)[asked:])
        mirror.read(spans)
        assert len(contents(hub)) == asked + 2
        assert mirror.requests == asked + 2
    assert not mirror.root.exists()


@pytest.mark.parametrize("resets", [False, True])
def test_a_transfer_that_breaks_off_goes_on_where_it_was(hub: LoopbackHub, quantized: Outcome, resets: bool) -> None:
    hub.drops[FIRST], hub.resets = 2, resets
    result = examine(ID)
    assert result.report.findings == verify(quantized.out).findings
    assert len(hub.sent(FIRST)) > 2
    if not resets:  # what was under way when a connection is reset may be lost
        assert result.fetched is not None
        assert result.fetched["fetched_bytes"] == sum(r.sent for r in contents(hub))


def test_a_hub_in_trouble_is_asked_again(hub: LoopbackHub) -> None:
    commit = hub.repos["model", ID].refs["main"]
    with open_mirror(ID, commit) as mirror:
        hub.errors = 1
        mirror.fetch([Span(FIRST, 200_000, 200_004)])
    assert not hub.errors


def test_a_server_that_sends_whole_files(hub: LoopbackHub, quantized: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = hub.answer

    def ignores_ranges(request: Request, body: bytes) -> object:
        request.range = None
        return answer(request, body)

    monkeypatch.setattr(hub, "answer", ignores_ranges)
    found = examine(ID)
    assert found.report.findings == verify(quantized.out).findings
    assert found.fetched is not None
    assert found.fetched["fetched_bytes"] <= sum(r.sent for r in contents(hub))  # the rest of a file is not waited for
    monkeypatch.setattr("assemble.hub.WHOLE_BYTES", 1_000_000)
    with pytest.raises(HubError, match=r"does not send parts of files \(model-.*\)\. Download the checkpoint instead"):
        examine(ID)


def test_a_revision_and_a_gated_repository(hub: LoopbackHub, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_shard(broken)
    hub.add(ID, broken, branch="wrong")
    assert command(ID).exit_code == 0
    wrong = command(ID, "--revision", "wrong")
    assert wrong.exit_code == 1
    assert "python -m assemble repair DIR" in wrong.stdout
    assert f"hf download {ID} --local-dir DIR" in wrong.stdout
    hub.repos["model", ID].gated = True
    refused = command(ID)
    assert refused.exit_code == 2
    assert f"{ID} is gated" in refused.stderr
    hub.tokens.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    opened = command(ID)
    assert opened.exit_code == 0
    assert TOKEN not in opened.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["org/absent"], "org/absent is neither a local directory nor a repository"),
        ([ID, "--revision", "v9"], f"{ID} has no revision 'v9'"),
        ([ID, "--deep"], f"hf download {ID}"),
        ([ID, "--source", "."], f"hf download {ID}"),
        (["."], ""),
        (["no/such/place"], "no/such/place is not a directory"),
        ([".", "--revision", "main"], "--revision is for a Hub id"),
        (["org/data"], "org/data has no config.json"),
    ],
)
def test_what_cannot_be_read_is_said(hub: LoopbackHub, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.md").write_text("no model")
    hub.add("org/data", tmp_path / "data")
    done = command(*arguments)
    assert done.exit_code == (2 if said else 1)
    assert said in done.stderr
    assert not hub.files_sent() & {FIRST, SECOND} or "--deep" in arguments or "--source" in arguments


def test_offline(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.go_offline(monkeypatch)
    done = command(ID)
    assert done.exit_code == 2
    assert "offline mode is on (HF_HUB_OFFLINE)" in done.stderr
    assert not hub.requests
