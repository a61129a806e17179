"""Faithfulness against size: circuits of the best edges by a score, and the areas under and above the curve."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.circuits.problem import CutMethod, OneMetric, make_problem
from mechicl.analysis.circuits.scores import Scores, read_scores
from mechicl.analysis.circuits.search import between_ends
from mechicl.analysis.interventions.ablation import Replacement
from mechicl.analysis.interventions.metrics import Inputs
from mechicl.base.arguments import Natural, check_fields, checked
from mechicl.base.precision import nan_last
from mechicl.base.progress import progress_bar
from mechicl.prompts import At
from mechicl.statistics import Interval, Result, ratio_interval
from mechicl.statistics.intervals import percentile_interval

FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of all edges, the sizes of circuits in the benchmark of Mueller et al. 2025."""
AREA_RESAMPLES = 2000  # of the prompts, for intervals of areas


@dataclass(frozen=True, eq=False)
class CircuitCurve(Result):
    """The share of a metric that the best edges keep, by their number; see `circuit_curve`.

    Attributes:
        fractions: shares of the model's edges that a circuit may have.
        counts: the same as numbers of edges.
        n_kept: by name of the scores, the number of these edges on a path from the embedding to the output.
        method: replacement of a cut edge's value, such as "zero".
        full: the metric of the whole model, `[prompt]`.
        ablated: with every edge cut, `[prompt]`.
        alone: by name of the scores, with all but the best edges cut, `[fraction prompt]`.
    """

    fractions: tuple[float, ...]
    counts: tuple[int, ...]
    n_kept: dict[str, tuple[int, ...]]
    metric: str
    method: str
    full: Float[Tensor, "prompt"]
    ablated: Float[Tensor, "prompt"]
    alone: dict[str, Float[Tensor, "fraction prompt"]]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scores, the controls last."""
        return tuple(self.alone)

    def faithfulness(self, name: str | None = None, level: float = 0.95) -> list[Interval]:
        """Measure the share of the metric that circuits of each size keep, by name of the scores (default: the first).

        `(alone - ablated) / (full - ablated)` of means over prompts, with intervals over prompts.
        """
        gained = self.full - self.ablated
        return [ratio_interval(alone - self.ablated, gained, level) for alone in self._of(name)]

    def cpr(self, name: str | None = None, level: float = 0.95, *, seed: int = 0) -> Interval:
        """Measure the circuit performance ratio: the area under faithfulness over the fraction of edges.

        By trapezoids between the fractions. If circuits of every size keep all of the metric, the area is the last
        fraction minus the first (0.999); more is possible without parts that harm the metric. The interval is from
        resampled prompts. Source: Mueller et al. 2025.
        """
        return self._area(name, level, seed, distance=False)

    def cmd(self, name: str | None = None, level: float = 0.95, *, seed: int = 0) -> Interval:
        """Measure the circuit-model distance: the area between faithfulness and 1 over the fraction of edges.

        As for `cpr`. Where the curve crosses 1 between two fractions, the trapezoid counts both sides.
        """
        return self._area(name, level, seed, distance=True)

    def _area(self, name: str | None, level: float, seed: int, *, distance: bool) -> Interval:
        # by trapezoids: half of the steps on both sides of each fraction
        steps = np.diff(self.fractions, prepend=self.fractions[0], append=self.fractions[-1])
        widths = (steps[:-1] + steps[1:]) / 2
        alone, full, ablated = (x.detach().cpu().double().numpy() for x in (self._of(name), self.full, self.ablated))
        n = full.shape[0]

        def area(weights: np.ndarray) -> np.ndarray:
            nothing = weights @ ablated
            shares = ((alone @ weights.T) - nothing) / (weights @ full - nothing)  # [fraction resample]
            return widths @ (np.abs(1 - shares) if distance else shares)

        value = float(area(np.full((1, n), 1 / n))[0])
        if n < 2:
            return Interval(value, float("nan"), float("nan"), n, level)
        drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=AREA_RESAMPLES) / n
        return percentile_interval(value, area(drawn).tolist(), n, level)

    def _of(self, name: str | None) -> Float[Tensor, "fraction prompt"]:
        if name is not None and name not in self.alone:
            raise ValueError(f"name must be one of {list(self.alone)}, got {name!r}")
        return self.alone[self.names[0] if name is None else name]

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Make a table with one row per size and scores: the number of edges, and their faithfulness."""
        rows = []
        for name in self.names:
            sizes = zip(self.fractions, self.counts, self.n_kept[name], self.faithfulness(name, level), strict=True)
            rows += [(name, part, count, kept, f.mean, f.low, f.high) for part, count, kept, f in sizes]
        return pd.DataFrame(rows, columns=["scores", "fraction", "edges", "kept", "faithfulness", "low", "high"])

    def _lines(self) -> list[tuple[str, str]]:
        return [(name, f"CPR {self.cpr(name)}, CMD {self.cmd(name)}") for name in self.names]


@dataclass(frozen=True)
class Ranked:
    """Circuits of the best edges by a score.

    Attributes:
        fractions: the shares of the edges that circuits have, increasing; rounded down to whole edges.
        n_random: number of random rankings that are measured as controls, named "random", "random 2", ...
        absolute: rank edges by the size of their scores, as the benchmark MIB does for `cmd`. False: first the edges
            whose cut changes the metric most in the direction of cutting all edges, as MIB does for `cpr`.
        only_paths: drop chosen edges on no path of chosen edges from the embedding to the output.
    """

    fractions: tuple[float, ...] = FRACTIONS
    n_random: Natural = 1
    absolute: bool = True
    only_paths: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        parts = [*self.fractions]
        if not parts or parts != sorted(set(parts)) or not 0 < parts[0] <= parts[-1] <= 1:
            raise ValueError(f"fractions must increase, above 0 and up to 1: got {tuple(parts)}")


@checked(locks=True)
def circuit_curve(
    model: Any,
    scores: Scores | Mapping[str, Scores],
    prompts: Inputs,
    metrics: OneMetric = None,
    *,
    ranked: Ranked = Ranked(),
    method: CutMethod | None = None,
    at: At | None = None,
    progress: bool | None = None,
) -> CircuitCurve:
    """Measure the faithfulness of circuits of the best 0.1%, 0.2%, ... of the edges by a score.

    Shows how many edges a metric needs, and compares rankings of edges with each other and with random ones. Source:
    Mueller et al. 2025, and their code for details. As there, a head's query, key and value are separate receivers;
    here the embedding of positions is not separate from that of tokens.

    The arguments that are not listed are those of `find_circuit`.

    Args:
        scores: the change of the metric when each edge is cut: the result of `score_edges`, or numbers by edge; or
            several of these by name, for instance those of an untrained model for comparison.
        prompts: other prompts than those of the scores.
        ranked: which circuits are measured: `Ranked(fractions, n_random, ...)`.
        method: value of a cut edge: by default the same as for the scores, else zero. "any" is measured with zero.

    Returns:
        A `CircuitCurve`, whose methods take the name of one of the scores (default: the first): `faithfulness(name)`
        for each fraction, and the areas `cpr(name)` and `cmd(name)`.

    Example:
        >>> induction = constructions.induction(d_vocab=16, n_ctx=32, n_heads=4, seed=0)
        >>> ids = torch.randint(16, (64, 16)).repeat(1, 2)
        >>> scores = score_edges(induction, ids[:32], next_token_loss(ids[:32, 0]), progress=False)
        >>> curve = circuit_curve(induction, scores, ids[32:], next_token_loss(ids[32:, 0]))
        >>> print(curve.cpr(), curve.cpr("random"))
    """
    parts = list(ranked.fractions)
    by_name: dict[Any, Any] = {getattr(scores, "scoring", "scores"): scores}
    if isinstance(scores, Mapping) and scores and all(isinstance(name, str) for name in scores):
        by_name = dict(scores)
    given = method if isinstance(method, Replacement) else Replacement(seed=ranked.seed)
    chosen = given.method if isinstance(method, Replacement) else method
    for name, each in by_name.items():
        theirs = getattr(each, "method", None)
        if theirs is not None and chosen is not None and theirs != chosen:
            raise ValueError(f"method must be {theirs!r}, that of the scores {name!r}, got {chosen!r}")
        chosen = theirs or chosen
    with progress_bar(unit="run", desc="curve", progress=progress) as bar:
        problem = make_problem(
            model, prompts, metrics, at=at, advance=bar.update,
            method=replace(given, method="zero" if chosen in (None, "any") else chosen),
        )  # fmt: skip
        edges, full, ablated = problem.graph.edges, problem.objective.full, problem.objective.ablated
        worth = {name: read_scores(each, edges, f"the scores {name!r}") for name, each in by_name.items()}
        generator = torch.Generator().manual_seed(ranked.seed)
        for draw in range(ranked.n_random):
            worth[f"random {draw + 1}" if draw else "random"] = torch.rand(len(edges), generator=generator)
        counts = [int(part * len(edges) + 1e-9) for part in parts]
        masks = {}
        for name, each in worth.items():
            signed = each.abs() if ranked.absolute else each * (1 if (ablated - full).mean() > 0 else -1)
            order = nan_last(signed).argsort(descending=True, stable=True)  # ties in the order of computation
            masks[name] = torch.zeros(len(counts), len(edges), dtype=torch.bool)
            for mask, count in zip(masks[name], counts, strict=True):
                mask[order[:count]] = True
                mask &= between_ends(problem.graph, mask) if ranked.only_paths else mask
        distinct, place = torch.unique(torch.cat(list(masks.values())), dim=0, return_inverse=True)
        values = problem.measure(distinct.to(problem.graph.tokens.device))[place]
    if not values.isfinite().all():
        raise ValueError(
            f"{problem.objective.name!r} is not finite on some circuit: give another metric, such as a difference of "
            f"logits, or method='mean' or 'resample'"
        )
    return CircuitCurve(
        fractions=tuple(parts),
        counts=tuple(counts),
        n_kept={name: tuple(mask.sum(1).tolist()) for name, mask in masks.items()},
        metric=problem.objective.name,
        method=problem.replacement.method,
        full=full,
        ablated=ablated,
        alone=dict(zip(masks, values.split(len(parts)), strict=True)),
    )
