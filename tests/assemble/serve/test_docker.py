"""The image without an engine: its file parsed and linted, its steps run here, its entrypoint started with a stub `vllm`."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose
from dockerfile_parse import DockerfileParser

from recipes.serve_profiles import load_profile, shipped_profiles, version_facts
from recipes.vllm_release import IMAGE, RELEASE
from tests.assemble.serve.test_command import STUB
from tests.loopback_hub import loopback_hub

ROOT = Path(__file__).parents[3]
DOCKERFILE, COMPOSE, IGNORE = ROOT / "Dockerfile", ROOT / "compose.yaml", ROOT / ".dockerignore"
Step = dict[str, Any]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    parser = DockerfileParser(path=str(tmp_path_factory.mktemp("parse") / "Dockerfile"))
    parser.content = DOCKERFILE.read_text()
    return [step for step in parser.structure if step["instruction"] != "COMMENT"]


def stage(steps: list[Step], name: str) -> list[Step]:
    """The instructions of one stage."""
    starts = [i for i, step in enumerate(steps) if step["instruction"] == "FROM"]
    first = next(i for i in starts if steps[i]["value"].split()[-1] == name)
    return steps[first : min([i for i in starts if i > first], default=len(steps))]


def values(steps: list[Step], instruction: str) -> list[str]:
    return [step["value"] for step in steps if step["instruction"] == instruction]


def command(step: str) -> str:
    """A RUN instruction as the shell gets it, without BuildKit's mounts."""
    return re.sub(r"^(--mount=\S+\s+)+", "", step)


def test_it_is_linted() -> None:
    hadolint = shutil.which("hadolint") or str(Path(sys.executable).parent / "hadolint")
    result = subprocess.run([hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_base_and_the_profiles_are_of_one_release(steps: list[Step]) -> None:
    (base,) = (value for value in values(steps, "ARG") if value.startswith("BASE="))
    releases = {load_profile(name)[1].vllm.default for name in shipped_profiles()}
    assert releases == {RELEASE}
    assert base == f"BASE={IMAGE}"
    assert RELEASE in version_facts().read_in
    assert [value.split()[0] for value in values(steps, "FROM")] == ["${BASE}", "tool", "scratch", "tool"]


def test_the_token_is_in_no_layer(steps: list[Step]) -> None:
    (download,) = values(stage(steps, "download"), "RUN")
    assert download.startswith("--mount=type=secret,id=HF_TOKEN ")
    everything = " ".join(
        f"{s['instruction']} {s['value']}" for s in steps if s["instruction"] in ("ARG", "ENV", "LABEL", "COPY")
    )
    assert "TOKEN" not in everything
    assert values(stage(steps, "serve"), "COPY") == ["--from=checkpoint --chown=2000:0 / /checkpoint/"]


def test_it_runs_as_no_root_and_says_where_it_comes_from(steps: list[Step]) -> None:
    serve = stage(steps, "serve")
    order = [step["instruction"] for step in serve]
    assert values(serve, "USER") == ["2000:0"]
    assert order.index("USER") < len(order) - 1 - order[::-1].index("RUN"), "the checks run as the user that serves"
    labels = values(serve, "LABEL")[0]
    for key in ("base.name", "image.revision", "checkpoint.model", "checkpoint.revision", "checkpoint.provenance", "profile"):
        assert key in labels
    (health,) = values(serve, "HEALTHCHECK")
    assert "http://127.0.0.1:8000/health" in health
    assert values(serve, "EXPOSE") == ["8000"]


def run(text: str, moved: Mapping[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a step's shell text with its places moved into a directory of the test."""
    for place, here in moved.items():
        text = text.replace(place, here)
    given = {"PATH": os.environ["PATH"], "HOME": str(Path.home()), **environment}
    return subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=False, env=given)


def build_context(target: Path) -> Path:
    """What the build gets of this folder, by .dockerignore: nothing but what it lets through."""
    lines = [line for line in IGNORE.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    for name in (line[1:] for line in lines if line.startswith("!")):
        source = ROOT / name
        ignored = shutil.ignore_patterns(*(line.removeprefix("**/") for line in lines if line.startswith("**/")))
        (shutil.copytree if source.is_dir() else shutil.copy)(
            source, target / name, **({"ignore": ignored} if source.is_dir() else {})
        )
    return target


@pytest.fixture(scope="module")
def installed(steps: list[Step], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tool stage's steps, run: what they install, in a directory of the test.

    Offline, so the packages that pip would fetch come from this environment, by way of PYTHONPATH; the project itself is
    built from the build context, and installed, as in the image.
    """
    root = tmp_path_factory.mktemp("image")
    (root / "build").mkdir()
    context = build_context(root / "build")
    tool = stage(steps, "tool")
    copied = {word for value in values(tool, "COPY") for word in value.split()[:-1]}
    assert copied == {path.name for path in context.iterdir()}, "every file of the context is copied, and no other"
    (step,) = values(tool, "RUN")
    site = next(path for path in sys.path if path.endswith("site-packages"))
    result = run(
        f"cd {context} && {command(step)}".replace("python3 ", f"{sys.executable} "),
        {"/opt/nvfp4": str(root / "opt")},
        PYTHONPATH=site,
        PIP_NO_BUILD_ISOLATION="0",
        PIP_NO_INDEX="1",
        PIP_NO_DEPS="1",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2x16gb-long-context" in result.stdout
    return root


def test_the_tool_is_installed_with_its_data(installed: Path) -> None:
    (package,) = installed.glob("opt/lib/python3*/site-packages/recipes")
    assert {path.name for path in (package / "serve").rglob("*.yaml")} >= {"96gb.yaml", "qwen3_5.yaml", "vllm.yaml"}
    assert not list(package.parent.glob("quantize")), "the image's tool has nothing that needs a model"


def in_image(installed: Path, checkpoint: Path) -> dict[str, str]:
    return {"/opt/nvfp4": str(installed / "opt"), "/checkpoint": str(checkpoint)}


def site() -> str:
    return next(path for path in sys.path if path.endswith("site-packages"))


def test_a_bad_checkpoint_makes_no_image(
    installed: Path, steps: list[Step], quantized: Any, headers: Callable[..., Path], tmp_path: Path
) -> None:
    check = command(values(stage(steps, "serve"), "RUN")[-1])
    environment = {"PROFILE": "2x16gb-long-context", "MODEL_NAME": "model", "PYTHONPATH": site()}
    good = run(check, in_image(installed, quantized.out), VERIFY="--deep", **environment)
    assert good.returncode == 0, good.stderr
    assert "fit to serve" in good.stdout or "sound" in good.stdout
    bad = shutil.copytree(quantized.out, tmp_path / "bad")
    (bad / "model-00001-of-00002.safetensors").write_bytes(b"cut")
    assert run(check, in_image(installed, bad), **environment).returncode == 1
    large = run(check, in_image(installed, headers("27B", quantized=False)), **environment)
    assert large.returncode == 1


def test_the_user_is_made_and_owns_its_home(steps: list[Step], tmp_path: Path) -> None:
    """With the real useradd, in a mount namespace where /etc is a copy and /home is empty."""
    step = next(value for value in values(stage(steps, "serve"), "RUN") if "useradd" in value)
    etc = tmp_path / "etc"
    inside = (
        f"cp -a /etc {etc} && mount --bind {etc} /etc && mount -t tmpfs tmpfs /home || exit 77\n"
        f"{command(step)} && getent passwd 2000 && stat -c '%u %g %A' /home/vllm /home/vllm/.cache"
    )
    result = subprocess.run(["unshare", "--mount", "/bin/sh", "-c", inside], capture_output=True, text=True, check=False)
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("no mount namespace may be made here")
    assert result.returncode == 0, result.stderr
    user, *rights = result.stdout.splitlines()
    assert user.split(":")[2:4] == ["2000", "0"]
    assert user.split(":")[5] == "/home/vllm"
    assert rights == ["2000 0 drwxrwxr-x"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"MODEL": "", "REVISION": ""}, "give --build-context checkpoint=DIR, or --build-arg MODEL=org/name"),
        ({"MODEL": "org/name", "REVISION": "main"}, "REVISION must be a commit, 40 hex digits"),
        ({"MODEL": "org/name", "REVISION": "a" * 41}, "REVISION must be a commit, 40 hex digits"),
    ],
)
def test_a_download_wants_a_pinned_model(arguments: dict[str, str], message: str, steps: list[Step], tmp_path: Path) -> None:
    (download,) = values(stage(steps, "download"), "RUN")
    result = run(command(download), {"/opt/nvfp4": str(tmp_path), "/checkpoint": str(tmp_path / "c")}, **arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_download_from_a_gated_repository(steps: list[Step], tiny: Path, tmp_path: Path) -> None:
    """The real `hf` against a loopback Hub: the commit's files, the token from the secret's file, and nothing left behind."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hf").symlink_to(Path(sys.executable).parent / "hf")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "HF_TOKEN").write_text("hf_secret\n")
    (download,) = values(stage(steps, "download"), "RUN")
    checkpoint, home = tmp_path / "checkpoint", tmp_path / "home"
    moved = {
        "/opt/nvfp4": str(tmp_path),
        "/checkpoint": str(checkpoint),
        "/run/secrets": str(tmp_path / "secrets"),
        "/tmp/hf": str(home),  # noqa: S108 - a place in the image
    }
    with loopback_hub() as hub:
        commit = hub.add("org/name", tiny)
        hub.repos["model", "org/name"].gated = True
        hub.tokens = {"hf_secret"}
        arguments = hub.environment(home) | {"MODEL": "org/name", "REVISION": commit}
        for name in ("HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE"):
            arguments.pop(name, None)
        refused = run(command(download), moved | {"/run/secrets": str(tmp_path / "nothing")}, **arguments)
        assert refused.returncode == 1
        result = run(command(download), moved, **arguments)
    assert result.returncode == 0, result.stderr
    assert "hf_secret" not in result.stdout + result.stderr
    assert {path.name for path in checkpoint.iterdir()} == {path.name for path in tiny.iterdir()}
    assert not home.exists()


def test_the_entrypoint_becomes_the_server(installed: Path, steps: list[Step], quantized: Any, tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text(STUB)
    (tmp_path / "vllm").chmod(0o755)
    entry = json.loads(values(stage(steps, "serve"), "ENTRYPOINT")[0])
    moved = in_image(installed, quantized.out)

    def start(*arguments: str, profile: str = "2x16gb-throughput") -> tuple[int, Any, str]:
        words = [word.replace("/opt/nvfp4", moved["/opt/nvfp4"]).replace("/checkpoint", moved["/checkpoint"]) for word in entry]
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": site(),
            "PROFILE": profile,
            "MODEL_NAME": "qwen",
        }
        result = subprocess.run([*words, *arguments], capture_output=True, text=True, check=False, env=environment)
        last = result.stdout.splitlines()[-1] if result.stdout else "null"
        return result.returncode, json.loads(last), result.stderr

    code, found, _ = start("--context", "1024", "--", "--api-key", "a b")
    assert code == 0
    argv = found["argv"]
    assert argv[:4] == ["serve", str(quantized.out), "--served-model-name", "qwen"]
    assert argv[argv.index("--max-num-seqs") + 1] == "8"
    assert argv[argv.index("--max-model-len") + 1] == "1024"
    assert argv[-2:] == ["--api-key", "a b"]
    assert found["environment"] == {}
    code, found, _ = start(profile="2x16gb-long-context")
    assert found["environment"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    code, found, said = start(profile="nothing")
    assert (code, found) == (2, None)
    assert "no serve profile named 'nothing'" in said


def test_the_health_check_asks_the_server(steps: list[Step]) -> None:
    (health,) = values(stage(steps, "serve"), "HEALTHCHECK")
    words = json.loads(health[health.index("[") :])
    result = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=False)
    assert result.returncode == 1, "nothing listens here"
    assert "refused" in result.stderr


def interpolated(text: str, environment: Mapping[str, str]) -> str:
    """Compose's own substitution: ${NAME:-default}, and ${NAME:?why it must be set}."""

    def value(match: re.Match[str]) -> str:
        found = environment.get(match["name"])
        if not found and match["kind"] == "?":
            raise KeyError(match["text"])
        return found or match["text"]

    return re.sub(r"\$\{(?P<name>[A-Z_]+):(?P<kind>[-?])(?P<text>[^}]*)\}", value, text)


def test_compose() -> None:
    text = COMPOSE.read_text()
    compose = PyCompose.from_yaml(interpolated(text, {"CHECKPOINT": "./out", "PORT": "9000"}))
    assert compose.service_names() == ["serve"]
    found = yaml.safe_load(compose.to_yaml())["services"]["serve"]
    assert found["image"] == "nvfp4-mtp:model"
    with pytest.raises(KeyError, match="the directory of the checkpoint"):
        interpolated(text, {})
    serve = yaml.safe_load(text)["services"]["serve"]
    assert serve["build"]["additional_contexts"] == {"checkpoint": "${CHECKPOINT:?the directory of the checkpoint}"}
    profile = re.fullmatch(r"\$\{PROFILE:-(.+)\}", serve["environment"]["PROFILE"])
    assert profile
    assert load_profile(profile[1])[1].gpus == "2x16GB"
    (device,) = serve["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 2, ["gpu"])
    assert serve["ports"] == ["127.0.0.1:${PORT:-8000}:8000"]
    arguments = {value.partition("=")[0] for value in re.findall(r"^ARG (\S+)", DOCKERFILE.read_text(), re.MULTILINE)}
    assert set(serve["build"]["args"]) <= arguments
