"""What is not uploaded, and where not to: each a clear refusal, and nothing of others' is lost."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from assemble.provenance import PROVENANCE
from assemble.publish.errors import RefusedError
from assemble.publish.proof import prove
from assemble.publish.target import PushTarget
from assemble.publish.upload import publish
from quantize.runner import Outcome
from tests.assemble.publish.conftest import REPO, SHARD, TOKEN
from tests.assemble.publish.uploading import assert_same, call, corrupt, received, refused, tip
from tests.loopback_hub import LoopbackHub
from tests.loopback_uploads import Fault


def test_a_repository_with_other_content(hub: LoopbackHub, checkpoint: Path, tiny: Path) -> None:
    hub.add(REPO, tiny)
    hub.repos[("model", REPO)].private = True
    refused(call("publish", checkpoint, REPO), 1, "holds something else", "config.json", "--replace")
    assert call("publish", checkpoint, REPO, "--replace").exit_code == 0
    assert_same(tip(hub), checkpoint)  # what was there and is not ours is gone


def test_a_new_card_for_the_same_weights_needs_no_word(hub: LoopbackHub, checkpoint: Path) -> None:
    assert call("publish", checkpoint, REPO).exit_code == 0
    record = json.loads((checkpoint / PROVENANCE).read_text())
    record["card"]["failures"] = {"evaluate": "as if it had been evaluated since"}
    (checkpoint / PROVENANCE).write_text(json.dumps(record))
    assert call("card", checkpoint).exit_code == 0
    result = call("publish", checkpoint, REPO)
    assert result.exit_code == 0, result.output
    assert "replacing README.md, provenance.json" in result.stderr
    assert "as if it had been evaluated since" in tip(hub)["README.md"].read_text()
    assert set(received(hub, checkpoint).values()) == {1}


@pytest.mark.parametrize("name", ["README.md", "figure.png", "LICENSE"])
def test_what_someone_put_there_is_not_lost(hub: LoopbackHub, checkpoint: Path, name: str) -> None:
    assert call("publish", checkpoint, REPO).exit_code == 0
    repo = hub.repos[("model", REPO)]
    place = repo.commits[repo.refs["main"]] / name
    place.unlink(missing_ok=True)
    place.write_text("edited on the page")
    refused(call("publish", checkpoint, REPO), 1, name, "--replace")
    assert place.read_text() == "edited on the page"
    assert call("publish", checkpoint, REPO, "--replace").exit_code == 0
    assert name not in tip(hub) or tip(hub)[name].read_text() != "edited on the page"


def test_a_public_repository_is_not_written_to_unasked(hub: LoopbackHub, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    hub.add(REPO, tmp_path / "empty")
    refused(call("publish", checkpoint, REPO), 1, "is public", "--public")
    assert call("publish", checkpoint, REPO, "--public").exit_code == 0


def test_a_branch(hub: LoopbackHub, checkpoint: Path) -> None:
    assert call("publish", checkpoint, REPO, "--branch", "v2").exit_code == 0
    assert_same(tip(hub, "v2"), checkpoint)
    assert tip(hub) == {}


@pytest.mark.parametrize("kind", ["none", "lost"])
def test_a_pull_request_is_opened_once(hub: LoopbackHub, checkpoint: Path, kind: str, quick: None) -> None:
    hub.faults.append(Fault("POST .*/commit/main", kind, times=kind != "none"))
    result = call("publish", checkpoint, REPO, "--pull-request", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["revision"] == "refs/pr/1"
    assert call("publish", checkpoint, REPO, "--pull-request").exit_code == 0
    assert len(hub.uploads.pulls[REPO]) == 1
    assert tip(hub) == {}
    assert_same(tip(hub, "refs/pr/1"), checkpoint)


def test_someone_else_commits_meanwhile(
    hub: LoopbackHub, checkpoint: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assemble.publish import upload

    real = upload._sent

    def overtaken(*arguments: object) -> object:
        operations = real(*arguments)
        hub.add(REPO, tiny)
        return operations

    monkeypatch.setattr(upload, "_sent", overtaken)
    refused(call("publish", checkpoint, REPO), 1, "someone else committed")


@pytest.mark.parametrize("name", [SHARD, "tokenizer_config.json"])
def test_a_file_that_changes_while_it_is_sent(hub: LoopbackHub, checkpoint: Path, name: str) -> None:
    proven = prove(checkpoint, REPO)
    data = bytearray((checkpoint / name).read_bytes())
    data[-2] ^= 1
    (checkpoint / name).write_bytes(data)
    with pytest.raises(RefusedError, match=name):
        publish(proven, PushTarget(REPO), lambda _: None)
    if name == SHARD:
        assert tip(hub) == {}


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["nowhere", REPO], ("nowhere is not a directory",)),
        (["CHECKPOINT", "no-slash"], ("no name of a repository",)),
        (["CHECKPOINT", "other/name"], ("'other' is none of your namespaces",)),
        (["CHECKPOINT", REPO, "--branch", "x", "--pull-request"], ("pull requests on main only",)),
    ],
)
def test_bad_targets(hub: LoopbackHub, checkpoint: Path, arguments: list[str], texts: tuple[str, ...]) -> None:
    refused(call("publish", *(str(checkpoint) if a == "CHECKPOINT" else a for a in arguments)), 2, *texts)
    assert not hub.repos


def test_tokens(hub: LoopbackHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.uploads.readers.add(TOKEN)
    refused(call("publish", checkpoint, REPO), 2, "may only read", "hf auth login")
    hub.tokens.clear()
    refused(call("publish", checkpoint, REPO), 2, "refuses your token")
    monkeypatch.delenv("HF_TOKEN")
    refused(call("publish", checkpoint, REPO), 2, "needs a token", "hf auth login")
    hub.go_offline(monkeypatch)
    refused(call("publish", checkpoint, REPO), 2, "offline mode")


@pytest.mark.parametrize("name", ["config.json", SHARD, "tokenizer.json", "README.md"])
@pytest.mark.parametrize("gone", [True, False])
def test_what_changed_since_it_verified_is_refused(hub: LoopbackHub, checkpoint: Path, name: str, gone: bool) -> None:
    path = checkpoint / name
    data = bytearray(path.read_bytes())
    path.unlink()
    if not gone:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    refused(call("publish", checkpoint, REPO), 1, "not what was checked", name)
    assert not hub.repos


def test_a_claim_without_a_record_is_refused(hub: LoopbackHub, checkpoint: Path) -> None:
    record = json.loads((checkpoint / PROVENANCE).read_text())
    card = (checkpoint / "README.md").read_text().replace("Not evaluated.", "KL divergence 0.001, better than BF16.")
    (checkpoint / "README.md").write_text(card)
    record["files"]["README.md"] = hashlib.sha256(card.encode()).hexdigest()
    (checkpoint / PROVENANCE).write_text(json.dumps(record))
    refused(call("publish", checkpoint, REPO), 1, "says what no record backs", "better than BF16")
    assert call("publish", checkpoint, REPO, "--own-card").exit_code == 0
    assert "better than BF16" in tip(hub)["README.md"].read_text()


def test_a_card_of_ones_own(hub: LoopbackHub, checkpoint: Path) -> None:
    """Written over the rendered one: refused, and sent when its author answers for it; a download of it agrees."""
    (checkpoint / "README.md").write_text("# mine\n")
    refused(call("publish", checkpoint, REPO), 1, "README.md: SHA-256", "--own-card")
    assert call("publish", checkpoint, REPO, "--own-card").exit_code == 0
    assert tip(hub)["README.md"].read_text() == "# mine\n"
    assert call("verify", REPO, "--provenance").exit_code == 0
    (checkpoint / "README.md").unlink()
    refused(call("publish", checkpoint, REPO, "--own-card"), 1, "has no README.md to send with --own-card")
    corrupt(checkpoint / "tokenizer.json")
    refused(call("publish", checkpoint, REPO, "--own-card"), 1, "tokenizer.json: SHA-256")


@pytest.mark.parametrize("option", [("--branch", "other"), ("--pull-request",)])
def test_other_content_where_nothing_is_lost(hub: LoopbackHub, checkpoint: Path, tiny: Path, option: tuple[str, ...]) -> None:
    """A new branch starts as main is, and a pull request only proposes: main keeps what it holds."""
    hub.add(REPO, tiny)
    hub.repos[("model", REPO)].private = True
    before = dict(tip(hub))
    result = call("publish", checkpoint, REPO, *option)
    assert result.exit_code == 0, result.output
    assert "replacing" in result.stderr
    assert dict(tip(hub)) == before


def test_a_card_of_another_version_is_rendered_anew(hub: LoopbackHub, checkpoint: Path) -> None:
    record = json.loads((checkpoint / PROVENANCE).read_text()) | {"card_form": "an older one"}
    (checkpoint / "README.md").write_text("# as it looked then\n")
    record["files"]["README.md"] = hashlib.sha256(b"# as it looked then\n").hexdigest()
    (checkpoint / PROVENANCE).write_text(json.dumps(record))
    assert call("publish", checkpoint, REPO).exit_code == 0
    assert f"vllm serve {REPO}" in tip(hub)["README.md"].read_text()
    assert call("verify", REPO, "--provenance").exit_code == 0


def test_what_breaks_a_rule_is_refused_though_its_digests_agree(hub: LoopbackHub, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (checkpoint / "config.json").write_text(json.dumps(config))
    record = json.loads((checkpoint / PROVENANCE).read_text())
    record["files"]["config.json"] = hashlib.sha256((checkpoint / "config.json").read_bytes()).hexdigest()
    (checkpoint / PROVENANCE).write_text(json.dumps(record))
    refused(call("publish", checkpoint, REPO), 1, "not fit to serve")


def test_another_ones_checkpoint(hub: LoopbackHub, checkpoint: Path, quantized: Outcome) -> None:
    (checkpoint / PROVENANCE).unlink()
    (checkpoint / "README.md").write_text("# words of its maker\n")
    refused(call("publish", checkpoint, REPO), 1, "no provenance.json", "assemble card")
    refused(call("card", checkpoint), 2, "was written by someone", "--replace")
    assert call("card", checkpoint, "--replace").exit_code == 0
    assert call("publish", checkpoint, REPO).exit_code == 0
    assert "How it was made is not recorded" in tip(hub)["README.md"].read_text()
    sizes = json.loads((checkpoint / PROVENANCE).read_text())["card"]["plan"]["sizes"]
    assert sizes == quantized.records["plan"].facts["sizes"]


def test_links_out_of_the_folder_are_not_sent(hub: LoopbackHub, checkpoint: Path, tmp_path: Path) -> None:
    shutil.move(checkpoint / "tokenizer.json", tmp_path / "private")
    (checkpoint / "tokenizer.json").symlink_to(tmp_path / "private")
    refused(call("publish", checkpoint, REPO), 1, "tokenizer.json", "link out of the folder")
