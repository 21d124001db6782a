"""The side of the second opinion that needs no vLLM: what is said when the interpreter is wrong, dies, or hangs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from assemble.vllm_load import VllmCrashError, VllmEnvironmentError, second_opinion, second_opinions

Interpreter = Callable[[str], Path]
VERSION = 'echo \'{"vllm": "0.0"}\''


def answer(*problems: tuple[str, str, int, str], tp: int = 1) -> str:
    """A shell command that prints one checkpoint's result: problems as (kind, part, rank, name)."""
    parts = [
        {
            "part": part,
            "rank": rank,
            "problems": [{"kind": k, "name": n, "detail": "so"} for k, p, r, n in problems if (p, r) == (part, rank)],
        }
        for rank in sorted({0, tp - 1})
        for part in ("target", "draft")
    ]
    return f"echo '{json.dumps({'tp': tp, 'parts': parts, 'seconds': 1.0, 'kv_cache': 'auto'})}'"


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    """Makes an executable that runs a shell script in an interpreter's place."""

    def make(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return make


def test_no_such_interpreter(tmp_path: Path) -> None:
    with pytest.raises(VllmEnvironmentError, match=r"nowhere cannot be run \(No such file or directory\).*make vllm-env"):
        second_opinion(tmp_path / "nowhere", tmp_path)


def test_not_an_interpreter(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("not a program")
    with pytest.raises(VllmEnvironmentError, match=r"Permission denied.*make vllm-env"):
        second_opinion(tmp_path / "python", tmp_path)


def test_no_vllm_in_it(tmp_path: Path) -> None:
    with pytest.raises(VllmEnvironmentError, match=r"No module named 'vllm'.*make vllm-env"):
        second_opinion(Path(sys.executable), tmp_path)


def test_the_process_dies(interpreter: Interpreter, tmp_path: Path) -> None:
    loads = [(tmp_path / "first", 1), (tmp_path / "second", 1)]
    python = interpreter(f"{VERSION}; {answer()}; echo 'out of luck' >&2; kill -SEGV $$")
    with pytest.raises(VllmCrashError, match=r"ended by SIGSEGV at .*second: out of luck"):
        second_opinions(python, loads)
    with pytest.raises(VllmCrashError, match=r"exit code 3 at .*first: it said nothing"):
        second_opinions(interpreter(f"{VERSION}; exit 3"), loads)


def test_the_process_hangs(interpreter: Interpreter, tmp_path: Path) -> None:
    loads = [(tmp_path / "first", 1), (tmp_path / "second", 1)]
    with pytest.raises(VllmCrashError, match=r"did not end within 1 s, at .*second"):
        second_opinions(interpreter(f"{VERSION}; {answer()}; exec sleep 60"), loads, timeout=-29.5)


def test_what_all_ranks_share_is_said_once(interpreter: Interpreter, tmp_path: Path) -> None:
    problems = [
        ("MISSING", "target", 0, "norm.weight"),
        ("MISSING", "target", 3, "norm.weight"),
        ("ERROR", "draft", 3, ""),
    ]
    opinion = second_opinion(interpreter(f"{VERSION}; {answer(*problems, tp=4)}"), tmp_path, 4)
    found = [(f.rule, f.where) for f in opinion.findings]
    assert found == [("VLLM-MISSING", "vLLM's target: norm.weight"), ("VLLM-ERROR", "vLLM's draft, rank 3 of 4")]
    assert opinion.refused
    assert not opinion.complete


def test_the_job_is_absolute_and_our_packages_stay_ours(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    python = interpreter(f'cat >job; echo "path=$PYTHONPATH" >>job; {VERSION}; {answer()}')
    opinion = second_opinion(python, Path("checkpoint"))
    assert opinion.complete
    job, path = (tmp_path / "job").read_text().split("path=")
    assert json.loads(job) == {"loads": [[str(tmp_path / "checkpoint"), 1]]}
    assert path == "\n"
