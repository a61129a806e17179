"""A folder that one process works in at a time: a lock that ends with its holder, however that one ends."""

import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mechicl.base.files import check_file, is_running, machine_name, read_bytes

try:
    import fcntl
except ImportError:  # there are no such locks on Windows
    fcntl = None

LOCK_FILE = ".lock"
HELD_FILE = ".lock.held"
"""In place of a lock, where the file system has none: there while a process holds the folder."""
PAUSE, PATIENCE = 0.1, 10.0
"""Seconds between looks at such a file, and until one is told what is waited for."""


class FolderInUseError(ValueError):
    """Another process works in the folder."""


@contextmanager
def locked(folder: str | Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder while the context lasts; the operating system lets go of it when the process dies.

    The lock is the file `.lock`, which stays, and names who held it last. It is a lock among those who ask for it: who
    only reads need not. On file systems that have no locks a file `.lock.held` stands for it, which only its holder
    makes and removes: one that was killed on this machine is noticed, one that was killed on another is not, and the
    message says which file to remove then.

    Args:
        folder: made if need be.
        wait: until it is free, if another process holds it.

    Raises:
        FolderInUseError: it is held, and not to be waited for; the message names the process.
        ValueError: what is called `.lock` there is a pipe or a device.

    Example:
        >>> with locked("runs/lsa-1l"):
        ...     train_in("runs/lsa-1l")
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / LOCK_FILE).exists():
        check_file(folder / LOCK_FILE)
    file = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, which lets go of the lock
    by_file = False
    try:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(folder / LOCK_FILE)
                raise FolderInUseError(
                    f"{folder} is in use by {holder}: wait until it has ended, or take another folder"
                ) from None
            except OSError:  # no locks here
                _make_held_file(folder, wait)
                by_file = True
        _sign(file.fileno())
        yield
    finally:
        if by_file:
            (folder / HELD_FILE).unlink(missing_ok=True)
        file.close()


def _make_held_file(folder: Path, wait: bool) -> None:
    """Hold a folder by a file that only one process can make."""
    path, started, told = folder / HELD_FILE, time.monotonic(), False
    while True:
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if _remove_if_dead(path):
                continue
            words = f"{folder} is in use by {_holder(path)}: wait until it has ended"
            if_ended = f"its file system has no locks; if that process was killed, remove {path}"
            if not wait:
                raise FolderInUseError(f"{words}, or take another folder ({if_ended})") from None
            if not told and time.monotonic() - started > PATIENCE:
                warnings.warn(f"{words} ({if_ended})", stacklevel=4)
                told = True
            time.sleep(PAUSE)
            continue
        try:
            _sign(file)
        finally:
            os.close(file)
        return


def _remove_if_dead(path: Path) -> bool:
    """Whether the file of a holder that is gone was removed. Of another machine's process that cannot be known."""
    try:
        words = read_bytes(path, 10_000)
    except FileNotFoundError:
        return True
    if not _is_dead(words):
        return False
    aside = path.with_name(f"{HELD_FILE}.{machine_name()}.{os.getpid()}")
    try:
        os.rename(path, aside)
        if aside.read_bytes() != words:  # somebody was quicker, and holds it now
            os.link(aside, path)
    except (FileNotFoundError, FileExistsError):
        return True
    finally:
        aside.unlink(missing_ok=True)
    return True


def _is_dead(words: bytes) -> bool:
    try:
        holder = json.loads(words)
        return holder["machine"] == machine_name() and not is_running(int(holder["process"]))
    except (ValueError, KeyError, TypeError):  # it has not signed yet
        return False


def _sign(file: int) -> None:
    """Say who holds the lock. It is held all the same where the disk is too full for that."""
    command = shlex.join(sys.argv) or "python"
    words = json.dumps({"process": os.getpid(), "machine": machine_name(), "command": command[:500]})
    try:
        os.ftruncate(file, 0)
        os.write(file, words.encode())
    except OSError:
        return


def _holder(path: Path) -> str:
    try:
        holder = json.loads(read_bytes(path, 10_000).decode("utf-8"))
        return f"process {holder['process']} on {holder['machine']} ({holder['command']})"
    except (OSError, ValueError, KeyError, TypeError):  # it has not signed yet
        return "another process"


def is_locked(folder: str | Path) -> bool:
    """Whether a process holds a folder (see `locked`). False where it cannot be told."""
    path = Path(folder) / LOCK_FILE
    if fcntl is None or not path.is_file():
        return False
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            held = Path(folder) / HELD_FILE
            try:
                return not _is_dead(held.read_bytes())
            except FileNotFoundError:
                return False
    return False
