"""Rules about files: index, shards, metadata, and the files beside the weights."""

import re
from collections.abc import Iterable, Iterator

from assemble.checkpoint import INDEX
from assemble.rules.model import Detail, Subject
from assemble.sidefiles import TOKENIZER, side_files

SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def index_and_files(subject: Subject) -> Iterable[Detail]:
    """IDX-1: the index and the files on disk name each other."""
    return _problems(subject, "IDX-1")


def index_and_headers(subject: Subject) -> Iterable[Detail]:
    """IDX-2: the index and the headers agree; no tensor in two files."""
    return _problems(subject, "IDX-2")


def sound_headers(subject: Subject) -> Iterable[Detail]:
    """IDX-4: every header is valid and covers its file exactly."""
    return _problems(subject, "IDX-4")


def _problems(subject: Subject, kind: str) -> Iterator[Detail]:
    for problem in subject.layout.problems:
        if problem.kind == kind:
            yield problem.where, problem.text, "files, index and headers that agree"


def total_size_and_names(subject: Subject) -> Iterator[Detail]:
    """IDX-3: `total_size` is the sum of the tensors' bytes, and shards are numbered 1 to n of n."""
    if subject.layout.index is None:
        return
    total = sum(t.nbytes for t in subject.tensors.values())
    metadata = subject.layout.index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if stated != total:
        yield f"{INDEX}: metadata.total_size", repr(stated), str(total)
    names = [shard.name for shard in subject.layout.shards]
    expected = [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    if any(SHARD_NAME.fullmatch(name) for name in names) and names != expected:
        wrong = next(name for name, good in zip(names, expected, strict=True) if name != good)
        yield wrong, "numbered otherwise", f"{expected[0]} to {expected[-1]}"


def pt_metadata(subject: Subject) -> Iterator[Detail]:
    """IDX-6: `__metadata__` says format pt."""
    for shard in subject.layout.shards:
        if shard.metadata.get("format") != "pt":
            yield f"{shard.name}: __metadata__.format", repr(shard.metadata.get("format")), "'pt'"


def forbidden_files(subject: Subject) -> Iterator[Detail]:
    """IDX-5: no file that makes vLLM take the checkpoint for something else."""
    root = subject.layout.root
    patterns = ("consolidated*.safetensors", "joint_head_config.json", "decision_config.json", "modules.json")
    for path in sorted(p for pattern in patterns for p in root.glob(pattern)):
        yield path.name, "present", "absent"
    for path in sorted(root.glob("*hf_quant_config.json"))[1:]:
        yield path.name, "a second *hf_quant_config.json", "one only"


def side_files_present(subject: Subject) -> Iterator[Detail]:
    """CFG-13: the tokenizer is there."""
    present = side_files(subject.layout.root)
    for name in (TOKENIZER, "tokenizer_config.json"):
        if name not in present:
            yield name, "absent", "the source's file"
