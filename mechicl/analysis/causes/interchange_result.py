"""A model's counterfactual predictions compared with a hypothesis's, and how much of them it explains."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise.plans import Cell, Kind
from mechicl.statistics import Interval, Result, ratio_interval

N_RESAMPLES = 500
MOST = 1e150  # of a squared distance: beyond, and where it is not a number, it counts as this
INTERVENTIONS = {
    "prediction": "no intervention: the predictions of both",
    "query exchanged": "the query's state, or stream, comes from the source",
    "context exchanged": "the context's state comes from the source",
    "point exchanged": "the state of one context point comes from a run in which this point was the source's",
    "query skips": "the changes of these steps, or layers, at the query are undone after them",
    "context skips": "their changes in the context are undone",
    "query repeats": "the query takes these steps twice",
    "context repeats": "the context takes them twice",
    "query does not read": "in these steps, or layers, the query reads nothing of the context",
    "query stops reading": "from this step on it reads nothing",
    "context isolated": "from this step on each point of the context reads only itself",
    "context frozen": "from this step on the context stays unchanged",
}
"""The interventions on algorithm and model. If a hypothesis names the subspaces of its variables, "query's residual
exchanged" and the like are made too, and "query's rest exchanged" for all directions outside them."""


@dataclass(frozen=True, eq=False)
class Interchange(Result):
    """A model's counterfactual predictions compared with a hypothesis's.

    The **interchange R²** of a cell is `1 - E|model - hypothesis|² / E|source - base|²`: 1 where the model does what
    the algorithm would, 0 where their distance is that of the two ends; always predicting 0 reaches 0.5 on ends that
    are independent with mean 0.

    Attributes:
        hypothesis: name of the hypothesis.
        cells: the interventions and their places.
        predictions: the model's predictions, `[cell y prompt]`.
        expected: the hypothesis's predictions, `[cell y prompt]`.
        base: the model's prediction without intervention, `[y prompt]`.
        sources: the model's prediction at the other end, `[cell y prompt]`: on the source prompts, and for an exchanged
            point on the prompts with that point.
        expected_base: the hypothesis's prediction without intervention, `[y prompt]`.
        untried: interventions that the model has no hooks for.
    """

    hypothesis: str
    cells: list[Cell]
    predictions: Float[Tensor, "cell y prompt"]
    expected: Float[Tensor, "cell y prompt"]
    base: Float[Tensor, "y prompt"]
    sources: Float[Tensor, "cell y prompt"]
    expected_base: Float[Tensor, "y prompt"]
    untried: tuple[str, ...] = ()

    @cached_property
    def r2(self) -> list[Interval]:
        """The interchange R² of each cell."""
        return [1 - ratio for ratio in self._parts(self.predictions - self.expected)]

    @cached_property
    def effects(self) -> Interval:
        """The share of the effects of all interventions that the hypothesis explains (see `explained`)."""
        return self.explained()

    def explained(self, kinds: Collection[Kind] = ("exchange", "ablation")) -> Interval:
        """The explained share of the effects of interventions, with a bootstrap interval over prompts.

        In each cell, with Δ the change from the prediction without intervention,
        `1 - E|Δmodel - Δhypothesis|² / (E|Δmodel|² + E|Δhypothesis|²)`: 1 where both change alike, 0 where one of them
        does not change or the changes are unrelated, -1 where they are opposite. Cells are averaged with weights: their
        changes relative to that between both ends, at most 1, so that neither tiny nor exploding changes decide.

        Args:
            kinds: kinds of interventions to count. Without any of them the interval is NaN.
        """
        chosen = [i for i, cell in enumerate(self.cells) if cell.kind in kinds]
        if not chosen:
            return Interval(math.nan, math.nan, math.nan, self.base.shape[-1])
        moved, expected = (self.predictions - self.base)[chosen], (self.expected - self.expected_base)[chosen]
        ends = (self.sources - self.base)[chosen]
        parts = [part.square().sum(1) for part in (moved - expected, moved, expected, ends)]
        n = moved.shape[-1]
        resamples = torch.randint(n, (N_RESAMPLES, n), generator=torch.Generator().manual_seed(0))
        counts = torch.stack([torch.bincount(row, minlength=n) for row in resamples]).double()
        means = [part.double().nan_to_num(MOST, MOST) @ counts.T / n for part in parts]
        values = _explained(*means)
        centre = _explained(*(part.double().nan_to_num(MOST, MOST).mean(-1, keepdim=True) for part in parts))
        low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return Interval(centre.item(), low, high, n)

    @property
    def moved(self) -> list[Interval]:
        """How far each intervention moves the model's prediction, relative to the squared distance of both ends."""
        return self._parts(self.predictions - self.base)

    @property
    def expected_moved(self) -> list[Interval]:
        """How far each intervention moves the hypothesis's prediction."""
        return self._parts(self.expected - self.expected_base)

    def _parts(self, distances: Tensor) -> list[Interval]:
        """Squared distances, relative to that between both ends."""
        squared = distances.square().mean(1).nan_to_num(MOST, MOST)
        ends = (self.sources - self.base).square().mean(1).clamp(min=1 / MOST)
        return [ratio_interval(*pair) for pair in zip(squared, ends, strict=True)]

    @property
    def weakest(self) -> int:
        """Index of the cell with the least R², which limits the support for a hypothesis; NaN counts as the least."""
        means = [-math.inf if math.isnan(r2.mean) else r2.mean for r2 in self.r2]
        return min(range(len(means)), key=means.__getitem__)

    @property
    def score(self) -> Interval:
        """The R² of the weakest cell."""
        return self.r2[self.weakest]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per cell: R² with its interval, and how far the prediction moved (model's and hypothesis's)."""
        rows = []
        for cell, r2, moved, expected in zip(self.cells, self.r2, self.moved, self.expected_moved, strict=True):
            places = {"layer": cell.layer, "to_layer": cell.to_layer, "step": cell.step}
            rows.append({"intervention": cell.intervention, **places, "r2": r2.mean, "low": r2.low, "high": r2.high,
                         "moved": moved.mean, "expected_moved": expected.mean})  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        lines = [("hypothesis", self.hypothesis), ("effects explained", str(self.effects))]
        for kind in ("exchange", "ablation"):
            if any(cell.kind == kind for cell in self.cells):
                lines.append((f"  of {kind}s", str(self.explained([kind]))))
        lines.append(("weakest", f"{self.score}, {self.cells[self.weakest]}"))
        by_intervention: dict[str, list[float]] = {}
        for cell, r2 in zip(self.cells, self.r2, strict=True):
            by_intervention.setdefault(cell.intervention, []).append(r2.mean)
        for name, values in by_intervention.items():
            lines.append((name, "  ".join(f"{value:.4f}" for value in values)))
        return lines + ([("untried", ", ".join(self.untried))] if self.untried else [])


def _explained(distances: Tensor, moved: Tensor, expected: Tensor, ends: Tensor) -> Tensor:
    """The weighted average over cells, on the first axis, of the explained share of the changes."""
    changes = (moved + expected).clamp(min=1e-300)
    weights = (changes / (2 * ends).clamp(min=1e-300)).clamp(max=1.0)
    return 1 - (weights * distances / changes).sum(0) / weights.sum(0).clamp(min=1e-300)
