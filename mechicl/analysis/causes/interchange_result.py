"""A model's counterfactual predictions beside a hypothesis's, and how much of them it explains."""

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
    "prediction": "no intervention: what both predict",
    "query exchanged": "the query's state, or stream, comes from the source",
    "context exchanged": "the context's comes from the source",
    "point exchanged": "that of one point of the context comes from a run in which this point was the source's",
    "query skips": "what these steps, or layers, do at the query is taken back after them",
    "context skips": "what they do in the context is",
    "query repeats": "the query takes these steps twice",
    "context repeats": "the context does",
    "query does not read": "in these steps, or layers, the query reads nothing of the context",
    "query stops reading": "from here on it reads nothing",
    "context isolated": "from here on each point of the context reads only itself",
    "context frozen": "from here on the context stays as it is",
}
"""What is done to the algorithm and to the model. Where a hypothesis says which subspaces carry its variables,
"query's residual exchanged" and the like are tried too, and "query's rest exchanged": what no variable lies in."""


@dataclass(frozen=True, eq=False)
class Interchange(Result):
    """A model's counterfactual predictions beside a hypothesis's.

    The **interchange R²** of a cell is `1 - E|model - hypothesis|² / E|source - base|²`: 1 where the model does what
    the algorithm would, 0 where it is as far from it as the two ends are from each other; and who says "0" to
    everything reaches 0.5 on ends that are independent with mean 0.

    Attributes:
        hypothesis: its name.
        cells: interventions and where.
        predictions: the model's, `[cell y prompt]`.
        expected: the hypothesis's, `[cell y prompt]`.
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
        return [one_minus(apart) for apart in self._parts(self.predictions - self.expected)]

    @property
    def typical_r2(self) -> list[float]:
        """R² of each cell from medians in place of means, which the few worst prompts do not decide."""
        distances = (self.predictions - self.expected).square().mean(1).nan_to_num(MOST, MOST).median(-1).values
        ends = (self.sources - self.base).square().mean(1).clamp(min=1 / MOST).median(-1).values
        return (1 - distances / ends).tolist()

    @cached_property
    def effects(self) -> Interval:
        """How much of what all the interventions do the hypothesis explains (see `explained`)."""
        return self.explained()

    def explained(self, kinds: Collection[Kind] = ("exchange", "ablation")) -> Interval:
        """How much of what interventions do the hypothesis explains, with a bootstrap interval over prompts.

        In each cell, with Δ the change from the prediction without intervention,
        `1 - E|Δmodel - Δhypothesis|² / (E|Δmodel|² + E|Δhypothesis|²)`: 1 where both change alike, 0 where one of them
        does not change or the changes have nothing to do with each other, -1 where they are opposite. Cells are
        averaged with weights: their changes as a part of that between both ends, at most 1, so that neither what hardly
        matters nor what explodes decides.

        Args:
            kinds: of the interventions that are asked about. Where there are none, the interval is NaN.
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
        """How far each intervention moves the model's prediction, as a part of the squared distance of both ends."""
        return self._parts(self.predictions - self.base)

    @property
    def to_source(self) -> list[Interval]:
        """How far it then is from the source's."""
        return self._parts(self.predictions - self.sources)

    @property
    def expected_moved(self) -> list[Interval]:
        """How far the hypothesis says that it moves."""
        return self._parts(self.expected - self.expected_base)

    def _parts(self, distances: Tensor) -> list[Interval]:
        """Squared, as parts of the distance between both ends."""
        squared = distances.square().mean(1).nan_to_num(MOST, MOST)
        ends = (self.sources - self.base).square().mean(1).clamp(min=1 / MOST)
        return [ratio_interval(*pair) for pair in zip(squared, ends, strict=True)]

    @property
    def weakest(self) -> int:
        """The number of the cell with the least R²: a hypothesis stands no firmer than there."""
        means = [r2.mean for r2 in self.r2]
        return min(range(len(means)), key=lambda i: _nan_first(means[i]))

    @property
    def score(self) -> Interval:
        """The R² of the weakest cell."""
        return self.r2[self.weakest]

    def to_dataframe(self) -> pd.DataFrame:
        """One row a cell: R² with its interval, and mean squared distances as parts of that between both ends.

        `typical_r2` is that of medians. `moved` is how far the intervention moved the model's prediction, `to_source`
        how far it still is from the source's, and `expected_moved` how far the hypothesis says that it moves.
        """
        rows = []
        columns = self.cells, self.r2, self.typical_r2, self.moved, self.to_source, self.expected_moved
        for cell, r2, typical, moved, to_source, expected in zip(*columns, strict=True):
            places = {"layer": cell.layer, "to_layer": cell.to_layer, "step": cell.step}
            rows.append({"intervention": cell.intervention, **places, "r2": r2.mean, "low": r2.low, "high": r2.high,
                         "typical_r2": typical, "moved": moved.mean, "to_source": to_source.mean,
                         "expected_moved": expected.mean})  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        weakest = f"{self.score}, {self.cells[self.weakest]}"
        lines = [("hypothesis", self.hypothesis), ("effects explained", str(self.effects))]
        for kind in ("exchange", "ablation"):
            if any(cell.kind == kind for cell in self.cells):
                lines.append((f"  of {kind}s", str(self.explained([kind]))))
        lines.append(("weakest", weakest))
        by_intervention: dict[str, list[float]] = {}
        for cell, r2 in zip(self.cells, self.r2, strict=True):
            by_intervention.setdefault(cell.intervention, []).append(r2.mean)
        for name, values in by_intervention.items():
            lines.append((name, "  ".join(f"{value:.4f}" for value in values)))
        return lines + ([("untried", ", ".join(self.untried))] if self.untried else [])


def _explained(apart: Tensor, moved: Tensor, expected: Tensor, ends: Tensor) -> Tensor:
    """The average over cells, on the first axis, of the part of the changes that both share."""
    changes = (moved + expected).clamp(min=1e-300)
    weights = (changes / (2 * ends).clamp(min=1e-300)).clamp(max=1.0)
    return 1 - (weights * apart / changes).sum(0) / weights.sum(0).clamp(min=1e-300)


def one_minus(ratio: Interval) -> Interval:
    """1 minus a ratio, with its interval."""
    return Interval(1 - ratio.mean, 1 - ratio.high, 1 - ratio.low, ratio.n, ratio.level)


def _nan_first(value: float) -> float:
    return value if value == value else -float("inf")
