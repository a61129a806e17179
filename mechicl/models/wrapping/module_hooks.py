"""TransformerLens' hook points at the sub-modules of any module, by torch's own forward hooks."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_act_name

from mechicl.models.holding import listening
from mechicl.models.layered import has_torch_hooks
from mechicl.models.opening.sites import AXES, BY_POS

Names = str | Sequence[str]
Split = Callable[[Tensor], Sequence[Tensor]]
Side = Literal["input", "output"]
KEYWORDS = {  # which argument of `wrap` declares each hook
    "hook_resid_pre": "layers='blocks.{}'",
    "hook_resid_mid": "resid_mid='blocks.{}.ln2'",
    "hook_resid_post": "layers='blocks.{}'",
    "hook_attn_out": "attention='blocks.{}.attn'",
    "hook_mlp_out": "mlp='blocks.{}.mlp'",
    **{
        f"hook_{part}": f"attention={{'{part}': 'blocks.{{}}.attn.{part}_proj', 'n_heads': ...}}, or 'qkv' for one "
        f"projection to all three"
        for part in "qkv"
    },
    "hook_z": "attention={'z': 'blocks.{}.attn.proj', 'n_heads': ...}",
    "hook_attn_scores": "attention={'scores': 'blocks.{}.attn.softmax'}",
    "hook_pattern": "attention={'pattern': 'blocks.{}.attn.softmax'}",
}
NO_HOOKS = "has no hooks: wrap it with layers=, the names of its layers"


@dataclass(frozen=True)
class Fused:
    """One of q, k and v in a projection that returns them in one tensor.

    Attributes:
        part: its number among what `split` returns.
        split: what makes q, k and v `[prompt pos head d_head]` of the projection's output `[prompt pos width]`. It may
            only move numbers about (split, reshape, transpose), so that a changed q can be put back.
    """

    part: int
    split: Split

    def columns(self, width: int, name: str) -> Tensor:
        """The indices of its numbers among the projection's outputs, `[head d_head]`."""
        try:
            return _columns(self.split, width)[self.part]
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"what {name!r} returns, of the width {width}, is not q, k and v: {error}") from error


@lru_cache(maxsize=256)
def _columns(split: Split, width: int) -> list[Tensor]:
    """Where q, k and v stand, `[head d_head]` each: what `split` does to the numbers of the places."""
    parts = [part.long() for part in split(torch.arange(width, dtype=torch.float64)[None, None])]
    shapes = [tuple(part.shape) for part in parts]
    if len(parts) != 3 or any(len(shape) != 4 or shape[:2] != (1, 1) for shape in shapes):
        raise ValueError(f"'split' must return three tensors [prompt pos head d_head], and returns {shapes}")
    for part in parts:
        places = part.flatten().tolist()
        if len(set(places)) < len(places) or not set(places) <= set(range(width)):
            raise ValueError("'split' must only move numbers about, so that a changed q, k or v can be put back")
    return [part[0, 0] for part in parts]


@dataclass(frozen=True)
class Place:
    """Where a component is seen: what goes into a sub-module, or what comes out of it.

    Attributes:
        component: as in `Site`.
        layer: number of the layer.
        side: "input" or "output" of the sub-module; of several, the first.
        n_heads: into how many heads the last axis is split, for q, k, v and z.
        fused: for q, k and v in one tensor.
        batch_first: False where the sub-module has `[pos prompt ...]`.
    """

    component: str
    layer: int
    side: Side
    n_heads: int | None = None
    fused: Fused | None = None
    batch_first: bool = True

    def split(self, activation: Any, name: str) -> Tensor:
        """The activation in TransformerLens' shape."""
        where, axes = f"the {self.side} of {name!r}", AXES[self.component]
        if not isinstance(activation, Tensor):
            raise TypeError(f"{where} is no tensor but {type(activation).__name__}: it cannot be {self.component!r}")
        if "key" in axes:
            if activation.ndim == 3 and self.n_heads == 1:
                return activation[:, None]
            expected = ["prompt", *axes]
        else:
            expected = ["prompt", "pos", "d_model" if axes == BY_POS else "n_heads * d_head"]
        if not self.batch_first and "key" not in axes:
            expected[:2] = expected[1::-1]
        if activation.ndim != len(expected):
            raise ValueError(
                f"{where} has the shape {tuple(activation.shape)}: {self.component!r} must be [{' '.join(expected)}]"
            )
        if "key" in axes:
            return activation
        if not self.batch_first:
            activation = activation.transpose(0, 1)
        if self.fused is not None:
            return activation[..., self.fused.columns(activation.shape[-1], name).to(activation.device)]
        if self.n_heads is None or axes == BY_POS:
            return activation
        if activation.shape[-1] % self.n_heads:
            raise ValueError(
                f"{where} has the shape {tuple(activation.shape)}: {self.component!r} is "
                f"[prompt pos n_heads * d_head] with n_heads={self.n_heads}"
            )
        return activation.unflatten(-1, (self.n_heads, -1))

    def join(self, seen: Tensor, activation: Tensor, name: str) -> Tensor:
        """The inverse of `split`: what the sub-module's activation is where that was seen."""
        axes = AXES[self.component]
        if "key" in axes:
            return seen[:, 0] if activation.ndim == 3 else seen
        if self.fused is not None:
            columns = self.fused.columns(activation.shape[-1], name).flatten().to(activation.device)
            turned = activation if self.batch_first else activation.transpose(0, 1)
            seen = turned.index_copy(-1, columns, seen.flatten(-2).to(activation.dtype))
        elif axes != BY_POS:
            seen = seen.flatten(-2)
        return seen if self.batch_first else seen.transpose(0, 1)


class HookedParts:
    """Sub-modules of a module, and the hook points that see what goes into them or comes out.

    torch's hooks are attached for as long as a run takes and only where a hook point has hooks, so that the module
    runs as ever in between. A sub-module that runs several times in a pass (a looped block) is named as often: its
    calls are the layers, in order.

    Args:
        module: whose sub-modules they are.
        parts: names of sub-modules, and what is seen there.
        blocks: gets the hook points, by TransformerLens' names.
    """

    def __init__(self, module: nn.Module, parts: Sequence[tuple[str, Place]], blocks: nn.ModuleList):
        self.module = module
        self._points: dict[tuple[str, int], HookPoint] = {}
        self._places: dict[str, list[Place]] = {}
        for name, place in parts:
            self._places.setdefault(name, []).append(place)
            *path, last = get_act_name(place.component, place.layer).split(".")[2:]
            holder = blocks[place.layer]
            for part in path:
                if not hasattr(holder, part):
                    holder.add_module(part, nn.Module())
                holder = getattr(holder, part)
            point = self._points[place.component, place.layer] = HookPoint()
            holder.add_module(last, point)

    def listens(self) -> bool:
        """Whether a hook point has hooks."""
        return any(map(has_torch_hooks, self._points.values()))

    @contextmanager
    def attached(self, calls: Counter[str]) -> Iterator[None]:
        """A context in which runs of the module pass through the hook points that have hooks.

        `calls` counts how often each sub-module with hooks runs.
        """
        before, after = [], []
        for name, places in self._places.items():
            if any(has_torch_hooks(self._point(place)) for place in places):
                part = self.module.get_submodule(name)
                # what comes in is seen last, and what comes out first: nearest to what the part itself does
                before.append((part, self._before(name, calls)))
                after.append((part, self._after(name, calls)))
        compiled = bool(before) and any(map(_is_compiled, self.module.modules()))
        # compiled code runs no new hooks
        eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with listening(before, after), eager:
            yield

    def check(self, calls: Counter[str]) -> None:
        """Refuse (ValueError) sub-modules with hooks that ran another number of times than they were named."""
        for name, places in self._places.items():
            named = Counter(place.component for place in places).most_common(1)[0][1]
            listens = any(has_torch_hooks(self._point(place)) for place in places)
            if listens and not calls[name]:
                raise ValueError(
                    f"{name!r}, named as {places[0].component!r}, does not run in a pass: its weights may be read by "
                    f"another part, as torch's MultiheadAttention reads those of its out_proj. Name a part that runs"
                )
            if listens and calls[name] != named:
                raise ValueError(
                    f"{name!r} runs {calls[name]} times in a pass, and is named {named} times: name a part that runs "
                    f"several times once for each, layers={[name] * min(calls[name], 3)}..., in the order of its runs"
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
                    first = _first_parameter(part, kwargs)
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
        if not has_torch_hooks(point):
            return activation
        # a hook may write into what it is given, and the module may need its own tensor again
        changed = place.join(point(place.split(activation, name).clone()), activation, name)
        if place.component == "resid_mid":  # the stream around the MLP is the tensor that this part is given
            return activation.copy_(changed)
        return changed


def expand(module: nn.Module, names: Names, keyword: str, *, n_layers: int | None = None) -> list[str]:
    """The names of sub-modules that a pattern with `{}` stands for, or a list of names, checked against the module.

    A sub-module that stands under several names has the first of them each time.

    Args:
        module: that has them.
        names: "blocks.{}" for blocks.0, blocks.1, ..., or the names themselves, in order.
        keyword: under which they were given, for messages.
        n_layers: how many there must be.

    Raises:
        ValueError: no such sub-module (the message names the module's own lists), or another number than of layers.
    """
    every, known, first_names = dict(module.named_modules(remove_duplicate=False)), {}, {}
    for name, part in every.items():
        known.setdefault(name.replace("._orig_mod", ""), part)  # which torch.compile puts in between
        first_names.setdefault(id(part), name)
    known = {**every, **known} if isinstance(names, str) and "_orig_mod" in names else known
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
    return [first_names[id(known[name])] for name in expanded]  # one part under two names runs twice


def unwrapped(module: nn.Module) -> nn.Module:
    """What `torch.compile`, `DataParallel` and the like are put around: in a copy or in traced code no hook runs."""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _hint(known: Mapping[str, nn.Module]) -> str:
    """The module's own numbered sub-modules, as patterns; without any, its parts."""
    numbered = {re.sub(r"\b0$", "{}", name): name for name in known if re.search(r"(^|\.)0$", name)}
    if numbered:
        return f"; it has {sorted(numbered, key=lambda name: (name.count('.'), name))[:6]}"
    return f"; it has {[name for name in known if name][:12]}"


def _is_compiled(part: nn.Module) -> bool:
    return part._compiled_call_impl is not None or hasattr(part, "_orig_mod")


def _first_parameter(part: nn.Module, kwargs: Mapping[str, Any]) -> str:
    """The name of a part's first input among those that it was given by name."""
    return next((name for name in inspect.signature(part.forward).parameters if name in kwargs), next(iter(kwargs)))
