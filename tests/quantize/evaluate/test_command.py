"""The command and the stage, as a user meets them: files, tables, errors and exit codes."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantize.__main__ import app
from quantize.runner import Outcome
from tests.quantize.evaluate.editing import broken
from tests.quantize.evaluate.test_faults import L, not_a_number, scale

Run = Callable[..., tuple[int, str, str]]
FEW = ("--rows", "2", "--tokens", "40")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    rows = [
        f"import os\n\n\nclass Reader{i}:\n    def read(self, path):\n        return open(path).read()\n" * 4 for i in range(3)
    ]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def evaluate() -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
        return result.exit_code, result.stdout, result.stderr

    return run


def test_a_report(evaluate: Run, quantized: Outcome, tiny: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    code, shown, _ = evaluate(quantized.out, "--source", tiny, "--data", text, *FEW, "--no-mtp", "--out", out)
    assert code == 0, shown
    assert "nothing stands out" in shown
    assert "KL(BF16 || quantized), mean" in shown
    names = {"report.json", "report.md", "modules.jsonl", "prompts.jsonl", "layer-error.png", "kl-histogram.png", "log.txt"}
    assert {path.name for path in out.iterdir()} == names
    report = json.loads((out / "report.json").read_text())
    assert report["data"]["scored_tokens"] == 2 * 39
    assert sum(report["kl_histogram"]["tokens"]) == 2 * 39
    assert [layer["index"] for layer in report["layer_errors"]] == [0, 1, 2, 3]
    assert report["quality"]["kl_mean"]["low"] <= report["quality"]["kl_mean"]["value"] <= report["quality"]["kl_mean"]["high"]
    assert len((out / "modules.jsonl").read_text().splitlines()) == 26
    prompts = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [40, 40]
    mean = sum(prompt["nll"] for prompt in prompts) / 2
    assert mean == pytest.approx(report["quality"]["nll_quantized"]["value"])
    for plot in ("layer-error.png", "kl-histogram.png"):
        assert (out / plot).read_bytes().startswith(b"\x89PNG")
        assert f"({plot})" in (out / "report.md").read_text()


def test_several_are_compared(evaluate: Run, quantized: Outcome, tiny: Path, text: Path, tmp_path: Path) -> None:
    worse = broken(quantized.out, tmp_path / "worse", scale(f"{L}.1.mlp.down_proj.weight_scale_2", 1.5))
    out = tmp_path / "both"
    code, shown, _ = evaluate(worse, quantized.out, "--source", tiny, "--data", text, *FEW, "--no-mtp", "--out", out, "--json")
    assert code == 0
    facts = json.loads(shown)["checkpoints"]
    assert [f["name"] for f in facts] == ["worse", "out"]
    assert [o["where"] for o in facts[0]["outliers"]] == [f"{L}.1.mlp.down_proj"]
    assert facts[0]["quality"]["kl_mean"]["value"] > facts[1]["quality"]["kl_mean"]["value"]
    table = [line for line in (out / "comparison.md").read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in table] == ["| checkpoint", "| out", "| worse"]  # the best first
    assert re.search(r"\+0\.\d+ ± 0\.\d+", table[2])
    assert (out / "pareto.png").is_file()
    assert (out / "worse" / "report.md").is_file()


def test_numbers_that_are_not(evaluate: Run, quantized: Outcome, tiny: Path, text: Path, tmp_path: Path) -> None:
    spoilt = broken(quantized.out, tmp_path / "spoilt", not_a_number)
    code, shown, error = evaluate(spoilt, "--source", tiny, "--data", text, *FEW, "--out", tmp_path / "report")
    assert code == 0, error
    assert f"{L}.2.mlp.up_proj reads back as NaN or infinity" in shown
    assert "not finite" in shown
    assert "MTP head: not measured: the checkpoint's predictions are not numbers" in shown
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["quality"]["nll_quantized"]["value"] is None
    assert (tmp_path / "report" / "kl-histogram.png").is_file()


def test_the_source_itself(evaluate: Run, tiny: Path, text: Path, tmp_path: Path) -> None:
    code, shown, error = evaluate(tiny, "--source", tiny, "--data", text, *FEW, "--no-mtp", "--out", tmp_path / "report")
    assert code == 0, error
    assert "100.00%" in shown
    assert "nothing stands out" in shown


def test_a_limit_that_is_not_kept(evaluate: Run, quantized: Outcome, tiny: Path, text: Path, tmp_path: Path) -> None:
    from recipes import loader

    recipe = tmp_path / "strict.yaml"
    recipe.write_text(loader.load("demo").text + "evaluation:\n  max_kl: 0.000001\n  max_outliers: 0\n")
    arguments = (quantized.out, "--source", tiny, "--data", text, *FEW, "--no-mtp", "--out", tmp_path / "report")
    code, shown, error = evaluate(*arguments, "--recipe", recipe)
    assert code == 1
    assert "max_kl is 1e-06, found 0.0" in error
    assert "NOT KEPT" in shown
    assert (tmp_path / "report" / "report.md").is_file()


def test_what_cannot_be(
    evaluate: Run, quantized: Outcome, tiny: Path, tiny_moe: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    cases = {
        (): "give a CHECKPOINT",
        (quantized.out,): "give a CHECKPOINT, and with --source",
        (quantized.out, "--source", tiny_moe, "--data", text): "was not made of",
        (quantized.out, "--source", quantized.out, "--data", text): "is quantized itself",
        (quantized.out, "--source", tiny): "no held-out text: the recipe's dataset",
        (quantized.out, "--source", tiny, "--data", tmp_path / "absent.jsonl"): "does not exist",
        (quantized.out, "--source", tiny, "--data", text, "--out", quantized.out): "is a checkpoint's folder",
        (quantized.out, "--source", tiny, "--data", text, "--cast-head", "INT4"): "FP8 or NVFP4",
        (quantized.out, "--source", tiny, "--tasks", "gsm8k"): "--tasks is for a server: give its --endpoint",
        (quantized.out, "--source", tiny, "--endpoint", "http://127.0.0.1:9/v1"): "Give either",
        (tmp_path / "nothing", "--source", tiny, "--data", text): "does not exist",
    }
    for arguments, expected in cases.items():
        out = () if "--out" in arguments else ("--out", tmp_path / "report")
        code, _, error = evaluate(*arguments, *out)
        assert code == 2, (arguments, error)
        assert expected in error, (arguments, error)
