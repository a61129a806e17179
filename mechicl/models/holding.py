"""One lock per model, and hooks that last as long as a `with` block.

One thread changes a model at a time: a run, adding hooks and copying take the model's lock, a `threading.RLock`, and
analyses lock the model while they run. As with any such lock, a thread that waits, within `with model.hooks(...)`, for
another thread that runs the same model waits forever; so do two threads that lock two models in opposite order, except
by `holding(a, b)`, and a process that was forked while another thread ran the model.

Plain calls of a `TransformerBridge` take no lock. So what we attach to one acts `in_this_thread` only.
"""

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


def holds_models(function: F) -> F:
    """Let a function or method lock the models among its arguments, also in lists and mappings, while it runs."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code runs without hooks
            return function(*args, **kwargs)
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
