"""Medians with bootstrap intervals, against scipy's bootstrap, exact resampling and the binomial rule."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.statistics import Interval, interval, median_interval


def test_five_samples_have_their_range_for_an_interval():
    values = torch.tensor([120.0, 150.0, 180.0, 1400.0, 160.0])
    assert str(median_interval(values)) == "160 (120 to 1400)"
    assert interval(values).low < 0  # what the t-interval says of a time


def test_the_ends_are_those_of_every_possible_resample():
    values = np.array([0.1, 0.2, 0.7, 1.5, 4.0, 9.0])
    medians = [np.median(each) for each in itertools.product(values, repeat=6)]  # 6^6 resamples, all of them
    low, high = np.quantile(medians, [0.025, 0.975])
    measured = median_interval(torch.tensor(values), n_resamples=50_000)
    assert (measured.low, measured.high) == pytest.approx((low, high))
    assert measured.mean == pytest.approx(1.1)


def test_it_is_scipys_percentile_bootstrap():
    values = np.random.default_rng(3).lognormal(size=60)
    expected = scipy.stats.bootstrap((values,), np.median, method="percentile", n_resamples=9999, rng=1)
    measured = median_interval(torch.tensor(values))
    assert measured.low == pytest.approx(expected.confidence_interval.low, rel=0.05)
    assert measured.high == pytest.approx(expected.confidence_interval.high, rel=0.05)


def test_it_covers_the_median_of_a_skewed_distribution_about_as_often_as_it_says():
    draws = np.random.default_rng(0).exponential(size=(300, 25))
    intervals = [median_interval(torch.tensor(draw), n_resamples=400) for draw in draws]
    assert 0.89 <= np.mean([math.log(2) in each for each in intervals]) <= 0.99


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30), st.integers(0, 3))
def test_the_interval_stays_within_the_samples_and_is_the_same_for_the_same_seed(values, seed):
    sample = torch.tensor(values, dtype=torch.float64)
    measured = median_interval(sample, seed, n_resamples=200)
    assert min(values) <= measured.low <= measured.mean <= measured.high <= max(values)
    assert measured.mean == np.median(values)
    assert (measured.n, measured.middle) == (len(values), "median")
    assert measured == median_interval(sample, seed, n_resamples=200)


@pytest.mark.parametrize("values", [[], [2.0], [1.0, math.nan, 2.0], [1.0, math.inf]])
def test_without_two_finite_samples_there_is_no_interval(values):
    measured = median_interval(torch.tensor(values))
    assert math.isnan(measured.low)
    assert math.isnan(measured.high)
    assert measured.n == len(values)


def test_many_samples_are_resampled_in_parts(monkeypatch):
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    whole = median_interval(values, n_resamples=100)
    monkeypatch.setattr("mechicl.statistics.intervals.CELLS", 60)
    assert median_interval(values, n_resamples=100) == whole  # the same draws, one resample at a time


@pytest.mark.parametrize("wrong", [{"level": 0.0}, {"level": 1.0}, {"n_resamples": 0}])
def test_what_makes_no_interval_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        median_interval(torch.rand(3), **wrong)


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (Interval(1.0, 1.0, 1.0, 3, 0.95, "median"), "1.0000 (1.0000 to 1.0000)"),
        (Interval(3e-15, 2e-15, 5e-15, 3, 0.95, "median"), "3e-15 (2e-15 to 5e-15)"),
        (Interval(0.0015, 0.0001, 0.0062, 4, 0.95, "median"), "0.0015 (0.0001 to 0.0062)"),
        (Interval(2.0, math.nan, math.nan, 1, 0.95, "median"), "2.0000 ± nan"),
    ],
)
def test_a_median_prints_both_ends(measured, text):
    assert str(measured) == text


def test_files_from_before_there_were_medians_hold_means():
    from mechicl.statistics.storage import decode

    saved = {"kind": "Interval", "fields": {"mean": 1.0, "low": 0.5, "high": 1.5, "n": 3, "level": 0.95}}
    assert decode(saved, {}) == Interval(1.0, 0.5, 1.5, 3)
