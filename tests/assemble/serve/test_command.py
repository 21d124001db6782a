"""Commands as text: what a real shell makes of them is what was decided."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from assemble.serve.adapter import Adapter
from assemble.serve.command import MARK, Place, docker_command, script, vllm_command
from assemble.serve.deciding import Serving, Wish, decide
from assemble.serve.described import Described
from recipes.serve_profiles import load_profile

UGLY = '/models/it\'s "here" $HOME; `x`\\ é'
STUB = """#!/usr/bin/env python3
import json, os, sys
names = ("PYTORCH_CUDA_ALLOC_CONF", "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE")
print(json.dumps({"argv": sys.argv[1:], "environment": {n: os.environ[n] for n in names if n in os.environ}}))
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder with a `vllm` and a `docker` that say how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("vllm", "docker"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    return folder


def called(stub: Path, *command: str) -> dict[str, object]:
    environment = {"PATH": f"{stub}:{os.environ['PATH']}"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(result.stdout)


@pytest.fixture
def serving(dense_27b: Described) -> Serving:
    adapter = Adapter("ft", Path("/adapters/my one"), 16, None, 4, None, ())
    return decide(*load_profile("2x16gb-long-context"), dense_27b, "a 'name'", Wish(adapters=(adapter,)))


def test_a_shell_gets_the_words_that_were_decided(serving: Serving, stub: Path) -> None:
    command = vllm_command(serving, Place(UGLY, None, 9000))
    assert command.argv[:5] == ["vllm", "serve", UGLY, "--port", "9000"]
    assert command.argv[-1] == "bfloat16"
    found = called(stub, "bash", "-c", command.text())
    assert found == {"argv": command.argv[1:], "environment": command.environment}
    assert "ft=/adapters/my one" in command.argv


def test_the_script_runs_the_same_and_explains_itself(serving: Serving, stub: Path, tmp_path: Path) -> None:
    command = vllm_command(serving, Place(UGLY, None, 8000))
    path = tmp_path / "serve.sh"
    path.write_text(script(serving, command))
    found = called(stub, "bash", str(path), "--api-key", "x")
    assert found == {"argv": [*command.argv[1:], "--api-key", "x"], "environment": command.environment}
    text = " ".join(line.lstrip(" #") for line in path.read_text().splitlines())
    assert MARK.lstrip("# ") in text
    for flag in serving.flags:
        assert " ".join(flag.reason.split()) in text, flag.name
    for variable in serving.environment:
        assert " ".join(variable.reason.split()) in text


def test_docker_mounts_the_checkpoint_and_the_adapters(serving: Serving, stub: Path, tmp_path: Path) -> None:
    root = tmp_path / "my checkpoint"
    root.mkdir()
    command = docker_command(serving, Place(str(root), None, 9000))
    argv = called(stub, "bash", "-c", command.text())["argv"]
    assert argv == command.argv[1:]
    words = command.argv
    image = words.index("vllm/vllm-openai:v0.27.1")
    assert words[image + 1] == "/model"
    before, after = words[:image], words[image + 2 :]
    assert before[:4] == ["docker", "run", "--rm", "--gpus"]
    assert {f"{root}:/model:ro", "/adapters/my one:/lora/ft:ro", "9000:8000", "4g"} <= set(before)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in before
    assert after[after.index("--lora-modules") + 1] == "ft=/lora/ft"
    assert "--port" not in after
    found = script(serving, command)
    assert called(stub, "bash", "-c", found)["argv"] == argv
    assert docker_command(serving, Place(str(root), None, 8000), "my/image:1").argv.count("my/image:1") == 1


def test_docker_mounts_a_whole_cached_repository(serving: Serving, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    command = docker_command(serving, Place(str(snapshot), None, 8000))
    assert f"{repository}:/hub:ro" in command.argv
    assert f"/hub/snapshots/{'a' * 40}" in command.argv


def test_a_hub_id_is_pinned_and_its_token_is_not_told(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    place = Place("org/name", "b" * 40, 8000)
    assert shlex.split(vllm_command(serving, place).text().replace("\\\n", ""))[3:7] == [
        "serve",
        "org/name",
        "--revision",
        "b" * 40,
    ]
    command = docker_command(serving, place)
    assert "hf_secret" not in command.text()
    words = command.argv
    assert words[words.index("HF_TOKEN") - 1] == "-e"
    assert any(word.endswith(":/root/.cache/huggingface") for word in words)
