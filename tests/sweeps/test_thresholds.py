"""Thresholds of sweeps, against crossings by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mechicl.sweeps.thresholds import find_threshold, passed


def frame(by_seed: dict[int, list[float]], places=(2, 8, 32)) -> pd.DataFrame:
    rows = [
        {"n": x, "seed": seed, "ratio": value}
        for seed, values in by_seed.items()
        for x, value in zip(places, values, strict=True)
    ]
    return pd.DataFrame(rows)


def test_it_is_where_the_mean_over_seeds_passes_the_level():
    threshold = find_threshold(frame({0: [-1, 0.5, 2], 1: [-1, 1.5, 2]}), "n", "ratio")
    assert threshold.mean == pytest.approx(4)  # halfway between 2 and 8, on a logarithmic axis
    assert threshold.n == 2
    assert find_threshold(frame({0: [0, 1.5, 3]}), "n", "ratio", level=1).mean == pytest.approx(2 * 4 ** (2 / 3))


def test_its_interval_is_a_jackknife_over_seeds():
    threshold = find_threshold(frame({0: [-1, 0.5, 2], 1: [-1, 1.5, 2]}), "n", "ratio")
    assert (threshold.low, threshold.high) == (0, math.inf)  # Student's t of two seeds is 12.7: beyond the axis
    three = find_threshold(frame({0: [-1, 0.8, 2], 1: [-1, 1.0, 2], 2: [-1, 1.2, 2]}), "n", "ratio")
    logs = [math.log(2) + math.log(4) / (1 + mean) for mean in (1.1, 1.0, 0.9)]  # without the first, second, third
    half = 4.302652729911275 * math.sqrt(2) * np.std(logs)  # Student's t, two degrees of freedom
    assert (three.low, three.high) == pytest.approx((4 * math.exp(-half), 4 * math.exp(half)))
    assert np.isnan([find_threshold(frame({0: [-1, 0.5, 2]}), "n", "ratio").low]).all()


@pytest.mark.parametrize("n_seeds", [3, 5])
def test_its_interval_holds_its_level_for_few_seeds(n_seeds):
    rng = np.random.default_rng(n_seeds)
    truth, inside, sweeps = np.array([-1.0, 0.25, 1.0]), 0, 400
    where = passed(np.array([2.0, 8.0, 32.0]), truth)
    for _ in range(sweeps):
        values = truth + 0.1 * rng.standard_normal((n_seeds, 3))
        threshold = find_threshold(frame({seed: list(row) for seed, row in enumerate(values)}), "n", "ratio")
        inside += threshold.low <= where <= threshold.high
    assert 0.92 <= inside / sweeps <= 0.98


def test_the_last_crossing_counts_and_beyond_the_axis_it_is_0_or_infinite():
    alike = find_threshold(frame({0: [1, -1, 1], 1: [1, -1, 1]}), "n", "ratio")
    assert alike.low == alike.mean == alike.high == pytest.approx(16)
    assert find_threshold(frame({0: [1, 2, 3]}), "n", "ratio").mean == 0
    assert find_threshold(frame({0: [-3, 2, -1]}), "n", "ratio").mean == math.inf
    some = find_threshold(frame({0: [-3, -2, -1], 1: [-3, -2, 2]}), "n", "ratio")
    assert math.isfinite(some.mean)
    assert some.high == math.inf


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_the_line_between_points_is_0_there(values):
    places = 2.0 ** np.arange(len(values))
    at = passed(places, np.array(values))
    if 0 < at < math.inf:
        assert np.interp(math.log(at), np.log(places), values) == pytest.approx(0, abs=1e-6)
        assert all(v > 0 for p, v in zip(places, values, strict=True) if p > at * (1 + 1e-12))
    else:
        assert values[-1] <= 0 if at else min(values) > 0


def test_tables_without_a_threshold_are_refused():
    with pytest.raises(KeyError, match="no column 'loss'; it has n, seed, ratio"):
        find_threshold(frame({0: [1, 2, 3]}), "n", "loss")
    with pytest.raises(ValueError, match="needs positive values of 'n'"):
        find_threshold(frame({0: [1, 2]}, (0, 1)), "n", "ratio")
    with pytest.raises(ValueError, match="no seed has 'ratio' at all 3 values of 'n'"):
        find_threshold(frame({0: [1, math.nan, 3]}), "n", "ratio")


def test_numbers_given_as_text_are_in_the_order_of_numbers():
    numbers = frame({0: [-1, 0.5, 2], 1: [-1, 1.5, 2]}, places=(2, 16, 128))
    text = numbers.assign(n=numbers["n"].map({2: "2", 16: "16", 128: "1.28e2"}))
    assert find_threshold(text, "n", "ratio") == find_threshold(numbers, "n", "ratio")
    with pytest.raises(ValueError, match="needs positive values of 'n'"):
        find_threshold(numbers.assign(n="many"), "n", "ratio")


def test_values_that_fall_and_rows_that_are_mixtures():
    frame = pd.DataFrame({"n": [2, 8, 32] * 2, "seed": [0] * 3 + [1] * 3, "loss": [1.0, -1, -2, 1, -1, -3]})
    assert find_threshold(frame, "n", "loss", rising=False).mean == pytest.approx(4.0)
    assert math.isinf(find_threshold(frame, "n", "loss").mean)
    with pytest.raises(ValueError, match="several rows have the same seed and 'n'"):
        find_threshold(pd.concat([frame, frame]), "n", "loss")
