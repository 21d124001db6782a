"""The header of a safetensors file: JSON that names every tensor, and says what and where it is.

It maps each tensor name to `dtype`, `shape` and `data_offsets` [begin, end), counted from the end of the header, and
`__metadata__` to strings. A mixture of experts has 150,000 entries, so sound headers are read by a compiled decoder; what it
stumbles over is read again one entry at a time, to say what is wrong.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from assemble.errors import InputError
from assemble.jsonfile import parse_object

RANK_LIMIT = 16  # dimensions of a tensor; a hostile header could give a million and have us multiply them
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class CheckpointError(InputError):
    """A checkpoint whose files do not hold together."""


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """One tensor's header entry: `start` is its absolute byte offset in the file `shard`.

    A large checkpoint has 150,000 of them, so it is msgspec's kind of dataclass: made in a third of the time, and never
    walked by the garbage collector, which has nothing to find here.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    nbytes: int


def read_header(header: bytes, shard: str, base: int) -> "Read":
    """Reads a header.

    Args:
        header: Its bytes.
        shard: The file's name.
        base: Where the file's tensor data begins.

    Returns:
        The tensors in the header's order, and `__metadata__`.

    Raises:
        CheckpointError: an entry that is not understood, or whose shape does not fill its bytes.
        JSONFileError: not a JSON object, or a key given twice.
    """
    return _at_once(header, shard, base) or _one_by_one(header, shard, base)


_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct, gc=False):
    """An entry of a header; None where it lacks a field, as `__metadata__` lacks them all."""

    dtype: str | None = None
    shape: tuple[_Number, ...] | None = None
    data_offsets: tuple[_Number, _Number] | None = None


class _Metadata(msgspec.Struct):
    """A header without its entries."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])
_METADATA = msgspec.json.Decoder(_Metadata)
Read = tuple[list[TensorInfo], Mapping[str, str]]


def _at_once(header: bytes, shard: str, base: int) -> Read | None:
    """Reads a header with the compiled decoder; None when there is anything about it that `_one_by_one` must judge.

    The decoder keeps the last of two equal keys in silence, so the keys are counted: without a backslash a quote ends a
    string, and one before a colon a key. Where each colon follows a quote, there are as many keys as colons.
    """
    if b"\\" in header or not header.isascii():
        return None
    try:
        entries, metadata = _ENTRIES.decode(header), _METADATA.decode(header).metadata
    except (msgspec.MsgspecError, RecursionError):
        return None
    described = entries.pop("__metadata__", None) is not None
    colons = header.count(b":")
    if header.count(b'":') != colons or colons != 4 * len(entries) + described + len(metadata):
        return None
    tensors = []
    for name, entry in entries.items():
        width, shape, offsets = DTYPE_BYTES.get(entry.dtype or ""), entry.shape, entry.data_offsets
        if width is None or shape is None or offsets is None or len(shape) > RANK_LIMIT:
            return None
        begin, end = offsets
        if end - begin != math.prod(shape) * width:
            return None
        tensors.append(TensorInfo(name, entry.dtype or "", shape, shard, base + begin, end - begin))
    return tensors, metadata


def _one_by_one(text: bytes, shard: str, base: int) -> Read:
    """Reads any header, and says what is wrong with it."""
    header = parse_object(text, f"the header of {shard}")
    metadata = header.pop("__metadata__", {})
    tensors = [_entry(name, value, shard, base) for name, value in header.items()]
    return tensors, metadata if isinstance(metadata, dict) else {}


def _entry(name: str, value: Any, shard: str, base: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"tensor {name}: header entry without dtype, shape and two data_offsets") from error
    numbers = [*shape, begin, end]
    understood = isinstance(dtype, str) and dtype in DTYPE_BYTES and len(shape) <= RANK_LIMIT
    if not understood or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        text = repr((dtype, shape[:RANK_LIMIT], begin, end))[:200]
        raise CheckpointError(f"tensor {name}: dtype, shape or offsets not understood: {text}")
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise CheckpointError(f"tensor {name}: {dtype} {list(shape)} does not fill its {end - begin} bytes")
    return TensorInfo(name, dtype, shape, shard, base + begin, end - begin)
