"""Means with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, Fraction, Natural, Positive, check_fields, checked, strictly_between
from mechicl.statistics.storage import storable

CELLS = 2**22  # of resamples in memory at once
UNBOUNDED = (-math.inf, math.inf)
"""Range of a quantity that is not a share, even if every sample is 0 or 1, such as an error or an effect."""


@storable
@dataclass(frozen=True)
class Interval:
    """A mean or a median with a confidence interval; printed as "mean ± half width".

    Attributes:
        mean: sample mean, or median; `low` and `high` are the ends of the interval.
        n: number of independent samples (prompts or seeds).
        level: confidence level.
        middle: "median" if `mean` is one. A median is printed with both ends, which need not be equally far from it.
        cut: True if the range of the quantity makes the ends unequally far from the mean; printed with both ends too.
    """

    mean: float
    low: float
    high: float
    n: int
    level: float = 0.95
    middle: Literal["mean", "median"] = "mean"
    cut: bool = False

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)

    def __str__(self) -> str:
        half, digits, size = self.half_width, 4, abs(self.mean)
        if half and math.isfinite(half):
            digits = max(0, 1 - math.floor(math.log10(half)))
        number, width = f".{digits}f", f".{digits}f"
        if digits > 12:  # differences at the level of rounding
            shown = math.floor(math.log10(size / half)) + 2 if size and math.isfinite(size) else 3
            number, width = f".{min(max(shown, 3), 12)}g", ".2g"
        elif 0 < size < 0.01 and not (half and math.isfinite(half)):
            number = ".4g"
        if (self.middle == "median" or self.cut) and math.isfinite(half):
            if 0 < size < 10 ** (1 - digits) and min(size, abs(self.low)) < half / 100:
                number = ".3g"  # decimals of the farther end would round the others away
            return f"{self.mean:{number}} ({self.low:{number}} to {self.high:{number}})"
        return f"{self.mean:{number}} ± {half:{width}}"

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2

    @checked
    def columns(self, name: str, prefix: str = "") -> dict[str, float]:
        """Return the mean and both ends by their columns in a table: NAME, PREFIXlow and PREFIXhigh."""
        return {name: self.mean, f"{prefix}low": self.low, f"{prefix}high": self.high}

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __rsub__(self, value: float) -> "Interval":
        return replace(self, mean=value - self.mean, low=value - self.high, high=value - self.low)

    @checked
    def within(self, least: float, most: float) -> "Interval":
        """Cut the ends to the range of the quantity: -1 to 1 for a cosine, 0 to 1 for a share."""
        mean, low, high = (min(max(value, least), most) for value in (self.mean, self.low, self.high))  # NaN stays
        cut = self.cut or low - self.low > 1e-9 or self.high - high > 1e-9  # more than rounding
        return replace(self, mean=mean, low=low, high=high, cut=cut)


ConfidenceLevel = Annotated[float, strictly_between(0, 1)]


@checked(undefined=True)
def interval(samples: Tensor, level: ConfidenceLevel = 0.95, *, within: tuple[float, float] | None = None) -> Interval:
    """Return the mean of independent samples with its confidence interval: exact for shares, else Student's t.

    Samples that are all 0 or 1 (right answers, for example) are a share of any dtype. Their interval is binomial
    (Clopper & Pearson 1934): 0 to 0.17 if none of 20 is 1, where Student's t would give 0 ± 0. The values alone decide:
    for errors or effects that may be exactly 0, pass `within=UNBOUNDED`. Other constant samples have a width of 0.

    Args:
        samples: every entry, of any shape, counts as one independent sample (a prompt or a seed).
        within: least and largest possible value, such as (0, 1) for a share and (-1, 1) for the difference of two
            paired answers. The interval is cut to it. If the samples have at most one other value, the shares at both
            limits get binomial intervals, which are combined (Donner & Zou 2012).

    Returns:
        `Interval` with `mean`, `low`, `high` and `n`. `low` and `high` are NaN with fewer than two samples. If a sample
        is NaN or infinite, the mean and both ends are not finite either.

    Raises:
        ValueError: the mean lies outside `within`, by more than rounding.

    Example:
        >>> print(interval(torch.zeros(20)))
        0.000 (0.000 to 0.168)
    """
    values = samples.detach().cpu().double().flatten()
    n = values.numel()
    mean = values.mean().item() if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n, level)
    least, most = within or ((0.0, 1.0) if is_share(values) else UNBOUNDED)
    margin = 1e-3 * (most - least) if math.isfinite(most - least) else 0.0
    if math.isfinite(mean) and not least - margin <= mean <= most + margin:
        raise ValueError(f"samples must lie within {within}, and have a mean of {mean:g}")
    others = values[(values != least) & (values != most)]
    middle = others[0].item() if len(others) else least
    if math.isfinite(least) and math.isfinite(most) and least <= middle <= most and (others == middle).all():
        above, below = (_share((values == end).sum().item(), n, level) for end in (most, least))
        return _difference(mean, most - middle, above, middle - least, below, n, paired=True)  # or 0 times `below`
    half = student_t_quantile(0.5 + level / 2, n - 1) * (values.std() / math.sqrt(n)).item()
    return Interval(mean, mean - half, mean + half, n, level).within(least, most)


@checked(undefined=True)
def ratio_interval(
    numerator: Float[Tensor, "sample"], denominator: Float[Tensor, "sample"], level: ConfidenceLevel = 0.95
) -> Interval:
    """Return the ratio of two means over the same samples, with an interval from the paired samples (delta method).

    Returns:
        `Interval` with `mean` (the ratio), `low`, `high` and `n`. It is NaN if a sample is not finite, or the
        denominator's mean is 0.
    """
    a, b = numerator.detach().cpu().double(), denominator.detach().cpu().double()
    ratio, size = (a.mean() / b.mean()).item(), b.mean().item()
    # the ratio of means has the standard error of the mean of (a - r b) / mean(b)
    shares = size and is_share(a) and is_share(b)
    limits = (-ratio, 1 - ratio if (a <= b).all() else 1.0) if shares else UNBOUNDED
    rest = interval(a - ratio * b, level, within=limits)
    low, high = sorted((rest.low / size, rest.high / size)) if size else (math.nan, math.nan)
    return replace(rest, mean=ratio, low=ratio + low, high=ratio + high)


@checked(undefined=True)
def difference_interval(
    first: Float[Tensor, "sample"], second: Float[Tensor, "other_sample"], level: ConfidenceLevel = 0.95
) -> Interval:
    """Return the difference of two means, second minus first, of samples whose spreads may differ (Welch 1947).

    Its coverage is right for few samples too, such as three seeds each, if they are nearly normal. For two shares (all
    samples 0 or 1) their binomial intervals are combined (Newcombe 1998).

    Args:
        first: samples whose mean is subtracted.
        second: independent samples of the other group; their number may differ.

    Returns:
        `Interval` with `mean` (the difference), `low`, `high` and `n` (the smaller number of samples). The ends are NaN
        if either group has fewer than two samples, or one that is not finite.

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
    if is_share(first) and is_share(second):
        return _difference(difference, 1.0, two, 1.0, one, n)
    shares = [each.detach().cpu().double().var().item() / each.numel() for each in (first, second)]
    total = sum(shares)
    free = total**2 / sum(v**2 / (k.n - 1) for v, k in zip(shares, (one, two), strict=True)) if total else math.inf
    half = student_t_quantile(0.5 + level / 2, free) * math.sqrt(total) if total else 0.0
    return Interval(difference, difference - half, difference + half, n, level)


@checked(undefined=True)
def median_interval(
    values: Tensor, seed: Natural = 0, level: ConfidenceLevel = 0.95, *, n_resamples: Count = 10_000
) -> Interval:
    """Return the median of independent samples with its bootstrap interval, for skewed or positive quantities.

    Both ends are medians of resamples (Efron 1979), so that the interval never leaves the samples' range. For few
    samples it is their range, which covers the population's median with probability 1 - 2^(1 - n) at any level: 94% for
    five samples, 75% for three.

    Args:
        values: every entry, of any shape, counts as one independent sample.

    Returns:
        `Interval` with `mean` (the median), `low`, `high` and `n`; `low` and `high` are NaN with fewer than two
        samples, or if any sample is not finite.

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
    return percentile_interval(median, np.concatenate(parts), n, level, "median")


@checked(undefined=True)
def crossed_interval(
    values: Float[Tensor, "seed prompt"],
    over: Float[Tensor, "#seed prompt"] | None = None,
    level: ConfidenceLevel = 0.95,
    *,
    trim: Fraction = 0.0,
    n_resamples: Count = 400,
) -> Interval:
    """Return the mean over seeds and prompts, or a ratio of means, with an interval for other seeds and other prompts.

    All seeds share the prompts, so the means of the seeds have the prompts' sampling error in common and an interval
    over seeds alone is too narrow. Seeds and prompts are two crossed factors: the variance of the mean is the sum of
    that over seeds and that over prompts, which are resampled for all seeds together (bootstrap). The quantile is
    Student's t with Satterthwaite's degrees of freedom, as a bootstrap of three seeds would be too narrow. Source: Owen
    2007 ("The pigeonhole bootstrap"), for two crossed factors; Satterthwaite 1946.

    Args:
        values: one for each seed and prompt, such as squared errors. Values that are not finite are left out, and
            prompts that have none count for nothing, in `over` neither.
        over: values that divide, such as the squared errors of an algorithm on the same prompts: each seed's mean is
            divided by their mean.
        trim: share of the prompts with the largest values that each mean leaves out, of `values` and of `over`
            separately, for heavy-tailed losses.

    Returns:
        `Interval` with the mean over seeds of the (trimmed) means or ratios, and `n`, the number of seeds. With one
        seed, the interval is over prompts. The ends are NaN if a seed has no finite values, or with a single value.
        Shares (all values 0 or 1) get a binomial interval for the number of independent samples that has this
        variance; if there is none, as all values are 0, for the number of seeds (or of prompts, if that is smaller).

    Example:
        >>> crossed_interval(squared_errors_of_seeds, squared_errors_of_gd)    # [seed prompt], [1 prompt]
    """
    if trim == 1:
        raise ValueError("trim must be below 1: it would leave out all prompts")
    known = values.isfinite().any(0)
    if over is not None:
        known = known & over.isfinite().any(0)
        over = over[:, known]
    values = values[:, known]
    n_seeds, n_prompts = values.shape
    if not n_prompts or not n_seeds:
        return Interval(math.nan, math.nan, math.nan, n_seeds, level)
    counts = prompt_counts(n_prompts, n_resamples)
    means = _trimmed_means(values, counts, trim)
    if over is not None:
        means = means / _trimmed_means(over, counts, trim)
    found = mean_of_resamples(means, n_prompts, level)
    share, half = found.mean, found.half_width
    if trim or not is_share(values[values.isfinite()]) or not math.isfinite(half) or (over is not None and half):
        return found
    alone = min(n for n in values.shape if n > 1)
    if over is not None:  # all values are 0, or equal the divisors
        ends, size = interval(torch.zeros(alone), level, within=(-share, 1.0)), over.nanmean().item()
        return replace(ends, mean=share, low=share + ends.low / size, high=share + ends.high / size, n=n_seeds)
    # the number of independent samples with this variance (Korn & Graubard 1998)
    n = share * (1 - share) * (student_t_quantile(0.5 + level / 2, 1e9) / half) ** 2 if half else alone
    return replace(_share(share * n, n, level), n=n_seeds)


@lru_cache(maxsize=2)  # of 20,000 prompts they are 64 MB
def prompt_counts(n_prompts: int, n_resamples: int) -> Float[np.ndarray, "resample prompt"]:
    """Return how often each prompt is in each resample; the first one is the prompts themselves."""
    # of n resampled prompts, n - 1 are drawn: the variance of their mean is then that of the mean without bias
    drawn = np.random.default_rng(0).multinomial(max(n_prompts - 1, 1), np.full(n_prompts, 1 / n_prompts), n_resamples)
    return np.concatenate([np.ones((1, n_prompts)), drawn])


def resample_counts(n: int, n_resamples: int, seed: int = 0) -> Float[Tensor, "resample sample"]:
    """Return how often each of n samples is in each resample, float64."""
    drawn = torch.randint(n, (n_resamples, n), generator=torch.Generator().manual_seed(seed))
    return torch.stack([torch.bincount(row, minlength=n) for row in drawn]).double()


def mean_of_resamples(values: Float[np.ndarray, "resample seed"], n_prompts: int, level: float) -> Interval:
    """Return the mean over seeds of what was measured on the prompts (first row) and on resamples of them."""
    mean, (seeds, *_), n_seeds = float(values[0].mean()), values, values.shape[1]
    variances = [float(seeds.var(ddof=1)) / n_seeds] if n_seeds > 1 else [0.0]
    variances.append(float(values[1:].mean(1).var(ddof=1)) if n_prompts > 1 and len(values) > 2 else 0.0)
    if not math.isfinite(mean + sum(variances)) or max(n_seeds, n_prompts) < 2:
        return Interval(mean, math.nan, math.nan, n_seeds, level)
    return _of_two_variances(mean, variances, (n_seeds, n_prompts), level)


@checked
def mean_of_intervals(values: Sequence[Interval]) -> Interval:
    """Return the mean over seeds of quantities that are known with intervals over shared prompts.

    Use it where only intervals are known: `crossed_interval` is exact but needs the values of each prompt. The variance
    is that over seeds plus the mean of the seeds' variances over prompts: an upper bound.

    Args:
        values: each seed's quantity with its interval over prompts, all of one level; ends that are NaN add no
            variance. If a mean is not finite, both ends are NaN.
    """
    means, level = np.array([value.mean for value in values]), values[0].level
    if levels := sorted({value.level for value in values} - {level}):
        raise ValueError(f"intervals must have one level, got {[level, *levels]}")
    quantiles = [student_t_quantile(0.5 + level / 2, max(value.n - 1, 1)) for value in values]
    if not np.isfinite(means).all():
        return Interval(float(means.mean()), math.nan, math.nan, len(values), level)
    if len(values) < 2:
        return replace(values[0], n=1)
    sizes, ends = (len(values), max(min(value.n for value in values), 2)), []
    for sides in ([v.mean - v.low for v in values], [v.high - v.mean for v in values]):
        within = float(np.nan_to_num(np.square(np.divide(sides, quantiles))).mean())
        variances = [float(means.var(ddof=1)) / len(values), within]
        ends.append(_of_two_variances(float(means.mean()), variances, sizes, level).half_width)
    return _asymmetric(float(means.mean()), ends[0], ends[1], len(values), level)


def is_share(values: Tensor) -> bool:
    """Return True if all samples are 0 or 1."""
    return bool(((values == 0) | (values == 1)).all()) and values.numel() > 0


def _share(k: float, n: float, level: float) -> Interval:
    """Return the share k / n with its exact binomial interval; the numbers need not be whole."""
    low = scipy.special.betaincinv(k, n - k + 1, (1 - level) / 2) if k > 0 else 0.0
    high = scipy.special.betaincinv(k + 1, n - k, (1 + level) / 2) if k < n else 1.0
    return _asymmetric(k / n, k / n - float(low), float(high) - k / n, round(n), level)


def _difference(
    mean: float, up: float, above: Interval, down: float, below: Interval, n: int, *, paired: bool = False
) -> Interval:
    """Return the interval of up * above - down * below; paired shares are those of two values of the same samples."""
    odds = [math.sqrt(each.mean / (1 - each.mean)) if each.mean < 1 else 0.0 for each in (above, below)]
    twice = 2 * odds[0] * odds[1] if paired else 0.0  # times minus the correlation of two counts (multinomial)
    sides = (above.mean - above.low, below.high - below.mean), (above.high - above.mean, below.mean - below.low)
    ends = [math.sqrt((up * a) ** 2 + (down * b) ** 2 + twice * up * a * down * b) for a, b in sides]
    return _asymmetric(mean, ends[0], ends[1], n, above.level)


def _asymmetric(mean: float, below: float, above: float, n: int, level: float) -> Interval:
    """Return an interval by the distances of both ends from the mean."""
    return Interval(mean, mean - below, mean + above, n, level, cut=abs(above - below) > 0.05 * (above + below))


def _of_two_variances(mean: float, variances: Sequence[float], sizes: tuple[int, int], level: float) -> Interval:
    """Return the interval of a mean by its variances over seeds and prompts, and the numbers of both."""
    total = sum(variances)
    if total < 1e-300:
        return Interval(mean, mean, mean, sizes[0], level)
    shares = [variance / total for variance in variances]  # Satterthwaite's degrees of freedom
    free = 1 / sum(share**2 / max(n - 1, 1) for share, n in zip(shares, sizes, strict=True))
    half = student_t_quantile(0.5 + level / 2, free) * math.sqrt(total)
    return Interval(mean, mean - half, mean + half, sizes[0], level)


def _trimmed_means(
    values: Float[Tensor, "seed prompt"], counts: Float[np.ndarray, "resample prompt"], trim: float
) -> Float[np.ndarray, "resample seed"]:
    """Return each seed's mean of the smallest values on resampled prompts, all but a share `trim` of them."""
    means = []
    for row in values.detach().cpu().double().numpy():
        finite = np.isfinite(row)
        # the largest values, many times as many as are left out; of the others every resample has all
        largest = np.argsort(np.where(finite, -row, np.inf))[: math.ceil(3 * trim * len(row)) + 100 if trim else 0]
        largest = largest[finite[largest]]
        weights = counts[:, largest]
        before, total = np.cumsum(weights, 1) - weights, counts @ finite
        left_out = np.clip(trim * total[:, None] - before, 0, weights)
        rest = finite.copy()
        rest[largest] = False
        kept = counts @ np.where(rest, row, 0.0) + (weights - left_out) @ row[largest]
        with np.errstate(invalid="ignore"):  # NaN for a seed without finite values
            means.append(kept / ((1 - trim) * total))
    return np.stack(means, 1)


def student_t_quantile(probability: Fraction, degrees_of_freedom: Positive) -> float:
    """Return a quantile of Student's t distribution."""
    return float(scipy.special.stdtrit(degrees_of_freedom, probability))


def percentile_interval(
    value: float, resampled: Any, n: int, level: ConfidenceLevel = 0.95, middle: Literal["mean", "median"] = "mean"
) -> Interval:
    """Return a value with its interval from resamples of n prompts."""
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, min(float(low), value), max(float(high), value), n, level, middle)
