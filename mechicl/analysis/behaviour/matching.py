"""Which step of one learner is most like each step of another, and which family of algorithms each layer resembles."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.algorithms.card import Algorithm
from mechicl.analysis.behaviour.alignment import (
    induced_weights,
    similarity_by_prefix,
    similarity_of_errors,
    similarity_of_weights,
)
from mechicl.analysis.behaviour.growth import Growth, fit_growth
from mechicl.base.arguments import between, checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.learners import IterativeLearner, Learner, Trajectory
from mechicl.learners.learners import bytes_per_prompt, name_of, predictions_at, trajectory_of
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, interval, storable
from mechicl.statistics.intervals import UNBOUNDED, percentile_interval, resample_counts
from mechicl.statistics.results import COSINE, index_of

Similarity = Literal["errors", "normalised errors", "weights"]
RESAMPLES = 1000  # of the prompts, for 95% intervals of the best step
STEP_COPIES = 4  # a trajectory has a prediction, and weights, for each step where `bytes_per_prompt` counts one


@storable
@dataclass(frozen=True)
class BestMatch:
    """The step of one learner that is most like a step of another.

    Attributes:
        row: the step that is matched (a model's layer).
        column: the step that matches it best (an algorithm's iteration); NaN where no similarity is defined.
        similarity: their mean cosine, with a 95% interval over prompts (on the prompts that chose the step).
        low: lower end of the best step's 95% interval, from resampled prompts; `high` is its upper end.
        at_edge: True if it is the smallest or largest step that was tried, so that a better one may lie beyond.
    """

    row: float
    column: float
    similarity: Interval
    low: float
    high: float
    at_edge: bool


@dataclass(frozen=True, eq=False)
class Match(Result):
    """Similarities between all steps of two learners.

    Attributes:
        row_name: the learner whose steps are matched (a model's layers).
        column_name: the learner whose steps match them (an algorithm's iterations).
        rows: the steps of the one, such as layers 0 to n_layers; `columns` are those of the other.
        similarities: cosines `[row column prompt]`; of weights, averaged over the numbers of points. Of normalised
            errors, terms whose mean over prompts is the mean over the numbers of points of the cosine over prompts.
    """

    row_name: str
    column_name: str
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    similarities: Float[Tensor, "row column prompt"] = field(metadata=COSINE)
    similarity: Similarity

    def mean(self) -> Float[Tensor, "row column"]:
        """Return means over the prompts for which a row's similarities are defined; NaN where a pair's never is.

        Similarities with a zero vector are not defined. All pairs of a row are compared on the same prompts, apart from
        pairs that are defined nowhere.
        """
        return _weighted_mean(self.similarities, torch.ones(1, self.similarities.shape[-1]))[0]

    def best_columns(self) -> list[int]:
        """Return the index of each row's best column: the largest mean similarity."""
        return self.mean().nan_to_num(-math.inf).argmax(1).tolist()

    def halves(self) -> tuple["Match", "Match"]:
        """Return the match on every other prompt and on the rest: choose on the one, measure on the other."""
        first, second = (dataclasses.replace(self, similarities=self.similarities[..., i::2]) for i in (0, 1))
        return first, second

    def best(self) -> list[BestMatch]:
        """Return each row's best match: a `BestMatch` with `row`, `column`, `similarity`, and the ends `low`, `high`.

        Source: Fu et al. 2024, Definition 4, which prints arg min for arg max.
        """
        columns = torch.tensor(self.columns, dtype=torch.float64)
        picked = columns[self._resampled]
        ends = torch.stack([picked.quantile(q, 0, interpolation="nearest") for q in (0.025, 0.975)])
        edges = (min(self.columns), max(self.columns)) if len(self.columns) > 1 else ()
        matches = []
        for i, (row, column) in enumerate(zip(self.rows, self.best_columns(), strict=True)):
            values = self.similarities[i, column]
            alike = interval(values[values.isfinite()], within=UNBOUNDED).within(-1, 1)
            best, low, high = (self.columns[column], *ends[:, i].tolist()) if alike.n else [math.nan] * 3
            matches.append(BestMatch(row, best, alike, low, high, best in edges))
        return matches

    def growth_rows(self) -> list[float]:
        """Return the rows where a trend can be seen.

        Their best match is not at an edge, at least 1, and known to a factor of 4 (a row that resembles no step matches
        any). Of the first rows with overlapping intervals only the last counts; of the last rows only the first.
        """
        best = self.best()
        inner = [b for b in best if not b.at_edge and b.column >= 1 and b.high <= 4 * b.low]
        first = next((i for i, b in enumerate(inner) if b.low > inner[0].high), len(inner)) - 1
        last = next((i for i, b in enumerate(inner) if b.high >= inner[-1].low), 0)
        return [b.row for b in inner[max(first, 0) : last + 1]]

    @checked
    def growth(
        self, rows: Sequence[float] | None = None, *, resamples: Annotated[int, between(1, RESAMPLES)] = 200
    ) -> Growth:
        """Fit the best-matching step as a linear and as an exponential function of the layer; see `Growth.better`.

        Args:
            rows: steps to fit (layers); by default `growth_rows()`.
            resamples: number of resamples of the prompts, for the 95% intervals; at most 1000.
        """
        rows = sorted(set(self.growth_rows() if rows is None else rows))
        indices, best = [index_of("row", row, self.rows) for row in rows], self.best_columns()
        fit = fit_growth(rows, [self.columns[best[i]] for i in indices])
        steps = torch.tensor(self.columns, dtype=torch.float64)[self._resampled[:resamples]][:, indices]
        refits = [fit_growth(rows, [max(k, 1.0) for k in picked]) for picked in steps.tolist()]
        n = self.similarities.shape[-1]
        return dataclasses.replace(
            fit,
            slope=percentile_interval(fit.slope.mean, [refit.slope.mean for refit in refits], n),
            doubling=percentile_interval(fit.doubling.mean, [refit.doubling.mean for refit in refits], n),
            linear_share=float(np.mean([refit.linear_aic < refit.exponential_aic for refit in refits])),
        )

    @functools.cached_property
    def _resampled(self) -> Int[Tensor, "resample row"]:
        """Index of each row's best column on resampled prompts; one product of counts and similarities for all."""
        counts = resample_counts(self.similarities.shape[-1], RESAMPLES)
        return _weighted_mean(self.similarities, counts).nan_to_num(-math.inf).argmax(-1)


def _weighted_mean(
    similarities: Float[Tensor, "row column prompt"], counts: Float[Tensor, "resample prompt"]
) -> Float[Tensor, "resample row column"]:
    """Means weighted by how often each prompt was drawn, over the prompts that `Match.mean` describes."""
    values = similarities.detach().cpu().double()
    defined = values.isfinite()
    ever = defined.any(-1, keepdim=True)
    used = (defined | ~ever).all(1)  # [row prompt]: all pairs of the row that are ever defined are defined there
    if used.all():  # one product for all rows
        means = counts.double() @ values.flatten(0, 1).T / counts.double().sum(-1, keepdim=True)
        return means.unflatten(1, values.shape[:2])
    weights = counts.double()[:, None] * used.double()
    sums = torch.einsum("srp,rcp->src", weights, values.nan_to_num(0.0))
    return (sums / weights.sum(-1, keepdim=True)).masked_fill(~ever[..., 0], math.nan)


@checked
def match(
    a: Learner | Trajectory,
    b: Learner | Trajectory | Algorithm,
    prompts: Prompts,
    *,
    similarity: Similarity = "errors",
    progress: bool | None = None,
) -> Match:
    """Compare every step of one learner with every step of another, e.g. a model's layers with Newton's iterations.

    Args:
        a: the learner whose steps are matched, e.g. a model's `fit_readouts`, or its trajectory on the prompts.
        b: the learner whose steps may match, e.g. `AlgorithmLearner(newton, dict(steps=range(24)))`; an algorithm's
            card (one of `algorithms.cards()`), whose step sizes adapt to its `freedom`: compare families with the same
            one, by `card.on(prompts, freedom)`; or an `AlgorithmFamily`, whose steps are values of a hyperparameter.
        prompts: a learner that predicts the query alone (a model on paired prompts) is compared on the query, others on
            all points. With one target, the cosine of two single errors is only ±1: use "weights" there.
        similarity: "errors" for the cosine between both learners' errors along each prompt (points after the first), as
            published, which depends on the largest errors, those after few points; "normalised errors" for the mean
            over numbers of points of the cosine over prompts; "weights" for the cosine between induced weights, exact
            derivatives of predictions with respect to the queries (the paper regresses them: `regressed_weights`).

    Returns:
        A `Match` between the steps of a (rows) and of b (columns): `mean()` similarities, the `best()` step of b for
        each row, and its `growth()` as a linear and as an exponential function of the layer.

    Source: Fu et al. 2024, A.3.

    Example:
        >>> newton = AlgorithmLearner(algorithms.newton, dict(steps=list(range(1, 24))))
        >>> match(fit_readouts(model, task.sample(1024, seed=0)), newton, prompts).best()
    """
    if len(prompts) == 0:
        raise ValueError("match() needs at least one prompt")
    b = b.on(prompts) if isinstance(b, Algorithm) else b
    for each in (a, b):
        if isinstance(each, Trajectory) and each.predictions.shape[1] != len(prompts):
            raise ValueError(f"the trajectory of {each.name or 'a learner'} is not of {prompts}")
    # both learners' trajectories at once, each of several steps
    per_prompt = STEP_COPIES * sum(bytes_per_prompt(each, prompts) for each in (a, b))
    size = Budget().rows(per_prompt, at_most=256)
    parts, batches = [], []
    for start in progress_bar(range(0, len(prompts), size), unit="batch", progress=progress, desc="match"):
        place = slice(start, start + size)
        batch = prompts[place]
        steps_a, steps_b = (_trajectory(each, batch, place, similarity == "weights") for each in (a, b))
        if (steps_a.predictions.shape[2] == 1) != (steps_b.predictions.shape[2] == 1):  # one predicts the query alone
            steps_a, steps_b = (each.part(slice(None), slice(-1, None)) for each in (steps_a, steps_b))
        if similarity == "errors":
            parts.append(similarity_of_errors(steps_a, steps_b, batch).cpu())
        elif similarity == "weights":
            parts.append(similarity_of_weights(steps_a, steps_b).nanmean(-1).cpu())
        else:
            batches.append((steps_a, steps_b))
    if batches:
        first, second = (
            Trajectory(each[0].steps, torch.cat([part.predictions.cpu() for part in each], dim=1), each[0].name)
            for each in zip(*batches, strict=True)
        )
        parts = [similarity_by_prefix(first, second, prompts).cpu()]
    names = steps_a.name or "a", steps_b.name or "b"
    return Match(*names, steps_a.steps, steps_b.steps, torch.cat(parts, dim=-1), similarity)


def _trajectory(learner: Learner | Trajectory, prompts: Prompts, place: slice, with_weights: bool) -> Trajectory:
    """The learner's steps on these prompts; those at `place` of a trajectory that was computed before."""
    if isinstance(learner, Trajectory):
        return learner.part(place)
    with torch.no_grad():
        if isinstance(learner, IterativeLearner):
            return trajectory_of(learner, prompts, with_weights=with_weights)
        weights = induced_weights(learner, prompts) if with_weights else None
        return Trajectory((1,), predictions_at(learner, prompts, "points")[None], name_of(learner), weights)


@dataclass(frozen=True, eq=False)
class FamilyRanking(Result):
    """Cosines of each layer with the best step of each family, on other prompts than the step was chosen on.

    Attributes:
        steps: the chosen steps, for each family one per layer.
        similarities: cosines `[family row prompt]`; NaN where one is not defined.
    """

    families: tuple[str, ...]
    rows: tuple[float, ...]
    steps: tuple[tuple[float, ...], ...]
    similarities: Float[Tensor, "family row prompt"] = field(metadata=COSINE)

    def of(self, family: str) -> Float[Tensor, "row prompt"]:
        """Return each layer's cosines with the best step of a family."""
        return self.similarities[index_of("family", family, self.families)]

    def minus(self, family: str, other: str) -> list[Interval]:
        """Return each layer's mean cosine of one family minus that of another, with a 95% interval over prompts."""
        return [interval(d[d.isfinite()], within=UNBOUNDED) for d in self.of(family) - self.of(other)]

    def best_similarities(self, family: str) -> list[Interval]:
        """Return each layer's mean cosine with the best step of a family, with a 95% interval over prompts."""
        return [interval(values[values.isfinite()], within=UNBOUNDED) for values in self.of(family)]

    def nearest(self, row: float, without: Sequence[str] = ()) -> list[str]:
        """Return the name of the family nearest to a layer, then those of the families tied with it.

        A family is tied if the difference from the first, prompt by prompt, has a 95% interval that covers 0.
        Families in `without` are not compared.
        """
        i = index_of("row", row, self.rows)
        means = dict(zip(self.families, self.similarities[:, i].nanmean(-1).nan_to_num(-2.0).tolist(), strict=True))
        order = sorted((name for name in self.families if name not in without), key=lambda name: -means[name])
        return [name for name in order if name == order[0] or self.minus(order[0], name)[i].low <= 0]


@checked
def rank_families(matches: Mapping[str, Match]) -> FamilyRanking:
    """Measure which family of algorithms is nearest to each layer of a model.

    For each family and layer, half of the prompts (every second one) choose the best-matching step, and the other half
    measure the similarity to it, so a family with more steps to choose from has no advantage.

    Args:
        matches: the result of `match` for each family, by the family's name: of the same model's layers, on the same
            prompts, by the same kind of similarity.

    Example:
        >>> families = {"Newton": newton, "ridge path": ridge_path}
        >>> ranking = rank_families({name: match(readouts, each, prompts) for name, each in families.items()})
        >>> ranking.minus("Newton", "ridge path")[3], ranking.nearest(3)
    """
    if not matches:
        raise ValueError("rank_families() needs at least one match")
    compared = {name: (each.rows, each.similarity, each.similarities.shape[-1]) for name, each in matches.items()}
    rows = next(iter(matches.values())).rows
    steps, similarities = [], []
    for name, each in matches.items():
        if compared[name] != next(iter(compared.values())):
            raise ValueError(f"the match with {name!r} is of other layers, prompts or similarities than the first one")
        choosing, measured = each.halves()
        columns = choosing.best_columns()
        steps.append(tuple(each.columns[column] for column in columns))
        similarities.append(measured.similarities[torch.arange(len(rows)), torch.tensor(columns)])
    return FamilyRanking(tuple(matches), rows, tuple(steps), torch.stack(similarities))
