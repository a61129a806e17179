import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.statistics import (
    Interval,
    difference_interval,
    interval,
    percentile_interval,
    ratio_interval,
    student_t_quantile,
)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.95, 1.05, "1.000 ± 0.050"),
        (0.877, 1.123, "1.00 ± 0.12"),
        (-11.0, 13.0, "1 ± 12"),
        (-1233.0, 1235.0, "1 ± 1234"),
        (1.0, 1.0, "1.0000 ± 0.0000"),
        (math.nan, math.nan, "1.0000 ± nan"),
        (-math.inf, math.inf, "1.0000 ± inf"),
    ],
)
def test_an_interval_shows_two_digits_of_its_half_width(low, high, text):
    assert str(Interval(1.0, low, high, n=5)) == text


def test_an_interval_at_the_level_of_rounding_does_not_show_zeros():
    assert str(Interval(3.21e-15, 3.11e-15, 3.31e-15, n=5)) == "3.21e-15 ± 1e-16"


def test_an_interval_contains_what_lies_between_its_ends():
    between = Interval(2.0, 1.0, 3.0, n=4)
    assert between.half_width == 1.0
    for inside in (1.0, 2.0, 3.0):
        assert inside in between
    for outside in (0.999, 3.001, math.nan, math.inf):
        assert outside not in between
    assert 1.0 not in Interval(1.0, math.nan, math.nan, n=1)


@settings(max_examples=30)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
def test_the_interval_is_students(values, level):
    measured = interval(torch.tensor(values, dtype=torch.float64), level)
    mean, error = np.mean(values), scipy.stats.sem(values)
    scale = max(map(abs, values))
    assert measured.mean == pytest.approx(mean, rel=1e-9, abs=1e-12 * scale)
    if error > 1e-9 * scale:
        low, high = scipy.stats.t.interval(level, len(values) - 1, loc=mean, scale=error)
        assert measured.low == pytest.approx(low, rel=1e-9, abs=1e-9 * scale)
        assert measured.high == pytest.approx(high, rel=1e-9, abs=1e-9 * scale)
    assert (measured.n, measured.level) == (len(values), level)


def test_an_interval_worked_by_hand():
    # Mean 2, standard deviation 1, n = 3: the 0.975 quantile with two degrees of freedom is 4.3027.
    measured = interval(torch.tensor([1.0, 2.0, 3.0]))
    assert measured.mean == 2.0
    assert measured.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("degrees", [1, 2, 9, 100])
@pytest.mark.parametrize("probability", [0.6, 0.95, 0.995])
def test_quantiles_invert_the_integral_of_students_density(degrees, probability):
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)

    def density(t):
        return constant * (1 + t * t / degrees) ** (-(degrees + 1) / 2)

    area = scipy.integrate.quad(density, 0, student_t_quantile(probability, degrees), epsabs=1e-12)[0]
    assert area == pytest.approx(probability - 0.5, abs=1e-9)


def test_quantiles_are_those_of_the_printed_tables():
    table = {(0.975, 1): 12.706, (0.975, 4): 2.776, (0.95, 10): 1.812, (0.995, 30): 2.750, (0.975, 100_000): 1.960}
    for (probability, degrees), printed in table.items():
        assert student_t_quantile(probability, degrees) == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_an_interval_covers_the_mean_as_often_as_it_says(level):
    draws = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covered = sum(0.0 in interval(row, level) for row in draws)
    assert scipy.stats.binomtest(covered, 2000, level).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_samples_of_any_dtype_and_shape_count_one_by_one(dtype):
    samples = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    measured = interval(samples)
    assert measured.n == 6
    assert measured.mean == pytest.approx(2 / 3, rel=1e-12)
    low, high = scipy.stats.t.interval(0.95, 5, loc=2 / 3, scale=scipy.stats.sem([0, 1, 1, 1, 0, 1]))
    assert (measured.low, measured.high) == pytest.approx((low, high), rel=1e-12)


def test_a_mean_of_single_precision_samples_does_not_lose_digits():
    samples = torch.full((1_000_000,), 1000.1, dtype=torch.float32)
    assert interval(samples).mean == pytest.approx(samples[0].item(), rel=1e-12)


def test_samples_with_gradients_can_be_averaged():
    assert interval(torch.ones(3, requires_grad=True)).mean == 1.0


def test_one_sample_or_none_has_no_interval():
    one = interval(torch.tensor(3.0))
    assert (one.mean, one.n) == (3.0, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    none = interval(torch.zeros(0))
    assert none.n == 0
    assert math.isnan(none.mean)
    assert math.isnan(none.half_width)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_samples_that_are_not_finite_are_not_left_out(bad):
    measured = interval(torch.tensor([1.0, bad, 2.0]))
    assert not math.isfinite(measured.mean)
    assert not math.isfinite(measured.low)
    assert not math.isfinite(measured.high)
    assert measured.n == 3


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, 95.0, math.nan])
def test_a_level_that_is_no_probability_is_refused(level):
    with pytest.raises(ValueError, match=r"strictly between 0 and 1|level must be a finite number"):
        interval(torch.ones(3), level)


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


def test_a_percentile_interval_holds_its_value_and_the_middle_of_the_resamples():
    resampled = np.linspace(0, 1, 1001).tolist()
    ends = percentile_interval(0.5, resampled, n=7)
    assert (ends.mean, ends.low, ends.high, ends.n) == pytest.approx((0.5, 0.025, 0.975, 7))
    assert percentile_interval(2.0, resampled, n=7).high == 2.0


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
    with pytest.raises(ValueError, match="level must be a number strictly between 0 and 1"):
        difference_interval(torch.ones(3), torch.ones(3), 1.0)
