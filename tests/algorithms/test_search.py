import math

import pytest

from mechicl.algorithms.search import minimize_on_grid


@pytest.mark.parametrize("best", [0.6, 0.9, 1.7, 3.9])
def test_the_least_value_between_the_grids_points_is_reached(best):
    value, error = minimize_on_grid(lambda x: (math.log(x / best)) ** 2 + 3, [0.5, 1.0, 2.0, 4.0])
    assert value == pytest.approx(best, rel=1e-6)
    assert error == pytest.approx(3, rel=1e-12)


def test_a_minimum_at_the_end_of_the_grid_or_beyond_is_its_end():
    assert minimize_on_grid(lambda v: (v - 5) ** 2, [0.1, 1.0, 2.0]) == pytest.approx((2.0, 9.0), rel=1e-6)
    assert minimize_on_grid(lambda v: v, [0.0, 1.0, 2.0]) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert minimize_on_grid(lambda v: (v - 5) ** 2, [5.0]) == (5.0, 0.0)


def test_values_that_diverge_count_as_bad_ones():
    def error(value: float) -> float:
        return (value - 1) ** 2 if value < 1.2 else (math.nan if value > 8 else math.inf)

    value, least = minimize_on_grid(error, [0.1, 0.5, 1.1, 3.0, 9.0])
    assert value == pytest.approx(1, abs=1e-6)
    assert least < 1e-12
    steep = minimize_on_grid(lambda v: (v - 1) ** 2 if v < 1.01 else v * 1e200, [0.5, 0.9, 1.5, 2.0])
    assert steep[0] == pytest.approx(1, abs=1e-6)
    assert minimize_on_grid(lambda v: math.nan, [1.0, 2.0])[1] > 1e40
