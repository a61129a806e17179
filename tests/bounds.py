"""A memory bound for tests of hostile files, and paths that are not regular files."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEGABYTES = 500


@contextmanager
def bounded() -> Iterator[None]:
    """Assert that the block raises the peak memory of this process by less than 500 MB."""
    peak = _peak()
    yield
    assert _peak() - peak < MEGABYTES


def _peak() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def make_no_file(path: Path, kind: str) -> None:
    """Create a pipe without a writer, a link to an endless device, or a sparse file of 3 GiB."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 3 * 2**30)
