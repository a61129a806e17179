"""Atomic writes, and reads that never execute a file's contents."""

import errno
import glob
import json
import os
import re
import shutil
import socket
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

NEW = ".new"
"""Folder in which files that change together are written before they replace the old ones."""
MOST_BYTES = 64 * 2**20
"""Largest JSON file or table that is read; such files are untrusted."""
MOST_VALUES = 4_000_000
"""Most values of a table or of a training's curves; each takes up to a hundred bytes of memory."""
_NUMBERS = re.compile(r"\[(\n[-+.\deE,\s]+)\]")
TEMPORARY = re.compile(r"\.(?P<machine>[^.]+)\.(?P<process>\d+)\.tmp$")


def machine_name() -> str:
    """Return this machine's name for use in file names; process ids are only unique together with it."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", socket.gethostname())[:60] or "unnamed"


def is_running(process: int) -> bool:
    """Tell whether a process id is in use on this machine."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        return True
    return True


def remove_leftovers(*folders: Path) -> None:
    """Remove temporary files of killed processes from folders that the caller has locked.

    A file of another running process of this machine stays. Whether a process of another machine is running cannot be
    known; the caller's lock decides.
    """
    for path in (path for folder in folders for path in folder.glob(".*.tmp")):
        name = TEMPORARY.search(path.name)
        process = int(name["process"]) if name and name["machine"] == machine_name() else os.getpid()
        if process == os.getpid() or not is_running(process):
            path.unlink(missing_ok=True)


def check_file(path: Path, most: int | None = None) -> None:
    """Check that a path is a regular file of at most `most` bytes (ValueError), not a folder (FileNotFoundError)."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise FileNotFoundError(f"{path} is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is a pipe, a device or the like, not a regular file: it is not read")
    if most is not None and status.st_size > most:
        raise ValueError(f"{path} has {status.st_size:,} bytes; a file of its kind is read up to {most:,}")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes; raises the errors of `check_file`."""
    check_file(path, most)
    with open(path, "rb") as file:
        return file.read(most)


def check_text(path: Path, most: int = MOST_BYTES) -> None:
    """Check that a regular file of at most `most` bytes is text in UTF-8 (ValueError); raises also as `check_file`."""
    check_file(path, most)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
                wrong = line.find(0)
            except UnicodeDecodeError as error:
                wrong = error.start
            if wrong >= 0:
                raise ValueError(f"{path} is not UTF-8 (byte {line[wrong]:#04x} in line {number}): save it as UTF-8")


def check_writable(folder: Path) -> None:
    """Check (OSError) that files can be written in a folder, which need not exist yet; leaves nothing there."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    probe = existing / f".mechicl.{machine_name()}.{os.getpid()}.tmp"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(error.errno, f"nothing can be written there ({error.strerror})", str(folder)) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically, even in a crash, and remove temporary files that killed processes left."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # a folder may be shared between machines, whose processes have the same ids
    start = f".{path.name}.{machine_name()}."
    for left in path.parent.glob(f"{glob.escape(start)}*.tmp"):
        process = left.name.removeprefix(start).removesuffix(".tmp")
        if process.isdecimal() and not is_running(int(process)):
            left.unlink(missing_ok=True)
    temporary = path.with_name(f"{start}{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # the error of a full disk has no file name
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_together(folder: Path, files: Mapping[str, bytes], last: str) -> None:
    """Replace several files of a folder, all or none, even if the process is killed.

    They are written to the subfolder `.new`, the one that readers open first (`last`) at the end. From then on the new
    files are the current ones (`current_path`); this call moves them into place, or the next one if this one is killed.
    """
    settle(folder, last)
    new = folder / NEW
    new.mkdir()
    try:
        for name in sorted(files, key=last.__eq__):
            write_bytes(new / name, files[name])
    finally:
        settle(folder, last)


def settle(folder: Path, last: str) -> None:
    """Move files that were written together into place, or remove them if some are missing."""
    new = folder / NEW
    if (new / last).is_file():
        names = [path.name for path in new.iterdir() if not path.name.endswith(".tmp")]
        for name in sorted(names, key=last.__eq__):
            os.replace(new / name, folder / name)
    shutil.rmtree(new, ignore_errors=True)


def current_path(folder: Path, name: str, last: str) -> Path:
    """Return the path of a file that was written by `write_together`, whether or not it was moved into place."""
    new = folder / NEW
    return new / name if (new / last).is_file() and (new / name).is_file() else folder / name


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically; raises the errors of `json_bytes`."""
    write_bytes(path, json_bytes(data))


def json_bytes(data: Any) -> bytes:
    """Encode as JSON, lists of numbers on one line; TypeError for other values, ValueError for non-finite numbers."""
    text = json.dumps(data, indent=1, allow_nan=False)
    return (_NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file is FileNotFoundError, any other fault ValueError."""
    data = read_bytes(path)
    try:
        read = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # including endless nesting and numbers of 5,000 digits
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(read).__name__}")
    return read


def read_csv(file: Any, **options: Any) -> "pd.DataFrame":
    """Read a CSV file by pandas; ValueError if it is not one, or if rows have more fields than the header."""
    import pandas as pd

    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        try:
            return pd.read_csv(file, index_col=False, **options)
        except pd.errors.ParserWarning:
            raise ValueError("rows have more fields than the header") from None
