"""Models and threads: predictions run side by side, and who changes a model, its hooks say, holds it for itself.

Hooks, and weights that are put in place of others, are part of a model: all threads would run into them. So every run
is a *pass*, of which there may be many at a time, and who adds hooks *holds* the model, alone: it waits for the passes
to end, and passes of other threads wait for it. The thread that holds a model may run it, and hold it once more.
"""

import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from threading import get_ident
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mechicl.base.temporary import Temporary

F = TypeVar("F", bound=Callable[..., Any])

FIRST_PAUSE, LONGEST_PAUSE = 20e-6, 2e-3  # seconds between two looks at whether it is one's turn
SUSPICIOUS, WORTH_A_WORD = 0.2, 60.0  # seconds of waiting after which one looks for a circle, and says something


class ModelsHeldInACircle(RuntimeError):
    """Threads that wait for models that the others hold: none would ever go on."""


class ModelLock:
    """Which threads are in a pass of a model, and which one holds it.

    Everything is kept in dictionaries, each step of which is one for the interpreter: an interrupt (Ctrl-C) comes
    before or after it, and `release` tells from what is there what is to be taken back.

    Attributes:
        number: models are held in this order where several are.
        passes: the threads that are in one.
    """

    def __init__(self):
        self.number = next(_NUMBERS)
        self.passes: dict[int, None] = {}
        self._holder: dict[str, int] = {}  # "thread": the one that holds it
        self._holds: dict[object, None] = {}  # what it holds it for
        self._queue: dict[object, None] = {}  # who waits, first come first

    def is_inside(self) -> bool:
        """Whether this thread is in a pass, or holds the model."""
        me = get_ident()
        return me in self.passes or self._holder.get("thread") == me

    def enter(self, me: int) -> None:
        """Begin this thread's pass; `passes.pop(me, None)` has to follow, whether this was interrupted or not."""
        if not self._try_to_enter(me):
            self._wait(lambda: self._try_to_enter(me))

    def hold(self, token: object) -> None:
        """Hold the model for `token`; `release` has to follow, whether this was interrupted or not."""
        me = get_ident()
        if self._holder.get("thread") != me:
            self._wait(lambda: self._is_first(token) and self._holder.setdefault("thread", me) == me, token)
            self._wait(lambda: not self.passes.keys() - {me})
        self._holds[token] = None

    def release(self, token: object, thread: int) -> None:
        """Hold it for `token` no longer, for which `thread` has held it."""
        self._holds.pop(token, None)
        if not self._holds and self._holder.get("thread") == thread:
            self._holder.pop("thread", None)

    def blockers(self) -> set[int]:
        """The threads that those who wait are waiting for."""
        return {*list(self.passes), *list(self._holder.values())}

    def _try_to_enter(self, me: int) -> bool:
        if self._holder.get("thread", me) != me:
            return False
        self.passes[me] = None
        if self._holder.get("thread", me) == me:  # first the pass, then this look: who holds it does it the other way
            return True
        self.passes.pop(me, None)
        return False

    def _is_first(self, token: object) -> bool:
        return list(self._queue)[:1] == [token]

    def _wait(self, ready: Callable[[], bool], token: object | None = None) -> None:
        token, me = object() if token is None else token, get_ident()
        try:
            self._queue[token] = None
            if ready():
                return
            start, pause, told, suspicions = time.monotonic(), FIRST_PAUSE, False, 0
            _WAITING[me] = self
            while not ready():
                time.sleep(pause)
                pause, waited = min(2 * pause, LONGEST_PAUSE), time.monotonic() - start
                if waited > SUSPICIOUS:
                    suspicions = suspicions + 1 if _is_in_a_circle(me) else 0
                    if suspicions > 10:  # seen while others move it may be none
                        raise ModelsHeldInACircle(
                            "this thread waits for a model that another thread runs or holds, and that one for a model "
                            "that this thread holds: hold them in the same order, or give each thread its own copies"
                        )
                if waited > WORTH_A_WORD and not told:
                    told = True
                    warnings.warn(
                        f"{threading.current_thread().name} has waited for a minute for a model that "
                        f"{self._names()} has hooks on, or changes: if that thread waits for this one to end, neither "
                        f"goes on (leave `with model.hooks(...)` first, or give each thread a copy of its own)",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        finally:
            try:
                self._queue.pop(token, None)
            finally:
                _WAITING.pop(me, None)

    def _names(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return " or ".join(names.get(thread, "a thread") for thread in self.blockers() - {get_ident()}) or "no thread"


_NUMBERS = itertools.count()
_LOCKS: "WeakKeyDictionary[nn.Module, ModelLock]" = WeakKeyDictionary()  # beside the models: not copied or saved
_WAITING: dict[int, ModelLock] = {}  # what each thread waits for
_MAKING = threading.Lock()


def lock_of(model: nn.Module) -> ModelLock:
    """The lock of a model, the same one for as long as the model is there."""
    lock = _LOCKS.get(model)
    if lock is None:
        with _MAKING:
            lock = _LOCKS.setdefault(model, ModelLock())
    return lock


def share_lock(model: nn.Module, other: nn.Module) -> None:
    """Let a model have the lock of another one, whose parts it runs."""
    lock = lock_of(other)
    with _MAKING:
        _LOCKS[model] = lock


def holding(*models: nn.Module) -> Temporary:
    """A context in which no other thread runs these models or holds them.

    Several are held in the same order by all threads. It may be entered again by the thread that is in it.

    Raises:
        ModelsHeldInACircle: when entered, threads wait for each other.
    """
    token, threads = object(), list[int]()
    locks = sorted({lock_of(model) for model in models}, key=lambda lock: lock.number)

    def hold() -> None:
        threads.append(get_ident())
        for lock in locks:
            lock.hold(token)

    def release() -> None:
        for thread in threads:
            for lock in reversed(locks):
                lock.release(token, thread)

    return Temporary(hold, release)


def in_a_pass(method: F) -> F:
    """Make a model's method a pass: it does not run while another thread holds the model.

    Raises:
        ModelsHeldInACircle: when called, threads wait for each other.
    """

    @wraps(method)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled runs without hooks
            return method(model, *args, **kwargs)
        lock, me = lock_of(model), get_ident()
        if lock.is_inside():
            return method(model, *args, **kwargs)
        passes = lock.passes
        try:
            lock.enter(me)
            return method(model, *args, **kwargs)
        finally:
            passes.pop(me, None)  # one step of the interpreter: see ModelLock

    return cast(F, run)


def holds_models(function: F) -> F:
    """Let a function hold the models among its arguments, those in lists and mappings too, for as long as it runs."""

    @wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        with holding(*_models_among([*args, *kwargs.values()])):
            return function(*args, **kwargs)

    return cast(F, held)


def _models_among(values: Iterable[object]) -> list[nn.Module]:
    models: list[nn.Module] = []
    for value in values:
        if isinstance(value, nn.Module):
            models.append(value)
        elif isinstance(value, list | tuple):
            models += _models_among(value)
        elif isinstance(value, Mapping):
            models += _models_among(value.values())
    return models


def _is_in_a_circle(me: int) -> bool:
    """Whether those that this thread waits for wait, each for the next, for this one."""
    reached: set[int] = set()
    ahead = [me]
    while ahead:
        lock = _WAITING.get(ahead.pop())
        blockers = set() if lock is None else lock.blockers() - reached
        if me in blockers and reached:
            return True
        blockers.discard(me)
        reached |= blockers
        ahead += blockers
    return False


def _forget_locks() -> None:
    """In a process that was forked, the other threads and what they held are gone."""
    global _MAKING
    _MAKING = threading.Lock()
    _LOCKS.clear()
    _WAITING.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
