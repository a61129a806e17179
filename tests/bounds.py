"""What a test of hostile files may take, and files that are none."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS, MEGABYTES = 2.0, 500


@contextmanager
def bounded() -> Iterator[None]:
    """See that something takes less than 2 s of this process, and 500 MB more than it had."""
    peak, started = _peak(), time.process_time()
    yield
    assert time.process_time() - started < SECONDS
    assert _peak() - peak < MEGABYTES


def _peak() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def make_no_file(path: Path, kind: str) -> None:
    """Put a pipe that nobody writes to, a device without an end, or 3 GiB of zeros that take no place on the disk."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 3 * 2**30)
