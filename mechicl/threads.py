"""How many of torch's threads a piece of work is worth: small work runs on one, whatever the machine has."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt

import torch

WORTH_A_THREAD = 2**21
"""Multiplications at a stretch that one thread does in about the time that starting and awaiting another takes ten
times over."""


def threads_worth(multiplications: float) -> int:
    """How many threads to give to work that takes so many multiplications from one wait for all threads to the next.

    The root of the work in units of `WORTH_A_THREAD`: what each thread saves falls with their number, what awaiting
    them costs grows with it. At most as many as torch has been told to use, and as there are cores. The number depends
    on nothing else, so that the same work gives the same bits again.

    Example:
        >>> threads_worth(10_000)
        1
    """
    return max(1, min(isqrt(int(multiplications / WORTH_A_THREAD)), torch.get_num_threads(), n_cores()))


def n_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def using_threads(number: int | None = None) -> Iterator[None]:
    """So many of torch's threads while it lasts; afterwards as many as before, whatever has been set in between."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)
