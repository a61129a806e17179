"""Hooks that last as long as a `with` block.

Plain calls of a `TransformerBridge` do not take the model's lock (see `base/threads.py`). So what we attach to one acts
`in_this_thread` only.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, cast

from transformer_lens.hook_points import HookPoint

from mechicl.base.threads import Function

Direction = Literal["fwd", "bwd"]


def in_this_thread(function: Function, otherwise: Callable[..., Any] = lambda *args, **kwargs: None) -> Function:
    """A function for calls in the current thread; in others `otherwise` runs, by default a hook that does nothing."""
    thread = threading.get_ident()

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else otherwise)(*args, **kwargs)

    return cast(Function, run)


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
    """A context in which the hooks at a model's hook points do not run; the caller has the model's lock."""
    points = dict.fromkeys(point for point in model.hook_dict.values() if isinstance(point, HookPoint))
    before = [(point, dict(point._forward_hooks)) for point in points if point._forward_hooks]
    try:
        for point, _ in before:
            point._forward_hooks.clear()
        yield
    finally:
        for point, hooks in before:
            point._forward_hooks.update(hooks)
