"""What a sweep of interventions found: predictions and metrics of every cell, for every prompt."""

import dataclasses
import itertools
import math
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.patching import PatchingResult

from mechicl.analysis.interventions.metrics import Metric, measured
from mechicl.statistics import Interval, interval, ratio_interval


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a model predicts under each of many interventions.

    Attributes:
        what: in words.
        axes: names of the axes of the cells, e.g. `("layer", "pos", "head")`.
        indices: the layers, positions, ... that were swept, for each axis.
        predictions: `[*axes prompt ...]`, the last axes as the model's predictions have them (`[y]`, or logits); None
            where only metrics were kept.
        unpatched: the predictions without intervention, `[prompt ...]`.
        source: the predictions of the run that activations were taken from; None where they come from no run.
        values: each metric for every cell and prompt, `[*axes prompt]`.
        unpatched_values: the same without intervention, `[prompt]`.
        source_values: the same of the run that activations were taken from.
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

    def measure(self, name: str, metric: Metric) -> "Sweep":
        """The same sweep with one more metric.

        Raises:
            ValueError: the predictions were not kept, or the metric returns another shape than `[prompt]`.
        """
        if self.predictions is None:
            raise ValueError("the predictions of this sweep were not kept: give the metric to the sweep itself")
        cells = self.predictions.flatten(0, len(self.axes) - 1)
        values = torch.stack([measured(name, metric, cell) for cell in cells]).unflatten(0, self.shape)
        extra = {} if self.source is None else {name: measured(name, metric, self.source)}
        return dataclasses.replace(
            self,
            values=self.values | {name: values},
            unpatched_values=self.unpatched_values | {name: measured(name, metric, self.unpatched)},
            source_values=self.source_values | extra,
        )

    def effect(self, metric: str | None = None) -> Float[Tensor, "..."]:
        """What each intervention changes in a metric (the first by default), `[*axes prompt]`."""
        name = self._metric(metric)
        return self.values[name] - self.unpatched_values[name]

    def recovered(self, metric: str | None = None) -> Float[Tensor, "..."]:
        """The share of the way from the unpatched run to the source's that each cell goes, in means over prompts.

        `[*axes]`: 0 where an intervention does nothing, 1 where it moves the mean metric all the way; NaN where the two
        runs have the same mean metric, up to rounding. The share is of means because that of a prompt has no meaning
        where both runs agree. The largest of many is biased upwards: measure the cell again on other prompts (`only=`).

        Raises:
            ValueError: the activations come from no run.
        """
        name = self._metric(metric)
        return self.effect(name).mean(-1) / self._whole(name).mean()

    def recovered_interval(self, *index: int, metric: str | None = None, level: float = 0.95) -> Interval:
        """The share that one cell recovers, by its places along the axes, with its interval over prompts.

        Raises:
            ValueError: another number of places than of axes, or activations that come from no run.
        """
        name = self._metric(metric)
        whole, effect = self._whole(name), self.effect(name)[self._place(index)]
        return ratio_interval(effect, whole, level)

    def interval(self, *index: int, metric: str | None = None, level: float = 0.95) -> Interval:
        """Mean effect of one cell, by its places along the axes, with its confidence interval over prompts."""
        return interval(self.effect(metric)[self._place(index)], level)

    def result(self, metric: str | None = None) -> PatchingResult:
        """A metric as TransformerLens' own result: bootstrap intervals, permutation tests, a table of all prompts."""
        name = self._metric(metric)
        index = pd.DataFrame(list(itertools.product(*self.indices)), columns=list(self.axes))
        return PatchingResult(
            values=self.values[name],
            axis_names=list(self.axes),
            index_df=index,
            metric_names=[name],
            reduced=False,
            baseline=self.unpatched_values[name],
        )

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """One row a cell: mean effect on each metric, and the ends of its interval over prompts."""
        table = pd.DataFrame(list(itertools.product(*self.indices)), columns=list(self.axes))
        for name in self.values:
            found = [interval(of, level) for of in self.effect(name).flatten(0, len(self.axes) - 1)]
            table[name] = self.values[name].mean(-1).flatten().cpu().numpy()
            for column, part in (("effect", "mean"), ("low", "low"), ("high", "high")):
                table[f"{name}_{column}"] = [getattr(each, part) for each in found]
        return table

    def strongest(self, n: int = 5, metric: str | None = None) -> pd.DataFrame:
        """The cells with the largest mean effects, up or down."""
        name = self._metric(metric)
        table = self.to_dataframe()
        order = table[f"{name}_effect"].abs().sort_values(ascending=False).index[:n]
        return table.loc[order, [*self.axes, name, f"{name}_effect", f"{name}_low", f"{name}_high"]]

    def _whole(self, name: str) -> Float[Tensor, "prompt"]:
        """The way from the unpatched run to the source's; NaN where there is none in the mean."""
        if name not in self.source_values:
            raise ValueError(f"{self.what} has no run that activations were taken from: look at effect()")
        source, unpatched = self.source_values[name], self.unpatched_values[name]
        whole, size = source - unpatched, source.abs().mean() + unpatched.abs().mean()
        return whole.masked_fill(whole.mean().abs() <= 1e-6 * size, math.nan)  # nothing but rounding to go

    def _place(self, index: tuple[int, ...]) -> tuple[int, ...]:
        if len(index) != len(self.axes):
            raise ValueError(f"a cell has an index for each of {self.axes}, got {index}")
        return index

    def _metric(self, name: str | None) -> str:
        if not self.values:
            raise ValueError(f"{self.what} has no metric yet: add one with measure(name, metric)")
        if name is not None and name not in self.values:
            raise ValueError(f"no metric {name!r} was measured, only {list(self.values)}")
        return name or next(iter(self.values))
