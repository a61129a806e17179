"""Threads: one lock per model, and the number of torch's threads for a piece of work.

One thread changes a model at a time: a run, adding hooks and copying take the model's lock, a `threading.RLock`, and
analyses lock the model while they run. As with any such lock, a thread that waits, within `with model.hooks(...)`, for
another thread that runs the same model waits forever; so do two threads that lock two models in opposite order, except
by `holding(a, b)`, and a process that was forked while another thread ran the model.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from math import isqrt
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

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


# ---- locks ----

_LOCKS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()  # outside the models: not copied or saved


def lock_of(model: nn.Module) -> Any:
    """The model's `threading.RLock`."""
    return _LOCKS.setdefault(model, threading.RLock())  # of threads that do this at once, all get the same lock


def share_lock(model: nn.Module, other: nn.Module) -> None:
    """Give a model the lock of another one that it runs."""
    _LOCKS[model] = lock_of(other)


@contextmanager
def holding(*models: nn.Module) -> Iterator[None]:
    """Lock models for this thread, in the same order in every thread: no other runs, changes or copies them."""
    with ExitStack() as stack:
        for lock in sorted({lock_of(model) for model in models}, key=id):
            stack.enter_context(lock)
        yield


def holds_models(function: Function) -> Function:
    """Let a function or method lock the models among its arguments while it runs.

    Models are also found in lists, mappings and objects with an attribute `model`.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code runs without hooks
            return function(*args, **kwargs)
        models = [*_models_among([*args, *kwargs.values()])]
        with lock_of(models[0]) if len(models) == 1 else holding(*models):
            return function(*args, **kwargs)

    return cast(Function, run)


def _models_among(values: Iterable[object]) -> Iterator[nn.Module]:
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, list | tuple):
            yield from _models_among(value)
        elif isinstance(model := getattr(value, "model", None), nn.Module):
            yield model
        elif isinstance(value, Mapping):
            yield from _models_among(value.values())
