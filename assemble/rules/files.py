"""Rules about the weights' files: index, shards, headers, metadata."""

import re
from collections.abc import Iterable, Iterator

from assemble.checkpoint import INDEX, Problem
from assemble.rules.model import Detail, Mend, Served
from assemble.rules.subject import Subject
from assemble.sidefiles import MISLEADING

SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def index_and_files(subject: Subject) -> Iterable[Detail]:
    """IDX-1: the index and the safetensors files on disk name each other; an index is there when there are several files."""
    return _problems(subject, "IDX-1", "a file of its own in this folder, named in the index")


def index_and_headers(subject: Subject) -> Iterable[Detail]:
    """IDX-2: the index places every stored tensor in the file that holds it, and no tensor is in two files."""
    return _problems(subject, "IDX-2", "each tensor in one file, where the index says")


def sound_headers(subject: Subject) -> Iterable[Detail]:
    """IDX-4: every header is valid, and its tensors cover the file without holes, overlaps or leftovers."""
    return _problems(subject, "IDX-4", "a valid safetensors file")


def _problems(subject: Subject, kind: str, expected: str) -> Iterator[Detail]:
    for problem in subject.layout.problems:
        if problem.kind == kind:
            yield Detail(problem.where, problem.text, expected, served=_served(kind, problem))


def _served(kind: str, problem: Problem) -> Served | None:
    """vLLM stops at absent files and at an index it cannot read; apart from that it reads whole files, index or not."""
    if kind == "IDX-1":
        if problem.where == INDEX:
            return Served.WORSE
        return Served.SILENT if "would not be read" in problem.text else Served.LOUD
    if kind == "IDX-2":
        if problem.where == INDEX:
            return Served.LOUD
        return Served.SILENT if "stored twice" in problem.text else Served.WORSE
    return None


def total_size_and_names(subject: Subject) -> Iterator[Detail]:
    """IDX-3: `total_size` is the sum of the tensors' bytes, and shards are numbered 1 to n of n."""
    if subject.layout.index is None:
        return
    total = sum(tensor.nbytes for shard in subject.layout.shards for tensor in shard.tensors)
    metadata = subject.layout.index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if stated != total or isinstance(stated, bool):
        yield Detail(f"{INDEX}: metadata.total_size", repr(stated)[:80], str(total))
    names = [shard.name for shard in subject.layout.shards]
    expected = [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    if any(SHARD_NAME.fullmatch(name) for name in names) and names != expected:
        wrong = next(name for name, good in zip(names, expected, strict=True) if name != good)
        yield Detail(wrong, "numbered otherwise than its neighbours", f"{expected[0]} to {expected[-1]}")


def pt_metadata(subject: Subject) -> Iterator[Detail]:
    """IDX-6: every shard's `__metadata__` says `format: pt`."""
    for shard in subject.layout.shards:
        if shard.metadata.get("format") != "pt":
            yield Detail(f"{shard.name}: __metadata__.format", repr(shard.metadata.get("format"))[:80], "'pt'")


def forbidden_files(subject: Subject) -> Iterator[Detail]:
    """IDX-5: no file is there that makes vLLM take the checkpoint for something else; one `*hf_quant_config.json` only."""
    for path in sorted(p for pattern in MISLEADING for p in subject.root.glob(pattern)):
        served = Served.SILENT if path.suffix == ".safetensors" else None  # only that file is read then
        yield Detail(path.name, "present", "absent", served=served)
    for path in sorted(subject.root.glob("*hf_quant_config.json")):
        if path.name != "hf_quant_config.json":
            yield Detail(path.name, "a second *hf_quant_config.json", "one only", mend=Mend.BY_HAND)
