"""Shards: read back by the safetensors library, aligned, and never there by half."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from assemble.checkpoint import DTYPE_BYTES, read_shard
from assemble.formats import TensorSpec
from assemble.plan import file_order
from assemble.writer import ShardWriter, read_chunks, sha256_file, sha256_tensor

KINDS = {"F32": np.float32, "U8": np.uint8, "F16": np.float16, "I64": np.int64}
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SPEC = st.builds(TensorSpec, st.text('ab.é"\\', min_size=1, max_size=6), st.sampled_from(sorted(KINDS)), SHAPES)
SPECS = st.lists(SPEC, max_size=6, unique_by=lambda spec: spec.name)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(specs=SPECS, data=st.data())
def test_read_back_by_safetensors(specs: list[TensorSpec], data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    rng = np.random.default_rng(1)
    content = {s.name: rng.integers(0, 100, s.shape).astype(KINDS[s.dtype]) for s in specs}
    ordered = sorted(specs, key=file_order)
    apart = data.draw(st.booleans())
    with ShardWriter(path, ordered, hash_apart=apart) as writer:
        for spec in data.draw(st.permutations(specs)):
            raw = content[spec.name].tobytes()
            cut = data.draw(st.integers(0, max(0, len(raw) - 1)))
            if cut:
                writer.write(spec.name, raw[:cut])
            writer.write(spec.name, raw[cut:], cut)
            if apart and data.draw(st.booleans()):
                writer.hash_written()
        assert writer.complete
    assert not path.with_name("x.safetensors.tmp").exists()
    loaded = load_file(path) if specs else {}
    assert loaded.keys() == content.keys()
    for name, array in content.items():
        np.testing.assert_array_equal(loaded[name], array)
    assert writer.sha256() == sha256_file(path)  # in whatever order the pieces came, and whoever hashed them
    shard = read_shard(path)
    assert shard.metadata == {"format": "pt"}
    for tensor in shard.tensors:
        assert tensor.start % DTYPE_BYTES[tensor.dtype] == 0 or not tensor.nbytes
        assert b"".join(read_chunks(path, tensor)) == content[tensor.name].tobytes()


def test_abandoned_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(RuntimeError), ShardWriter(path, [TensorSpec("a", "U8", (4,))]):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_shard_is_not_committed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"the old one")
    with pytest.raises(ValueError, match="never written"), ShardWriter(path, [TensorSpec("a", "U8", (4,))]) as writer:
        writer.write("a", b"12")
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert path.read_bytes() == b"the old one"


def test_writes_that_do_not_fit(tmp_path: Path) -> None:
    def written(*pieces: bytes, name: str = "a") -> None:
        with ShardWriter(tmp_path / "x", [TensorSpec("a", "U8", (4,))]) as writer:
            for piece in pieces:
                writer.write(name, piece)

    with pytest.raises(KeyError):
        written(b"", name="b")
    with pytest.raises(ValueError, match="written once"):
        written(b"12345")
    with pytest.raises(ValueError, match="written once"):
        written(b"1234", b"1234")
    assert list(tmp_path.iterdir()) == []


def test_digests(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with ShardWriter(path, [TensorSpec("a", "U8", (3,))]) as writer:
        writer.write("a", b"abc")
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_tensor(path, read_shard(path).tensors[0]) == abc
    seen: list[int] = []
    assert len(sha256_file(path, seen.append)) == 64
    assert sum(seen) == path.stat().st_size
    whole = read_shard(path).tensors[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="ends inside tensor a"):
        list(read_chunks(path, whole))
