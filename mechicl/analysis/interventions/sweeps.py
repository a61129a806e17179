"""The result of a sweep of interventions: predictions and metrics of every cell, for every prompt."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor
from transformer_lens.patching import PatchingResult

from mechicl.base.arguments import Count
from mechicl.statistics import UNBOUNDED, Interval, Result, interval, ratio_interval
from mechicl.statistics.results import largest


@dataclass(frozen=True, eq=False)
class InterventionSweep(Result):
    """A model's predictions and metrics under each of a series of interventions (cells); see `patch` and `ablate`.

    `to_dataframe()` has one row per cell: the mean of each metric (column NAME) and of its change (NAME_effect), with
    95% intervals over prompts.

    Attributes:
        what: the interventions, as text.
        axes: names of the axes of the cells, e.g. `("layer", "pos", "head")`.
        indices: the layers, positions, ... that were swept, for each axis.
        predictions: `[*axes prompt ...]`, the last axes as in the model's predictions (`[y]`, or logits); None where
            only metrics were kept.
        unpatched: the predictions without intervention, `[prompt ...]`.
        source: the predictions of the run that activations were taken from; None if there is no such run.
        values: each metric for every cell and prompt, `[*axes prompt]`.
        unpatched_values: each metric without intervention, `[prompt]`.
        source_values: each metric of the run that activations were taken from, `[prompt]`.
    """

    what: str
    axes: tuple[str, ...]
    indices: tuple[tuple[int, ...], ...]
    predictions: Float[Tensor, "..."] | None
    unpatched: Float[Tensor, "prompt ..."]
    source: Float[Tensor, "prompt ..."] | None = None
    values: dict[str, Float[Tensor, "..."]] = field(default_factory=dict)
    unpatched_values: dict[str, Float[Tensor, "prompt"]] = field(default_factory=dict)
    source_values: dict[str, Float[Tensor, "prompt"]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells along each axis."""
        return tuple(map(len, self.indices))

    def samples(self) -> dict[str, Tensor]:
        """Return each metric and, as `metric_effect`, the effect on it, `[*axes prompt]`."""
        pairs = ({name: values, f"{name}_effect": self.effect(name)} for name, values in self.values.items())
        return {name: tensor for pair in pairs for name, tensor in pair.items()}

    def axis_names(self) -> dict[str, tuple[str, ...]]:
        """Return the axes of the cells, for each metric."""
        return dict.fromkeys(self.samples(), self.axes)

    def axis_values(self, axis: str, size: int) -> list[Any]:
        """Return the layers, positions, ... that were swept along an axis; `size` is unused."""
        if axis not in self.axes:
            raise ValueError(f"axis must be one of {list(self.axes)}, got {axis!r}")
        return list(self.indices[self.axes.index(axis)])

    def effect(self, metric: str | None = None) -> Float[Tensor, "..."]:
        """Return the change of a metric (by default the first) by each intervention, `[*axes prompt]`."""
        name = self._metric(metric)
        return self.values[name] - self.unpatched_values[name]

    def recovered(self, metric: str | None = None) -> Float[Tensor, "..."]:
        """Return the share of the difference between source and unpatched run that each cell recovers, `[*axes]`.

        0 where an intervention does nothing, 1 where it moves the mean metric all the way; NaN where both runs have the
        same mean metric, up to rounding. It is a share of means, since the share of a single prompt is undefined where
        both runs agree. The largest of many cells is biased upwards: measure it again on other prompts (`only=`).
        """
        name = self._metric(metric)
        return self.effect(name).mean(-1) / self._whole(name).mean()

    def recovered_interval(self, *index: int, metric: str | None = None, level: float = 0.95) -> Interval:
        """Return the share that one cell recovers (see `recovered`), with its interval over prompts.

        `index` is the cell's index along each axis, counted from 0 over the layers, positions, ... that were swept.
        """
        name = self._metric(metric)
        whole, effect = self._whole(name), self.effect(name)[self._place(index)]
        return ratio_interval(effect, whole, level)

    def interval(self, *index: int, metric: str | None = None, level: float = 0.95) -> Interval:
        """Return the mean effect of one cell (see `effect`), with its interval over prompts.

        `index` is the cell's index along each axis, counted from 0 over the layers, positions, ... that were swept.
        """
        return interval(self.effect(metric)[self._place(index)], level, within=UNBOUNDED)

    def to_patching_result(self, metric: str | None = None) -> PatchingResult:
        """Convert a metric to TransformerLens' `PatchingResult`, for its bootstrap intervals and permutation tests."""
        name = self._metric(metric)
        return PatchingResult(
            values=self.values[name],
            axis_names=list(self.axes),
            index_df=pd.DataFrame(list(itertools.product(*self.indices)), columns=list(self.axes)),
            metric_names=[name],
            reduced=False,
            baseline=self.unpatched_values[name],
        )

    def strongest(self, n: Count = 5, metric: str | None = None) -> pd.DataFrame:
        """Return the `n` cells with the largest mean effects, up or down, and their 95% intervals; warn of ties."""
        name = self._metric(metric)
        table = self.to_dataframe()
        order, _ = largest(table[f"{name}_effect"].abs().to_numpy(), n, "cells")
        columns = [name, f"{name}_effect", f"{name}_effect_low", f"{name}_effect_high"]
        return table.loc[order, [*self.axes, *columns]]

    def _whole(self, name: str) -> Float[Tensor, "prompt"]:
        if name not in self.source_values:
            raise ValueError(f"the activations of {self.what} do not come from a run: use effect()")
        source, unpatched = self.source_values[name], self.unpatched_values[name]
        whole, size = source - unpatched, source.abs().mean() + unpatched.abs().mean()
        return whole.masked_fill(whole.mean().abs() <= 1e-6 * size, math.nan)  # only rounding

    def _place(self, index: tuple[int, ...]) -> tuple[int, ...]:
        if len(index) != len(self.axes):
            raise ValueError(f"expected one index per axis {self.axes}, got {index}")
        return index

    def _metric(self, name: str | None) -> str:
        if not self.values:
            raise ValueError(f"{self.what} has no metric yet: give metrics= to the sweep")
        if name is not None and name not in self.values:
            raise ValueError(f"no metric {name!r} was measured, only {list(self.values)}")
        return name or next(iter(self.values))
