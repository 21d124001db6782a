"""Headers and index: what is read is what the safetensors library reads."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from assemble.checkpoint import INDEX, JSON_LIMIT, Checkpoint, CheckpointError, read_json, read_layout, read_shard, stays_inside
from assemble.jsonfile import JSONFileError

DTYPES = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8, "I64": np.int64, "F16": np.float16, "BOOL": np.bool_}
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)
ARRAYS = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(["F32", "U8", "I64", "F16", "BOOL"]), st.lists(st.integers(0, 4), max_size=3)),
    max_size=6,
)
METADATA = st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1, max_size=2)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrays=ARRAYS, metadata=METADATA)
def test_reads_what_safetensors_wrote(arrays: dict, metadata: dict | None, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    written = {n: rng.integers(0, 2, tuple(shape)).astype(DTYPES[d]) for n, (d, shape) in arrays.items()}
    path = tmp_path / "model.safetensors"
    save_file(written, path, metadata=metadata)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    with safe_open(path, "np") as theirs:
        assert set(checkpoint) == set(theirs.keys())
        assert dict(checkpoint.shards[0].metadata) == (theirs.metadata() or {})
    for name, array in written.items():
        info = checkpoint[name]
        assert (info.dtype, info.shape, info.nbytes) == (arrays[name][0], array.shape, array.nbytes)
        assert checkpoint.read(name) == array.tobytes()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(cut=st.integers(0, 400))
def test_every_truncation_is_refused(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.arange(10, dtype=np.int64), "b": np.zeros(3, np.float32)}, path)
    data = path.read_bytes()
    path.write_bytes(data[: max(0, len(data) - 1 - cut)])
    with pytest.raises((CheckpointError, JSONFileError)):
        read_shard(path)
    path.write_bytes(data + bytes(1 + cut))
    with pytest.raises(CheckpointError):
        read_shard(path)


def test_files_are_those_that_the_index_names(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        save_file({name: np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "d": "d.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    layout = read_layout(tmp_path)
    assert [shard.name for shard in layout.shards] == ["a.safetensors", "b.safetensors"]
    assert {(p.kind, p.where) for p in layout.problems} == {("IDX-1", "c.safetensors"), ("IDX-1", "d.safetensors")}
    (tmp_path / INDEX).unlink()
    assert [shard.name for shard in read_layout(tmp_path).shards] == ["a.safetensors", "b.safetensors", "c.safetensors"]


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda root: None, "does not exist"),
        (lambda root: root.write_text(""), "is a file"),
        (lambda root: root.mkdir(), "no config.json"),
        (lambda root: (root.mkdir(), (root / "config.json").write_text("{}")), "no weights here"),
    ],
)  # fmt: skip
def test_what_is_not_a_checkpoint(prepare, text: str, tmp_path: Path) -> None:
    prepare(tmp_path / "root")
    with pytest.raises(CheckpointError, match=text):
        Checkpoint.open(tmp_path / "root")


def test_links(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("")
    (tmp_path / "outside").write_text("")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0").write_text("")
    for target in (
        tmp_path / "outside",
        Path("../outside"),
        Path("file"),
        blobs / "0",
        blobs / "../blobs/0",
        blobs / "../../outside",
    ):
        link = root / "link"
        link.symlink_to(target)
        inside = stays_inside(link)
        assert inside == ("outside" not in str(target)), target
        link.unlink()
    (root / "one").symlink_to(tmp_path / "outside")
    (root / "two").symlink_to("one")
    assert not stays_inside(root / "two")


def test_json_files(tmp_path: Path) -> None:
    assert read_json(tmp_path, "absent.json") is None
    (tmp_path / "a.json").write_text('{"a": NaN}')
    assert read_json(tmp_path, "a.json")
    with (tmp_path / "big.json").open("wb") as file:
        file.truncate(JSON_LIMIT + 1)
    for name, text in (("big.json", "at most"), ("list.json", "must hold a JSON object"), ("twice.json", "appears twice")):
        if not (tmp_path / name).exists():
            (tmp_path / name).write_text({"list.json": "[]", "twice.json": '{"a": 1, "a": 1}'}[name])
        with pytest.raises(JSONFileError, match=text):
            read_json(tmp_path, name)
