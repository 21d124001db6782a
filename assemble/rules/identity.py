"""Rules that need the source checkpoint: what is not quantized is the source's, byte for byte."""

from collections.abc import Iterator

from assemble.architecture import MTP_PREFIX
from assemble.checkpoint import Checkpoint
from assemble.rules.model import Detail, Subject
from assemble.writer import sha256_tensor


def unquantized_identical(subject: Subject) -> Iterator[Detail]:
    """Q-13b: every tensor outside quantized modules equals the source's: dtype, shape, SHA-256 of its bytes."""
    if subject.source is not None:
        names = [n for n in subject.source if not n.startswith(MTP_PREFIX) and n.removesuffix(".weight") not in subject.schemes]
        yield from _identical(subject, subject.source, names)


def head_identical(subject: Subject) -> Iterator[Detail]:
    """MTP-3: every tensor of the head equals the one it was taken from."""
    origin = subject.head or subject.source
    if origin is not None:
        yield from _identical(subject, origin, [n for n in origin if n.startswith(MTP_PREFIX)])


def _identical(subject: Subject, origin: Checkpoint, names: list[str]) -> Iterator[Detail]:
    for name in names:
        mine, theirs = subject.tensors.get(name), origin[name]
        if mine is None:
            yield name, "absent", f"{theirs.dtype} {list(theirs.shape)}, as in the source"
        elif (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            yield name, f"{mine.dtype} {list(mine.shape)}", f"{theirs.dtype} {list(theirs.shape)}, as in the source"
        else:
            found = sha256_tensor(subject.layout.root / mine.shard, mine)
            expected = sha256_tensor(origin.path_of(theirs), theirs)
            if found != expected:
                yield name, f"SHA-256 {found[:16]}…", f"the source's {expected[:16]}…"
            subject.progress(2 * mine.nbytes)
