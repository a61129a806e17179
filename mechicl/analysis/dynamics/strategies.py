"""Which strategies a model mixes during training: the mixture of learners that predicts most like each snapshot."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.families import NONE
from mechicl.analysis.dynamics.training import Training, measure_snapshots
from mechicl.base.arguments import Positive, at_least, checked
from mechicl.base.memory import MEMORY
from mechicl.learners import Learners, token_log_probabilities
from mechicl.learners.learners import named_learners, predictions_at, prompt_batches
from mechicl.learners.token_learners import as_token_learner, named_token_learners, sequence_batches
from mechicl.prompts import Prompts, TokenSequences
from mechicl.prompts.prompts import PointsAt
from mechicl.statistics import Interval, Result
from mechicl.statistics.intervals import interval, student_t_quantile
from mechicl.statistics.results import SHARE, index_of

MOST_STRATEGIES = 8  # the solver tries every subset of them
ROUNDING = 1e-20  # of squares
DEPENDENT = 1e-9
"""Strategies are linearly dependent if their differences' smallest eigenvalue is below this share of the largest."""
MIXTURE = "mixture"


@dataclass(frozen=True, eq=False)
class StrategyTracking(Result):
    """The convex mixture of strategies nearest to a model at the snapshots of its training; see `track_strategies`.

    Squared differences are means over prompts, divided by the strategies' own spread: the largest mean squared
    deviation of a strategy from the constant that is the mean prediction of all strategies.

    Attributes:
        steps: training steps of the snapshots.
        learners: names of the strategies.
        weights: weight of each strategy in the nearest mixture; they sum to 1 over strategies.
        residual: squared difference between the model and this mixture: 0 for an exact mixture, about 1 for a constant.
        distances: squared difference between the model and each strategy.
        left_out: squared difference between each strategy and the nearest mixture of the others, in the order of
            `learners`: the residual of a model that follows a strategy which was left out. NaN for one strategy.
        threshold: residual above which the verdict is "none of these".
        weight_errors: standard error over prompts of the mean weight over seeds (bootstrap).
        residual_errors: that of the mean residual.
        coordinates: the first two principal components of the predictions of all snapshots and strategies.
        learner_coordinates: the strategies' places in the same plane.
        explained: share of the variance that each of the two components explains.
    """

    steps: tuple[int, ...]
    learners: tuple[str, ...]
    weights: Float[Tensor, "learner step seed"] = field(metadata=SHARE)
    residual: Float[Tensor, "step seed"]
    distances: Float[Tensor, "learner step seed"]
    left_out: tuple[float, ...]
    threshold: float
    weight_errors: Float[Tensor, "learner step"]
    residual_errors: Float[Tensor, "step"]
    coordinates: Float[Tensor, "component step seed"]
    learner_coordinates: Float[Tensor, "component learner"]
    explained: tuple[float, ...]

    def samples(self) -> dict[str, Tensor]:
        """Return the quantities that have a value for each seed."""
        return {"weights": self.weights, "residual": self.residual, "distances": self.distances}

    @checked
    def weight(self, name: str, level: float = 0.95) -> list[Interval]:
        """Return a strategy's mean weight over seeds at each snapshot, with an interval over seeds and prompts.

        The variance is the sum of that of the seeds' mean (Student's t) and that over resampled prompts; a bootstrap of
        three seeds would be too narrow. With one seed the interval is over prompts alone.

        Args:
            name: name of the strategy.
        """
        i = index_of("name", name, self.learners)
        found = zip(self.weights[i], self.weight_errors[i].tolist(), strict=True)
        return [_interval(seeds, error, level).within(0, 1) for seeds, error in found]

    @checked
    def residuals(self, level: float = 0.95) -> list[Interval]:
        """Return the mean residual over seeds at each snapshot, with an interval as of `weight`."""
        found = zip(self.residual, self.residual_errors.tolist(), strict=True)
        return [_interval(seeds, error, level).within(0, math.inf) for seeds, error in found]

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The verdict at each snapshot.

        It is "none of these" if the mean residual exceeds the threshold, the name of the strategy whose weight is above
        1/2 with its whole interval, or else "mixture".
        """
        weights = {name: self.weight(name) for name in self.learners}
        verdicts = []
        for i, residual in enumerate(self.residual.mean(-1).tolist()):
            leading = [name for name, values in weights.items() if values[i].low > 0.5]
            verdicts.append(NONE if not residual <= self.threshold else [*leading, MIXTURE][0])
        return tuple(verdicts)

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Return a row for each snapshot: means over seeds with the ends of their intervals, and the verdict."""
        columns = {**{name: self.weight(name, level) for name in self.learners}, "residual": self.residuals(level)}
        frame = pd.DataFrame({"step": self.steps})
        for name, values in columns.items():
            frame[name] = [each.mean for each in values]
            frame[f"{name}_low"], frame[f"{name}_high"] = zip(*((v.low, v.high) for v in values), strict=True)
        return frame.assign(verdict=self.verdicts)

    def _lines(self) -> list[tuple[str, str]]:
        width = max(16, *map(len, self.learners)) + 2
        columns = [*(self.weight(name) for name in self.learners), self.residuals()]
        lines = [("step", "".join(f"{name:>{width}}" for name in (*self.learners, "residual")) + "  verdict")]
        for i, (step, verdict) in enumerate(zip(self.steps, self.verdicts, strict=True)):
            cells = "".join(f"{c[i].mean:>{width - 8}.3f}{f' ± {c[i].half_width:.3f}':>8}" for c in columns)
            lines.append((str(step), f"{cells}  {verdict}"))
        return lines


@checked
@torch.no_grad()
def track_strategies(
    checkpoint: Training,
    strategies: Learners,
    prompts: Prompts | TokenSequences,
    *,
    at: PointsAt = "query",
    threshold: Positive = 0.2,
    n_resamples: Annotated[int, at_least(2)] = 200,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> StrategyTracking:
    """Find the convex mixture of strategies that predicts most like the model at each snapshot of a training.

    Predictions are values for points and probabilities of the next token for tokens. In both cases the mixture has the
    least squared difference, on the simplex of weights: the problem is convex with one solution, the residual is
    comparable between tasks, and a strategy that excludes a token has a finite distance. (The Kullback-Leibler
    divergence would be infinite there; `identify_on_tokens` measures it for single learners.) Choose prompts on which
    the strategies differ, for example half from a pool and half new ones.

    Args:
        checkpoint: a checkpoint with snapshots, a list of models in the order of training (steps 0, 1, 2, ...), or
            models by step; a list of models at a step has one for each seed.
        strategies: one to eight learners by name, or a sequence of learners with names.
        prompts: prompts or token sequences to compare predictions on; tokens count where `predictable`.
        at: for prompts of points: "query" for the last point, "points" for every prefix.
        threshold: residual above which the verdict is "none of these". Compare it with `left_out`: a strategy whose
            value there is smaller would not be missed.
        n_resamples: number of resamples of the prompts, for intervals.
        memory: bound on memory in bytes of the predictions of all models.

    Returns:
        A `StrategyTracking` with `weights` `[learner step seed]`, `residual` `[step seed]`, `distances`, and
        `coordinates` of a picture of all predictions; `weight(name)` has intervals over seeds and prompts, and
        `verdicts` names the strategy at each snapshot.

    Raises:
        CheckpointError: a checkpoint without snapshots.
        ValueError: too many strategies, strategies whose predictions are linearly dependent on these prompts, different
            numbers of seeds or outputs, no prompts, or predictions that exceed `memory`.

    Source: Wurgaft et al. 2025 and Park et al. 2024, who place models between a memorising and a generalising
    predictor. The convex mixture of any number of strategies with its residual is our choice.

    Example:
        >>> task = MarkovChains(d_vocab=3, n_ctx=48)
        >>> learners = algorithms.references(task)
        >>> track = track_strategies([learners["uniform"], learners["bigram"]], learners, task.sample(20, seed=0))
        >>> track.verdicts
        ('uniform', 'bigram')
    """
    on_tokens = isinstance(prompts, TokenSequences)
    named: dict[str, Any] = named_token_learners(strategies) if on_tokens else named_learners(strategies)
    if not 1 <= len(named) <= MOST_STRATEGIES:
        raise ValueError(f"strategies must be 1 to {MOST_STRATEGIES} learners, got {len(named)}")
    if len(prompts) < 2:
        raise ValueError(f"prompts must be two or more, got {len(prompts)}")

    def predict(learner: Any) -> Float[Tensor, "prompt output"]:
        return _predicted(learner, prompts, at, memory)

    references = torch.stack([predict(each) for each in named.values()])

    def predict_model(model: Any) -> Tensor:
        found = predict(as_token_learner(model) if on_tokens else model)
        if found.shape != references.shape[1:]:
            sizes = f"{found.shape[1]} and {references.shape[2]}"
            raise ValueError(f"the model and the strategies must have as many outputs for each prompt, got {sizes}")
        total.append(found.numel() * 8)
        if sum(total) + references.numel() * 8 > memory:
            raise ValueError(f"the predictions of all models take more than memory={memory:g} bytes: use fewer prompts")
        return found

    total: list[int] = []
    steps, rows = measure_snapshots(checkpoint, predict_model, progress)
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"every step must have as many seeds, got {[len(row) for row in rows]}")
    models = torch.stack([torch.stack(row) for row in rows])  # [step seed prompt output]
    center = references.mean((0, 1))
    deviations = references - center
    spread = deviations.square().sum(-1).mean(-1).max().item()
    if spread <= ROUNDING * references.square().sum(-1).mean().item():
        raise ValueError("strategies must differ from a constant on these prompts, got the same prediction everywhere")
    moments = _Moments(deviations / math.sqrt(spread), (models - center) / math.sqrt(spread))
    moments.check(list(named))
    weights, residual = moments.fit()
    drawn = torch.randint(len(prompts), (n_resamples, len(prompts)), generator=torch.Generator().manual_seed(seed))
    refits = [moments.fit(torch.bincount(row, minlength=len(prompts)).double()) for row in drawn]
    weight_errors, residual_errors = (torch.stack([each[i].mean(-1) for each in refits]).std(0) for i in (0, 1))
    own, cross, square = (each.mean(0) for each in (moments.gram, moments.cross, moments.square))
    distances = (square + own.diagonal()[:, None, None] - 2 * cross.movedim(-1, 0)).clamp(min=0)
    places, explained = _components(torch.cat([references, models.flatten(0, 1)]))
    n = len(named)
    return StrategyTracking(
        steps, tuple(named), weights, residual, distances, moments.left_out(), threshold, weight_errors,
        residual_errors, places[:, n:].unflatten(1, models.shape[:2]), places[:, :n], explained,
    )  # fmt: skip


class _Moments:
    """Products of predictions for each prompt, from which mixtures are fitted on any resample of the prompts."""

    def __init__(self, strategies: Float[Tensor, "learner prompt output"], models: Tensor):
        self.gram = torch.einsum("kpo,lpo->pkl", strategies, strategies)
        self.cross = torch.einsum("kpo,tspo->ptsk", strategies, models)
        self.square = models.square().sum(-1).movedim(-1, 0)  # [prompt step seed]

    def fit(self, counts: Float[Tensor, "prompt"] | None = None) -> tuple[Tensor, Tensor]:
        """Return weights `[learner step seed]` and residuals `[step seed]`, with prompts counted several times."""
        counts = torch.ones(len(self.gram)).double() if counts is None else counts
        gram, cross, square = (
            torch.tensordot(counts / counts.sum(), each, 1) for each in (self.gram, self.cross, self.square)
        )
        weights = nearest_mixture(gram, cross)
        fitted = torch.einsum("tsk,kl,tsl->ts", weights, gram, weights) - 2 * (weights * cross).sum(-1)
        return weights.movedim(-1, 0), (square + fitted).clamp(min=0)

    def check(self, names: list[str]) -> None:
        """Refuse strategies one of whose predictions is a combination of the others'."""
        gram = self.gram.mean(0)
        apart = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
        basis = gram[1:, 1:] - gram[:1, 1:] - gram[1:, :1] + gram[0, 0]
        values = torch.linalg.eigvalsh(basis)
        if len(values) and not values[0] > DEPENDENT * values[-1]:
            i, j = min(itertools.combinations(range(len(names)), 2), key=lambda pair: apart[pair].item())
            raise ValueError(
                f"strategies must be linearly independent on these prompts; {names[i]!r} and {names[j]!r} are the most "
                f"alike: leave one out, or choose prompts on which they differ"
            )

    def left_out(self) -> tuple[float, ...]:
        """Return the squared distance of each strategy from the nearest mixture of the others."""
        gram, found = self.gram.mean(0), []
        for i in range(len(gram)):
            kept = [j for j in range(len(gram)) if j != i]
            if not kept:
                return (math.nan,)
            others, cross = gram[kept][:, kept], gram[kept, i]
            weights = nearest_mixture(others, cross)
            found.append((gram[i, i] - 2 * weights @ cross + weights @ others @ weights).clamp(min=0).item())
        return tuple(found)


def nearest_mixture(gram: Float[Tensor, "k k"], cross: Float[Tensor, "*model k"]) -> Float[Tensor, "*model k"]:
    """Return the weights `w >= 0` with sum 1 that minimise `w G w - 2 w c`, by trying every set of positive ones.

    On each set the minimum with sum 1 solves a linear system (Lagrange); the best one without negative weights is the
    minimum, because the problem is convex.
    """
    flat = cross.reshape(-1, cross.shape[-1])
    best, lowest = torch.zeros_like(flat), torch.full_like(flat[:, 0], math.inf)
    for size in range(1, len(gram) + 1):
        for kept in map(list, itertools.combinations(range(len(gram)), size)):
            system = torch.ones(size + 1, size + 1).double()
            system[:size, :size], system[size, size] = gram[kept][:, kept], 0
            sides = torch.cat([flat[:, kept].T, torch.ones(1, len(flat)).double()])
            weights = torch.zeros_like(flat)
            weights[:, kept] = torch.linalg.solve_ex(system, sides)[0][:size].T
            value = ((weights @ gram) * weights - 2 * weights * flat).sum(-1)
            better = (weights.amin(-1) >= -1e-12) & (value < lowest)  # False for NaN, of a singular system
            best, lowest = torch.where(better[:, None], weights, best), torch.where(better, value, lowest)
    return best.clamp(min=0).view_as(cross)


def _predicted(learner: Any, prompts: Any, at: PointsAt, memory: float) -> Float[Tensor, "prompt output"]:
    """Return all predictions of each prompt as one row, float64: values, or probabilities where a token is scored."""
    if isinstance(prompts, TokenSequences):
        batches = sequence_batches(prompts, 1 + int(prompts.ids.max()), memory)
        scored = [
            (token_log_probabilities(learner, part).exp(), part.predictable[:, 1:, None].cpu()) for part in batches
        ]
        found = [probabilities * counted for probabilities, counted in scored]
    else:
        found = [predictions_at(learner, part, at).cpu().double() for part in prompt_batches(learner, prompts, memory)]
    return torch.cat([part.flatten(1) for part in found])


def _components(rows: Float[Tensor, "row prompt output"]) -> tuple[Float[Tensor, "component row"], tuple[float, ...]]:
    """Return the first two principal components of the rows, and the share of the variance of each."""
    flat = rows.flatten(1)
    flat = (flat - flat.mean(0)) / math.sqrt(rows.shape[1])
    values, vectors = torch.linalg.eigh(flat @ flat.T)
    values, vectors = values.clamp(min=0).flip(0)[:2], vectors.flip(1)[:, :2]
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()  # the largest entry is positive
    total = flat.square().sum().clamp(min=1e-300)
    return (vectors * signs * values.sqrt()).T, tuple((values / total).tolist())


def _interval(seeds: Float[Tensor, "seed"], error: float, level: float) -> Interval:
    """The mean over seeds, with the variance over seeds and the squared standard error over prompts added."""
    over_seeds = interval(seeds, level)
    half = student_t_quantile(0.5 + level / 2, 1e9) * error
    if len(seeds) > 1:
        half = math.hypot(half, over_seeds.half_width)
    return Interval(over_seeds.mean, over_seeds.mean - half, over_seeds.mean + half, len(seeds), level)
