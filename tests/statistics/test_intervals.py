"""Means, ratios, differences and medians with their intervals, against scipy and exact resampling."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analyses.support.resamples import crossed_median_interval, resampled_means
from mechicl.statistics import (
    UNBOUNDED,
    Interval,
    crossed_interval,
    difference_interval,
    interval,
    mean_of_intervals,
    median_interval,
    ratio_interval,
)
from mechicl.statistics.intervals import percentile_interval
from mechicl.statistics.storage import decode

nan, inf = math.nan, math.inf


@pytest.mark.parametrize(("measured", "text"), [
    (Interval(1.0, 0.877, 1.123, 5), "1.00 ± 0.12"),
    (Interval(1.0, -1233.0, 1235.0, 5), "1 ± 1234"),
    (Interval(1.0, 1.0, 1.0, 5), "1.0000 ± 0.0000"),
    (Interval(1.0, -inf, inf, 5), "1.0000 ± inf"),
    (Interval(3.21e-15, 3.11e-15, 3.31e-15, n=5), "3.21e-15 ± 1e-16"),
    (Interval(1.0, 1.0, 1.0, 3, 0.95, "median"), "1.0000 (1.0000 to 1.0000)"),
    (Interval(0.0015, 0.0001, 0.0062, 4, 0.95, "median"), "0.0015 (0.0001 to 0.0062)"),
    (Interval(0.03, 0.0297, 668.0, 3, 0.95, "median"), "0.03 (0.0297 to 668)"),
    (Interval(2.0, nan, nan, 1, 0.95, "median"), "2.0000 ± nan"),
    (Interval(1.23456789, 1.23456789 - 4.7e-15, 1.23456789 + 4.7e-15, 5), "1.23456789 ± 4.7e-15"),
    (Interval(2e-16, 1e-16, 3e-16, 5), "2e-16 ± 1e-16"),
    (Interval(3e-5, 3e-5, 3e-5, 5), "3e-05 ± 0.0000"),
    (Interval(3e-5, nan, nan, 5), "3e-05 ± nan"),
    (interval(torch.zeros(20)), "0.000 (0.000 to 0.168)"),
    (interval(torch.zeros(20)).within(0, 1), "0.000 (0.000 to 0.168)"),
    (interval(torch.arange(20) % 2), "0.50 ± 0.23"),
])  # fmt: skip
def test_an_interval_shows_two_digits_of_its_half_width_or_both_ends(measured, text):
    assert str(measured) == text


def test_an_interval_contains_the_numbers_between_its_ends():
    between = Interval(2.0, 1.0, 3.0, n=4)
    assert between.half_width == 1.0
    assert all(inside in between for inside in (1.0, 2.0, 3.0))
    assert not any(outside in between for outside in (0.999, 3.001, nan, inf))
    assert 1.0 not in Interval(1.0, nan, nan, n=1)


def test_files_from_before_there_were_medians_contain_means():
    saved = {"kind": "Interval", "fields": {"mean": 1.0, "low": 0.5, "high": 1.5, "n": 3, "level": 0.95}}
    assert decode(saved, {}) == Interval(1.0, 0.5, 1.5, 3)


# ---- means ----
@settings(max_examples=30)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_interval_is_students(values, level):
    measured = interval(torch.tensor(values, dtype=torch.float64), level)
    mean, error = np.mean(values), scipy.stats.sem(values)
    scale = max(map(abs, values))
    assert measured.mean == pytest.approx(mean, rel=1e-9, abs=1e-12 * scale)
    if error > 1e-9 * scale and not set(values) <= {0, 1}:
        low, high = scipy.stats.t.interval(level, len(values) - 1, loc=mean, scale=error)
        assert measured.low == pytest.approx(low, rel=1e-9, abs=1e-9 * scale)
        assert measured.high == pytest.approx(high, rel=1e-9, abs=1e-9 * scale)
    assert (measured.n, measured.level) == (len(values), level)


def test_a_mean_of_single_precision_samples_with_gradients_does_not_lose_digits():
    samples = torch.full((1_000_000,), 1000.1, requires_grad=True)
    assert interval(samples).mean == pytest.approx(samples[0].item(), rel=1e-12)


@pytest.mark.parametrize("make", [interval, median_interval])
@pytest.mark.parametrize("values", [[], [2.0]])
def test_fewer_than_two_samples_have_no_interval(make, values):
    measured = make(torch.tensor(values))
    assert math.isnan(measured.low)
    assert math.isnan(measured.high)
    assert measured.n == len(values)
    assert measured.mean == 2.0 if values else math.isnan(measured.mean)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_samples_that_are_not_finite_are_not_left_out(bad):
    measured = interval(torch.tensor([1.0, bad, 2.0]))
    assert not any(map(math.isfinite, (measured.mean, measured.low, measured.high)))
    assert measured.n == 3
    assert math.isnan(median_interval(torch.tensor([1.0, bad, 2.0])).low)
    ends = mean_of_intervals([Interval(0.5, 0.4, 0.6, 9), Interval(bad, nan, nan, 9)])
    assert math.isnan(ends.low)
    assert math.isnan(ends.high)


# ---- ratios and differences ----
def test_a_ratio_of_means_has_the_interval_of_the_delta_method():
    generator = torch.Generator().manual_seed(0)
    b = 2 + torch.rand(50, generator=generator, dtype=torch.float64)
    a = 3 * b + 0.1 * torch.randn(50, generator=generator, dtype=torch.float64)
    ratio = ratio_interval(a, b)
    x, y = a.numpy(), b.numpy()
    covariance = np.cov(x, y) / len(x)
    gradient = np.array([1 / y.mean(), -x.mean() / y.mean() ** 2])
    half = scipy.stats.t.ppf(0.975, 49) * math.sqrt(gradient @ covariance @ gradient)
    assert ratio.mean == pytest.approx(x.mean() / y.mean(), rel=1e-12)
    assert ratio.half_width == pytest.approx(half, rel=1e-9)


def test_a_difference_of_means_is_that_of_welch():
    first, second = torch.tensor([312.5, 312.5, 362.5]), torch.tensor([687.5, 587.5, 687.5, 700.0])
    expected = scipy.stats.ttest_ind(second, first, equal_var=False)
    for level in (0.9, 0.95):
        ends = expected.confidence_interval(level)
        measured = difference_interval(first, second, level)
        assert (measured.low, measured.high) == pytest.approx((ends.low, ends.high), rel=1e-6)
    assert measured.mean == pytest.approx(second.mean().item() - first.mean().item())
    assert (measured.n, measured.level) == (3, 0.95)


def test_a_difference_of_samples_without_spread_or_of_single_ones():
    assert difference_interval(torch.ones(3), torch.full((2,), 4.0)) == Interval(3.0, 3.0, 3.0, 2)
    alone = difference_interval(torch.ones(1), torch.ones(5))
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)


def test_a_percentile_interval_contains_its_value_and_the_middle_of_the_resamples():
    resampled = np.linspace(0, 1, 1001).tolist()
    ends = percentile_interval(0.5, resampled, n=7)
    assert (ends.mean, ends.low, ends.high, ends.n) == pytest.approx((0.5, 0.025, 0.975, 7))
    assert percentile_interval(2.0, resampled, n=7).high == 2.0


# ---- medians ----
def test_the_ends_are_those_of_every_possible_resample():
    values = np.array([0.1, 0.2, 0.7, 1.5, 4.0, 9.0])
    medians = [np.median(each) for each in itertools.product(values, repeat=6)]  # 6^6 resamples, all of them
    low, high = np.quantile(medians, [0.025, 0.975])
    measured = median_interval(torch.tensor(values), n_resamples=50_000)
    assert (measured.low, measured.high) == pytest.approx((low, high))
    assert measured.mean == pytest.approx(1.1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30), st.integers(0, 3))
def test_the_interval_stays_within_the_samples_and_is_the_same_for_the_same_seed(values, seed):
    sample = torch.tensor(values, dtype=torch.float64)
    measured = median_interval(sample, seed, n_resamples=200)
    assert min(values) <= measured.low <= measured.mean <= measured.high <= max(values)
    assert measured.mean == np.median(values)
    assert (measured.n, measured.middle) == (len(values), "median")
    assert measured == median_interval(sample, seed, n_resamples=200)


def test_many_samples_are_resampled_in_parts(monkeypatch):
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    whole = median_interval(values, n_resamples=100)
    monkeypatch.setattr("mechicl.statistics.intervals.CELLS", 60)
    assert median_interval(values, n_resamples=100) == whole  # the same draws, one resample at a time


@pytest.mark.parametrize(("call", "named"), [
    (lambda: difference_interval(torch.ones(0), torch.ones(3)), "first and second"),
    (lambda: ratio_interval(torch.ones(2), torch.ones(3)), "numerator and denominator|denominator"),
    (lambda: mean_of_intervals([interval(torch.rand(9), p) for p in (0.9, 0.5)]), r"one level, got \[0.9, 0.5"),
])  # fmt: skip
def test_what_makes_no_interval_is_named(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()


# ---- seeds and prompts ----
def crossed(rng, seeds, prompts, seed_std, prompt_std, rest_std):
    parts = [rng.normal(size=shape) for shape in ((seeds, 1), (1, prompts), (seeds, prompts))]
    stds = (seed_std, prompt_std, rest_std)
    return torch.from_numpy(sum(std * part for std, part in zip(stds, parts, strict=True)))


@pytest.mark.parametrize(
    ("seeds", "prompts", "seed_std", "one_way_at_most"), [(3, 200, 0.02, 0.8), (4, 100, 0.1, 0.8), (5, 300, 1.0, 0.98)]
)
def test_crossed_intervals_cover_where_intervals_over_seeds_do_not(seeds, prompts, seed_std, one_way_at_most):
    rng, n = np.random.default_rng(1), 300
    tables = [crossed(rng, seeds, prompts, seed_std, 1.0, 0.5) for _ in range(n)]
    covered = sum(0.0 in crossed_interval(table, n_resamples=200) for table in tables) / n
    one_way = sum(0.0 in interval(table.mean(1)) for table in tables) / n
    assert 0.90 <= covered <= 0.98
    assert one_way <= one_way_at_most
    if seed_std == 1.0:  # seeds alone decide: both are Student's interval over seeds
        assert one_way >= 0.9


def test_crossed_intervals_of_ratios_cover_the_ratio_of_expectations():
    rng, n, covered, one_way = np.random.default_rng(2), 300, 0, 0
    for _ in range(n):
        reference = torch.from_numpy(rng.exponential(size=(1, 300)))
        factors = 1 + 0.02 * torch.from_numpy(rng.normal(size=(3, 1)))
        values = factors * reference * torch.from_numpy(rng.exponential(size=(1, 300)))
        covered += 1.0 in crossed_interval(values, reference, n_resamples=200)
        one_way += 1.0 in interval(values.mean(1) / reference.mean())
    assert 0.90 <= covered / n <= 0.98
    assert one_way / n < 0.8


def test_crossed_intervals_have_the_two_variances_of_the_mean():
    table = crossed(np.random.default_rng(3), 4, 50, 1.0, 1.0, 1.0)
    measured = crossed_interval(table, n_resamples=20_000)
    variances = table.mean(1).var().item() / 4, table.mean(0).var().item() / 50
    free = sum(variances) ** 2 / (variances[0] ** 2 / 3 + variances[1] ** 2 / 49)
    half = scipy.stats.t.ppf(0.975, free) * math.sqrt(sum(variances))
    assert measured.mean == pytest.approx(table.mean().item())
    assert measured.half_width == pytest.approx(half, rel=0.02)
    same = table[0].expand(4, 50)  # equal seeds: the prompts' interval
    assert crossed_interval(same, n_resamples=20_000).half_width == pytest.approx(
        interval(same[0]).half_width, rel=0.03
    )


def test_percentages_are_no_shares_and_something_is_left_of_a_trimmed_mean():
    with pytest.raises(ValueError, match="a mean of 80"):
        interval(torch.tensor([70.0, 80.0, 90.0]), within=(0, 1))
    with pytest.raises(ValueError, match="trim must be below 1"):
        crossed_interval(torch.rand(3, 20), trim=1.0)


def test_trimmed_means_leave_out_the_largest_values():
    table = crossed(np.random.default_rng(4), 3, 200, 1.0, 1.0, 1.0).exp()
    table[:, 7] = 1e9
    expected = table.sort().values[:, :198].mean(1) / 2.0
    assert crossed_interval(table, torch.full((1, 200), 2.0), trim=0.01).mean == pytest.approx(expected.mean().item())
    holes = table.clone()
    holes[1, 7] = nan
    assert math.isfinite(crossed_interval(holes, trim=0.01).half_width)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1)])
def test_crossed_intervals_without_enough_values_have_no_ends(shape):
    assert math.isnan(crossed_interval(torch.ones(shape)).low)


def test_a_seed_without_finite_values_leaves_the_mean_undefined():
    assert math.isnan(crossed_interval(torch.tensor([[1.0, 2.0], [nan, nan]])).mean)


# ---- medians over seeds, and prompts ----
def test_resampled_means_are_of_the_prompts_first_and_then_of_resamples_that_all_calls_share():
    table = crossed(np.random.default_rng(5), 3, 40, 1.0, 1.0, 1.0)
    means = resampled_means(table, n_resamples=4000)
    torch.testing.assert_close(means[0], table.mean(1))
    torch.testing.assert_close(resampled_means(torch.stack([table, 2 * table]), n_resamples=4000)[:, 1], 2 * means)
    expected = table.std(1) / math.sqrt(40)  # with n - 1 of n prompts, resamples have the unbiased variance
    torch.testing.assert_close(means[1:].std(0), expected, rtol=0.05, atol=0)


@pytest.mark.parametrize(("seeds", "least"), [(3, 0.75), (5, 0.92)])
def test_crossed_medians_cover_where_medians_over_seeds_do_not(seeds, least):
    rng, n = np.random.default_rng(6), 100
    tables = [crossed(rng, seeds, 100, 0.1, 1.0, 0.5) for _ in range(n)]
    found = [crossed_median_interval(resampled_means(table, n_resamples=60), 100)[0] for table in tables]
    assert sum(0.0 in each for each in found) / n >= least
    assert sum(0.0 in median_interval(table.mean(1), n_resamples=200) for table in tables) / n < 0.7


def test_a_crossed_median_is_at_least_as_wide_as_the_seeds_range_and_its_mean_is_the_crossed_one():
    table = crossed(np.random.default_rng(7), 4, 60, 1.0, 0.1, 0.1)
    median, mean = crossed_median_interval(resampled_means(table), 60)
    assert median.low <= table.mean(1).min() + 0.02
    assert median.high >= table.mean(1).max() - 0.02
    assert (median.mean, median.n) == (pytest.approx(table.mean(1).median().item(), abs=0.5), 4)
    expected = crossed_interval(table)
    assert (mean.mean, mean.half_width) == (pytest.approx(expected.mean), pytest.approx(expected.half_width))


def test_pairs_of_seeds_are_resampled_by_seed():
    pairs = list(itertools.combinations(range(4), 2))
    values = torch.tensor([1.0 if 3 in pair else 0.0 for pair in pairs]).double().expand(401, 6)
    median, mean = crossed_median_interval(values, 50, pairs)
    assert (median.mean, median.low, median.high, median.n, mean.mean) == (0.5, 0.0, 1.0, 6, 0.5)
    holes = values.clone()
    holes[3, 0] = nan
    assert math.isnan(crossed_median_interval(holes, 50, pairs)[0].low)


# ---- shares ----
@pytest.mark.parametrize("right", [0, 1, 7, 19, 20])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_interval_of_a_share_is_binomial(right, dtype, level):
    samples = (torch.arange(20) < right).to(dtype)
    exact = scipy.stats.binomtest(right, 20).proportion_ci(level, method="exact")
    found = [interval(samples, level), interval(samples.view(4, 5), level), interval(samples, level, within=(0, 1))]
    found += [replace(crossed_interval(samples[None].double(), level=level), n=20)] if right in (0, 20) else []
    for measured in found:
        assert (measured.mean, measured.n) == (pytest.approx(right / 20), 20)
        assert (measured.low, measured.high) == pytest.approx((exact.low, exact.high), abs=1e-12)


@pytest.mark.parametrize("n_seeds", [1, 3])
def test_prompts_without_values_are_as_if_they_were_not_there(n_seeds):
    generator = torch.Generator().manual_seed(0)
    values, over = torch.rand(2, n_seeds, 60, generator=generator).double()
    known = torch.rand(60, generator=generator) < 0.4
    values[:, ~known] = math.nan
    shares = (values > 0.9).double().where(known, math.nan)
    for one, other in ((values, over), (values, over[:1]), (shares, None), (values, None), (over, values)):
        rest = None if other is None else other[:, known]
        assert str(crossed_interval(one, other)) == str(crossed_interval(one[:, known], rest))
    assert math.isnan(crossed_interval(values[:, ~known]).mean)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.3, -2.0])
def test_constant_quantities_that_are_no_shares_are_exact(value):
    measured = interval(torch.full((20,), value), within=UNBOUNDED)
    assert (measured.low, measured.high) == pytest.approx((value, value), abs=1e-7)


@pytest.mark.parametrize(("least", "most", "value"), [(0, 1, 0.5), (-1, 1, 0.0), (-1, 1, 1.0), (0, 3, 1.0)])
def test_a_constant_sample_of_a_limited_quantity_has_a_width(least, most, value):
    measured = interval(torch.full((20,), value), within=(least, most))
    rare = 1 - 0.025 ** (1 / 20)  # the largest share of other values that shows none in 20 with probability 0.025
    limits = value - rare * (value - least), value + rare * (most - value)
    assert (measured.low, measured.high) == pytest.approx(limits, abs=1e-9)


def covered(draw, estimate, truth: float, n: int = 400) -> float:
    generator = torch.Generator().manual_seed(0)
    return sum(truth in estimate(*draw(generator)) for _ in range(n)) / n


@pytest.mark.parametrize(("gained", "lost"), [(0.05, 0.0), (0.05, 0.02), (0.3, 0.5), (0.02, 0.95)])
def test_intervals_of_paired_differences_of_shares_cover(gained, lost):
    def draw(generator):
        u = torch.rand(20, generator=generator)
        return ((u < gained).double() - (u > 1 - lost).double(),)

    assert covered(draw, lambda each: interval(each, within=(-1, 1)), gained - lost) >= 0.92


@pytest.mark.parametrize(("first", "second"), [(0.02, 0.02), (0.3, 0.5), (0.02, 0.9), (0.97, 0.97)])
def test_intervals_of_differences_and_ratios_of_shares_cover(first, second):
    def draw(generator):
        shares = ((20, first), (15, second))
        return [(torch.rand(n, generator=generator) < share).double() for n, share in shares]

    def pair(generator):
        first_samples, _ = draw(generator)
        return first_samples, (torch.rand(20, generator=generator) < second).double().index_fill(0, torch.tensor(0), 1)

    assert covered(draw, difference_interval, second - first) >= 0.92
    if second > 0.3:
        assert covered(pair, ratio_interval, first / (0.05 + 0.95 * second)) >= 0.92


def test_a_share_of_all_is_a_share():
    share, right = interval(torch.ones(20).index_fill(0, torch.tensor([3]), 0)), torch.arange(20).ne(3).float()
    ratio = ratio_interval(right, torch.ones(20))
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((share.mean, share.low, share.high))


def test_shares_of_seeds_and_prompts_that_are_all_0_have_a_width():
    none = torch.zeros(3, 20)
    of_three, of_twenty = (scipy.stats.binomtest(0, n).proportion_ci().high for n in (3, 20))
    assert crossed_interval(none).high == pytest.approx(of_three)  # another seed may be right in every prompt
    assert crossed_interval(1 - none).low == pytest.approx(1 - of_three)
    assert crossed_interval(none[:1], torch.ones(1, 20) * torch.arange(20).remainder(2)).high == pytest.approx(
        2 * of_twenty
    )
    one = none.clone()
    one[0, 0] = 1
    assert 0 < crossed_interval(one).low < 1 / 60 < crossed_interval(one).high < 0.5
    averaged = mean_of_intervals([interval(row) for row in none])
    assert averaged.low == 0 < averaged.high < 0.5


def test_crossed_shares_cover_for_other_seeds_and_prompts():
    def draw(generator):  # seeds with different abilities, prompts with different difficulties
        seeds, prompts = torch.randn(5, 1, generator=generator), torch.randn(1, 30, generator=generator)
        return ((torch.rand(5, 30, generator=generator) < torch.sigmoid(seeds + prompts - 4)).double(),)

    truth = scipy.integrate.quad(lambda z: scipy.special.expit(2**0.5 * z - 4) * scipy.stats.norm.pdf(z), -8, 8)[0]
    assert covered(draw, crossed_interval, truth, 200) > 0.9
