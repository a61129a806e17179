"""How many of torch's threads a piece of work is worth: small work runs on one, whatever the machine has."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt
from threading import get_ident

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
    """A context with so many of torch's threads; afterwards as many as before, whatever has been set in between.

    A thread of Python's that starts meanwhile gets the number of the moment from torch. If it has such a context too,
    it gets the ordinary number at its end.
    """
    token, me = object(), get_ident()

    before = torch.get_num_threads()
    others = {used: ordinary for thread, used, ordinary in list(_IN_USE.values()) if thread != me}
    ordinary = others.get(before, before)
    _IN_USE[token] = (me, before if number is None else number, ordinary)
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(ordinary)
        _IN_USE.pop(token, None)


_IN_USE: dict[object, tuple[int, int, int]] = {}  # by context: the thread, its number, and the one to go back to
