"""The number of torch's threads for a piece of work; small work runs on one thread."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt

import torch

WORTH_A_THREAD = 2**21
"""Multiplications that one thread does in about ten times the time of starting and awaiting another thread."""


def threads_worth(multiplications: float) -> int:
    """Return the number of threads for work with this many multiplications between two synchronisations.

    It is the square root of the work in units of `WORTH_A_THREAD`, because the cost of awaiting threads grows with
    their number. It depends on nothing else, so the same work gives the same bits again.

    Example:
        >>> threads_worth(10_000)
        1
    """
    return max(1, min(isqrt(int(multiplications / WORTH_A_THREAD)), torch.get_num_threads(), n_cores()))


def n_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def using_threads(number: int | None = None) -> Iterator[None]:
    """Set torch's number of threads during a `with` block, and restore it afterwards, whatever was set in between.

    A Python thread that starts meanwhile inherits the current number from torch, and keeps it.
    """
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)
