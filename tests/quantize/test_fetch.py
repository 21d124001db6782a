"""A model from the Hub: what is downloaded, what is kept, what each refusal says, and one whole run."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from huggingface_hub import constants, snapshot_download

from assemble.checkpoint import INDEX, Checkpoint, CheckpointError
from assemble.verify import verify
from quantize import hashing
from quantize.planning import as_json, build_plan
from quantize.source import BASE_CARD, SMALL_FILES, SourceError, fetch, open_headers
from recipes import loader
from tests.loopback_hub import LoopbackHub, loopback_hub

PIECE = 1_000_003  # bytes hashed in one go, here
MODEL = "org/tiny"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
STRAY = ("pytorch_model.bin", "figure.png", "optimizer.safetensors", "fp16/model.safetensors", "fp16/config.json")
TOKEN = "hf_thisTokenMustNeverBeSeen"  # noqa: S105 - not a secret


@pytest.fixture(scope="module")
def repository(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's repository, with things in it that nobody needs."""
    root = tmp_path_factory.mktemp("repository") / "model"
    shutil.copytree(tiny, root)
    (root / "fp16").mkdir()
    for name in STRAY:
        (root / name).write_bytes(b"not wanted")
    return root


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """HF_HOME: empty."""
    return tmp_path / "home"


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[LoopbackHub]:
    """A hub that has the model; this process uses it, with an empty cache."""
    with loopback_hub() as hub:
        hub.add(MODEL, repository)
        hub.connect(monkeypatch, home)
        yield hub


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a download to disk every MB (10 MB otherwise, more than a shard has), so that there is something to resume."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1_000_000)


def wanted_files(repository: Path) -> set[str]:
    return {name for name in (*SMALL_FILES, BASE_CARD) if (repository / name).is_file()} | set(SHARDS)


def files_of(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def refused(reference: str, revision: str | None = None) -> str:
    """The text of the refusal, which both ways in must give as one paragraph that names the model."""
    texts = set()
    for read in (fetch, open_headers):
        with pytest.raises(SourceError) as caught:
            read(reference, revision)
        texts.add(str(caught.value))
    assert all("\n" not in text for text in texts)
    return " / ".join(texts)


def test_a_snapshot_has_the_files_that_matter_and_no_others(hub: LoopbackHub, repository: Path) -> None:
    source = fetch(MODEL, None)
    assert files_of(source.root) == hub.files_sent() == wanted_files(repository)
    assert (source.revision, source.public_name) == (hub.repos["model", MODEL].refs["main"], MODEL)
    for name in wanted_files(repository):
        assert (source.root / name).read_bytes() == (repository / name).read_bytes()
    asked = len(hub.requests)
    assert fetch(MODEL, None) == source
    assert not [r for r in hub.requests[asked:] if r.method == "GET" and "/resolve/" in r.path]


def test_a_branch_a_tag_and_a_commit_are_pinned(hub: LoopbackHub, make_variant: Callable[..., Path]) -> None:
    first, other = hub.repos["model", MODEL].refs["main"], make_variant(shards=1)
    second = hub.add(MODEL, other, branch="pr/1")
    assert fetch(MODEL, "pr/1").revision == second
    assert fetch(MODEL, second).root == fetch(MODEL, "pr/1").root
    assert fetch(MODEL, None).revision == first
    hub.add(MODEL, other)  # main moves on; the commit stays
    assert fetch(MODEL, first).revision == first
    assert fetch(MODEL, None).revision not in {first, second}
    assert {p.name for p in fetch(MODEL, second).root.glob("*.safetensors")} == {"model-00001-of-00001.safetensors"}


@pytest.mark.usefixtures("small_chunks")
def test_a_dropped_connection_is_resumed_where_it_broke_off(hub: LoopbackHub, repository: Path) -> None:
    hub.drops[SHARDS[0]] = 1
    source = fetch(MODEL, None)
    whole, rest = hub.sent(SHARDS[0])
    size = (repository / SHARDS[0]).stat().st_size
    assert (whole.range, rest.range) == (None, f"bytes={size // 2 // 1_000_000 * 1_000_000}-")
    assert whole.sent + rest.sent < size + 1_000_000
    assert (source.root / SHARDS[0]).read_bytes() == (repository / SHARDS[0]).read_bytes()


def test_after_a_failed_download_the_next_call_keeps_complete_files(hub: LoopbackHub, repository: Path) -> None:
    hub.drops[SHARDS[1]], hub.resets = 1, True
    with pytest.raises(SourceError, match=f"the Hub did not give {MODEL}: .*complete files are kept"):
        fetch(MODEL, None)
    done = wanted_files(repository) - {SHARDS[1]}
    asked = len(hub.requests)
    source = fetch(MODEL, None)
    sent_again = {r.path.rpartition("/")[2] for r in hub.requests[asked:] if r.method == "GET" and "/resolve/" in r.path}
    assert SHARDS[1] in sent_again
    assert not sent_again & (done - {SHARDS[0]})  # the other shard may have been under way when the first call gave up
    assert (source.root / SHARDS[1]).read_bytes() == (repository / SHARDS[1]).read_bytes()


def test_headers_come_without_the_weights_and_give_the_same_plan(hub: LoopbackHub, tiny: Path) -> None:
    remote, local = open_headers(MODEL, None), open_headers(str(tiny), None)
    for shard in SHARDS:
        requests = hub.sent(shard)
        assert requests
        assert all(r.range for r in requests)
        assert sum(r.sent for r in requests) < 110_000 < (tiny / shard).stat().st_size
    assert not list(remote.root.glob("*.safetensors"))
    assert (remote.shards, remote.config) == (local.shards, local.config)
    assert list(remote) == list(local)
    recipe = loader.load("demo").recipe
    assert as_json(build_plan(recipe, remote, remote), recipe) == as_json(build_plan(recipe, local, local), recipe)


def test_headers_of_one_shard_without_an_index(hub: LoopbackHub, make_variant: Callable[..., Path]) -> None:
    root = make_variant(shards=1)
    (root / INDEX).unlink()
    content = (root / "model-00001-of-00001.safetensors").read_bytes()
    (root / "model-00001-of-00001.safetensors").unlink()
    end = 8 + int.from_bytes(content[:8], "little")
    backwards = json.dumps(dict(reversed(json.loads(content[8:end]).items()))).encode()  # a header may be in any order
    (root / "model.safetensors").write_bytes(len(backwards).to_bytes(8, "little") + backwards + content[end:])
    hub.add("org/single", root)
    assert open_headers("org/single", None).shards == Checkpoint.open(root).shards
    assert Checkpoint.open(fetch("org/single", None).root).shards == Checkpoint.open(root).shards


def test_headers_of_a_complete_snapshot_are_read_from_it(hub: LoopbackHub) -> None:
    source = fetch(MODEL, None)
    asked = len(hub.requests)
    assert open_headers(MODEL, None).root == source.root
    assert not [r for r in hub.requests[asked:] if "/resolve/" in r.path]


def test_an_index_that_the_headers_contradict_is_refused_before_the_download(
    hub: LoopbackHub, tiny: Path, tmp_path: Path
) -> None:
    root = tmp_path / "wrong"
    shutil.copytree(tiny, root)
    index = json.loads((root / INDEX).read_text())
    index["weight_map"]["mtp.fc.weight"] = SHARDS[0]
    (root / INDEX).write_text(json.dumps(index))
    hub.add("org/wrong", root)
    with pytest.raises(CheckpointError, match=r"org/wrong: mtp.fc.weight: .*disagree"):
        open_headers("org/wrong", None)
    (root / SHARDS[1]).unlink()
    hub.add("org/wrong", root)
    assert f"has no {SHARDS[1]}" in refused_headers("org/wrong")


@pytest.mark.parametrize("name", ["../config.json", "fp16/model.safetensors", "*.safetensors", 3, "pytorch_model.bin"])
def test_an_index_that_names_what_is_no_shard_beside_it(hub: LoopbackHub, tiny: Path, tmp_path: Path, name: object) -> None:
    shutil.copytree(tiny, tmp_path / "hostile")
    (tmp_path / "hostile" / INDEX).write_text(json.dumps({"weight_map": {"a": SHARDS[0], "b": name}}))
    hub.add("org/hostile", tmp_path / "hostile")
    for read in (fetch, open_headers):
        with pytest.raises(CheckpointError, match="weight_map must map tensor names to names of safetensors files"):
            read("org/hostile", None)
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())


def refused_headers(reference: str) -> str:
    with pytest.raises(SourceError) as caught:
        open_headers(reference, None)
    return str(caught.value)


def test_offline_a_cached_snapshot_is_used(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    source = fetch(MODEL, None)
    asked = len(hub.requests)
    hub.go_offline(monkeypatch)
    assert fetch(MODEL, None) == fetch(MODEL, "main") == fetch(MODEL, source.revision) == source
    assert open_headers(MODEL, None).shards == Checkpoint.open(tiny).shards
    assert len(hub.requests) == asked


def test_offline_a_cache_that_another_program_filled_is_used(
    hub: LoopbackHub, home: Path, calibration: Path, tmp_path: Path
) -> None:
    commit = hub.repos["model", MODEL].refs["main"]
    snapshot_download(MODEL, allow_patterns=[*SMALL_FILES, *SHARDS])
    shutil.rmtree(home / "hub" / "models--org--tiny" / "trees")  # the listing that older versions do not write
    options = ("--revision", commit, "--calibration", str(calibration))
    done = command(hub, home, "plan", MODEL, str(tmp_path / "out"), *options, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr


def test_a_hub_that_is_gone_leaves_the_cache(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fetch(MODEL, None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nothing answers
    assert fetch(MODEL, None) == source
    for revision in (None, "0" * 40):
        text = refused("org/other", revision)
        assert "the Hub did not give org/other: " in text
        assert "Connection refused" in text


def test_offline_without_all_of_it_in_the_cache(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.go_offline(monkeypatch)
    text = refused(MODEL)
    assert "offline mode is on (HF_HUB_OFFLINE)" in text
    assert "local directory" in text
    hub.go_offline(monkeypatch, offline=False)
    open_headers(MODEL, None)  # everything but the shards
    hub.go_offline(monkeypatch)
    assert "the local cache does not have all of it" in refused(MODEL)


def test_a_gated_model(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["model", MODEL].gated = True
    text = refused(MODEL)
    assert f"{MODEL} is gated" in text
    assert "hf auth login" in text
    hub.tokens.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch(MODEL, None).revision == hub.repos["model", MODEL].refs["main"]


def test_a_token_that_the_hub_refuses(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    text = refused(MODEL)
    assert "the Hub refuses your token" in text
    assert TOKEN not in text


def test_a_repository_that_is_not_there(hub: LoopbackHub, tmp_path: Path) -> None:
    assert "org/absent is neither a local directory nor a repository the Hub shows you" in refused("org/absent")
    assert "org/a--b: " in refused("org/a--b")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.md").write_text("no model")
    hub.add("org/data", tmp_path / "data")
    assert "org/data has no config.json" in refused("org/data")


def test_a_revision_that_is_not_there(hub: LoopbackHub) -> None:
    for revision in ("v9", "0" * 40):
        assert f"{MODEL} has no revision '{revision}'" in refused(MODEL, revision)


def test_a_hub_in_trouble(hub: LoopbackHub) -> None:
    hub.errors = 2
    text = refused(MODEL)
    assert f"the Hub did not give {MODEL}: " in text
    assert "500" in text
    assert "try again" in text
    assert fetch(MODEL, None).root.is_dir()


def test_a_revision_of_a_directory_and_a_directory_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    assert "--revision is for a Hub id" in refused(str(tiny), "main")
    assert "absent does not exist" in refused(str(tmp_path / "absent"))


def test_a_cache_that_cannot_be_written(hub: LoopbackHub, home: Path) -> None:
    home.mkdir()
    (home / "hub").write_text("a file where the cache's folder should be")
    text = refused(MODEL)
    assert f"{MODEL} cannot be stored in the cache: {home / 'hub'}" in text
    assert "HF_HOME" in text


def command(
    hub: LoopbackHub, home: Path, *arguments: str, prefix: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the whole way, from the variables on."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | hub.environment(home) | variables
    line = [*prefix, sys.executable, "-m", "quantize", *arguments, "--recipe", "demo"]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["org/absent"], {}, "org/absent is neither a local directory nor a repository"),
        ([MODEL, "--revision", "v9"], {}, f"{MODEL} has no revision 'v9'"),
        ([MODEL], {"HF_HUB_OFFLINE": "1"}, "offline mode is on"),
        (["org/gated"], {}, "org/gated is gated"),
        (["org/private"], {}, "for a private one, log in"),
        ([MODEL, "--mtp-from", "org/gated"], {}, "org/gated is gated"),
        ([MODEL, "--mtp-from", "org/absent"], {}, "org/absent is neither"),
        ([MODEL], {"HF_TOKEN": TOKEN}, "the Hub refuses your token"),
    ],
)
def test_the_command_ends_with_2_and_one_paragraph(
    hub: LoopbackHub, home: Path, repository: Path, tmp_path: Path, arguments: list[str], variables: dict[str, str], said: str
) -> None:
    hub.add("org/gated", repository)
    hub.repos["model", "org/gated"].gated = True
    hub.add("org/private", repository)
    hub.repos["model", "org/private"].private = True
    model, *options = arguments
    done = command(hub, home, "plan", model, str(tmp_path / "out"), *options, **variables)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert not (tmp_path / "out.run").exists()


def test_a_disk_that_is_full_is_not_the_hubs_fault(hub: LoopbackHub, home: Path, calibration: Path, tmp_path: Path) -> None:
    limited = ("bash", "-c", 'ulimit -f 2000; exec "$@"', "bash")  # no file above 2000 kB
    done = command(hub, home, "run", MODEL, str(tmp_path / "out"), "--calibration", str(calibration), prefix=limited)
    assert done.returncode == 1
    assert "error: the disk is full (File too large)" in done.stderr


def test_the_whole_job_from_the_hub(
    hub: LoopbackHub, home: Path, tiny: Path, make_variant: Callable[..., Path], calibration: Path, tmp_path: Path
) -> None:
    """A gated model without a head, its head from another repository, and a token that nothing may show."""
    model, head = hub.add("org/headless", make_variant(head="none")), hub.repos["model", MODEL].refs["main"]
    hub.repos["model", "org/headless"].gated = True
    hub.tokens.add(TOKEN)
    out = tmp_path / "out"
    done = command(
        hub, home, "run", "org/headless", str(out), "--mtp-from", MODEL,
        "--calibration", str(calibration), "--device", "cpu", HF_TOKEN=TOKEN,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not verify(out).errors
    made, original = Checkpoint.open(out), Checkpoint.open(tiny)
    for name in (n for n in original if n.startswith("mtp.")):
        assert made.read(name) == original.read(name)
    card = (out / "README.md").read_text()
    assert "base_model: org/headless" in card
    assert f"org/headless at commit `{model}`" in card
    assert f"{MODEL} at commit `{head}`" in card
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["model"] == {"name": "org/headless", "revision": model}
    records = {
        path: path.read_text() for path in [*tmp_path.glob("out.run/**/*.json"), out / "README.md", out / "provenance.json"]
    }
    assert len(records) > 8
    for text in [done.stdout, done.stderr, *records.values()]:
        assert TOKEN not in text
    assert {r.token for r in hub.requests if "org/headless" in r.path} == {TOKEN}


@pytest.mark.parametrize("nbytes", [0, 1, PIECE - 1, PIECE, 7 * PIECE + 5])
def test_the_pieces_of_a_file_are_hashed_in_their_order(nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "PIECE", PIECE)
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    for _ in range(3):
        assert hashing.digest(tmp_path / "model.safetensors") == f"blake3:{blake3(data).hexdigest()}"
