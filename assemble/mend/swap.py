"""Puts a finished directory under its name: a reader sees the old checkpoint or the new one, whenever the work is killed.

The new checkpoint is made in `.NAME.mending`, beside the place it is for. For a new place one rename finishes it. In place,
Linux exchanges the two directories in one step (`renameat2` with RENAME_EXCHANGE: ext4, xfs, btrfs, tmpfs, overlayfs), so the
checkpoint's path never is empty; then the old directory is deleted, which removes names, not the shared shards. Where a file
system cannot exchange, there are two renames: killed between them, the old directory is `.NAME.replaced`, and the next command
on the checkpoint puts it back before anything else. Whatever else a killed command left is deleted by the next one.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from assemble.errors import InputError
from assemble.writer import sync_directory

AT_FDCWD = -100
RENAME_EXCHANGE = 2  # linux/fs.h


class BusyError(InputError):
    """Another command is mending the same checkpoint."""


def staging_of(target: Path) -> Path:
    """Where the directory that is to become `target` is made."""
    return target.parent / f".{target.name}.mending"


def files_of(target: Path) -> tuple[Path, ...]:
    """What a command has beside the checkpoint that it makes, and the checkpoint's own name."""
    return target, staging_of(target), _replaced(target), _lock(target)


def _lock(target: Path) -> Path:
    return target.parent / f".{target.name}.lock"


def _replaced(target: Path) -> Path:
    return target.parent / f".{target.name}.replaced"


@contextlib.contextmanager
def exclusively(target: Path) -> Iterator[None]:
    """Keeps a second mending of `target` out while the first is at work.

    Raises:
        BusyError: there is one at work.
    """
    lock = _lock(target)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(f"{target} is being mended by another command. Wait for it to end.") from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def recover(target: Path) -> None:
    """Finishes what a killed command left at `target`: afterwards it is the old or the new checkpoint, and nothing else.

    Raises:
        BusyError: that command is still at work.
    """
    replaced, staging = _replaced(target), staging_of(target)
    if not (replaced.is_dir() or staging.is_dir() or _lock(target).exists()):
        return
    with exclusively(target):
        if replaced.is_dir() and not target.exists():
            replaced.rename(target)
        for leftover in (replaced, staging):
            if leftover.is_dir():
                shutil.rmtree(leftover)


def publish(staging: Path, target: Path) -> None:
    """Gives the finished directory its name, in the place of what has it now."""
    if not target.exists():
        staging.rename(target)
    elif _exchange(staging, target):
        sync_directory(target.parent)
        shutil.rmtree(staging)
    else:
        target.rename(_replaced(target))
        staging.rename(target)
        sync_directory(target.parent)
        shutil.rmtree(_replaced(target))
    sync_directory(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two directories in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
