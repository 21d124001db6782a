"""Evaluation and card around a finished checkpoint: asked for later, stopped anywhere, failed, never at the weights' cost."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from assemble.__main__ import app as assemble_app
from assemble.errors import InputError
from assemble.provenance import check_files, read_provenance
from quantize.__main__ import app
from quantize.console import Reporter
from quantize.errors import CheckFailedError
from quantize.runner import Outcome, StaleRunError, run
from quantize.stage import Request, SmokeTarget, read_record
from quantize.stages import evaluate
from recipes import loader
from recipes.loader import LoadedRecipe
from tests.quantize.smoke.replay import replaying

SMALL = {"rows": 1, "tokens": 24, "num_speculative_tokens": 1}  # an evaluation of a second or two
STOPS = [
    ("kill", 1, r"replace .*/evaluate/stage\.json"),
    ("full", 1, r"replace .*/card/provenance\.json"),
    ("kill", 1, r"replace .*/released\.json"),
    ("kill", 2, r"unlink .*/collected/config\.json"),  # of the old folder, after the exchange; the first was the rest of before
    ("kill", 1, r"replace .*/released\.json"),  # that the exchange is over
]


def recipe(root: Path, **evaluation: object) -> Path:
    """The demonstration's recipe with a small evaluation, as a file."""
    path = root / "small.yaml"
    path.write_text(loader.load("demo").text + f"evaluation: {json.dumps(SMALL | evaluation)}\n")
    return path


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that is none of the calibration's."""
    path = tmp_path_factory.mktemp("heldout") / "heldout.jsonl"
    text = Path(shutil.__file__).read_text()
    path.write_text("".join(json.dumps({"text": text[start : start + 400]}) + "\n" for start in range(2000, 6000, 400)))
    return path


@pytest.fixture
def finished(quantized: Outcome, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change; its OUT."""
    shutil.copytree(quantized.out, tmp_path / "out")
    shutil.copytree(quantized.out.with_name("out.run"), tmp_path / "out.run")
    return tmp_path / "out"


@pytest.fixture
def request_for(finished: Path, tiny: Path, calibration: Path, held_out: Path, tmp_path: Path) -> Request:
    """Evaluates the finished run on a small part of the text."""
    loaded: LoadedRecipe = loader.load(str(recipe(tmp_path)))
    return Request(str(tiny), finished, loaded, None, None, calibration, "cpu", evaluate=True, evaluation_data=held_out)


def weights(out: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and content of every file that is no card."""
    names = [p for p in out.iterdir() if p.name not in ("README.md", "provenance.json") and p.suffix != ".png"]
    return {p.name: (p.stat().st_ino, p.read_bytes()) for p in names}


def test_evaluated_later_the_card_is_renewed_and_nothing_else(request_for: Request) -> None:
    out, before = request_for.out, weights(request_for.out)
    (out / "mine.txt").write_text("left alone")
    outcome = run(request_for, Reporter())
    assert not outcome.already_complete
    assert {n: v for n, v in weights(out).items() if n != "mine.txt"} == before  # the same files, not copies of them
    card = (out / "README.md").read_text()
    assert "Not evaluated" not in card
    assert "scored" in card
    for line in [line for line in card.splitlines() if line.startswith("![")]:
        assert (out / line.rpartition("(")[2].rstrip(")")).is_file()
    (out / "mine.txt").unlink()
    record = read_provenance(out)
    assert record is not None
    assert not check_files(out, record).findings
    assert "evaluate" in record["stages"]
    again = run(replace(request_for, evaluate=False, evaluation_data=None), Reporter())  # not asked for now: it still counts
    assert again.already_complete
    assert (out / "README.md").read_text() == card


def test_stopped_everywhere(request_for: Request, tmp_path: Path, quantized: Outcome) -> None:
    out, before = request_for.out, weights(request_for.out)
    for how, count, pattern in STOPS:
        done = start(how, count, pattern, request_for, tmp_path)
        assert done.returncode == {"kill": -9, "full": 1}[how], (pattern, done.stderr)
        assert weights(out) == before, pattern  # OUT is whole all the time
        record = read_provenance(out)
        assert record is not None
        assert not check_files(out, record).findings, pattern
    done = start("kill", 1, "never", request_for, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Not evaluated" not in (out / "README.md").read_text()
    assert weights(out) == before
    assert not list(tmp_path.glob("out.run/**/*.safetensors"))
    assert {p.name for p in tmp_path.iterdir()} == {"out", "out.run", "small.yaml"}


def start(how: str, count: int, pattern: str, request: Request, root: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["run", request.model, str(request.out), "--recipe", str(root / "small.yaml"), "--device", "cpu", "--evaluate"]
    arguments += ["--calibration", str(request.calibration), "--evaluation-data", str(request.evaluation_data)]
    command = [sys.executable, "-m", "tests.quantize.interrupting", how, str(count), pattern, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], env=environment)


def test_a_gate_that_fails_leaves_out_as_it_is_and_the_card_tells_later(request_for: Request, tmp_path: Path) -> None:
    out, card = request_for.out, (request_for.out / "README.md").read_text()
    strict = replace(request_for, recipe=loader.load(str(recipe(tmp_path, max_kl=1e-9))))
    with pytest.raises(CheckFailedError):
        run(strict, Reporter())
    assert (out / "README.md").read_text() == card
    assert (out.with_name("out.run") / "evaluate" / "report.json").is_file()
    run(replace(strict, evaluate=False, evaluation_data=None), Reporter())
    assert "The evaluation was run and **did not pass**" in (out / "README.md").read_text()
    assert str(tmp_path) not in (out / "README.md").read_text() + (out / "provenance.json").read_text()


@pytest.mark.parametrize("max_kl", [None, 1e-9], ids=["passes", "fails"])
def test_text_that_changes_while_it_is_read_is_refused(
    max_kl: float | None, request_for: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, real = tmp_path / "heldout.jsonl", evaluate.held_out
    shutil.copy(str(request_for.evaluation_data), text)
    changes = {"max_kl": max_kl} if max_kl else {}
    wanted = replace(request_for, evaluation_data=text, recipe=loader.load(str(recipe(tmp_path, **changes))))

    def read_and_changed(*arguments: object) -> object:
        rows = real(*arguments)  # type: ignore[arg-type]
        with text.open("a") as file:
            file.write(json.dumps({"text": "more"}) + "\n")
        return rows

    monkeypatch.setattr(evaluate, "held_out", read_and_changed)
    with pytest.raises(InputError, match=r"changed while it was read:\n  data\.heldout\.jsonl: "):
        run(wanted, Reporter())
    assert {"stage.json", "failed.json"}.isdisjoint(path.name for path in (wanted.workspace / "evaluate").iterdir())


def test_a_smoke_test_that_fails_is_told_and_another_target_is_tried(request_for: Request, tmp_path: Path) -> None:
    """The recorded vLLM served the unquantized model: it does not say `modelopt_mixed`."""
    target = SmokeTarget(python=replaying(tmp_path))
    plain = replace(request_for, evaluate=False, evaluation_data=None)
    with pytest.raises(CheckFailedError, match="quantization"):
        run(replace(plain, smoke=target), Reporter())
    run(plain, Reporter())
    card = (request_for.out / "README.md").read_text()
    assert "A smoke test was run and **did not pass**" in card
    assert str(tmp_path) not in card + (request_for.out / "provenance.json").read_text()


def test_other_text_is_refused_with_the_way_out(request_for: Request, calibration: Path, tmp_path: Path) -> None:
    record_evaluation(request_for)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "other " * 200}) + "\n")
    with pytest.raises(StaleRunError) as refused:
        run(replace(request_for, evaluation_data=other), Reporter())
    assert "asked.data.other.jsonl: absent" in str(refused.value)
    assert f"remove {request_for.workspace / 'evaluate'} to do it anew" in str(refused.value)


def test_what_was_not_asked_for_is_not_imported() -> None:
    code = "import sys, quantize.runner; print([name for name in sys.modules if name.startswith('quantize.stages.')])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "quantize.stages.card" in found
    assert not [stage for stage in ("evaluate", "smoke", "publish") if f"quantize.stages.{stage}" in found]


def record_evaluation(request: Request) -> None:
    """A record of an evaluation whose folder is otherwise empty: for what is decided before it would be looked into."""
    from quantize.pipeline import PIPELINE
    from quantize.runner import _Run

    state = _Run(request, Reporter(), finished=True)
    stages = {stage.name: stage for stage in PIPELINE}
    for name in ("fetch", "plan", "calibrate", "quantize", "assemble", "verify"):
        record = read_record(request.workspace / name)
        assert record is not None
        state.records[name] = record
    identity = stages["evaluate"].identity(request, state.records, {})
    directory = request.workspace / "evaluate"
    directory.mkdir()
    replace(state.records["verify"], stage="evaluate", identity=identity, outputs={}).save(directory)


def test_a_card_that_was_made_anew_is_taken_and_a_written_one_is_not(request_for: Request) -> None:
    out, plain = request_for.out, replace(request_for, evaluate=False, evaluation_data=None)
    record = json.loads((out / "provenance.json").read_text())
    (out / "provenance.json").write_text(json.dumps(record | {"name": "another-name"}))
    assert CliRunner().invoke(assemble_app, ["card", str(out)]).exit_code == 0
    assert "vllm serve another-name" in (out / "README.md").read_text()
    run(plain, Reporter())
    assert "vllm serve out" in (out / "README.md").read_text()
    (out / "README.md").write_text("# mine\n")
    with pytest.raises(InputError, match=r"README\.md is not what this run made"):
        run(plain, Reporter())


def test_a_changed_out_is_refused_before_the_work(request_for: Request) -> None:
    config = request_for.out / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(InputError, match=r"config\.json is not what this run made"):
        run(request_for, Reporter())
    assert not (request_for.workspace / "evaluate").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--evaluation-data", "x.jsonl"], "--evaluation-data is for --evaluate"),
        (["--vllm-python", "python"], "are for --smoke"),
        (["--vllm-tp", "2"], "are for --smoke"),
        (["--smoke", "--vllm-endpoint", "http://x", "--vllm-tp", "2"], "Leave them out"),
        (["--smoke", "--vllm-python", "python3", "--vllm-args", "[]"], "--vllm-args must be a JSON object"),
        (["--public"], "are for --push"),
        (["--smoke", "--vllm-python", "p", "--vllm-image", "i"], "exclude each other"),
        (["--push", "name"], "no name of a repository"),
        (["--evaluate", "--evaluation-data", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], text: str, tiny: Path, calibration: Path, tmp_path: Path) -> None:
    options = ["--recipe", "demo", "--calibration", str(calibration), "--device", "cpu", *arguments]
    result = CliRunner().invoke(app, ["run", str(tiny), str(tmp_path / "out"), *options])
    assert result.exit_code == 2, result.output
    assert text in result.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_smoke_target_is_plain_text() -> None:
    assert SmokeTarget(image="vllm/vllm-openai:v0.26.0").identity == {
        "python": None, "image": "vllm/vllm-openai:v0.26.0", "endpoint": None, "tensor_parallel_size": "1", "engine": "{}",
    }  # fmt: skip
