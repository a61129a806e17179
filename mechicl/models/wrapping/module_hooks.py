"""TransformerLens' hook points at the sub-modules of any module, by torch's own forward hooks."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_act_name

from mechicl.models.layered import has_torch_hooks
from mechicl.models.opening.sites import AXES, BY_POS
from mechicl.models.wrapping.fused_attention import StepwiseAttention

Split = Callable[[Tensor], Sequence[Tensor]]
Side = Literal["input", "output", "inside"]
KEYWORDS = {  # the argument of `wrap` that declares each hook
    **dict.fromkeys(("hook_resid_pre", "hook_resid_post"), "layers='blocks.{}'"),
    "hook_resid_mid": "resid_mid='blocks.{}.ln2'",
    "hook_attn_out": "attention='blocks.{}.attn'",
    "hook_mlp_out": "mlp='blocks.{}.mlp'",
    **{
        f"hook_{part}": f"attention={{{part!r}: ..., 'n_heads': ...}}, or 'qkv' for one projection to all"
        for part in "qkv"
    },
    "hook_z": "attention={'z': 'blocks.{}.attn.proj', 'n_heads': ...}",
    "hook_attn_scores": "attention={'scores': 'blocks.{}.attn.softmax'}, or 'fused' for scaled_dot_product_attention",
    "hook_pattern": "attention={'pattern': 'blocks.{}.attn.softmax'}, or 'fused' for scaled_dot_product_attention",
}
NO_HOOKS = "has no hooks: wrap it with layers=, the names of its layers"


@dataclass(frozen=True)
class JointProjection:
    """One of q, k and v in the output of a projection that returns them in one tensor."""

    part: int  # its index among the results of `split`
    # maps the projection's output `[prompt pos width]` to q, k and v `[prompt pos head d_head]`. It may only rearrange
    # numbers (split, reshape, transpose), so that a changed q can be written back.
    split: Split

    def columns(self, width: int, name: str) -> Tensor:
        """The indices of its numbers among the projection's outputs, `[head d_head]`."""
        try:
            return _columns(self.split, width)[self.part]
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the output of {name!r}, of width {width}, is not q, k and v: {error}") from error


@lru_cache(maxsize=256)
def _columns(split: Split, width: int) -> list[Tensor]:
    parts = [part.long() for part in split(torch.arange(width, dtype=torch.float64)[None, None])]
    shapes = [tuple(part.shape) for part in parts]
    if len(parts) != 3 or any(len(shape) != 4 or shape[:2] != (1, 1) for shape in shapes):
        raise ValueError(f"'split' must return three tensors [prompt pos head d_head], got {shapes}")
    for part in parts:
        columns = part.flatten().tolist()
        if len(set(columns)) < len(columns) or not set(columns) <= set(range(width)):
            raise ValueError("'split' must only rearrange numbers, so that a changed q, k or v can be written back")
    return [part[0, 0] for part in parts]


@dataclass(frozen=True)
class HookPlace:
    """Where a component is read: the input of a sub-module, its output, or inside its fused attention."""

    component: str  # name of the component, such as "pattern", as in `Site`
    layer: int  # number of the layer
    side: Side  # "input", "output" (of several values, the first) or "inside"
    n_heads: int | None = None  # number of heads in the last axis, for q, k, v and z
    joint: JointProjection | None = None  # for q, k and v in one tensor
    batch_first: bool = True  # False for a sub-module that takes `[pos prompt ...]`

    def split(self, activation: Any, name: str) -> Tensor:
        """The activation in TransformerLens' shape."""
        where, axes = f"the {self.side} of {name!r}", AXES[self.component]
        if not isinstance(activation, Tensor):
            raise TypeError(f"{where} is {type(activation).__name__}, not a tensor: it cannot be {self.component!r}")
        if activation.is_nested:
            fix = "make nn.TransformerEncoder with enable_nested_tensor=False"
            raise ValueError(f"{where} is a nested tensor, from which torch has removed the padding: {fix}")
        if self.side == "inside":
            if "head" in axes[1:] and activation.shape[2] != self.n_heads:
                raise ValueError(f"{name!r} has {activation.shape[2]} heads of {self.component}, not {self.n_heads}")
            return activation
        if axes == BY_POS and activation.ndim == 4 and self.batch_first:  # cells: [prompt row column d_model]
            return activation
        expected, per_head = ["prompt", *axes], None
        if "key" not in axes:
            first = ["prompt", "pos"] if self.batch_first else ["pos", "prompt"]
            expected = [*first, "d_model" if axes == BY_POS else "n_heads * d_head"]
            per_head = self.n_heads if axes != BY_POS and self.joint is None else None
        elif activation.ndim == 3 and self.n_heads == 1:
            return activation[:, None]
        if activation.ndim != len(expected) or (per_head and activation.shape[-1] % per_head):
            raise ValueError(
                f"{where} has the shape {tuple(activation.shape)}: {self.component!r} must be [{' '.join(expected)}]"
                + (f" with n_heads={per_head}" if per_head else "")
            )
        if "key" in axes:
            return activation
        activation = activation if self.batch_first else activation.transpose(0, 1)
        if self.joint is not None:
            return activation[..., self.joint.columns(activation.shape[-1], name).to(activation.device)]
        return activation.unflatten(-1, (per_head, -1)) if per_head else activation

    def join(self, seen: Tensor, activation: Tensor, name: str) -> Tensor:
        """The inverse of `split`: the sub-module's activation with a changed component."""
        axes = AXES[self.component]
        if self.side == "inside":
            return seen
        if "key" in axes:
            return seen[:, 0] if activation.ndim == 3 else seen
        if self.joint is not None:
            columns = self.joint.columns(activation.shape[-1], name).flatten().to(activation.device)
            whole = activation if self.batch_first else activation.transpose(0, 1)
            seen = whole.index_copy(-1, columns, seen.flatten(-2).to(activation.dtype))
        elif axes != BY_POS:
            seen = seen.flatten(-2)
        return seen if self.batch_first else seen.transpose(0, 1)


class HookedParts:
    """Hook points in `blocks` that read inputs or outputs of sub-modules, with torch's hooks only while needed.

    A sub-module that runs several times (a looped block) is named that often; its calls are the layers, in order.
    """

    def __init__(self, module: nn.Module, parts: Sequence[tuple[str, HookPlace]], blocks: nn.ModuleList):
        self.module = module
        self.opens_attention = any(place.side == "inside" for _, place in parts)
        self._points: dict[tuple[str, int], tuple[nn.Module, str]] = {}  # as a module and an attribute of it
        self._places: dict[str, list[HookPlace]] = {}
        self._compared: set[Any] = set()
        for name, place in parts:
            self._places.setdefault(name, []).append(place)
            *path, last = get_act_name(place.component, place.layer).split(".")[2:]
            holder = blocks[place.layer]
            for part in path:
                if not hasattr(holder, part):
                    holder.add_module(part, nn.Module())
                holder = getattr(holder, part)
            holder.add_module(last, HookPoint())
            self._points[place.component, place.layer] = holder, last

    def has_hooks(self) -> bool:
        """True if a hook point has hooks, or another library has replaced it or its `forward`."""
        return any(map(_is_hooked, self._points.values()))

    @contextmanager
    def attached(self, calls: Counter[str]) -> Iterator[None]:
        """A context in which runs pass through hooked points; `calls` counts the runs of each sub-module."""
        with ExitStack() as stack:
            attention = StepwiseAttention(self._compared)
            hooked = {name: list(filter(self._hooked, places)) for name, places in self._places.items()}
            for name, places in hooked.items():
                if places:
                    part = self.module.get_submodule(name)
                    # inputs are read after the user's own hooks, outputs before them: next to the part's own code
                    inputs: list[Any] = []  # of the calls that are running
                    before, after = (each(name, calls, inputs, attention) for each in (self._before, self._after))
                    stack.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
                    stack.callback(part.register_forward_hook(after, prepend=True).remove)
            if any(place.side == "inside" for places in hooked.values() for place in places):
                stack.enter_context(attention)
            parts = self.module.modules()
            if any(hooked.values()) and any(p._compiled_call_impl or hasattr(p, "_orig_mod") for p in parts):
                stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code runs no new hooks
            yield

    def check(self, calls: Counter[str]) -> None:
        """Refuse (ValueError) sub-modules with hooks that ran another number of times than they were named."""
        for name, places in self._places.items():
            if not any(map(self._hooked, places)):
                continue
            named = Counter(place.component for place in places).most_common(1)[0][1]
            if not calls[name]:
                raise ValueError(f"{name!r}, named as {places[0].component!r}, does not run: name a part that runs")
            if calls[name] != named:
                raise ValueError(f"{name!r} runs {calls[name]} times, and is named {named} times: name it for each")

    def _hooked(self, place: HookPlace) -> bool:
        return _is_hooked(self._points[place.component, place.layer])

    def _at_call(self, name: str, side: str, number: int) -> list[HookPlace]:
        """The places on one side of a part in its call of that number: each component's layer of that number."""
        by_component: dict[str, list[HookPlace]] = {}
        for place in self._places[name]:
            if place.side == side:
                by_component.setdefault(place.component, []).append(place)
        places = [places[number] for places in by_component.values() if number < len(places)]
        return [place for place in places if self._hooked(place)]

    def _before(
        self, name: str, calls: Counter[str], inputs: list[Any], attention: StepwiseAttention
    ) -> Callable[..., Any]:
        def see_input(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number = calls[name]
            calls[name] += 1
            first = _first_parameter(part, kwargs) if kwargs and not args else ""
            given = seen = args[0] if args else kwargs.get(first)
            for place in self._at_call(name, "input", number):
                seen = self._see(place, name, seen)
            if seen is not given:
                args, kwargs = ((seen, *args[1:]), kwargs) if args else (args, {**kwargs, first: seen})
            inputs.append((given, seen, _version(seen)))
            inside = {place.component: place for place in self._at_call(name, "inside", number)}
            if inside:
                attention.n_calls = 0
                attention.see = lambda component, activation: (
                    self._see(inside[component], name, activation) if component in inside else activation
                )
            return args, kwargs

        return see_input

    def _after(
        self, name: str, calls: Counter[str], inputs: list[Any], attention: StepwiseAttention
    ) -> Callable[..., Any]:
        def see_output(part: nn.Module, args: tuple[Any, ...], returned: Any) -> Any:
            if self._at_call(name, "inside", calls[name] - 1):
                attention.see = None
                if attention.n_calls != 1:
                    problem = f"calls torch's fused attention {attention.n_calls} times in a run, not once"
                    raise ValueError(f"{name!r} {problem}: name its softmax as 'scores' and 'pattern', not 'fused'")
            several: Any = returned if isinstance(returned, tuple) and returned else None
            first: Any = several[0] if several else returned
            given, seen, version = inputs.pop()
            writes = _version(seen) != version  # into its input, which its caller may read
            in_place = writes and first is seen
            if writes and seen is not given:
                given.copy_(seen)
                first = given if in_place else first
            for place in self._at_call(name, "output", calls[name] - 1):
                changed = self._see(place, name, first)
                first = first.copy_(changed) if in_place and changed is not first else changed
            if not several:
                return first
            fields = getattr(several, "_fields", None)  # of a named tuple
            return several._replace(**{fields[0]: first}) if fields else (first, *several[1:])

        return see_output

    def _see(self, place: HookPlace, name: str, activation: Any) -> Any:
        holder, attribute = self._points[place.component, place.layer]
        point = getattr(holder, attribute)
        # hooks and the module may keep their tensors, and write into them: each has its own
        changed = place.join(point(place.split(activation, name).clone()), activation, name)
        if place.component == "resid_mid":  # the stream around the MLP is the tensor that this part receives
            return activation.copy_(changed)
        with torch.inference_mode(False):  # whose tensors have no version
            return changed.clone()


def _is_hooked(place: tuple[nn.Module, str]) -> bool:
    point: Any = place[0]._modules[place[1]]
    return has_torch_hooks(point) or type(point) is not HookPoint or "forward" in point.__dict__


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _first_parameter(part: nn.Module, kwargs: Mapping[str, Any]) -> str:
    return next((name for name in inspect.signature(part.forward).parameters if name in kwargs), next(iter(kwargs)))
