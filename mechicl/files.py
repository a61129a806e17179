"""Files that are whole or not there: atomic writes, and reads that never execute what they find."""

import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NEW = ".new"
"""Where files that change together are written before they take the place of the old ones."""
TEMPORARY = re.compile(r"\.(?P<machine>[^.]+)\.(?P<process>\d+)\.tmp$")


def machine_name() -> str:
    """This machine's name, as names of files have it: a number of a process means something only beside it."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", socket.gethostname())[:60] or "unnamed"


def is_running(process: int) -> bool:
    """Whether this machine has a process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def remove_leftovers(*folders: Path) -> None:
    """Remove what processes that were killed in the middle of a write left in folders.

    Who calls holds the folders' lock, so that nobody else writes there; a file of another process of this machine that
    is still running stays all the same. Of processes of other machines nothing can be asked, and the lock decides.
    """
    for path in (path for folder in folders for path in folder.glob(".*.tmp")):
        name = TEMPORARY.search(path.name)
        process = int(name["process"]) if name and name["machine"] == machine_name() else os.getpid()
        if process == os.getpid() or not is_running(process):
            path.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file by new contents so that a crash at any moment leaves the old or the new, never a mixture."""
    # folders may be shared between machines, whose processes have the same numbers
    temporary = path.with_name(f".{path.name}.{machine_name()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk is told without a name
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_together(folder: Path, files: Mapping[str, bytes], last: str) -> None:
    """Replace several files of a folder, all or none: cut short at any moment, the old or the new ones are there.

    They are written to a folder beside, `last` at the end: from then on the new ones count (`current_path`), and are
    moved into place by this call, or by the next if this one is killed.

    Args:
        folder: which is there.
        files: name to contents.
        last: the name of the file that readers open first.
    """
    settle(folder, last)
    beside = folder / NEW
    beside.mkdir()
    try:
        for name in sorted(files, key=last.__eq__):
            write_bytes(beside / name, files[name])
    finally:
        settle(folder, last)


def settle(folder: Path, last: str) -> None:
    """Move files that were written together into place, or remove them where some were not written any more."""
    beside = folder / NEW
    if (beside / last).is_file():
        names = [path.name for path in beside.iterdir() if not path.name.endswith(".tmp")]
        for name in sorted(names, key=last.__eq__):
            os.replace(beside / name, folder / name)
    shutil.rmtree(beside, ignore_errors=True)


def current_path(folder: Path, name: str, last: str) -> Path:
    """Where a file of those that are written together is, in place or still beside."""
    beside = folder / NEW
    return beside / name if (beside / last).is_file() and (beside / name).is_file() else folder / name


def write_json(path: Path, data: Any) -> None:
    """JSON, atomically. Numbers that are not finite are refused: they are no JSON."""
    write_bytes(path, json_bytes(data))


def json_bytes(data: Any) -> bytes:
    """Data as the JSON that `write_json` writes.

    Raises:
        TypeError: something that JSON has no form for.
        ValueError: a number that is not finite.
    """
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # endless nesting and numbers of 5,000 digits included
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data
