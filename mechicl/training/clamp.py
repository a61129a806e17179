"""`Clamp`: an intervention during training, one of the `interventions` of a `TrainingConfig`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.base.arguments import Natural, check_fields, checked
from mechicl.models.opening.sites import AXES, hook_name

Places = Natural | tuple[Natural, ...] | None
PLACES = ("head", "pos", "query", "key", "neuron")
SOURCE_FIELDS = ("source", "source_seed", "source_layer", "source_head")


@dataclass(frozen=True)
class Clamp:
    """An intervention during training: part of an activation is replaced in all forward passes of some steps.

    Places are named as for `analysis.patch`. No gradient passes through a replaced activation: weights without another
    effect get the gradient 0, and Adam moves them only by the momentum that they had. Held-out losses are those with
    the clamps of the last training step. The weights that are saved and returned do not contain the clamp. Source:
    Singh et al. 2024 ("What needs to go right for an induction head?"), who clamp activations during training.

    Attributes:
        component: "z", "pattern", or another component that `patch` lists; or the full name of any hook, such as
            "hook_embed", whose activation is then replaced as a whole, without a layer and places.
        layer: number of the layer.
        head: head, or several; None for all. So are `pos` (positions), `query` and `key` (positions in scores and
            patterns) and `neuron`. Positions that shorter prompts of a curriculum lack are ignored there.
        method: "value" sets the activation to `value`; "mean" to its mean over the prompts of the batch (of each
            process); "copy" to the activation of another model, `source`, on the same prompts; "freeze" to that of this
            run's own weights at an earlier step, `snapshot`; "detach" keeps its value and only cuts the gradient there.
        value: the number for "value".
        source: for "copy", the checkpoint of the other model: a name, a folder, or "hf://owner/name", as for `load`.
        source_seed: training seed of the source's model; by default the one with the lowest held-out loss. "own" takes
            for each trained model the source's model with the same seed.
        source_layer: layer of the source that is copied from; by default `layer`.
        source_head: head of the source that is copied to all chosen heads; by default each is copied to the same head.
        snapshot: for "copy", the training step of a snapshot of the source, by default its final weights; for "freeze",
            a step of this run, which becomes one of its snapshots; by default 0, the initial weights.
        steps: first training step (from 0) with the clamp, and the first one without it again; None for the whole run.

    Raises:
        ValueError: fields that do not fit the method, places that the component does not have, an empty span of steps,
            or a frozen activation of a later step than the first clamped one.

    Example:
        >>> Clamp("pattern", layer=0, head=1, method="copy", source="induction-2l", steps=(0, 500)).hook_name
        'blocks.0.attn.hook_pattern'
    """

    component: str
    layer: Natural | None = None
    head: Places = None
    pos: Places = None
    query: Places = None
    key: Places = None
    neuron: Places = None
    method: Literal["value", "mean", "copy", "freeze", "detach"] = "value"
    value: float = 0.0
    source: str | None = None
    source_seed: Natural | Literal["own"] | None = None
    source_layer: Natural | None = None
    source_head: Natural | None = None
    snapshot: Natural | None = None
    steps: tuple[Natural, Natural] | None = None

    def __post_init__(self):
        for axis in PLACES:
            if isinstance(places := getattr(self, axis), range):
                object.__setattr__(self, axis, tuple(places))
        check_fields(self)
        if (self.component in AXES) != (self.layer is not None):
            given = f"component={self.component!r} and layer={self.layer}"
            raise ValueError(f"one of {tuple(AXES)} needs a layer, and the full name of a hook has none; got {given}")
        if wrong := [axis for axis in PLACES if getattr(self, axis) is not None and axis not in self.axes]:
            raise ValueError(f"{self.component!r} has the axes {self.axes}, not {wrong}")
        if empty := [axis for axis in PLACES if getattr(self, axis) == ()]:
            raise ValueError(f"{empty[0]} has no place: leave it out to replace all")
        allowed = {"value": ("value",), "copy": (*SOURCE_FIELDS, "snapshot"), "freeze": ("snapshot",)}
        for name in ("value", *SOURCE_FIELDS, "snapshot"):
            if getattr(self, name) != (0.0 if name == "value" else None) and name not in allowed.get(self.method, ()):
                raise ValueError(f"method={self.method!r} has no {name}: leave it out, or change the method")
        if self.method == "copy" and self.source is None:
            raise ValueError("method='copy' needs a source: the name or folder of a checkpoint")
        if self.source_head is not None and "head" not in self.axes:
            raise ValueError(f"{self.component!r} has no heads, so it cannot be copied from source_head")
        if self.method == "value" and self.hook_name.endswith("hook_attn_scores"):
            raise ValueError("a value for attn_scores would unmask hidden keys: clamp 'pattern'")
        first, end = self.steps or (0, 1)
        if first >= end:
            raise ValueError(f"steps must be two numbers, the lower first, got {self.steps}")
        if self.method == "freeze" and (self.snapshot or 0) > first:
            raise ValueError(f"snapshot={self.snapshot} is after the first clamped step, {first}")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes between `prompt` and features along which places of the activation can be chosen."""
        return AXES.get(self.component, ())

    @property
    def hook_name(self) -> str:
        """The name of the clamped hook."""
        return self.component if self.layer is None else hook_name(self.component, self.layer)

    @property
    def source_hook_name(self) -> str:
        """The name of the hook that the source's activation is taken from."""
        layer = self.layer if self.source_layer is None else self.source_layer
        return self.component if layer is None else hook_name(self.component, layer)

    @checked
    def is_active(self, step: int) -> bool:
        """True if training step `step` (from 0) has the clamp."""
        return self.steps is None or self.steps[0] <= step < self.steps[1]

    @checked
    def places(self, axis: str) -> tuple[int, ...] | None:
        """The chosen heads, positions, ... along an axis; None for all."""
        places = getattr(self, axis)
        return (places,) if isinstance(places, int) else places

    def _mask(self, shape: Sequence[int], device: torch.device) -> Bool[Tensor, "..."]:
        """True where an activation `[prompt *shape]` is replaced; of size 1 along axes that are replaced as a whole."""
        mask = torch.ones([1] * len(shape), dtype=torch.bool, device=device)
        for dim, axis in enumerate(self.axes):
            if (places := self.places(axis)) is not None:
                chosen = torch.zeros(shape[dim], dtype=torch.bool, device=device)
                chosen[[place for place in places if place < shape[dim]]] = True
                mask = mask & chosen.view(-1, *[1] * (len(shape) - dim - 1))
        return mask

    def hook(self, copied: Tensor | None) -> Callable[..., Tensor]:
        """A hook that replaces the chosen places of an activation, by `copied` where the method copies or freezes."""
        if copied is not None and self.source_head is not None:
            copied = copied.narrow(1 + self.axes.index("head"), self.source_head, 1)

        def replace(activation: Tensor, hook: HookPoint) -> Tensor:
            mask, new = self._mask(activation.shape[1:], activation.device), activation.detach()
            if self.method == "value":
                return torch.where(mask, self.value, activation)
            if self.method == "mean":
                new = new.mean(0, keepdim=True)
            return torch.where(mask, new if copied is None else copied.to(activation.dtype), activation)

        return replace
