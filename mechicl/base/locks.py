"""Exclusive use of a folder by one process at a time."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from mechicl.base.files import check_file, machine_name, read_bytes

LOCK_FILE = ".lock"


class FolderInUseError(ValueError):
    """Another process has locked the folder."""


@contextmanager
def locked(folder: str | Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder during a `with` block; the operating system releases the lock when the process ends.

    The lock is the file `.lock` with the name of the last process that locked it; reading needs none. Without `flock`,
    filelock uses the file's existence and cannot notice that a process of another machine was killed. With `wait=False`
    a locked folder is a `FolderInUseError` that names the process.
    """
    path = Path(folder, LOCK_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        check_file(path)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise FolderInUseError(
            f"{folder} is in use by {_holder(path)}: wait until it has ended, or use another folder"
        ) from None
    try:
        if not isinstance(lock, SoftFileLock):  # which writes its own contents
            command = (shlex.join(sys.argv) or "python")[:500]
            with suppress(OSError):  # a full disk
                path.write_text(f"process {os.getpid()} on {machine_name()} ({command})", "utf-8")
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    try:
        return read_bytes(path, 10_000).decode("utf-8") or "another process"
    except (OSError, ValueError):
        return "another process"


def is_locked(folder: str | Path) -> bool:
    """Tell whether a process has locked a folder; False for a folder that this process may not write to."""
    path = Path(folder, LOCK_FILE)
    if not path.is_file():
        return False
    try:
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True
    except OSError:
        return False
