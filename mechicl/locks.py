"""A folder that one process works in at a time: a lock that ends with its holder, however that one ends."""

import json
import os
import shlex
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # there are no such locks on Windows
    fcntl = None

LOCK_FILE = ".lock"


class FolderInUseError(ValueError):
    """Another process works in the folder."""


@contextmanager
def locked(folder: str | Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder while the context lasts; the operating system lets go of it when the process dies.

    The lock is the file `.lock`, which stays, and names who held it last. It is a lock among those who ask for it: who
    only reads need not. On file systems that have no locks there is a warning, and none.

    Args:
        folder: made if need be.
        wait: until it is free, if another process holds it.

    Raises:
        FolderInUseError: it is held, and not to be waited for; the message names the process.

    Example:
        >>> with locked("runs/lsa-1l"):
        ...     train_in("runs/lsa-1l")
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, which lets go of the lock
    try:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderInUseError(
                    f"{folder} is in use by {_holder(folder)}: wait until it has ended, or take another folder"
                ) from None
            except OSError as error:
                warnings.warn(f"{folder} cannot be locked ({error}): see that no other process uses it", stacklevel=3)
        _sign(file.fileno())
        yield
    finally:
        file.close()


def _sign(file: int) -> None:
    """Say who holds the lock. It is held all the same where the disk is too full for that."""
    command = shlex.join(sys.argv) or "python"
    words = json.dumps({"process": os.getpid(), "machine": socket.gethostname(), "command": command[:500]})
    try:
        os.ftruncate(file, 0)
        os.write(file, words.encode())
    except OSError:
        return


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))
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
            return False
    return False
