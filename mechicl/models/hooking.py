"""Hooks that come and go whole, whatever is interrupted, and whatever another library's bookkeeping has lost."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import nn
from transformer_lens.hook_points import HookPoint

from mechicl.base.temporary import Temporary

Direction = Literal["fwd", "bwd"]
PLACES: dict[Direction, tuple[str, str]] = {
    "fwd": ("_forward_hooks", "fwd_hooks"),
    "bwd": ("_backward_hooks", "bwd_hooks"),
}
"""Where a hook point keeps hooks of each direction: torch's dictionary, and TransformerLens' list of handles."""


class AddedHooks:
    """Hooks for hook points, and what there was before they were added.

    TransformerLens adds a hook to torch's dictionary first and to its own list of handles then. What is interrupted in
    between has a hook that none of its methods finds. So what was added is told from the dictionaries before and after.

    Args:
        hooks: hook points, hooks, and their directions.
        level: TransformerLens' label of what is added together.
        prepend: call them before those that are there.
    """

    def __init__(
        self,
        hooks: Sequence[tuple[HookPoint, Callable[..., Any], Direction]],
        *,
        level: int | None = None,
        prepend: bool = False,
    ):
        self._hooks, self._level, self._prepend = hooks, level, prepend
        self._before: list[tuple[HookPoint, Direction, frozenset[int], list[Any]]] = []
        self._added: list[frozenset[int]] | None = None

    @property
    def complete(self) -> bool:
        """Whether all have been added."""
        return self._added is not None

    def add(self) -> None:
        """Add them all."""
        places: Iterable[tuple[HookPoint, Direction]] = ((point, direction) for point, _, direction in self._hooks)
        for point, direction in dict.fromkeys(places):
            hooks, handles = _kept(point, direction)
            self._before.append((point, direction, frozenset(hooks), list(handles)))
        for point, hook, direction in self._hooks:
            point.add_hook(hook, dir=direction, level=self._level, prepend=self._prepend)
        self._added = [frozenset(_kept(point, direction)[0]) - keys for point, direction, keys, _ in self._before]

    def remove(self) -> None:
        """Remove as many as have been added; those that came later stay."""
        for number, (point, direction, before, handles_before) in enumerate(self._before):
            hooks, handles = _kept(point, direction)
            added = frozenset(hooks) - before if self._added is None else self._added[number]
            for key in added:
                hooks.pop(key, None)
            left = handles_before if self._added is None else [each for each in handles if each.hook.id not in added]
            setattr(point, PLACES[direction][1], left)


def adding(hooks: Sequence[tuple[HookPoint, Callable[..., Any], Direction]], *, prepend: bool = False) -> Temporary:
    """A context with hooks at some hook points."""
    added = AddedHooks(hooks, prepend=prepend)
    return Temporary(added.add, added.remove)


def leaving_no_hooks(points: Iterable[HookPoint]) -> Temporary:
    """A context after which hook points have the hooks that they had before: for code of others that adds some."""
    places: list[tuple[HookPoint, Direction]] = [
        (point, direction) for point in dict.fromkeys(points) for direction in PLACES
    ]
    before = [(*place, frozenset(_kept(*place)[0]), list(_kept(*place)[1])) for place in places]

    def remove_others() -> None:
        for point, direction, keys, handles in before:
            hooks = _kept(point, direction)[0]
            if frozenset(hooks) != keys:
                for key in frozenset(hooks) - keys:
                    hooks.pop(key, None)
                setattr(point, PLACES[direction][1], handles)

    return Temporary(lambda: None, remove_others)


def remove_all_hooks(
    points: Iterable[HookPoint], directions: Iterable[Direction] = ("fwd", "bwd"), *, including_permanent: bool = False
) -> None:
    """Remove what was added to hook points by `add_hook`, whether TransformerLens' lists know of it or not."""
    for point in dict.fromkeys(points):
        for direction in directions:
            hooks, handles = _kept(point, direction)
            permanent = [] if including_permanent else [handle for handle in handles if handle.is_permanent]
            kept = {handle.hook.id for handle in permanent}
            for key, hook in list(hooks.items()):
                if key not in kept and _is_of_a_hook_point(hook):
                    hooks.pop(key, None)
            setattr(point, PLACES[direction][1], permanent)


def listening(
    before: Sequence[tuple[nn.Module, Callable[..., Any]]] = (),
    after: Sequence[tuple[nn.Module, Callable[..., Any]]] = (),
) -> Temporary:
    """A context in which functions are called before or after modules run: torch's own hooks, on any module.

    Args:
        before: of `(module, args, kwargs)`; the last is called first.
        after: of `(module, args, output)`; the last is called first.
    """

    def attach() -> None:
        for module, function in before:
            module.register_forward_pre_hook(function, with_kwargs=True)
        for module, function in after:
            module.register_forward_hook(function, prepend=True)

    def detach() -> None:
        for module, function in (*before, *after):
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, each in hooks.items() if each is function]:
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    hooks.pop(key, None)

    return Temporary(attach, detach)


def _kept(point: HookPoint, direction: Direction) -> tuple[dict[int, Any], list[Any]]:
    hooks, handles = PLACES[direction]
    return getattr(point, hooks), getattr(point, handles)


def _is_of_a_hook_point(hook: Callable[..., Any]) -> bool:
    """Whether it is one of the functions that `HookPoint.add_hook` puts around hooks."""
    return getattr(hook, "__qualname__", "").startswith("HookPoint.add_hook.")
