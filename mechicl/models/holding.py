"""One lock per model, and hooks that last as long as a `with` block.

Hooks, and weights that temporarily replace others, are part of a model: every thread that runs it would see them. So a
run of a model, adding hooks to it and copying it all take the model's lock, an `RLock`: one thread at a time, which may
take the lock again. A thread that waits, within `with model.hooks(...)`, for another thread that runs the same model
waits forever, and so do two threads that lock two models in opposite order, except by `holding(a, b)`.

Plain calls of a `TransformerBridge` take no lock. So what we attach to one acts `in_this_thread` only.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

F = TypeVar("F", bound=Callable[..., Any])
Direction = Literal["fwd", "bwd"]

_LOCKS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()  # outside the models: not copied or saved
_LOOKUP = threading.Lock()


def lock_of(model: nn.Module) -> Any:
    """The model's `threading.RLock`."""
    with _LOOKUP:
        return _LOCKS.setdefault(model, threading.RLock())


def share_lock(model: nn.Module, other: nn.Module) -> None:
    """Give a model the lock of another one that it runs."""
    lock = lock_of(other)
    with _LOOKUP:
        _LOCKS[model] = lock


@contextmanager
def holding(*models: nn.Module) -> Iterator[None]:
    """Lock models for this thread, in the same order in every thread: no other runs, changes or copies them."""
    with ExitStack() as stack:
        for lock in sorted({lock_of(model) for model in models}, key=id):
            stack.enter_context(lock)
        yield


def in_a_pass(method: F) -> F:
    """Let a model's method take the model's lock while it runs."""

    @wraps(method)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code runs without hooks
            return method(model, *args, **kwargs)
        with lock_of(model):
            return method(model, *args, **kwargs)

    return cast(F, run)


def holds_models(function: F) -> F:
    """Let a function lock the models among its arguments, including those in lists and mappings, while it runs."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with holding(*_models_among([*args, *kwargs.values()])):
            return function(*args, **kwargs)

    return cast(F, run)


def _models_among(values: Iterable[object]) -> Iterator[nn.Module]:
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, list | tuple):
            yield from _models_among(value)
        elif isinstance(value, Mapping):
            yield from _models_among(value.values())


def in_this_thread(function: F, otherwise: Callable[..., Any] = lambda *args, **kwargs: None) -> F:
    """A function for calls in the current thread; in others `otherwise` runs, by default a hook that does nothing."""
    thread = threading.get_ident()

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else otherwise)(*args, **kwargs)

    return cast(F, run)


@contextmanager
def adding(
    hooks: Sequence[tuple[HookPoint, Callable[..., Any], Direction]], *, prepend: bool = False
) -> Iterator[None]:
    """A context with hooks at some hook points; `prepend` calls them before the others."""
    added = []
    try:
        for point, hook, direction in hooks:
            hook = in_this_thread(hook) if direction == "fwd" else hook  # torch has its own threads for gradients
            added.append((point, point.add_hook(hook, dir=direction, prepend=prepend)))
        yield
    finally:
        for point, handle in added:
            handle.hook.remove()
            point.fwd_hooks = [each for each in point.fwd_hooks if each is not handle]
            point.bwd_hooks = [each for each in point.bwd_hooks if each is not handle]


@contextmanager
def without_user_hooks(model: Any) -> Iterator[None]:
    """A context with the model's lock, in which the hooks at its hook points do not run."""
    with holding(model):
        points = dict.fromkeys(point for point in model.hook_dict.values() if isinstance(point, HookPoint))
        before = [(point, dict(point._forward_hooks)) for point in points if point._forward_hooks]
        try:
            for point, _ in before:
                point._forward_hooks.clear()
            yield
        finally:
            for point, hooks in before:
                point._forward_hooks.update(hooks)


def _forget_locks() -> None:
    """Forget the locks in a forked process, where the threads that acquired them do not run."""
    global _LOOKUP
    _LOOKUP = threading.Lock()
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
