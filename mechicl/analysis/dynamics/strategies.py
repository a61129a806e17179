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
from mechicl.checkpoints.study import takes_study
from mechicl.learners import Learners, token_log_probabilities
from mechicl.learners.learners import named_learners, predictions_at, prompt_batches
from mechicl.learners.token_learners import as_token_learner, named_token_learners, sequence_batches
from mechicl.prompts import Prompts, TokenSequences
from mechicl.prompts.prompts import PointsAt
from mechicl.statistics import Interval, Result
from mechicl.statistics.intervals import UNBOUNDED, interval, resample_counts, student_t_quantile
from mechicl.statistics.results import SHARE, index_of

MOST_STRATEGIES = 8  # the solver tries every subset of them
_ROUNDING = 1e-20  # of squares
DEPENDENT = 1e-9
"""Strategies are linearly dependent if their differences' smallest eigenvalue is below this share of the largest."""


@dataclass(frozen=True, eq=False)
class StrategyTracking(Result):
    """The convex mixture of strategies nearest to a model at the snapshots of its training; see `track_strategies`.

    Squared differences are means over prompts, divided by the strategies' own spread: the largest mean squared
    deviation of a strategy from the constant that is the mean prediction of all strategies.

    Attributes:
        steps: training steps of the snapshots.
        weights: weight of each strategy in the nearest mixture; they sum to 1 over strategies.
        residual: squared difference between the model and this mixture: 0 for an exact mixture, about 1 for a constant.
        distances: squared difference between the model and each strategy.
        left_out: squared difference between each strategy and the nearest mixture of the others: the residual of a
            model that follows a strategy which was left out. NaN for one strategy.
        threshold: residual above which the verdict is "none of these".
        errors: standard errors over prompts (bootstrap) of the mean over seeds of the weights, then of the residual.
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
    errors: Float[Tensor, "quantity step"]
    coordinates: Float[Tensor, "component step seed"]
    learner_coordinates: Float[Tensor, "component learner"]
    explained: tuple[float, ...]

    def samples(self) -> dict[str, Tensor]:
        """Return the quantities that have a value for each seed."""
        return {"weights": self.weights, "residual": self.residual, "distances": self.distances}

    def curve(self, name: str, level: float = 0.95) -> list[Interval]:
        """Return the mean over seeds at each snapshot of a strategy's weight or of the "residual", with an interval.

        Its variance sums that of the seeds' mean (Student's t) and of resampled prompts (the latter for one seed).
        """
        i = index_of("name", name, (*self.learners, "residual"))
        values, most = (self.residual, math.inf) if i == len(self.learners) else (self.weights[i], 1.0)
        found = []
        for seeds, error in zip(values, self.errors[i].tolist(), strict=True):
            mean, half = interval(seeds, level, within=UNBOUNDED), student_t_quantile(0.5 + level / 2, 1e9) * error
            half = math.hypot(half, mean.half_width) if len(seeds) > 1 else half
            found.append(Interval(mean.mean, mean.mean - half, mean.mean + half, len(seeds), level).within(0, most))
        return found

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The verdict at each snapshot: a strategy whose weight is above 1/2 with its whole interval, else "mixture".

        It is "none of these" if the mean residual exceeds the threshold.
        """
        weights, residuals = {name: self.curve(name) for name in self.learners}, self.residual.mean(-1).tolist()
        leading = [[name for name, each in weights.items() if each[i].low > 0.5] for i in range(len(self.steps))]
        found = zip(leading, residuals, strict=True)
        return tuple([*names, "mixture"][0] if residual <= self.threshold else NONE for names, residual in found)

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Return a row for each snapshot: means over seeds with the ends of their intervals, and the verdict."""
        parts = [pd.DataFrame({"step": self.steps})]
        for name in (*self.learners, "residual"):
            parts.append(pd.DataFrame([each.columns(name, f"{name}_") for each in self.curve(name, level)]))
        return pd.concat(parts, axis=1).assign(verdict=self.verdicts)

    def _lines(self) -> list[tuple[str, str]]:
        shown = self.to_dataframe()[["step", *self.learners, "residual", "verdict"]]
        first, *rows = shown.to_string(index=False, float_format="{:.3f}".format).splitlines()
        return [("", first), *(("", row) for row in rows)]


@takes_study
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
    progress: bool | None = None,
) -> StrategyTracking:
    """Find the convex mixture of strategies that predicts most like the model at each snapshot of a training.

    Predictions are values for points and probabilities of the next token for tokens. The mixture has the least squared
    difference on the simplex of weights, which is a convex problem with one solution and finite where a strategy
    excludes a token (`identify_on_tokens` measures Kullback-Leibler divergences of single learners). Choose prompts on
    which strategies differ, for example half from a pool and half new ones. Source: Wurgaft et al. 2025 and Park et al.
    2024, who place models between a memorising and a generalising predictor; more strategies and the residual are our
    choice.

    Args:
        checkpoint: a checkpoint with snapshots, a list of models in the order of training (steps 0, 1, 2, ...), or
            models by step; a list of models at a step has one for each seed.
        strategies: one to eight learners by name, or a sequence of learners with names.
        prompts: prompts or token sequences to compare predictions on; tokens count where `predictable`.
        at: for prompts of points: "query" for the last point, "points" for every prefix.
        threshold: residual above which the verdict is "none of these". A strategy with less in `left_out` would not be
            missed if it were left out.

    Returns:
        A `StrategyTracking`: `weights`, `residual`, ...; `curve(name)` has intervals over seeds and prompts, and
        `verdicts` names the strategy at each snapshot.

    Raises:
        CheckpointError: a checkpoint without snapshots.
        ValueError: too many strategies, strategies whose predictions are linearly dependent on these prompts, different
            numbers of seeds or outputs, or no prompts.

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
    references = torch.stack([_predicted(each, prompts, at) for each in named.values()])
    n = len(named)

    def predict(model: Any) -> Float[Tensor, "prompt output"]:
        found = _predicted(as_token_learner(model) if on_tokens else model, prompts, at)
        if found.shape != references.shape[1:]:
            sizes = f"{found.shape[1]} and {references.shape[2]}"
            raise ValueError(f"the model and the strategies must have as many outputs for each prompt, got {sizes}")
        return found

    steps, rows = measure_snapshots(checkpoint, predict, progress)
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"every step must have as many seeds, got {[len(row) for row in rows]}")
    models = torch.stack([each for row in rows for each in row])
    center = references.mean((0, 1))
    spread = (references - center).square().sum(-1).mean(-1).max()
    if spread <= _ROUNDING * references.square().sum(-1).mean():
        raise ValueError("strategies must differ from a constant on these prompts, got the same prediction everywhere")
    every = (torch.cat([references, models]) - center) / spread.sqrt()
    # products of all predictions with those of the strategies, for each prompt: all that mixtures depend on
    moments = torch.einsum("kpo,ipo->pki", every[:n], every)
    squares = every[n:].square().sum(-1).T
    _check_independent(moments.mean(0)[:, :n], list(named))

    def fit(weights: Float[Tensor, "prompt"]) -> Float[Tensor, "quantity model"]:
        products, square = torch.tensordot(weights, moments, 1), weights @ squares
        mixture, distance = nearest_mixture(products[:, :n], products[:, n:], square)
        return torch.cat([mixture, distance[None]])

    size = (len(steps), len(rows[0]))
    fitted = fit(torch.full((len(prompts),), 1 / len(prompts), dtype=torch.float64)).unflatten(1, size)
    shares = resample_counts(len(prompts), n_resamples, seed) / len(prompts)
    errors = torch.stack([fit(each).unflatten(1, size).mean(-1) for each in shares]).std(0)
    gram = moments.mean(0)[:, :n]
    kept = [[j for j in range(n) if j != i] for i in range(n)] if n > 1 else []
    alone = [nearest_mixture(gram[o][:, o], gram[o, i, None], gram[i, i])[1].item() for i, o in enumerate(kept)]
    distances = (squares.mean(0) + gram.diagonal()[:, None] - 2 * moments.mean(0)[:, n:]).clamp(min=0)
    places, explained = _components(torch.cat([references, models]))
    return StrategyTracking(
        steps, tuple(named), fitted[:n], fitted[n], distances.unflatten(1, size), tuple(alone or [math.nan]), threshold,
        errors, places[:, n:].unflatten(1, size), places[:, :n], explained,
    )  # fmt: skip


def nearest_mixture(
    gram: Float[Tensor, "k k"], cross: Float[Tensor, "k model"], square: Float[Tensor, "*model"]
) -> tuple[Float[Tensor, "k model"], Float[Tensor, "model"]]:
    """Return the weights `w >= 0` with sum 1 that minimise `w G w - 2 w c + s`, and the minimum.

    Each set of positive weights is a linear system (Lagrange); the problem is convex, so the best one is it.
    """
    k, n_models = cross.shape
    best, lowest = torch.zeros_like(cross), torch.full_like(cross[0], math.inf)
    for kept in (list(each) for size in range(1, k + 1) for each in itertools.combinations(range(k), size)):
        system = torch.ones(len(kept) + 1, len(kept) + 1).double()
        system[:-1, :-1], system[-1, -1] = gram[kept][:, kept], 0
        sides = torch.cat([cross[kept], torch.ones(1, n_models).double()])
        weights = torch.zeros_like(cross)
        weights[kept] = torch.linalg.solve_ex(system, sides)[0][:-1]
        value = (weights * (gram @ weights - 2 * cross)).sum(0)
        better = (weights.amin(0) >= -1e-12) & (value < lowest)  # False for NaN, of a singular system
        best, lowest = torch.where(better, weights, best), torch.where(better, value, lowest)
    return best.clamp(min=0), (square + lowest).clamp(min=0)


def _check_independent(gram: Float[Tensor, "k k"], names: list[str]) -> None:
    values = torch.linalg.eigvalsh(gram[1:, 1:] - gram[:1, 1:] - gram[1:, :1] + gram[0, 0])
    if len(values) and not values[0] > DEPENDENT * values[-1]:
        apart = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
        i, j = min(itertools.combinations(range(len(names)), 2), key=lambda pair: apart[pair].item())
        raise ValueError(
            f"strategies must be linearly independent on these prompts; {names[i]!r} and {names[j]!r} are the most "
            f"alike: leave one out, or choose prompts on which they differ"
        )


def _predicted(learner: Any, prompts: Any, at: PointsAt) -> Float[Tensor, "prompt output"]:
    """Return all predictions of each prompt as one row, float64: values, or probabilities where a token is scored."""
    if isinstance(prompts, TokenSequences):
        parts = sequence_batches(prompts, 1 + int(prompts.ids.max()))
        logs = [(token_log_probabilities(learner, part), part.predictable[:, 1:, None].cpu()) for part in parts]
        found = [each.exp() * scored for each, scored in logs]
    else:
        found = [predictions_at(learner, part, at).cpu().double() for part in prompt_batches(learner, prompts)]
    predictions = torch.cat([part.flatten(1) for part in found])
    if not predictions.isfinite().all():
        name = getattr(learner, "name", type(learner).__name__)
        raise ValueError(f"predictions must be finite, but {name} predicts NaN or infinity: leave out that step")
    return predictions


def _components(rows: Float[Tensor, "row prompt output"]) -> tuple[Float[Tensor, "component row"], tuple[float, ...]]:
    """Return the first two principal components of the rows, and the share of the variance of each."""
    flat = (rows - rows.mean(0)).flatten(1) / math.sqrt(rows.shape[1])
    values, vectors = torch.linalg.eigh(flat @ flat.T)
    values, vectors = values.clamp(min=0).flip(0)[:2], vectors.flip(1)[:, :2]
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()  # the largest entry is positive
    return (vectors * signs * values.sqrt()).T, tuple((values / flat.square().sum()).tolist())
