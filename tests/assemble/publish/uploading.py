"""What the tests of uploads do and look at."""

import hashlib
from pathlib import Path

from typer.testing import CliRunner, Result

from assemble.__main__ import app
from assemble.provenance import PROVENANCE
from tests.assemble.publish.conftest import REPO, TOKEN
from tests.loopback_hub import LoopbackHub

RENDERED = {"README.md", PROVENANCE}  # for the repository: their commands name it


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert TOKEN not in result.output
    return result


def refused(result: Result, code: int, *texts: str) -> None:
    """One paragraph on stderr that holds each text, and no traceback."""
    assert result.exit_code == code, (result.output, result.exception)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    for text in texts:
        assert text in last, last


def tip(hub: LoopbackHub, branch: str = "main") -> dict[str, Path]:
    repo = hub.repos[("model", REPO)]
    return {n: p for n, p in repo.files(repo.refs[branch]).items() if n != ".gitattributes"}


def assert_same(files: dict[str, Path], checkpoint: Path) -> None:
    """The same files, and the same bytes but in what is rendered for the repository."""
    assert set(files) == {p.name for p in checkpoint.iterdir()}
    for name in set(files) - RENDERED:
        assert files[name].read_bytes() == (checkpoint / name).read_bytes(), name


def received(hub: LoopbackHub, checkpoint: Path) -> dict[str, int]:
    """How many times each shard arrived."""
    return {
        p.name: hub.uploads.received.get(hashlib.sha256(p.read_bytes()).hexdigest(), 0)
        for p in checkpoint.glob("*.safetensors")
    }


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
