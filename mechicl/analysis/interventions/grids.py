"""The cells of a sweep: a component at every combination of layers, positions, heads, ..."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mechicl.analysis.interventions.runs import Sites
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edits import check_edits
from mechicl.models.opening.sites import Site, axes_of, check_hook, hook_name, nearest_name

Axes = Sequence[str] | Mapping[str, Sequence[int] | int | None]
"""Axes to sweep, or for each the layers, positions, ... to sweep (None: all)."""


@dataclass(frozen=True)
class CellGrid:
    """The cells of a sweep."""

    component: str
    # the swept axes, "layer" among them; along its other axes the component is replaced as a whole.
    axes: tuple[str, ...]
    indices: tuple[tuple[int, ...], ...]  # the layers, positions, ... for each of the axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells along each axis."""
        return tuple(map(len, self.indices))

    @property
    def hook_names(self) -> list[str]:
        """The component's hooks in the layers that are swept."""
        return [hook_name(self.component, layer) for layer in self.indices[self.axes.index("layer")]]

    def cells(self) -> list[Sites]:
        """One site for each combination of indices, in order."""
        places = itertools.product(*self.indices)
        return [(Site(self.component, **dict(zip(self.axes, place, strict=True))),) for place in places]


def make_grid(adapter: ModelAdapter, tokens: Tensor, component: str, axes: Axes | None) -> CellGrid:
    """Make the cells of a sweep; ValueError if a run on one token shows that the model lacks or ignores one."""
    known, chosen = ("layer", *axes_of(component)), axes if isinstance(axes, Mapping) else {}
    if axes is None:
        axes = ("layer", "head") if "head" in known else ("layer", known[1])
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if wrong := [axis for axis in axes if axis not in known]:
        raise ValueError(f"{component!r} has the axes {known}, not {wrong[0]!r}{nearest_name(wrong[0], known)}")
    if len(set(axes)) < len(axes) or "layer" not in axes:
        raise ValueError(f"axes must contain 'layer', and each axis once; got {axes}")

    def indices_along(axis: str, size: int) -> tuple[int, ...]:
        given = chosen.get(axis)
        places = tuple(int(i) for i in np.atleast_1d(range(size) if given is None else given))
        outside = [i for i in places if not 0 <= i < size]
        if outside or not places:
            raise ValueError(f"{axis} must be 0 to {size - 1}, got {outside or 'none'}")
        return places

    layers = indices_along("layer", adapter.n_layers)
    for layer in layers:
        check_hook(adapter.model, hook_name(component, layer))
    name = hook_name(component, layers[0])
    shape = adapter.record(tokens[:1], [name], 1)[name].shape[1:]
    sizes = {"layer": adapter.n_layers, **dict(zip(axes_of(component), shape, strict=False))}  # features come last
    grid = CellGrid(component, axes, tuple(indices_along(axis, sizes[axis]) for axis in axes))
    check_edits(adapter, tokens, grid.hook_names)
    return grid
