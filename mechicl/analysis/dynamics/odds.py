"""When memorising gives way to generalising: a model of loss and complexity, fitted to weights of strategies."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, NonNegative, Positive, checked
from mechicl.statistics import Result

LOSS_AND_COMPLEXITY, LOGISTIC, CONSTANT = "loss and complexity", "logistic", "constant"
LOG_BOUND = 20.0  # of logarithms of factors, and of the coefficients of the logistic baseline
Points = tuple[np.ndarray, np.ndarray, np.ndarray]  # of each condition: log pool size, log steps, gap of the losses


@dataclass(frozen=True, eq=False)
class StrategyOdds(Result):
    """Fitted odds of memorising against generalising, by pool size and steps; see `fit_strategy_odds`.

    Attributes:
        pool_sizes: all pool sizes D.
        steps: training steps N.
        loss_gaps: loss of generalising minus that of memorising on each pool, in nats.
        held_out: pool sizes that were not fitted.
        parameters: of "loss and complexity": `(log g, α, log k, β)`; of "logistic": intercept and coefficients of log D
            and log N; of "constant": the log odds.
        scores: by model, the error on held-out conditions, `[seed]`: the mean Kullback-Leibler divergence of the
            predicted from the measured shares, in nats. Lower is better.
        fitted_scores: the same on the fitted conditions.
        shares: measured shares of memorising.
        predicted: by model, predicted shares of all conditions.
    """

    pool_sizes: tuple[int, ...]
    steps: tuple[int, ...]
    loss_gaps: tuple[float, ...]
    held_out: tuple[int, ...]
    parameters: dict[str, tuple[float, ...]]
    scores: dict[str, Float[Tensor, "seed"]]
    fitted_scores: dict[str, Float[Tensor, "seed"]]
    shares: Float[Tensor, "pool_size step seed"]
    predicted: dict[str, Float[Tensor, "pool_size step"]]

    def samples(self) -> dict[str, Tensor]:
        """Return the scores on held-out conditions, by model."""
        return dict(self.scores)

    @checked
    def predict(
        self,
        pool_sizes: Sequence[Positive],
        steps: Sequence[Positive],
        loss_gaps: Sequence[float],
        name: str = LOSS_AND_COMPLEXITY,
    ) -> Float[Tensor, "pool_size step"]:
        """Return the share of memorising that a fitted model predicts for other pools and steps.

        Args:
            pool_sizes: pool sizes D.
            steps: training steps N.
            loss_gaps: loss of generalising minus that of memorising, for each pool.
            name: the model: "loss and complexity", "logistic" or "constant".
        """
        if len(loss_gaps) != len(pool_sizes):
            raise ValueError(f"loss_gaps must be one for each of {len(pool_sizes)} pools, got {len(loss_gaps)}")
        if name not in self.parameters:
            raise ValueError(f"name must be one of {list(self.parameters)}, got {name!r}")
        odds = _ODDS[name](np.asarray(self.parameters[name]), _points(pool_sizes, steps, loss_gaps))
        return torch.from_numpy(scipy.special.expit(odds)).view(len(pool_sizes), len(steps))


@checked(undefined=True)
def fit_strategy_odds(
    shares: Float[Tensor, "pool_size step seed"],
    pool_sizes: Sequence[Count],
    steps: Sequence[Count],
    loss_gaps: Sequence[NonNegative],
    *,
    held_out: Sequence[Count],
) -> StrategyOdds:
    """Fit the odds of memorising against generalising by loss and complexity, and test them on held-out pool sizes.

    The log odds after N steps on a pool of D tasks are `g N^α ΔL(D) - k D^β`. The first term is evidence: each step
    favours the strategy with the smaller loss, ΔL is the gap, and α < 1 counts later steps less. The second is the
    complexity of a memorising strategy, which grows with the pool. g, k > 0, α in [0, 2] and β in [0, 3] are fitted by
    least cross entropy. The baselines are a constant, and logistic regression on log D and log N.

    The form is that of Wurgaft et al. 2025 as we know it, not checked against the paper's text. As we remember it, the
    paper estimates complexities by compression; here they are a power of D with a fitted factor.

    Args:
        shares: weight of memorising divided by the weight of both strategies, 0 to 1, at each pool size and step (for
            example from `track_strategies(...).weights`). NaN leaves a condition out, for example one whose verdict is
            "none of these".
        pool_sizes: pool sizes D, different.
        steps: training steps N, 1 or more.
        loss_gaps: expected loss of the generalising strategy minus that of the memorising one on each pool, in nats.
        held_out: pool sizes that are predicted and not fitted.

    Returns:
        A `StrategyOdds`: `scores[model]` is the error on the held-out sizes for each seed, `parameters` the fits, and
        `predict` the shares at other sizes and steps.

    Raises:
        ValueError: sizes that do not fit together, shares outside 0 to 1, or no condition to fit or to predict.

    Source: after Wurgaft et al. 2025, "In-Context Learning Strategies Emerge Rationally".

    Example:
        >>> sizes, steps, gaps = (2, 4, 8, 16, 32), (10, 100, 1000), (1.0, 0.6, 0.4, 0.2, 0.1)
        >>> odds = torch.tensor([[0.1 * n**0.5 * gap - 0.1 * size for n in steps] for size, gap in zip(sizes, gaps)])
        >>> fit = fit_strategy_odds(odds.sigmoid()[..., None], sizes, steps, gaps, held_out=(4, 16))
        >>> min(fit.scores, key=lambda name: fit.scores[name].mean())
        'loss and complexity'
    """
    if shares.shape[:2] != (len(pool_sizes), len(steps)) or len(loss_gaps) != len(pool_sizes):
        raise ValueError(
            f"shares must be [pool_size step seed] for {len(pool_sizes)} pool sizes and {len(steps)} steps, with a "
            f"loss gap for each pool size, got {tuple(shares.shape)} and {len(loss_gaps)} loss gaps"
        )
    if len(set(pool_sizes)) != len(pool_sizes) or not set(held_out) < set(pool_sizes) or not held_out:
        raise ValueError(f"held_out must be some of the different pool_sizes {tuple(pool_sizes)}, got {held_out}")
    measured = shares.double().numpy()
    known = np.isfinite(measured)
    if (measured[known] < 0).any() or (measured[known] > 1).any():
        raise ValueError("shares must be from 0 to 1, or NaN for a condition that is left out")
    out = np.isin(np.asarray(pool_sizes), held_out)[:, None, None] & known
    if not out.any() or not (known & ~out).any():
        raise ValueError("shares must have values both at fitted and at held-out pool sizes, the others are NaN")
    points = _points(pool_sizes, steps, loss_gaps)
    used = known & ~out
    counts, sums = used.sum(-1).ravel(), np.where(used, measured, 0).sum(-1).ravel()
    parameters, predicted, scores = {}, {}, ({}, {})
    for name, odds in _ODDS.items():
        best = _fit(odds, _STARTS[name](points), _BOUNDS[name], points, counts, sums)
        parameters[name] = tuple(best.tolist())
        share = scipy.special.expit(odds(best, points)).reshape(shares.shape[:2])
        predicted[name] = torch.from_numpy(share)
        divergence = _divergence(measured, np.broadcast_to(share[..., None], measured.shape))
        for part, mask in zip(scores, (out, used), strict=True):
            part[name] = torch.from_numpy(np.nanmean(np.where(mask, divergence, np.nan), (0, 1)))
    return StrategyOdds(
        tuple(pool_sizes), tuple(steps), tuple(map(float, loss_gaps)), tuple(held_out), parameters, *scores,
        shares.double(), predicted,
    )  # fmt: skip


def _points(pool_sizes: Sequence[float], steps: Sequence[float], loss_gaps: Sequence[float]) -> Points:
    """The conditions of a grid, one after the other."""
    sizes, numbers = np.meshgrid(np.asarray(pool_sizes, float), np.asarray(steps, float), indexing="ij")
    return np.log(sizes.ravel()), np.log(numbers.ravel()), np.repeat(np.asarray(loss_gaps, float), len(steps))


def _loss_and_complexity(p: np.ndarray, points: Points) -> np.ndarray:
    log_size, log_step, gap = points
    evidence = gap * np.exp(np.minimum(p[0] + p[1] * log_step, LOG_BOUND))
    return evidence - np.exp(np.minimum(p[2] + p[3] * log_size, LOG_BOUND))


def _logistic(p: np.ndarray, points: Points) -> np.ndarray:
    return p[0] + p[1] * points[0] + p[2] * points[1]


_ODDS: dict[str, Callable[[np.ndarray, Points], np.ndarray]] = {
    LOSS_AND_COMPLEXITY: _loss_and_complexity, LOGISTIC: _logistic, CONSTANT: lambda p, points: p[0] + 0 * points[0],
}  # fmt: skip
_BOUNDS = {
    LOSS_AND_COMPLEXITY: [(-LOG_BOUND, LOG_BOUND), (0.0, 2.0), (-LOG_BOUND, LOG_BOUND), (0.0, 3.0)],
    LOGISTIC: [(-LOG_BOUND, LOG_BOUND)] * 3,
    CONSTANT: [(-LOG_BOUND, LOG_BOUND)],
}
_STARTS: dict[str, Callable[[Points], list[tuple[float, ...]]]] = {
    # both terms are 1 or 5 in the middle of the grid
    LOSS_AND_COMPLEXITY: lambda points: [
        (float(np.log(size / max(points[2].mean(), 1e-9)) - a * points[1].mean()), a,
         float(np.log(size) - b * points[0].mean()), b)
        for a, b, size in itertools.product((0.2, 0.6, 1.0), (0.2, 0.6, 1.0), (1.0, 5.0))
    ],
    LOGISTIC: lambda points: [(0.0, 0.0, 0.0)],
    CONSTANT: lambda points: [(0.0,)],
}  # fmt: skip


def _fit(
    odds: Callable[[np.ndarray, Points], np.ndarray], starts: Sequence[tuple[float, ...]],
    bounds: list[tuple[float, float]], points: Points, counts: np.ndarray, sums: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """The parameters of least cross entropy with the shares, from the best of several starts."""

    def loss(p: np.ndarray) -> float:
        values = odds(p, points)  # log(1 + e^x) - share * x
        return float((counts * np.logaddexp(0, values) - sums * values).sum() / counts.sum())

    starts = [tuple(np.clip(start, *np.transpose(bounds))) for start in starts]
    options: Any = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 1000}
    found = [scipy.optimize.minimize(loss, s, method="L-BFGS-B", bounds=bounds, options=options) for s in starts]
    return min(found, key=lambda each: each.fun).x


def _divergence(measured: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Divergence of the predicted from the measured share, of two outcomes, in nats."""
    parts = (
        scipy.special.rel_entr(a, np.clip(b, 1e-12, 1))
        for a, b in ((measured, predicted), (1 - measured, 1 - predicted))
    )
    return sum(parts, np.zeros_like(measured))
