"""Places in a model: the activation that a component has in a layer, at some position and head."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformer_lens.utilities import get_act_name

from mechicl.statistics import storable

BY_POS = ("pos",)
BY_HEAD = ("pos", "head")
BY_KEY = ("head", "query", "key")
AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"), BY_POS),
    **dict.fromkeys(("q", "k", "v", "z", "result"), BY_HEAD),
    **dict.fromkeys(("attn_scores", "pattern"), BY_KEY),
}
"""The axes of each component's activation after `prompt` and before its features: `pos`, `head`, and of a pattern the
`query` and `key` positions."""

COMPUTE_RESULTS = ": call model.set_use_attn_result(True) first"


@storable
@dataclass(frozen=True)
class Site:
    """Part of an activation: a component of a layer, at one position, head, query or key, or at all of them (None).

    Attributes:
        component: "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z" (a head's output),
            "result", "attn_scores" or "pattern".
        layer: number of the layer.
        pos: position; not for scores and patterns.
        head: head; only for parts of the attention.
        query: query position, for scores and patterns.
        key: key position, likewise.

    Raises:
        ValueError: an unknown component, or a part that it does not have.

    Example:
        >>> Site("z", layer=3, pos=40, head=1).hook_name
        'blocks.3.attn.hook_z'
    """

    component: str
    layer: int
    pos: int | None = None
    head: int | None = None
    query: int | None = None
    key: int | None = None

    def __post_init__(self):
        axes = axes_of(self.component)
        extra = [a for a in ("pos", "head", "query", "key") if getattr(self, a) is not None and a not in axes]
        if extra:
            raise ValueError(f"{self.component!r} has the axes {axes}, not {extra}")

    def __str__(self) -> str:
        parts = [f"{axis} {getattr(self, axis)}" for axis in axes_of(self.component) if getattr(self, axis) is not None]
        return ", ".join([f"{self.component} of layer {self.layer}", *parts])

    @property
    def hook_name(self) -> str:
        """The name of its hook."""
        return get_act_name(self.component, self.layer)

    @property
    def index(self) -> tuple[int | slice, ...]:
        """Its place in the activation of one prompt: `activation[prompt][index]`."""
        parts = (getattr(self, axis) for axis in axes_of(self.component))
        return tuple(slice(None) if part is None else part for part in parts)


def axes_of(component: str) -> tuple[str, ...]:
    """The axes by which parts of a component are told apart.

    Raises:
        ValueError: an unknown component; the message names the nearest.
    """
    if component not in AXES:
        raise ValueError(f"component {component!r} is not one of {tuple(AXES)}{nearest(component, AXES)}")
    return AXES[component]


def check_hook(model: Any, name: str) -> None:
    """Refuse (ValueError) a hook that the model does not have; the message names the nearest that it has."""
    names = hook_names(model)
    if name not in names:
        hint = nearest(name, names)
        if name.endswith("hook_result") and hasattr(model, "set_use_attn_result"):
            hint = COMPUTE_RESULTS
        if hasattr(model, "how_to_declare"):
            hint = model.how_to_declare(name)
        raise ValueError(f"the model has no hook {name!r}{hint}")


def silent_hook(name: str) -> ValueError:
    """The error for a hook that the model has, but that a run never reaches."""
    hint = COMPUTE_RESULTS if name.endswith("hook_result") else ""
    return ValueError(f"the hook {name!r} does not fire in this model{hint}")


def hook_names(model: Any) -> list[str]:
    """Names of all hooks of a model, aliases too where it has them."""
    aliases = getattr(model, "hook_aliases", None)
    return [*model.hook_dict, *(aliases if isinstance(aliases, dict) else ())]


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?", or nothing if nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
