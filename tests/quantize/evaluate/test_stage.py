"""`run --evaluate`: the stage's record, its files, and a limit that is not kept."""

import json
from pathlib import Path

import pytest

from quantize.console import Reporter
from quantize.errors import CheckFailedError
from quantize.runner import run
from quantize.stage import Request
from recipes import loader
from recipes.loader import LoadedRecipe

TEXT = "".join(f"def area_{i}(width, height):\n    return width * height + {i}\n\n\n" for i in range(30))


def request_for(tiny: Path, calibration: Path, tmp_path: Path, limits: str) -> Request:
    data = tmp_path / "held-out.jsonl"
    data.write_text("".join(json.dumps({"text": TEXT[i * 90 :]}) + "\n" for i in range(3)))
    recipe = tmp_path / "own.yaml"
    recipe.write_text(loader.load("demo").text + f"evaluation:\n  rows: 2\n  tokens: 40\n{limits}")
    loaded: LoadedRecipe = loader.load(str(recipe))
    return Request(
        str(tiny), tmp_path / "out", loaded, calibration=calibration, device="cpu", evaluate=True, evaluation_data=data
    )


@pytest.fixture(autouse=True)
def few_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantize.evaluate.evaluation.PROMPTS", 1)


def test_the_record(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    request = request_for(tiny, calibration, tmp_path, "  max_kl: 1.0\n  max_outliers: 0\n  min_tokens_per_step: 1.0\n")
    outcome = run(request, Reporter())
    facts = outcome.records["evaluate"].facts
    assert facts["name"] == "out"
    assert facts["data"]["calibration"] == "disjoint"
    assert facts["data"]["rows"] == 2
    assert facts["outliers"] == []
    assert [(gate["name"], gate["passed"]) for gate in facts["gates"]] == [
        ("max_kl", True), ("min_tokens_per_step", True), ("max_outliers", True),
    ]  # fmt: skip
    assert set(facts["mtp"]["bodies"]) == {"bf16", "quantized"}
    assert str(tmp_path) not in json.dumps(facts)
    folder = request.workspace / "evaluate"
    assert set(outcome.records["evaluate"].outputs) == {
        "acceptance.png", "kl-histogram.png", "layer-error.png", "modules.jsonl", "prompts.jsonl", "report.json", "report.md",
    }  # fmt: skip
    assert json.loads((folder / "report.json").read_text())["quality"] == facts["quality"]


def test_a_limit_stops_the_run(tiny: Path, calibration: Path, tmp_path: Path) -> None:
    request = request_for(tiny, calibration, tmp_path, "  max_kl: 0.000001\n")
    with pytest.raises(CheckFailedError, match="max_kl is 1e-06, found"):
        run(request, Reporter())
    assert not request.out.exists()
    assert (request.workspace / "evaluate" / "report.md").is_file()
