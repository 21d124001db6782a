"""Makes the mended checkpoint: unchanged shards and files are hard links, changed ones are written, then all is verified.

Nothing is ever written through a hard link: what changes is written to a new file.
"""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from assemble.checkpoint import Checkpoint
from assemble.errors import InputError
from assemble.jsonfile import write_object
from assemble.mend import swap
from assemble.mend.layout import OutputShard
from assemble.mend.origins import Stored
from assemble.mend.repairs import MendPlan
from assemble.verify import Report, verify
from assemble.writer import Progress, ShardWriter, link_file, read_chunks, sync_directory

KEPT = ".before-repair"


class OutputError(InputError):
    """A place where the mended checkpoint cannot be put."""


@dataclass(frozen=True)
class Mended:
    """What came of a plan.

    Attributes:
        out: Where the mended checkpoint is; None when there was nothing to mend.
        statements: What computations said about their results: the error of a rescaling.
        report: What verification says of it.
    """

    out: Path | None
    statements: tuple[str, ...]
    report: Report


def check_output(root: Path, out: Path | None) -> Path:
    """The directory that the result will have, its own name free of links.

    Raises:
        OutputError: `out` exists and is not empty, or its parent does not exist, or the checkpoint is a mount point.
    """
    if out is None:
        target = root.resolve()
        if target.is_mount():
            raise OutputError(f"{root} is a mount point and cannot be replaced as a whole. Give --out, a new directory in it.")
        return target
    target = out.parent.resolve() / out.name
    if not target.parent.is_dir():
        raise OutputError(f"{out.parent} is not a directory; --out makes only the last part of its path.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{out} exists and is not empty. Give --out a new directory, or mend in place.")
    return target


def execute(
    plan: MendPlan,
    target: Path,
    *,
    source: Checkpoint | None = None,
    head: Checkpoint | None = None,
    progress: Progress = lambda _: None,
) -> Mended:
    """Makes the planned checkpoint beside `target`, verifies it, and puts it there.

    Args:
        plan: What to make.
        target: A new directory, or the checkpoint's own.
        source: For the verification.
        head: For the verification.
        progress: Called with the tensor bytes written.

    Raises:
        OSError: the disk is full, say. The checkpoint is as it was.
    """
    staging = swap.staging_of(target)
    staging.mkdir()
    try:
        statements = _fill(plan, target, staging, progress)
        report = verify(staging, source=source, head=head)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if target.is_dir() and target != plan.found.root.resolve():
        target.rmdir()
    swap.publish(staging, target)
    return Mended(target, tuple(statements), _renamed(report, staging, target))


def _fill(plan: MendPlan, target: Path, staging: Path, progress: Progress) -> list[str]:
    """Makes everything that the checkpoint will have; what the computations said."""
    in_place = target == plan.found.root.resolve()
    place = link_within if in_place else link_to
    _other_files(plan, staging, place, keep=in_place, own={p.name for p in swap.files_of(target)})
    statements = []
    for shard in plan.shards:
        if shard.link is None:
            statements += write_shard(shard, staging, progress)
        else:
            place(plan.found.root / shard.link, staging / shard.name)
    for name, path in plan.side_files.items():
        shutil.copyfile(path, staging / name)
    for name, value in plan.written.items():
        write_object(staging / name, value)
    sync_directory(staging)
    return statements


def _renamed(report: Report, staging: Path, target: Path) -> Report:
    """The report with the checkpoint's final name in it."""
    findings = (dataclasses.replace(f, mend=f.mend.replace(str(staging), str(target))) for f in report.findings)
    return dataclasses.replace(report, root=target, findings=tuple(findings))


def _other_files(plan: MendPlan, staging: Path, place: Callable[[Path, Path], None], *, keep: bool, own: set[str]) -> None:
    """Brings over what is not a shard of the plan; with `keep`, what is replaced or left out stays under another name.

    `own` are this command's files, which lie in the checkpoint when the new directory is made inside it.
    """
    shards = {shard.name for shard in plan.found.shards} - plan.removed
    own = own if staging.parent == plan.found.root.resolve() else set()
    replaced = {*plan.removed, *plan.written, *plan.side_files}
    for path in sorted(plan.found.root.iterdir()):
        if path.name in shards or path.name in own:
            continue
        if path.name not in replaced:
            place(path, staging / path.name)
        elif keep:
            place(path, staging / _free_name(plan.found.root, path.name))


def _free_name(root: Path, name: str) -> str:
    names = (f"{name}{KEPT}" + (f"-{i}" if i else "") for i in range(1000))
    return next(n for n in names if not (root / n).exists())


def write_shard(shard: OutputShard, directory: Path, progress: Progress) -> list[str]:
    """Writes one shard; each module that is computed is computed once, for all its tensors.

    Returns:
        What the computations said.
    """
    said, done = [], set()
    with ShardWriter(directory / shard.name, shard.tensors) as writer:

        def emit(name: str, data: bytes, offset: int) -> None:
            writer.write(name, data, offset)
            progress(len(data))

        for spec in shard.tensors:
            origin = shard.origins[spec.name]
            if not isinstance(origin, Stored):
                if id(origin) not in done:
                    done.add(id(origin))
                    said.append(origin.write(emit))
                continue
            offset = 0
            for chunk in read_chunks(origin.path, origin.tensor):
                emit(spec.name, chunk, offset)
                offset += len(chunk)
            if not spec.nbytes:
                emit(spec.name, b"", 0)
    return [text for text in said if text]


def link_to(path: Path, new: Path) -> None:
    """A hard link to a file (through a symbolic link to it), or a copy on another file system; a directory likewise."""
    if path.is_dir():
        new.mkdir()
        for inner in path.iterdir():
            link_to(inner, new / inner.name)
        return
    link_file(path, new)


def link_within(path: Path, new: Path) -> None:
    """As `link_to`, for a directory beside the old one: a symbolic link (into a cache, say) stays what it is."""
    if path.is_symlink():
        new.symlink_to(path.readlink())
    elif path.is_dir():
        new.mkdir()
        for inner in path.iterdir():
            link_within(inner, new / inner.name)
    else:
        link_to(path, new)
