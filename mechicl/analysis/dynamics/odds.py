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

from mechicl.base.arguments import Count, NonNegative, checked
from mechicl.statistics import Result

BOUND = 20.0  # of logarithms of factors, and of coefficients


@dataclass(frozen=True, eq=False)
class StrategyOdds(Result):
    """Fitted odds of memorising against generalising, by pool size and steps; see `fit_strategy_odds`.

    Attributes:
        parameters: of "loss and complexity": `(log g, α, log k, β)`; of "logistic": intercept and coefficients of log D
            and log N; of "constant": the log odds.
        scores: by model, the error on held-out conditions: the mean Kullback-Leibler divergence of the predicted from
            the measured shares, in nats. Lower is better.
        fitted_scores: the same on the fitted conditions.
        predicted: by model, the predicted shares of all conditions.
    """

    parameters: dict[str, tuple[float, ...]]
    scores: dict[str, Float[Tensor, "seed"]]
    fitted_scores: dict[str, Float[Tensor, "seed"]]
    predicted: dict[str, Float[Tensor, "pool_size step"]]

    def samples(self) -> dict[str, Tensor]:
        """Return the scores on held-out conditions, by model."""
        return dict(self.scores)


@checked(undefined=True)
def fit_strategy_odds(
    shares: Float[Tensor, "pool_size step seed"],
    pool_sizes: Sequence[Count],
    steps: Sequence[Count],
    loss_gaps: Sequence[NonNegative],
    *,
    held_out: Sequence[Count],
) -> StrategyOdds:
    """Fit a law of loss and complexity to the odds of memorising over generalising; test it on held-out pool sizes.

    The log odds after N steps on a pool of D tasks are `g N^α ΔL(D) - k D^β`. The first term is evidence: each step
    favours the strategy with the smaller loss, ΔL is the gap, and α < 1 counts later steps less. The second is the
    complexity of a memorising strategy, which grows with the pool. g, k > 0, α in [0, 2] and β in [0, 3] are fitted by
    least cross entropy. The baselines are a constant, and logistic regression on log D and log N.

    The form is that of Wurgaft et al. 2025, "In-Context Learning Strategies Emerge Rationally", as we know it, not
    checked against its text. As we remember it, complexities are estimated there by compression; here they are a power
    of D.

    Args:
        shares: weight of memorising divided by the weight of both strategies, 0 to 1, at each pool size and step (for
            example from `track_strategies(...).weights`). NaN leaves a condition out, for example where
            `track_strategies` reports that neither strategy fits.
        pool_sizes: the pool sizes D, all distinct.
        steps: training steps N, 1 or more.
        loss_gaps: expected loss of the generalising strategy minus that of the memorising one on each pool: mean cross
            entropies in nats for tokens, mean squared errors over twice the noise variance for Gaussian noise.
        held_out: pool sizes that are predicted and not fitted.

    Returns:
        A `StrategyOdds` with entries for "loss and complexity", "logistic" and "constant": `scores` `[seed]`, errors on
        held-out sizes in nats (0 is best); `parameters`; `predicted`, the shares at all sizes and steps.

    Raises:
        ValueError: sizes that do not fit together, shares outside 0 to 1, fewer than two sizes or steps to fit, or no
            condition to predict.

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
    measured = shares.double().numpy(force=True)
    known = np.isfinite(measured)
    if ((measured < 0) | (measured > 1)).any():
        raise ValueError("shares must be from 0 to 1, or NaN for a condition that is left out")
    predicted = known & np.isin(pool_sizes, held_out)[:, None, None]
    fitted = known & ~predicted
    if not predicted.any() or not fitted.any():
        raise ValueError("shares must have values both at fitted and at held-out pool sizes, the others are NaN")
    sizes, times = (int(fitted.any(axis).sum()) for axis in ((1, 2), (0, 2)))
    if sizes < 2 or times < 2:
        raise ValueError("shares must have values at two or more fitted pool sizes and steps, or the law's powers are "
                         f"arbitrary; got {sizes} sizes and {times} steps")  # fmt: skip
    conditions = np.log(pool_sizes)[:, None], np.log(steps)[None], np.array(loss_gaps)[:, None]
    counts, sums = fitted.sum(-1), np.where(fitted, measured, 0).sum(-1)
    parameters, predictions, scores = {}, {}, ({}, {})
    options: Any = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 1000}
    for name, (odds, bounds, starts) in _MODELS.items():

        @np.errstate(under="ignore")
        def cross_entropy(p: np.ndarray, odds: Any = odds) -> float:
            values = odds(p, *conditions)  # log(1 + e^x) - share * x
            return float((counts * np.logaddexp(0, values) - sums * values).sum() / counts.sum())

        found = [scipy.optimize.minimize(cross_entropy, start, method="L-BFGS-B", bounds=bounds, options=options)
                 for start in starts]  # fmt: skip
        best = min(found, key=lambda each: each.fun).x
        predictions[name] = torch.from_numpy(scipy.special.expit(odds(best, *conditions)))
        share = np.broadcast_to(predictions[name][..., None].numpy(), measured.shape)
        pairs = ((measured, share), (1 - measured, 1 - share))
        divergence = np.sum([scipy.special.rel_entr(a, np.clip(b, 1e-12, 1)) for a, b in pairs], axis=0)
        parameters[name] = tuple(best.tolist())
        for part, mask in zip(scores, (predicted, fitted), strict=True):
            total = np.where(mask, divergence, 0).sum((0, 1)) / np.where(mask.any((0, 1)), mask.sum((0, 1)), np.nan)
            part[name] = torch.from_numpy(total)
    return StrategyOdds(parameters, *scores, predictions)


def _loss_and_complexity(p: np.ndarray, log_size: np.ndarray, log_step: np.ndarray, gap: np.ndarray) -> np.ndarray:
    return gap * np.exp(np.minimum(p[0] + p[1] * log_step, BOUND)) - np.exp(np.minimum(p[2] + p[3] * log_size, BOUND))


_MODELS: dict[str, tuple[Callable[..., np.ndarray], list[tuple[float, float]], list[tuple[float, ...]]]] = {
    "loss and complexity": (
        _loss_and_complexity,
        [(-BOUND, BOUND), (0.0, 2.0), (-BOUND, BOUND), (0.0, 3.0)],
        list(itertools.product((-4.0, 0.0), (0.2, 0.8), (-4.0, 0.0), (0.2, 0.8))),
    ),
    "logistic": (lambda p, d, n, gap: p[0] + p[1] * d + p[2] * n, [(-BOUND, BOUND)] * 3, [(0.0, 0.0, 0.0)]),
    "constant": (lambda p, d, n, gap: p[0] + 0 * d + 0 * n, [(-BOUND, BOUND)], [(0.0,)]),
}
"""Log odds of each model, bounds of its parameters, and where their search starts."""
