"""Which cells a sweep has: a component at every combination of layers, positions, heads, ..."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformer_lens.utilities import get_act_name

from mechicl.analysis.interventions.runs import Sites
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edits import check_edits
from mechicl.models.opening.sites import Site, axes_of, check_hook, nearest

Only = Mapping[str, Sequence[int] | int]


@dataclass(frozen=True)
class CellGrid:
    """The cells of a sweep.

    Attributes:
        component: what is replaced.
        axes: what is swept, "layer" among them; along the component's other axes it is replaced as a whole.
        indices: the layers, positions, ... for each of the axes.
    """

    component: str
    axes: tuple[str, ...]
    indices: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells along each axis."""
        return tuple(map(len, self.indices))

    @property
    def hook_names(self) -> list[str]:
        """The component's hooks in the layers that are swept."""
        return [get_act_name(self.component, layer) for layer in self.indices[self.axes.index("layer")]]

    def cells(self) -> list[Sites]:
        """One site for each combination of indices, in order."""
        places = itertools.product(*self.indices)
        return [(Site(self.component, **dict(zip(self.axes, place, strict=True))),) for place in places]


def make_grid(
    adapter: ModelAdapter, tokens: Tensor, component: str, axes: Sequence[str] | None, only: Only | None
) -> CellGrid:
    """The cells of a sweep, checked against the model (ValueError) by runs on the first of the tokens.

    A model that ignores edits of the component, or part of them, is refused too.
    """
    axes, only = _checked_axes(component, axes), only or {}
    layers = _indices(only, "layer", range(adapter.n_layers))
    if not layers:
        raise ValueError("there is no layer to sweep")
    for layer in layers:
        if not 0 <= layer < adapter.n_layers:
            raise ValueError(f"layer {layer}: the model has layers 0 to {adapter.n_layers - 1}")
        check_hook(adapter.model, get_act_name(component, layer))
    name = get_act_name(component, layers[0])
    shape = adapter.record(tokens[:1], [name], 1)[name].shape[1:]
    sizes = {"layer": adapter.n_layers, **dict(zip(axes_of(component), shape, strict=False))}  # features come last
    extra = [axis for axis in only if axis not in axes]
    if extra:
        raise ValueError(f"only={extra[0]!r} is no axis of this sweep over {axes}")
    indices = tuple(_indices(only, axis, range(sizes[axis])) for axis in axes)
    for axis, places in zip(axes, indices, strict=True):
        outside = [i for i in places if not 0 <= i < sizes[axis]]
        if outside or not places:
            raise ValueError(f"{axis} must be 0 to {sizes[axis] - 1}, got {outside or 'none'}")
    grid = CellGrid(component, axes, indices)
    check_edits(adapter, tokens, grid.hook_names)
    return grid


def _checked_axes(component: str, axes: Sequence[str] | None) -> tuple[str, ...]:
    known = ("layer", *axes_of(component))
    axes = (axes,) if isinstance(axes, str) else axes
    if axes is None:
        return ("layer", "head") if "head" in known else ("layer", "pos")
    wrong = [axis for axis in axes if axis not in known]
    if wrong:
        raise ValueError(f"{component!r} has the axes {known}, not {wrong[0]!r}{nearest(wrong[0], known)}")
    if len(set(axes)) < len(axes) or "layer" not in axes:
        raise ValueError(f"a sweep needs 'layer' among its axes, and each once; got {tuple(axes)}")
    return tuple(axes)


def _indices(only: Only, axis: str, every: range) -> tuple[int, ...]:
    """The indices along an axis: all, or the one or several of `only`."""
    return tuple(int(i) for i in np.atleast_1d(only.get(axis, every)))
