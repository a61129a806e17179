"""Files that are whole or not there: atomic writes, and reads that never execute what they find."""

import errno
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NEW = ".new"
"""Where files that change together are written before they take the place of the old ones."""
MOST_BYTES = 64 * 2**20
"""Of a file of JSON or a table that is read at all: who wrote it may be anybody."""
MOST_VALUES = 4_000_000
"""Values, names and brackets of such a file: each takes up to a hundred bytes of memory."""
MOST_BYTES_OF_WORDS = 8 * 2**20
"""Of such a file with other characters than ASCII's, which take four bytes each; JSON that is written here has none."""
TEMPORARY = re.compile(r"\.(?P<machine>[^.]+)\.(?P<process>\d+)\.tmp$")


def machine_name() -> str:
    """This machine's name, as names of files have it: a number of a process means something only beside it."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", socket.gethostname())[:60] or "unnamed"


def is_running(process: int) -> bool:
    """Whether this machine has a process of that number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # the second for numbers that no process has
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


def check_file(path: Path, most: int | None = None) -> None:
    """Refuse what is no regular file, or a larger one than is read, before it is opened.

    Args:
        path: of the file, or of a link to it.
        most: bytes; any number by default.

    Raises:
        FileNotFoundError: nothing is there, or a folder.
        ValueError: a pipe or a device, which would be waited for or read for ever; or a file of more bytes.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise FileNotFoundError(f"{path} is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is a pipe, a device or the like, not a regular file: it is not read")
    if most is not None and status.st_size > most:
        raise ValueError(f"{path} has {status.st_size:,} bytes; a file of its kind is read up to {most:,}")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The contents of a regular file of at most so many bytes; errors as for `check_file`."""
    check_file(path, most)
    with open(path, "rb") as file:
        return file.read(most)


def check_writable(folder: Path) -> None:
    """See that files can be written in a folder that is there, or that is still to be made; nothing is left there.

    Raises:
        OSError: they cannot; names the folder.
    """
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    probe = there / f".mechicl.{machine_name()}.{os.getpid()}.tmp"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(error.errno, f"nothing can be written there ({error.strerror})", str(folder)) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file by new contents so that a crash at any moment leaves the old or the new, never a mixture.

    What processes of this machine that were killed in the middle of writing the same file left there is removed.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # folders may be shared between machines, whose processes have the same numbers
    _remove_dead(path)
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


def _remove_dead(path: Path) -> None:
    """Remove what ended processes of this machine have left of a file."""
    start = f".{path.name}.{machine_name()}."
    if not path.parent.is_dir():
        return
    for name in os.listdir(path.parent):
        process = name.removeprefix(start).removesuffix(".tmp")
        if name.startswith(start) and process.isdecimal() and not is_running(int(process)):
            (path.parent / name).unlink(missing_ok=True)


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


def read_json(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """A JSON object, whoever wrote it: what would take unreasonable memory is refused before it does.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, not an object, no regular file, or more than is read of it.
    """
    data = read_bytes(path, most)
    check_values(path, data)
    if len(data) > MOST_BYTES_OF_WORDS and not data.isascii():
        raise ValueError(f"{path} has {len(data):,} bytes, not all of them ASCII; such a file is read up to "
                         f"{MOST_BYTES_OF_WORDS:,}")  # fmt: skip
    try:
        read = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # endless nesting and numbers of 5,000 digits included
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(read).__name__}")
    return read


def check_values(path: Path, data: bytes) -> None:
    """Refuse JSON of more values than fit into memory that a file of text may reasonably take.

    Raises:
        ValueError: names the file and the bound.
    """
    if sum(map(data.count, (b",", b":", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"{path} holds more than {MOST_VALUES:,} values, names and brackets: so many are not read")
