"""Known messages are explained: those that a real vLLM printed on a CPU, and those of a GPU as its source words them."""

import json
from pathlib import Path
from typing import Any

import pytest

from assemble.rules.book import RULES
from assemble.verify import verify
from quantize.smoke.failures import EXPECTED, FAILURES, WARNINGS, Kind, explain
from quantize.smoke.passes import End, Pass
from quantize.smoke.report import FAIL
from quantize.smoke.verdict import verdict
from recipes.schema import Smoke
from tests.quantize.smoke.cases import CASES, Case, make
from tests.quantize.smoke.replay import RECORDED, failure

# Messages that take a GPU, another version or Docker, in the words of the source that failures.yaml names: kind, tab, message.
PRINTED = [line.split("\t") for line in (RECORDED / "messages.txt").read_text().splitlines()]


def failed(text: str, end: End = End.FAILED, detail: str = "", phase: str = "load") -> Pass:
    return Pass("plain", {"phase": phase}, f"INFO starting\n{text}\nINFO more\n", end, detail)


@pytest.mark.parametrize(("kind", "text"), PRINTED)
def test_what_a_gpu_machine_prints_is_told_apart(kind: str, text: str) -> None:
    why = explain(failed(text))
    assert (why.kind, why.message) == (Kind[kind], text.strip())
    assert why.cause
    assert why.remedy


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_real_vllm_said_is_explained(case: Case, tmp_path: Path, tiny: Path, request: pytest.FixtureRequest) -> None:
    kept = failure(RECORDED / "failures" / f"{case.name}.json")
    why = explain(kept)
    assert why.kind is case.kind, why
    assert case.word.lower() in why.message.lower()
    if case.rule:
        quantized = request.getfixturevalue("quantized").out
        root = make(case, quantized, tiny, tmp_path / "checkpoint")
        assert case.rule in {f.rule for f in verify(root).findings}
        loads = next(c for c in verdict(root, {"plain": kept}, Smoke(), "python").checks if c.name == "loads")
        assert loads.status == FAIL
        assert case.rule in loads.cause


def test_what_it_said_itself_comes_before_its_log() -> None:
    error = {"type": "ValueError", "message": "Mixed quant_algo within fused layer x", "traceback": ""}
    result = {"phase": "load", "error": error}
    why = explain(Pass("plain", result, "CUDA out of memory\n", End.FAILED))
    assert why.kind is Kind.CHECKPOINT


def test_an_engine_in_a_process_of_its_own_leaves_the_reason_in_the_log() -> None:
    error = {"type": "RuntimeError", "message": "Engine core initialization failed. See root cause above."}
    result = {"phase": "load", "error": error}
    why = explain(Pass("plain", result, "(EngineCore) ValueError: No available memory for the cache blocks.\n", End.FAILED))
    assert why.kind is Kind.MEMORY


def test_time_death_and_the_unknown_are_told_apart() -> None:
    assert explain(failed("", End.TIMEOUT, "not done within 30 min 00 s")).kind is Kind.TIMEOUT
    killed = explain(failed("", End.DIED, "ended by SIGKILL"))
    assert (killed.kind, "memory" in killed.cause) == (Kind.KILLED, True)
    assert "memory" not in explain(failed("", End.DIED, "ended by SIGSEGV")).cause
    unknown = explain(failed("something never seen"))
    assert (unknown.kind, "last line: INFO more" in unknown.message) == (Kind.UNFINISHED, True)
    raised = explain(failed("OddError: never seen", End.DIED, "ended with exit code 1"))
    assert (raised.kind, raised.message) == (Kind.UNKNOWN, "OddError: never seen")


def test_the_table_names_rules_that_exist_and_sources() -> None:
    rules = {rule.id for rule in RULES}
    rows: list[Any] = [*FAILURES, *WARNINGS, *EXPECTED]
    for row in rows:
        assert set(row.rules) <= rules, row
        assert row.source


def test_recordings_hold_no_path_of_a_machine() -> None:
    for path in RECORDED.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not [word for word in ("/work/", "/root/", "/home/", "/ckpt/") if word in text], path
            if path.suffix == ".json":
                json.loads(text)
