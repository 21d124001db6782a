"""From a model on the (loopback) Hub to a checkpoint on it, through the commands that people give, with and without faults."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from huggingface_hub import snapshot_download
from typer.testing import CliRunner, Result

from assemble.__main__ import app as assemble_app
from quantize.__main__ import app
from recipes import loader
from tests.loopback_hub import LoopbackHub, loopback_hub
from tests.loopback_uploads import Fault

BASE, REPO = "org/tiny", "user/tiny-nvfp4"
TOKEN = "hf_thisTokenMustNeverBeSeen"  # noqa: S105 - not a secret
BASE_CARD = "---\nlicense: apache-2.0\nlanguage: [en]\npipeline_tag: image-text-to-text\n---\n# Tiny\n"
RENDERED = {"README.md", "provenance.json"}  # for the repository: their commands name it
EVALUATION = {"rows": 1, "tokens": 24, "num_speculative_tokens": 1}


@dataclass
class World:
    """A hub that has the base model, and where a run works."""

    hub: LoopbackHub
    root: Path
    out: Path
    calibration: Path

    def run(self, *options: str, repo: str = REPO, recipe: str = "small.yaml") -> Result:
        """`run org/tiny OUT --evaluate --push`, as a user would give it."""
        arguments = ["run", BASE, str(self.out), "--recipe", str(self.root / recipe), "--device", "cpu", "--evaluate"]
        arguments += ["--calibration", str(self.calibration), "--evaluation-data", str(self.root / "heldout.jsonl")]
        result = CliRunner().invoke(app, [*arguments, "--push", repo, *options])
        assert TOKEN not in result.output
        return result

    def tip(self, repo: str = REPO) -> dict[str, Path]:
        """The files of the main branch."""
        found = self.hub.repos[("model", repo)]
        return {n: p for n, p in found.files(found.refs["main"]).items() if n != ".gitattributes"}

    def assert_published(self, repo: str = REPO) -> None:
        """The remote verifies, and a fresh download is OUT, byte for byte but for the card's commands."""
        verified = CliRunner().invoke(assemble_app, ["verify", repo, "--provenance"])
        assert verified.exit_code == 0, verified.output
        fetched = Path(snapshot_download(repo, local_dir=self.root / f"fetched-{repo.replace('/', '-')}"))
        names = {p.name for p in fetched.iterdir() if p.is_file() and p.name != ".gitattributes"}
        assert names == {p.name for p in self.out.iterdir()}
        for name in names - RENDERED:
            assert (fetched / name).read_bytes() == (self.out / name).read_bytes(), name
        checked = CliRunner().invoke(assemble_app, ["verify", str(fetched), "--provenance"])
        assert checked.exit_code == 0, checked.output


@pytest.fixture(scope="module")
def world(tiny: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The base on the hub, and everything that a run needs."""
    root = tmp_path_factory.mktemp("end-to-end")
    base = Path(shutil.copytree(tiny, root / "base"))
    (base / "README.md").write_text(BASE_CARD)
    text = loader.load("demo").text
    (root / "small.yaml").write_text(text + f"evaluation: {json.dumps(EVALUATION)}\n")
    (root / "strict.yaml").write_text(text + f"evaluation: {json.dumps(EVALUATION | {'max_kl': 1e-9})}\n")
    held_out = Path(shutil.__file__).read_text()
    (root / "heldout.jsonl").write_text(json.dumps({"text": held_out[2000:2600]}) + "\n")
    with loopback_hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub.connect(patch, root / "home")
        hub.tokens.add(TOKEN)
        patch.setenv("HF_TOKEN", TOKEN)
        hub.add(BASE, base)
        yield World(hub, root, root / "out", calibration)


def test_a_checkpoint_that_misses_its_gate_is_neither_made_nor_sent(world: World) -> None:
    world.hub.drops = {"model-00001-of-00002.safetensors": 1, "model-00002-of-00002.safetensors": 2}  # on the way here, too
    result = world.run(recipe="strict.yaml")
    assert result.exit_code == 1, result.output
    assert set(world.hub.drops.values()) == {0}
    assert "max_kl" in result.stderr.strip().splitlines()[-1]
    assert not world.out.exists()
    assert ("model", REPO) not in world.hub.repos
    assert list(world.root.glob("out.run/assemble/*.safetensors"))  # nothing is lost


def test_from_the_hub_to_the_hub(world: World) -> None:
    """Goes on from the run before, whose gate was too strict."""
    result = world.run("--json")
    assert result.exit_code == 0, result.output
    assert "quantize: done before, kept" in result.stderr
    summary = json.loads(result.stdout)
    assert 0 < summary["evaluated"]["kl_mean"]["value"] < 1
    told = summary["published"]
    assert (told["repo_id"], told["private"], told["url"]) == (REPO, True, f"{world.hub.endpoint}/{REPO}")
    world.assert_published()
    card = world.tip()["README.md"].read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert (metadata["base_model"], metadata["license"], metadata["language"]) == (BASE, "apache-2.0", ["en"])
    assert f"vllm serve {REPO}" in card
    assert f"{BASE} at commit `{world.hub.repos[('model', BASE)].refs['main']}`" in card
    assert "Not evaluated" not in card
    for path in (*world.tip().values(), *world.root.glob("out.run/**/*")):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
    for path in (world.tip()["README.md"], world.tip()["provenance.json"]):
        assert str(world.root) not in path.read_text()


def test_the_same_again_sends_nothing(world: World) -> None:
    world.run()
    before = len(world.hub.requests)
    result = world.run()
    assert result.exit_code == 0, result.output
    assert "holds exactly this already" in result.stderr
    assert {r.method for r in world.hub.requests[before:]} <= {"GET", "HEAD"}


@pytest.mark.parametrize(
    ("name", "pattern", "kind", "times"),
    [
        ("error", r"POST .*/(preupload|commit)/", "error", 2),
        ("busy", r"(POST|PUT) .*/(batch|lfs/|commit/)", "busy", 2),
        ("drop", r"PUT .*/lfs/", "drop", 2),
        ("lost", r"POST .*/commit/", "lost", 1),
    ],
)
def test_with_a_hub_in_trouble(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str, pattern: str, kind: str, times: int
) -> None:
    import time

    real, repo = time.sleep, f"user/{name}"
    monkeypatch.setattr(time, "sleep", lambda seconds: real(seconds / 100))
    if not world.out.exists():
        world.run()
    shutil.rmtree(world.hub.uploads.storage / "objects", ignore_errors=True)  # so that everything is sent anew
    fault = Fault(pattern, kind, times)
    world.hub.faults[:] = [fault]
    result = world.run(repo=repo)
    assert result.exit_code == 0, result.output
    assert fault.happened == times
    assert len(world.hub.repos[("model", repo)].commits) == 2  # the Hub's own first one, and ours
    world.assert_published(repo)


def test_a_file_that_is_damaged_on_the_hub(world: World) -> None:
    if not world.out.exists():
        world.run()
    shard = max(world.out.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    stored = world.hub.uploads.object_path(hashlib.sha256(data).hexdigest())
    data[len(data) // 2] ^= 1
    stored.parent.mkdir(exist_ok=True)
    stored.unlink(missing_ok=True)
    stored.write_bytes(data)
    result = world.run(repo="user/damaged")
    assert result.exit_code == 1, result.output
    assert shard.name in result.stderr.strip().splitlines()[-1]
    assert "not what was sent" in result.stderr
    assert world.out.is_dir()
    verified = CliRunner().invoke(assemble_app, ["verify", "user/damaged", "--provenance"])
    assert verified.exit_code == 1
    assert f"changed    {shard.name}" in verified.stdout


def test_a_target_that_cannot_be_is_refused_before_any_work(world: World) -> None:
    world.hub.uploads.readers.add(TOKEN)
    try:
        before = len(world.hub.requests)
        result = world.run(repo="user/never")
        assert result.exit_code == 2
        assert "may only read" in result.stderr.strip().splitlines()[-1]
        assert [r.path for r in world.hub.requests[before:]] == ["/api/whoami-v2"]
    finally:
        world.hub.uploads.readers.clear()
