"""How best-matching steps grow with the layer: linearly or exponentially."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from mechicl.statistics import Interval, Result


@dataclass(frozen=True)
class Growth(Result):
    """How the best-matching step grows with the layer: linearly or exponentially.

    Errors of both curves are normal in log k. Intervals are over resampled prompts, with the best steps chosen anew.

    Attributes:
        columns: the best-matching steps at the layers `rows` that the curves were fitted to.
        slope: steps per layer of the linear fit `k = a + slope * layer`.
        doubling: doublings per layer of the exponential fit `k = 2^(a + doubling * layer)`.
        linear_aic: corrected Akaike criterion of the linear fit; lower is better. `exponential_aic` is the other's.
        linear_share: share of the resamples in which the linear fit has the lower criterion.
    """

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    slope: Interval
    doubling: Interval
    linear_aic: float
    exponential_aic: float
    linear_share: float
    linear_fit: tuple[float, ...]
    exponential_fit: tuple[float, ...]

    @property
    def better(self) -> Literal["linear", "exponential", "undecided"]:
        """The curve with the lower criterion; undecided where they differ by less than 2."""
        difference = self.linear_aic - self.exponential_aic
        if not abs(difference) >= 2:
            return "undecided"
        return "linear" if difference < 0 else "exponential"


def fit_growth(rows: Sequence[float], columns: Sequence[float]) -> Growth:
    """Fit linear and exponential curves to (layer, best step) pairs; the ends of intervals are NaN."""
    if len(rows) != len(columns) or len(set(rows)) != len(rows) or len(rows) < 5 or min(columns) < 1:
        raise ValueError(f"growth needs at least 5 different layers with steps >= 1, got {[*rows]} and {[*columns]}")
    order = np.argsort(np.asarray(rows, dtype=float))
    x, k = (np.asarray(values, dtype=float)[order] for values in (rows, columns))
    log_k = np.log(k)

    def linear(p: np.ndarray) -> np.ndarray:
        # The line is fitted to log k, so it must be positive at all layers. Given by the logarithms of its two ends it
        # is, whatever the parameters, and no bound on them is needed.
        first, last = np.exp(p)
        return first + (last - first) * (x - x[0]) / (x[-1] - x[0])

    straight = scipy.optimize.least_squares(lambda p: np.log(linear(p)) - log_k, x0=log_k[[0, -1]])
    first, last = np.exp(straight.x)
    slope, intercept = np.polyfit(x, log_k, 1)
    exponential = intercept + slope * x
    linear_aic, exponential_aic = _corrected_aic(straight.fun), _corrected_aic(exponential - log_k)
    values = (last - first) / (x[-1] - x[0]), slope / math.log(2)
    rows, columns, line, curve = (tuple(v.tolist()) for v in (x, k, linear(straight.x), np.exp(exponential)))
    per_layer, doubling = (Interval(float(value), math.nan, math.nan, len(x)) for value in values)
    share = float(linear_aic < exponential_aic)
    return Growth(rows, columns, per_layer, doubling, linear_aic, exponential_aic, share, line, curve)


def _corrected_aic(residuals: np.ndarray) -> float:
    """Akaike's criterion for two parameters and a variance, corrected for few points (Hurvich & Tsai 1989)."""
    n, k = len(residuals), 3
    variance = max(float(residuals @ residuals) / n, 1e-24)
    return n * math.log(variance) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
