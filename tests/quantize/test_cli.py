"""What people meet: flags, exit codes, output, and one clear paragraph for every bad input."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from assemble.__main__ import app as assemble_app
from benchmarks.headers import source_config_of, write_headers
from quantize.__main__ import app
from quantize.runner import Outcome

FLAGS = Path(__file__).with_name("flags.json")
Edit = Callable[[Path], None]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(result: Result, *texts: str) -> None:
    """Exit 2, one paragraph on stderr that holds each text, no traceback."""
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
    message = result.stderr
    assert message.startswith("error: ")
    assert len(message.strip().splitlines()) == 1, message
    for text in texts:
        assert text in message, message


def edit_json(name: str, change: Callable[[dict], object]) -> Edit:
    def edit(root: Path) -> None:
        data = json.loads((root / name).read_text())
        change(data)
        (root / name).write_text(json.dumps(data))

    return edit


def truncate(root: Path) -> None:
    shard = root / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1000)


def drop_from_index(data: dict) -> None:
    data["weight_map"] = {n: f for n, f in data["weight_map"].items() if "00002" not in f}


def copy_shard(root: Path) -> None:
    shutil.copyfile(root / "model-00001-of-00002.safetensors", root / "model-00003-of-00003.safetensors")
    edit_json("model.safetensors.index.json", lambda d: d["weight_map"].update({"x": "model-00003-of-00003.safetensors"}))(root)


def remove(name: str) -> Edit:
    return lambda root: (root / name).unlink()


def text_config(**values: object) -> Edit:
    return edit_json("config.json", lambda d: d["text_config"].update(values))


BAD_SOURCES: list[tuple[str, Edit, tuple[str, ...]]] = [
    ("no config", remove("config.json"), ("has no config.json",)),
    ("config not JSON", lambda root: (root / "config.json").write_text("{") and None, ("config.json is not valid JSON",)),
    ("shard missing", remove("model-00001-of-00002.safetensors"), ("model-00001-of-00002", "named in the index")),
    ("shard truncated", truncate, ("model-00002-of-00002", "cut off")),
    ("shard not in the index", edit_json("model.safetensors.index.json", drop_from_index), ("00002", "not in the index")),
    ("tensor in two shards", copy_shard, ("stored twice",)),
    ("unknown model_type", edit_json("config.json", lambda d: d.update(model_type="llama")), ("'llama'", "Qwen3.5")),
    ("other class", edit_json("config.json", lambda d: d.update(architectures=["X"])), ("architectures",)),
    ("a field missing", edit_json("config.json", lambda d: d["text_config"].pop("head_dim")), ("head_dim",)),
    ("layer_types too long", text_config(num_hidden_layers=3), ("layer_types has 4 entries",)),
    ("tied embeddings", edit_json("config.json", lambda d: d.update(tie_word_embeddings=True)), ("tied", "lm_head")),
    ("other shape", text_config(intermediate_size=1024), ("mlp.gate_proj.weight", "[512, 256]", "[1024, 256]")),
    ("no tokenizer", remove("tokenizer.json"), ("tokenizer.json",)),
    (
        "generation_config out of range",
        edit_json("generation_config.json", lambda d: d.update(top_p=2)),
        ("generation_config.json", "top_p", "2"),
    ),
    ("already quantized", edit_json("config.json", lambda d: d.update(quantization_config={"a": 1})), ("already quantized",)),
]


@pytest.mark.parametrize(("edit", "texts"), [b[1:] for b in BAD_SOURCES], ids=[b[0] for b in BAD_SOURCES])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_bad_source(command: str, edit: Edit, texts: tuple[str, ...], tiny: Path, calibration: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    edit(tmp_path / "model")
    refused(call(command, tmp_path / "model", tmp_path / "out", "--calibration", calibration), *texts)
    assert not list(tmp_path.glob("out*"))


def test_quantized_source(quantized: Outcome, calibration: Path, tmp_path: Path) -> None:
    refused(call("run", quantized.out, tmp_path / "out", "--calibration", calibration), "already quantized")


def test_no_head(make_variant: Callable[..., Path], tiny: Path, calibration: Path, tmp_path: Path) -> None:
    lost = make_variant(head="none")
    refused(call("plan", lost, "--calibration", calibration), "no MTP head", "--mtp-from")
    found = call("plan", lost, tmp_path / "out", "--calibration", calibration, "--mtp-from", tiny, "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["tensors"]["mtp.fc.weight"]["from"] == "copied from the head's checkpoint"


def test_head_of_another_size(make_variant: Callable[..., Path], tiny: Path, calibration: Path, tmp_path: Path) -> None:
    other = write_headers(tmp_path / "big", source_config_of("27B"))
    refused(
        call("plan", make_variant(head="none"), "--calibration", calibration, "--mtp-from", other),
        "mtp.fc.weight", "[5120, 10240]", "[256, 512]",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["nowhere", "out"], ("nowhere does not exist",)),
        (["MODEL", "MODEL"], ("lies inside MODEL",)),
        (["MODEL", "MODEL/out"], ("lies inside MODEL",)),
        (["MODEL", "EXISTS"], ("already exists",)),
        (["MODEL", "out", "--device", "cuda"], ("--device cuda",)),
        (["MODEL", "out", "--recipe", "demoo"], ("no recipe named 'demoo'", "did you mean demo?")),
        (["MODEL", "out", "--recipe", "BROKEN.yaml"], ("not valid YAML",)),
        (["MODEL", "out", "--recipe", "nowhere.yaml"], ("does not exist",)),
        (["MODEL", "out", "--revision", "main"], ("--revision is for a Hub id",)),
        (["MODEL", "out", "--mtp-from", "nowhere"], ("nowhere does not exist",)),
        (["MODEL", "out", "--calibration", "nowhere.jsonl"], ("nowhere.jsonl",)),
        (["MODEL", "out", "--calibration", "COLUMN.jsonl"], ("no column 'article'", "it has: body")),
        (["MODEL", "out", "--calibration", "FEW.jsonl"], ("fewer calibration tokens than asked", "num_samples")),
    ],
    ids=lambda value: " ".join(value[2:] or value) if isinstance(value, list) else "",
)
def test_bad_argument(
    arguments: list[str], texts: tuple[str, ...], tiny: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(tiny, "MODEL")
    Path("EXISTS").mkdir()
    Path("BROKEN.yaml").write_text("calibration: [")
    Path("COLUMN.jsonl").write_text('{"body": "text"}\n')
    Path("FEW.jsonl").write_text('{"text": "only a little"}\n')
    if "--calibration" not in arguments:
        arguments = [*arguments, "--calibration", str(calibration)]
    result = call("run", *arguments)
    if "fewer" in texts[0]:  # known once the text is tokenized: notes come before it
        assert result.exit_code == 2
        assert all(t in result.stderr.splitlines()[-1] for t in texts)
    else:
        refused(result, *texts)
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "LICENSE", "config.json", "model-00001-of-00002.safetensors"])
def test_a_link_out_of_the_folder_is_not_followed(name: str, tiny: Path, calibration: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "private").write_bytes((tiny / name).read_bytes() if (tiny / name).exists() else b"secret")
    (tmp_path / "model" / name).unlink(missing_ok=True)
    (tmp_path / "model" / name).symlink_to(tmp_path / "private")
    refused(call("run", tmp_path / "model", tmp_path / "out", "--calibration", calibration), name, "symbolic link")


def test_another_models_tokenizer(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    tokenizer = tmp_path / "model" / "tokenizer.json"
    data = json.loads(tokenizer.read_text())
    common = max(data["model"]["vocab"].values())  # the longest merge is rare: give the space's token a number out of range
    data["model"]["vocab"]["\u0120"] = common + 5000
    tokenizer.write_text(json.dumps(data))
    result = call("run", tmp_path / "model", tmp_path / "out", "--calibration", calibration, "--recipe", "demo")
    assert result.exit_code == 2, result.stderr
    assert "vocab_size is 2048" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = call("run", tiny, tmp_path / "file" / "out", "--calibration", calibration, "--recipe", "demo")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: Not a directory: " + str(tmp_path / "file"))


def test_not_enough_disk(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    layers = 64 * (2 + free // 20_000_000_000)
    huge = write_headers(tmp_path / "huge", source_config_of("27B", num_hidden_layers=layers))
    planned = call("plan", huge, tmp_path / "out", "--calibration", calibration)
    assert planned.exit_code == 2
    assert "error: not enough disk" in planned.stderr
    assert "NVFP4" in planned.stdout  # the plan is shown all the same: it may be for another machine
    result = call("run", huge, tmp_path / "out", "--calibration", calibration)
    assert (result.exit_code, list(tmp_path.glob("out*"))) == (2, [])
    assert result.stderr.splitlines()[-1].startswith("error: not enough disk")


def test_stale_run(tiny: Path, calibration: Path, quantized: Outcome, tmp_path: Path) -> None:
    shutil.copytree(quantized.out, tmp_path / "out")
    shutil.copytree(quantized.out.with_name("out.run"), tmp_path / "out.run")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(quantized_recipe().replace("num_samples: 16", "num_samples: 8"))
    result = call("run", tiny, tmp_path / "out", "--recipe", recipe, "--calibration", calibration)
    assert result.exit_code == 2
    assert "calibration.num_samples: 16 -> 8" in result.stderr


def quantized_recipe() -> str:
    from recipes.loader import SHIPPED

    return (SHIPPED / "demo.yaml").read_text()


@pytest.mark.parametrize(
    ("shape", "counts", "tensors", "source_bytes"),
    [
        ("27B", {"FP8": 208, "W4A16_NVFP4": 193}, 2001, 54_000_000_000),
        ("35B-A3B", {"FP8": 130, "W4A16_NVFP4": 161}, 93_627, 69_000_000_000),
    ],
)
def test_plan_of_true_shapes(
    shape: str, counts: dict, tensors: int, source_bytes: int, calibration: Path, tmp_path: Path
) -> None:
    root = write_headers(tmp_path / "source", source_config_of(shape))
    result = call("plan", root, tmp_path / "out", "--calibration", calibration, "--json", "--device", "cpu")
    plan = json.loads(result.stdout)
    assert plan["counts"] == counts
    assert len(plan["quantized_layers"]) == sum(counts.values())
    assert len(plan["tensors"]) == tensors
    assert sum(s["bytes"] for s in plan["shards"]) == plan["total_size"]
    needs = plan["needs"]
    assert needs["memory_needed"] < source_bytes / 2  # a layer at a time, whatever the model's size
    assert result.exit_code == (2 if plan["problems"] else 0)
    short_of_memory = needs["weights_needed"] > needs["memory_available"]
    assert any("two decoder layers" in p for p in plan["problems"]) == short_of_memory


@pytest.mark.parametrize(("base", "published"), [("Qwen3.5-27B", "Qwen3.6-27B"), ("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B")])
def test_plan_lists_what_nvidia_lists(base: str, published: str, reference: Path, calibration: Path, tmp_path: Path) -> None:
    root = write_headers(tmp_path / "source", json.loads((reference / f"{base}.json").read_text()))
    result = call("plan", root, tmp_path / "out", "--calibration", calibration, "--json", "--device", "cpu")
    theirs = json.loads((reference / f"nvidia--{published}-NVFP4_config.json").read_text())["quantization_config"]
    assert json.loads(result.stdout)["quantized_layers"] == {m: e["quant_algo"] for m, e in theirs["quantized_layers"].items()}


@pytest.mark.parametrize(("model", "layers"), [("Qwen3.5-122B-A10B", 48), ("Qwen3.5-397B-A17B", 60)])
def test_plan_covers_what_nvidia_names_in_larger_models(
    model: str, layers: int, reference: Path, calibration: Path, tmp_path: Path
) -> None:
    """NVIDIA quantizes these two by another recipe; its ignore list names the layers of each kind and the shared experts."""
    config = json.loads((reference / f"nvidia--{model}-NVFP4_config.json").read_text())
    ignore = config.pop("quantization_config")["ignore"]
    config["text_config"]["num_experts"] = 8  # listed once a layer, however many there are
    root = write_headers(tmp_path / "source", config)
    plan = json.loads(call("plan", root, tmp_path / "out", "--calibration", calibration, "--json", "--device", "cpu").stdout)

    def theirs(part: str) -> set[str]:
        return {e.removesuffix("*") for e in ignore if e.startswith("model.") and e.removesuffix("*").endswith(part)}

    def ours(part: str, scheme: str) -> set[str]:
        return {m.partition(part)[0] + part for m, s in plan["quantized_layers"].items() if part in m and s == scheme}

    assert ours(".linear_attn", "FP8") == theirs(".linear_attn")
    assert ours(".self_attn", "FP8") == theirs(".self_attn")
    assert ours(".mlp.shared_expert", "W4A16_NVFP4") == theirs(".mlp.shared_expert")
    assert len(ours(".mlp.experts", "W4A16_NVFP4")) == layers
    assert plan["counts"] == {"FP8": layers * 3 * 3 // 4 + layers, "W4A16_NVFP4": 4 * layers + 1}


def test_help_and_plan_are_quick_and_import_no_torch(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from quantize.__main__ import app;"
        "r = CliRunner().invoke(app, sys.argv[1:]);"
        "print(r.exit_code, [m for m in ('torch', 'transformers', 'modelopt', 'datasets') if m in sys.modules])"
    )
    for arguments in (["--help"], ["plan", str(tiny), str(tmp_path / "out"), "--calibration", str(calibration)]):
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "0 []"
        assert time.monotonic() - started < 20  # about 0.5 s on an idle machine; the bound is for a crowded one


def test_run_json_and_status(tiny: Path, calibration: Path, quantized: Outcome) -> None:
    out = quantized.out
    result = call("run", tiny, out, "--recipe", "demo", "--calibration", calibration, "--device", "cpu", "--json")
    summary = json.loads(result.stdout)
    assert summary["already_complete"]
    assert summary["counts"] == {"FP8": 13, "W4A16_NVFP4": 13}
    status = json.loads(call("status", out, "--json").stdout)
    assert status["complete"]
    states = {s["stage"]: s["state"] for s in status["stages"]}
    optional = {"evaluate", "smoke", "publish"}
    assert {name for name, state in states.items() if state == "not asked for"} == optional
    assert {state for name, state in states.items() if name not in optional} == {"done"}
    refused(call("status", out.with_name("nothing")), "no run is recorded")


def test_a_run_says_its_own_lines_only(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantize", "run", str(tiny), str(tmp_path / "out"), "--recipe", "demo", "--device", "cpu"]
    done = subprocess.run([*command, "--calibration", str(calibration)], capture_output=True, text=True, check=True)
    said = {line.partition(":")[0] for line in done.stderr.splitlines()}
    assert said <= {"note", "fetch", "plan", "calibrate", "quantize", "assemble", "verify", "card"}, done.stderr
    chatter = (tmp_path / "out.run" / "quantize" / "log-0.txt").read_text()
    assert "flash-linear-attention" in chatter, "what transformers says is for the curious"


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_is_no_failure(closed: str, quantized: Outcome) -> None:
    command = f"exec {sys.executable} -m quantize status {quantized.out} --json {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = call("run", tmp_path / "nowhere", tmp_path / "out", "--debug")
    assert isinstance(result.exception, ValueError)


def test_flags_are_frozen() -> None:
    """A changed command line breaks people's scripts: change flags.json knowingly."""
    flags = {}
    for name, command in (("quantize", app), ("assemble", assemble_app)):
        group = typer.main.get_command(command)
        for sub, parameters in sorted((n, c.params) for n, c in group.commands.items()):  # type: ignore[attr-defined]
            flags[f"{name} {sub}"] = sorted(
                o for p in parameters for o in (p.opts if p.param_type_name == "option" else [p.name])
            )
    assert flags == json.loads(FLAGS.read_text())
