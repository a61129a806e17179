"""Means with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit
from torch import Tensor

from mechicl.base.arguments import Count, Fraction, Natural, Positive, checked, strictly_between
from mechicl.statistics.storage import storable

CELLS = 2**22  # of resamples that are held at once


@storable
@dataclass(frozen=True)
class Interval:
    """A mean or a median with a confidence interval.

    Attributes:
        mean: sample mean; the median where `middle` says so.
        low: lower end.
        high: upper end.
        n: number of independent samples (prompts or seeds).
        level: confidence level, 0.95 by default.
        middle: what `mean` holds. A median prints with both ends, which need not be equally far from it.
        cut: an end was moved to the limit of the quantity's range (`within`); printed with both ends too.
    """

    mean: float
    low: float
    high: float
    n: int
    level: float = 0.95
    middle: Literal["mean", "median"] = "mean"
    cut: bool = False

    def __str__(self) -> str:
        if (self.middle == "median" or self.cut) and math.isfinite(self.half_width):
            digits = max(0, 2 - _magnitude(self.half_width)) if self.half_width else 4
            if digits > 12:
                return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"
            return f"{self.mean:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"
        digits = 4 if not self.half_width or not math.isfinite(self.half_width) else 2 - _magnitude(self.half_width)
        if digits > 12:  # differences at the level of rounding
            return f"{self.mean:.3g} ± {self.half_width:.2g}"
        digits = max(digits, 0)
        return f"{self.mean:.{digits}f} ± {self.half_width:.{digits}f}"

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __rsub__(self, value: float) -> "Interval":
        return replace(self, mean=value - self.mean, low=value - self.high, high=value - self.low)

    def within(self, least: float, most: float) -> "Interval":
        """The interval, its ends cut to the range of the quantity: -1 to 1 for a cosine, 0 to 1 for a share."""
        mean, low, high = (min(max(value, least), most) for value in (self.mean, self.low, self.high))  # NaN stays
        cut = low - self.low > 1e-9 or self.high - high > 1e-9  # more than rounding
        return replace(self, mean=mean, low=low, high=high, cut=cut)


ConfidenceLevel = Annotated[float, strictly_between(0, 1)]


def _magnitude(value: float) -> int:
    return math.floor(math.log10(abs(value))) + 1


@checked(undefined=True)
def interval(samples: Tensor, level: ConfidenceLevel = 0.95) -> Interval:
    """Mean of independent samples and its confidence interval from Student's t distribution.

    With one sample, or none, the interval is not defined and its ends are NaN. Samples that are not finite give a
    mean and ends that are not either: nothing is left out silently.

    Args:
        samples: any shape; every entry counts as one independent sample.
        level: confidence level, strictly between 0 and 1.

    Raises:
        ValueError: level out of range.
    """
    values = samples.detach().cpu().double().flatten()
    n = values.numel()
    mean = values.mean().item() if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n, level)
    half = student_t_quantile(0.5 + level / 2, n - 1) * (values.std() / math.sqrt(n)).item()
    return Interval(mean, mean - half, mean + half, n, level)


@checked(undefined=True)
def ratio_interval(
    numerator: Float[Tensor, "sample"], denominator: Float[Tensor, "sample"], level: ConfidenceLevel = 0.95
) -> Interval:
    """Ratio of two means over the same samples, with an interval from the paired samples (delta method).

    Raises:
        ValueError: different numbers of samples, or level out of range.
    """
    if numerator.shape != denominator.shape:
        raise ValueError(f"paired samples needed, got {tuple(numerator.shape)} and {tuple(denominator.shape)}")
    a, b = numerator.detach().cpu().double(), denominator.detach().cpu().double()
    ratio = a.mean() / b.mean()
    # the ratio of means has the standard error of the mean of (a - r b) / mean(b)
    return interval(ratio + (a - ratio * b) / b.mean(), level)


@checked(undefined=True)
def difference_interval(
    first: Float[Tensor, "sample"], second: Float[Tensor, "other_sample"], level: ConfidenceLevel = 0.95
) -> Interval:
    """Difference of two means, second minus first, of independent samples whose spreads may differ (Welch 1947).

    It holds its level for few samples too, three seeds each for example, where they are near a normal distribution.

    Args:
        first: samples of the one.
        second: samples of the other, which need not be as many.
        level: confidence level, strictly between 0 and 1.

    Returns:
        The interval, NaN at its ends where one of the two has fewer than two samples, or
        one that is not finite; its `n` is the smaller number.

    Raises:
        ValueError: level out of range, or no samples.

    Example:
        >>> print(difference_interval(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 6.0, 7.0])))
        4.0 ± 2.3
    """
    if not (len(first) and len(second)):
        raise ValueError(f"first and second need samples, got {len(first)} and {len(second)}")
    one, two = interval(first, level), interval(second, level)
    difference, n = two.mean - one.mean, min(one.n, two.n)
    if n < 2 or not math.isfinite(difference):
        return Interval(difference, math.nan, math.nan, n, level)
    shares = [each.detach().cpu().double().var().item() / each.numel() for each in (first, second)]
    total = sum(shares)
    free = total**2 / sum(v**2 / (k.n - 1) for v, k in zip(shares, (one, two), strict=True)) if total else math.inf
    half = student_t_quantile(0.5 + level / 2, free) * math.sqrt(total) if total else 0.0
    return Interval(difference, difference - half, difference + half, n, level)


@checked(undefined=True)
def median_interval(
    values: Tensor, seed: Natural = 0, level: ConfidenceLevel = 0.95, *, n_resamples: Count = 10_000
) -> Interval:
    """Median of independent samples with its bootstrap interval, for what is skewed or cannot be negative.

    Both ends are medians of resamples (Efron 1979), so that the interval never leaves the samples' range; of few
    samples it is their range, which covers the median of what they were drawn from with a chance of 1 - 2^(1 - n): 94%
    for five of them, 75% for three, whatever the level. With one sample, or none, or one that is not finite, the ends
    are NaN.

    Args:
        values: any shape; every entry counts as one independent sample.
        seed: of the resamples.
        level: confidence level, strictly between 0 and 1.
        n_resamples: drawn with replacement.

    Raises:
        ValueError: level out of range, or no resamples.

    Example:
        >>> print(median_interval(torch.tensor([120.0, 150.0, 180.0, 1400.0, 160.0])))
        160 (120 to 1400)
    """
    samples = values.detach().cpu().double().flatten().numpy()
    n = samples.size
    median = float(np.median(samples)) if n else math.nan
    if n < 2 or not np.isfinite(samples).all():
        return Interval(median, math.nan, math.nan, n, level, "median")
    rng = np.random.default_rng(seed)
    most = max(1, CELLS // n)
    parts = [
        np.median(samples[rng.integers(n, size=(min(most, n_resamples - start), n))], axis=1)
        for start in range(0, n_resamples, most)
    ]
    low, high = np.quantile(np.concatenate(parts), [(1 - level) / 2, (1 + level) / 2])
    return Interval(median, min(float(low), median), max(float(high), median), n, level, "median")


@checked
def student_t_quantile(probability: Fraction, degrees_of_freedom: Positive) -> float:
    """Quantile of Student's t distribution.

    Args:
        probability: from 0 to 1.
        degrees_of_freedom: positive and finite.
    """
    return float(stdtrit(degrees_of_freedom, probability))


@checked(undefined=True)
def percentile_interval(value: float, resampled: Sequence[float], n: int, level: ConfidenceLevel = 0.95) -> Interval:
    """A value with its interval from resamples of n prompts.

    Raises:
        ValueError: level out of range.
    """
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, min(float(low), value), max(float(high), value), n, level)
