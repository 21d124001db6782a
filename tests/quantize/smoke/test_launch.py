"""Starting, watching and ending the runner: with programs that stand where a vLLM environment would."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assemble.errors import InputError
from quantize.console import Reporter
from quantize.smoke import launch
from quantize.smoke.failures import Kind, explain
from quantize.smoke.launch import Container, Interpreter, check_place, here, prepare, run_pass, run_passes
from quantize.smoke.passes import End
from quantize.smoke.prompts import bundled_prompts
from quantize.smoke.settings import RUNNER, Ask
from recipes.schema import Smoke
from tests.quantize.smoke.replay import interpreter, replaying


@pytest.fixture
def ask(tiny: Path) -> Ask:
    return Ask(tiny, Smoke(), bundled_prompts())


def test_both_passes_run_and_are_kept(ask: Ask, tmp_path: Path) -> None:
    passes = run_passes(Interpreter(replaying(tmp_path)), ask, tmp_path / "run", 60, Reporter())
    assert [one.end for one in passes.values()] == [End.FINISHED, End.FINISHED]
    assert passes["mtp"].result["speculation"]["drafts"] > 0
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"plain.json", "plain.log", "plain.settings.json", "mtp.json", "mtp.log", "mtp.settings.json"} == kept
    asked = [json.loads((tmp_path / "run" / f"{name}.settings.json").read_text()) for name in ("plain", "mtp")]
    assert [a["speculative"] for a in asked] == [None, {"method": "mtp", "num_speculative_tokens": 2}]
    assert [a["nll"] for a in asked] == [True, False]


def test_the_real_runner_without_a_vllm_says_so(ask: Ask, tmp_path: Path) -> None:
    one = run_pass(Interpreter(Path(sys.executable)), ask, "plain", tmp_path, 60, Reporter())
    assert one.end is End.FAILED
    why = explain(one)
    assert (why.kind, "vllm" in why.message) == (Kind.VERSION, True)
    assert "Traceback" in (tmp_path / "plain.log").read_text()


def test_a_checkpoint_that_does_not_load_is_not_tried_twice(ask: Ask, tmp_path: Path) -> None:
    passes = run_passes(Interpreter(Path(sys.executable)), ask, tmp_path, 60, Reporter())
    assert list(passes) == ["plain"]


def test_its_time_over_it_is_ended_with_all_its_children(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    body = (
        "result = pathlib.Path(sys.argv[3])\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, 1); time.sleep(600)'])\n"
        "result.with_name('child').write_text(str(child.pid))\n"
        "result.write_text(json.dumps({'protocol': 1, 'phase': 'load', 'ok': False}))\n"
        "print('loading', flush=True)\n"
        "time.sleep(600)"
    )
    started = time.monotonic()
    one = run_pass(Interpreter(interpreter(tmp_path, body)), ask, "plain", tmp_path, 3, Reporter())
    assert time.monotonic() - started < 60
    assert one.end is End.TIMEOUT
    why = explain(one)
    assert (why.kind, "loading" in why.cause) == (Kind.TIMEOUT, True)
    assert "loading" in one.log
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("body", "detail"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"), ("sys.exit(7)", "exit code 7")],
)
def test_a_death_without_a_word_is_told(ask: Ask, tmp_path: Path, body: str, detail: str) -> None:
    one = run_pass(Interpreter(interpreter(tmp_path, body)), ask, "plain", tmp_path, 60, Reporter())
    assert (one.end, detail in one.detail) == (End.DIED, True)
    assert explain(one).kind is Kind.KILLED


def test_an_old_result_is_not_taken_for_a_new_one(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text('{"protocol": 1, "ok": true, "phase": "done"}')
    assert run_pass(Interpreter(interpreter(tmp_path, "sys.exit(1)")), ask, "plain", tmp_path, 60, Reporter()).end is End.DIED


def test_another_interpreter_is_not_led_to_our_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert "PYTHONPATH" not in Interpreter(tmp_path / "python").environment()
    assert Interpreter(Path(sys.executable)).environment()["PYTHONPATH"] == "/ours"


def test_what_is_not_there_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no such program"):
        check_place(Interpreter(tmp_path / "nothing"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="docker is not on the PATH"):
        check_place(Container())
    with pytest.raises(InputError, match="--vllm-python"):
        here()


def docker(tmp_path: Path, body: str) -> Path:
    record = f"pathlib.Path({str(tmp_path / 'calls')!r}).open('a').write(json.dumps(sys.argv[1:]) + chr(10))"
    path = interpreter(tmp_path, f"{record}\n{body}")
    return path.rename(tmp_path / "docker")


def calls(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def test_a_container_gets_what_it_needs_and_no_more(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path, "sys.exit(0)")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "run").mkdir()
    run_pass(Container("an/image:v1"), ask, "mtp", tmp_path / "run", 60, Reporter())
    (argv,) = calls(tmp_path)
    assert argv[:3] == ["run", "--rm", "--init"]
    volumes = [argv[i + 1] for i, word in enumerate(argv) if word == "--volume"]
    assert volumes == [
        f"{ask.checkpoint}:{ask.checkpoint}:ro",
        f"{RUNNER.parent}:{RUNNER.parent}:ro",
        f"{tmp_path / 'run'}:{tmp_path / 'run'}:rw",
    ]
    assert argv[argv.index("--gpus") + 1] == "all"
    image = argv.index("an/image:v1")
    assert argv[image - 2 : image] == ["--entrypoint", "python3"]
    assert argv[image + 1 :] == [
        str(RUNNER),
        str(tmp_path / "run/mtp.settings.json"),
        str(tmp_path / "run/mtp.json"),
        "--model",
        str(ask.checkpoint),
    ]
    assert "VLLM_USE_FLASHINFER_SAMPLER" in argv
    assert "secret" not in str(argv)
    assert "HF_TOKEN" not in argv


def test_a_container_is_killed_by_its_name(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path, "time.sleep(600 if sys.argv[1] == 'run' else 0)")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place = Container()
    assert run_pass(place, ask, "plain", tmp_path, 1.5, Reporter()).end is End.TIMEOUT
    assert calls(tmp_path)[1] == ["kill", place.name]


def test_docker_s_own_failures_are_explained(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].'
    docker(tmp_path, f"sys.stderr.write({text!r}); sys.exit(125)")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert explain(run_pass(Container(), ask, "plain", tmp_path, 60, Reporter())).kind is Kind.NO_GPU


def test_a_prepared_folder_runs_by_itself(ask: Ask, tmp_path: Path) -> None:
    *there, last = prepare(ask, tmp_path / "kit")
    assert last == f"python -m quantize smoke {ask.checkpoint} --result {tmp_path / 'kit'}"
    for line in there:
        command = line.replace("CHECKPOINT", str(ask.checkpoint)).split()
        assert command[0] == "python3"
        done = subprocess.run([sys.executable, "-I", *command[1:]], cwd=tmp_path / "kit", check=False, timeout=60)
        assert done.returncode == 1  # no vLLM here: the result says so
    assert json.loads((tmp_path / "kit/mtp.json").read_text())["error"]["message"] == "No module named 'vllm'"
