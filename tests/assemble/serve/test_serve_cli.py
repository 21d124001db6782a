"""`serve` and `profiles` as a user meets them: what goes where, how they end, and that --exec becomes the server."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from assemble.__main__ import app
from assemble.serve import commands_that_fit
from quantize.runner import Outcome
from tests.assemble.checkpoints import Copy
from tests.assemble.serve.test_adapter import pair, write
from tests.assemble.serve.test_command import STUB
from tests.loopback_hub import loopback_hub


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if path is not None:
        environment["PATH"] = f"{path}:{environment['PATH']}"
    command = [sys.executable, "-m", "assemble", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def invoke(*arguments: str) -> Result:
    """The same in this process: a second quicker."""
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def root(headers: Callable[..., Path]) -> Path:
    return headers("27B")


def test_the_command_alone_is_on_stdout(root: Path) -> None:
    result = run("serve", str(root), "--profile", "2x16gb-long-context")
    assert result.returncode == 0, result.stderr
    expected = next(c for c in commands_that_fit(root) if c.profile == "2x16gb-long-context").command
    assert result.stdout == expected + "\n"
    assert "2x16gb-long-context: one long conversation" in result.stderr
    assert "KV pool 15" in result.stderr
    assert "warning" not in result.stderr


def test_json_says_everything(root: Path) -> None:
    result = invoke("serve", str(root), "--profile", "96gb", "--name", "mine", "--json", "--", "--api-key", "x y")
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert found["argv"] == shlex.split(found["command"].replace("\\\n", ""))
    assert found["argv"][-2:] == ["--api-key", "x y"]
    assert found["argv"][4] == "mine"
    assert set(found["reasons"]) >= {word for word in found["argv"] if word.startswith("--")}
    assert found["fit"]
    assert (found["context"], found["vllm"]) == (131072, "0.27.1")


def test_exit_codes(root: Path, headers: Callable[..., Path], tmp_path: Path) -> None:
    refused = invoke("serve", str(headers("27B", quantized=False)), "--profile", "32gb")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: it does not fit 32gb: ")
    for arguments, message in [
        (("serve", str(root), "--profile", "33gb"), "no serve profile named '33gb'; did you mean 32gb?"),
        (("serve", str(tmp_path / "absent"), "--profile", "32gb"), "is not a directory"),
        (("serve", str(tmp_path), "--profile", "32gb"), "config.json"),
        (("serve", str(root), "--profile", "32gb", "--gpus", "lots"), "--gpus"),
        (("serve", str(root), "--profile", "32gb", "--lora", "x"), "give a name and a directory"),
        (("profiles", "x"), "no serve profile named 'x'"),
    ]:
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.stderr
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_without_a_profile_it_says_which_fit(root: Path) -> None:
    result = invoke("serve", str(root))
    assert result.exit_code == 0
    assert result.stderr == f"next: python -m assemble serve {root} --profile 2x16gb-long-context\n"
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["2x16gb-long-context", "150,000"] in [line[:2] for line in lines]
    found = json.loads(invoke("serve", str(root), "--json").stdout)
    assert [row["fits"] for row in found["profiles"]] == [True] * 5


def test_when_no_profile_fits_it_says_why_and_ends_with_1(headers: Callable[..., Path]) -> None:
    root = headers("27B", quantized=False)
    result = invoke("serve", str(root), "--gpus", "1x16GB")
    assert result.exit_code == 1
    assert result.stdout.count("does not fit: ") == 5
    assert "What would help" not in result.stdout
    assert "none fits" in result.stderr
    reasons = [row["reason"] for row in json.loads(invoke("serve", str(root), "--vllm", "0.20", "--json").stdout)["profiles"]]
    assert all(reasons)


def test_what_is_to_be_run_needs_a_profile(root: Path) -> None:
    for option in (("--docker",), ("--exec",), ("--script", "x.sh")):
        result = invoke("serve", str(root), *option, "--vllm", "0.27.1")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Give --profile, one of 2x16gb-long-context" in result.stderr


def test_exec_becomes_the_server(root: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text(STUB)
    (tmp_path / "vllm").chmod(0o755)
    result = run("serve", str(root), "--profile", "2x16gb-long-context", "--exec", "--", "--api-key", "x", path=tmp_path)
    assert result.returncode == 0, result.stderr
    *command, said = result.stdout.splitlines()
    found = json.loads(said)
    text = shlex.split("\n".join(command).replace("\\\n", ""))
    assert ["vllm", *found["argv"]] == [word for word in text if "=" not in word or word.startswith("{")]
    assert found["argv"][-2:] == ["--api-key", "x"]
    assert found["environment"]["VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"] == "67108864"


def test_exec_asks_the_installed_vllm_for_its_version(root: Path, tmp_path: Path) -> None:
    """A real environment's `vllm` script: pip's first line, and a distribution with a version."""
    site = tmp_path / "site"
    (site / "vllm-0.33.0.dist-info").mkdir(parents=True)
    (site / "vllm-0.33.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "vllm").write_text(STUB.replace("#!/usr/bin/env python3", f"#!{python}"))
    (tmp_path / "vllm").chmod(0o755)
    result = run("serve", str(root), "--profile", "96gb", "--exec", path=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "vLLM 0.33.0 on 1x 96 GB card" in result.stderr


def test_exec_does_not_start_a_broken_checkpoint(dense: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").write_text(STUB)
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    dense.drop(dense.names(".input_scale")[0])
    dense.save()
    arguments = ("serve", str(dense.root), "--profile", "2x16gb-throughput")
    assert invoke(*arguments).exit_code == 0, "only printed"
    result = invoke(*arguments, "--exec")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: not started: the checkpoint breaks 1 rule, first Q-3 at " in result.stderr


def test_a_hub_id_is_read_by_range_and_pinned(quantized: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with loopback_hub() as hub:
        hub.connect(monkeypatch, tmp_path / "home")
        commit = hub.add("org/tiny", quantized.out)
        result = invoke("serve", "org/tiny", "--profile", "96gb")
    assert result.exit_code == 0, result.stderr
    assert f"vllm serve org/tiny \\\n  --revision {commit} \\\n  --served-model-name tiny \\\n" in result.stdout
    whole = sum(path.stat().st_size for path in quantized.out.iterdir())
    assert sum(request.sent for request in hub.requests) < whole / 4


def test_exec_without_a_server(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("serve", str(root), "--profile", "96gb", "--exec")
    assert result.returncode == 1
    assert "vllm is not on PATH" in result.stderr


def test_a_script_is_written_and_nothing_else_is_overwritten(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    arguments = ("serve", str(root), "--profile", "96gb", "--script", str(path))
    assert invoke(*arguments).exit_code == 0
    assert os.access(path, os.X_OK)
    assert invoke(*arguments, "--docker").exit_code == 0
    assert "docker run" in path.read_text()
    path.write_text("mine")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "did not write it" in result.stderr
    assert path.read_text() == "mine"


def test_an_adapter_is_checked(root: Path, tmp_path: Path) -> None:
    shapes = pair("model.language_model.layers.0.mlp.gate_proj", 17408, 5120)
    write(tmp_path / "good", shapes, base_model_name_or_path="Qwen/Qwen-27B")
    result = invoke("serve", str(root), "--profile", "48gb-agents", "--lora", f"ft={tmp_path / 'good'}")
    assert result.exit_code == 0, result.stderr
    assert f"--lora-modules ft={tmp_path / 'good'}" in result.stdout
    assert "--max-lora-rank 8" in result.stdout
    write(tmp_path / "bad", pair("model.language_model.layers.0.mlp.gate_proj", 4096, 5120))
    result = invoke("serve", str(root), "--profile", "48gb-agents", "--lora", f"ft={tmp_path / 'bad'}")
    assert result.exit_code == 2
    assert "lora_B [4096, 8], expected [8, 5120] and [17408, 8]" in result.stderr


def test_profiles(root: Path) -> None:
    listed = invoke("profiles").stdout
    assert "2x16gb-long-context" in listed
    one = invoke("profiles", "48gb-agents").stdout
    for word in ("--max-lora-rank RANK", "--trust-remote-code", "--calculate-kv-scales", "left out"):
        assert word in one
    assert set(json.loads(invoke("profiles", "--json").stdout)) == {c.profile for c in commands_that_fit(root)}


def test_it_takes_little_time(root: Path) -> None:
    """CPU seconds, which other programs on the machine change least; the target is one second on the clock."""
    before = os.times()
    run("serve", str(root), "--profile", "96gb")
    after = os.times()
    assert (after.children_user - before.children_user) + (after.children_system - before.children_system) < 1.5
