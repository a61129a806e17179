"""TransformerLens' hook points at the sub-modules of any module, by torch's own forward hooks."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn as nn
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.models.sites import AXES

Names = str | Sequence[str]
Side = Literal["input", "output"]
NO_HOOKS = "has no hooks: wrap it with layers=, the names of its layers"


@dataclass(frozen=True)
class Place:
    """Where a component is seen: what goes into a sub-module, or what comes out of it.

    Attributes:
        component: as in `Site`.
        layer: number of the layer.
        side: "input" or "output" of the sub-module; of several, the first.
        n_heads: into how many heads the last axis is split, for "z".
    """

    component: str
    layer: int
    side: Side
    n_heads: int | None = None

    def split(self, activation: Any, name: str) -> Tensor:
        """The activation in TransformerLens' shape.

        Raises:
            TypeError: no tensor stands there.
            ValueError: a tensor of another number of axes, or that cannot be split into heads.
        """
        where = f"the {self.side} of {name!r}"
        if not isinstance(activation, Tensor):
            raise TypeError(f"{where} is no tensor but {type(activation).__name__}: it cannot be {self.component!r}")
        if self.n_heads is not None:
            if activation.ndim != 3 or activation.shape[-1] % self.n_heads:
                raise ValueError(
                    f"{where} has the shape {tuple(activation.shape)}: {self.component!r} is "
                    f"[prompt pos n_heads * d_head] with n_heads={self.n_heads}"
                )
            return activation.unflatten(-1, (self.n_heads, -1))
        axes = AXES[self.component]
        expected = ["prompt", *axes] if "key" in axes else ["prompt", *axes, "d_model"]
        if activation.ndim != len(expected):
            raise ValueError(
                f"{where} has the shape {tuple(activation.shape)}: {self.component!r} must be [{' '.join(expected)}]"
            )
        return activation

    def join(self, activation: Tensor) -> Tensor:
        """The inverse of `split`."""
        return activation if self.n_heads is None else activation.flatten(-2)


class HookedParts:
    """Sub-modules of a module, and the hook points that see what goes into them or comes out.

    torch's hooks are attached for as long as a run takes and only where a hook point has hooks, so that the module
    runs as ever in between. A sub-module that runs several times in a pass (a looped block) is named as often: its
    calls are the layers, in order.

    Args:
        module: whose sub-modules they are.
        points: the hook points by component and layer.
    """

    def __init__(self, module: nn.Module, points: Mapping[tuple[str, int], HookPoint]):
        self.module = module
        self._points = points
        self._places: dict[str, list[Place]] = {}

    def add(self, name: str, place: Place) -> None:
        """See a component at the sub-module of that name."""
        self._places.setdefault(name, []).append(place)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """A context in which runs of the module pass through the hook points that have hooks.

        Raises:
            ValueError: at its end, a sub-module ran another number of times than it was named.
        """
        calls: Counter[str] = Counter()
        with ExitStack() as stack:
            for name, places in self._places.items():
                if any(_has_hooks(self._point(place)) for place in places):
                    part = self.module.get_submodule(name)
                    # what comes in is seen last, and what comes out first: nearest to what the part itself does
                    before = part.register_forward_pre_hook(self._before(name, calls), with_kwargs=True)
                    after = part.register_forward_hook(self._after(name, calls), prepend=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            yield
        for name, n_calls in calls.items():
            named = Counter(place.component for place in self._places[name]).most_common(1)[0][1]
            if n_calls != named:
                raise ValueError(
                    f"{name!r} runs {n_calls} times in a pass, and is named {named} times: name a part that runs "
                    f"several times once for each, layers={[name] * min(n_calls, 3)}..., in the order of its runs"
                )

    def _point(self, place: Place) -> HookPoint:
        return self._points[place.component, place.layer]

    def _at_call(self, name: str, side: str, number: int) -> list[Place]:
        """The places on one side of a part in its call of that number: each component's layer of that number."""
        by_component: dict[str, list[Place]] = {}
        for place in self._places[name]:
            if place.side == side:
                by_component.setdefault(place.component, []).append(place)
        return [places[number] for places in by_component.values() if number < len(places)]

    def _before(self, name: str, calls: Counter[str]) -> Callable[..., Any]:
        def see_input(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number = calls[name]
            calls[name] += 1
            for place in self._at_call(name, "input", number):
                if args:
                    args = (self._see(place, name, args[0]), *args[1:])
                elif kwargs:
                    first = next(iter(kwargs))
                    kwargs = {**kwargs, first: self._see(place, name, kwargs[first])}
            return args, kwargs

        return see_input

    def _after(self, name: str, calls: Counter[str]) -> Callable[..., Any]:
        def see_output(part: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            for place in self._at_call(name, "output", calls[name] - 1):
                if isinstance(output, tuple) and output:
                    whole: Any = output
                    first = self._see(place, name, whole[0])
                    fields = getattr(whole, "_fields", None)  # of a named tuple
                    output = whole._replace(**{fields[0]: first}) if fields else (first, *whole[1:])
                else:
                    output = self._see(place, name, output)
            return output

        return see_output

    def _see(self, place: Place, name: str, activation: Any) -> Any:
        point = self._point(place)
        if not _has_hooks(point):
            return activation
        # a hook may write into what it is given, and the module may need its own tensor again
        return place.join(point(place.split(activation, name).clone()))


def expand(module: nn.Module, names: Names, keyword: str, *, n_layers: int | None = None) -> list[str]:
    """The names of sub-modules that a pattern with `{}` stands for, or a list of names, checked against the module.

    Args:
        module: that has them.
        names: "blocks.{}" for blocks.0, blocks.1, ..., or the names themselves, in order.
        keyword: under which they were given, for messages.
        n_layers: how many there must be.

    Raises:
        ValueError: no such sub-module (the message names the module's own lists), or another number than of layers.
    """
    known = dict(module.named_modules())
    if isinstance(names, str) and names.count("{}") == 1:
        expanded, layer = [], 0
        while names.format(layer) in known:
            expanded.append(names.format(layer))
            layer += 1
        if not expanded:
            raise ValueError(f"{keyword}={names!r} names no sub-module: there is no {names.format(0)!r}{_hint(known)}")
    else:
        expanded = [names] if isinstance(names, str) else list(names)
        missing = [name for name in expanded if name not in known or not name]
        if missing or not expanded:
            what = f"no sub-module {missing[0]!r}" if missing else "no name at all"
            raise ValueError(f"{keyword}={names!r}: {what}{_hint(known)}")
    if n_layers is not None and len(expanded) != n_layers:
        raise ValueError(f"{keyword}={names!r} names {len(expanded)} sub-modules, and there are {n_layers} layers")
    return expanded


def _hint(known: Mapping[str, nn.Module]) -> str:
    """The module's own numbered sub-modules, as patterns; without any, its parts."""
    numbered = {re.sub(r"\b0$", "{}", name): name for name in known if re.search(r"(^|\.)0$", name)}
    if numbered:
        return f"; it has {sorted(numbered, key=lambda name: (name.count('.'), name))[:6]}"
    return f"; it has {[name for name in known if name][:12]}"


def _has_hooks(point: HookPoint) -> bool:
    return bool(point._forward_hooks or point._forward_pre_hooks or point._backward_hooks or point._backward_pre_hooks)
