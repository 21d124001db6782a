"""A checkpoint goes to the (loopback) Hub through the real client: whole, once, to the right place, or with a clear refusal."""

import hashlib
import json
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from tests.assemble.publish.conftest import REPO, SHARD, TOKEN, faults
from tests.assemble.publish.uploading import assert_same, call, corrupt, received, refused, tip
from tests.loopback_hub import LoopbackHub


def test_everything_arrives_once_privately_and_is_compared(hub: LoopbackHub, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "notes.txt").write_text("mine")
    result = call("publish", checkpoint, REPO, "--json")
    assert result.exit_code == 0, result.output
    (checkpoint / "notes.txt").unlink()
    told = json.loads(result.stdout)
    repo = hub.repos[("model", REPO)]
    assert (told["commit"], told["private"], told["left"]) == (repo.refs["main"], True, ["notes.txt"])
    assert repo.private
    assert len(repo.commits) == 2  # the Hub's own first one, and ours
    assert_same(tip(hub), checkpoint)
    assert set(received(hub, checkpoint).values()) == {1}
    assert f"vllm serve {REPO}" in tip(hub)["README.md"].read_text()
    assert all(TOKEN not in path.read_text(errors="replace") for path in tip(hub).values())
    fetched = Path(snapshot_download(REPO, local_dir=tmp_path / "fetched"))
    assert call("verify", fetched, "--provenance").exit_code == 0


def test_a_second_time_there_is_nothing_to_do(hub: LoopbackHub, checkpoint: Path) -> None:
    assert call("publish", checkpoint, REPO).exit_code == 0
    before = len(hub.requests)
    result = call("publish", checkpoint, REPO)
    assert result.exit_code == 0
    assert "nothing to send" in result.stdout
    assert {r.method for r in hub.requests[before:]} == {"GET"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("pattern", "kind", "times"),
    [
        (r"POST .*/repos/create", "error", 1),
        (r"POST .*/repos/create", "lost", 1),
        (r"POST .*/preupload/", "error", 2),
        (r"POST .*/objects/batch", "busy", 2),
        (r"PUT .*/lfs/.*/2$", "drop", 1),
        (r"PUT .*/lfs/", "error", 2),
        (r"PUT .*/lfs/", "busy", 1),
        (r"PUT .*/lfs/", "lost", 1),
        (r"POST .*/complete", "lost", 1),
        (r"POST .*/commit/main", "error", 2),
        (r"POST .*/commit/main", "busy", 1),
        (r"POST .*/commit/main", "drop", 1),
        (r"POST .*/commit/main", "lost", 1),
        (r"GET .*/whoami", "busy", 1),
        (r"GET .*/tree/", "error", 1),
        (r"GET .*/api/models/", "drop", 1),
    ],
)
def test_a_hub_in_trouble(hub: LoopbackHub, checkpoint: Path, pattern: str, kind: str, times: int) -> None:
    fault = faults(hub, pattern, kind, times)
    result = call("publish", checkpoint, REPO)
    assert result.exit_code == 0, result.output
    assert fault.happened == times
    assert_same(tip(hub), checkpoint)
    assert len(hub.repos[("model", REPO)].commits) == 2
    assert call("verify", REPO, "--provenance").exit_code == 0


@pytest.mark.usefixtures("quick")
def test_given_up_and_continued_nothing_that_arrived_is_sent_again(hub: LoopbackHub, checkpoint: Path) -> None:
    large = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    oid = hashlib.sha256(large.read_bytes()).hexdigest()
    faults(hub, f"PUT .*/lfs/{oid}", "drop", 99)
    refused(call("publish", checkpoint, REPO), 2, REPO, "Give the same command again")
    assert received(hub, checkpoint)[large.name] == 0
    assert sum(received(hub, checkpoint).values()) == 1
    assert tip(hub) == {}  # nobody sees half a checkpoint
    hub.faults.clear()
    assert call("publish", checkpoint, REPO).exit_code == 0
    assert set(received(hub, checkpoint).values()) == {1}
    assert_same(tip(hub), checkpoint)


def test_a_commit_that_never_gets_through(hub: LoopbackHub, checkpoint: Path, quick: None) -> None:
    faults(hub, "POST .*/commit/main", "error", 99)
    refused(call("publish", checkpoint, REPO), 2, "Give the same command again")
    hub.faults.clear()
    assert call("publish", checkpoint, REPO).exit_code == 0
    assert set(received(hub, checkpoint).values()) == {1}


def test_a_remote_file_that_is_another(hub: LoopbackHub, checkpoint: Path) -> None:
    assert call("publish", checkpoint, REPO).exit_code == 0
    corrupt(tip(hub)[SHARD])
    result = call("verify", REPO, "--provenance")
    assert result.exit_code == 1
    assert SHARD in next(line for line in result.stdout.splitlines() if line.startswith("error"))
    refused(call("publish", checkpoint, REPO), 1, SHARD, "--replace")


def test_a_file_that_is_damaged_on_the_hubs_side_is_found_after_the_upload(hub: LoopbackHub, checkpoint: Path) -> None:
    oid = hashlib.sha256((checkpoint / SHARD).read_bytes()).hexdigest()
    (hub.uploads.storage / "objects").mkdir()
    hub.uploads.object_path(oid).write_bytes((checkpoint / SHARD).read_bytes())
    corrupt(hub.uploads.object_path(oid))  # the storage says that it has the object already
    refused(call("publish", checkpoint, REPO), 1, "not what was sent", SHARD)
