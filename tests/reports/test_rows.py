"""Rows: how they are written down, over what seeds they are, and what they print."""

import math

import pytest
import torch

from mechicl.checkpoints import Checkpoint
from mechicl.models import TransformerConfig, build
from mechicl.reports.rows import Row, in_words, over_seeds
from mechicl.statistics import Interval, interval, median_interval


def checkpoint(*losses: float) -> Checkpoint:
    models = [build(TransformerConfig(x_dim=2, n_context=3), i) for i in range(len(losses))]
    return Checkpoint("mine", models, {"curve": {"eval_loss": [list(losses)]}})


def test_a_quantity_is_over_all_seeds_and_the_note_says_what_it_is_without_those_that_are_stuck():
    values = torch.tensor([1.0, 1.2, 1.4, 5.0])
    measured, over, note = over_seeds(values, checkpoint(0.5, 0.51, 0.52, 0.9))
    assert measured == interval(values)
    assert over == "seeds"
    assert note == "without 1 of 4 stuck seeds: 1.20 ± 0.50"
    assert over_seeds(values, checkpoint(0.5, 0.51, 0.52, 0.53))[2] == ""


def test_the_median_of_what_is_skewed():
    values = [1.0, 1.2, 1.4, 5.0]
    measured, _, note = over_seeds(values, checkpoint(0.9, 0.5, 0.5, 0.5), median=True)
    assert measured == median_interval(torch.tensor(values, dtype=torch.float64))
    assert note == "without 1 of 4 stuck seeds: 1.4 (1.2 to 5.0)"


def test_one_seed_is_one_seed():
    measured, over, note = over_seeds([2.0], checkpoint(0.5))
    assert (measured.mean, measured.n, over, note) == (2.0, 1, "seed", "")
    assert math.isnan(measured.low)


def test_as_many_values_as_seeds_are_needed():
    with pytest.raises(ValueError, match="2 values for the 3 seeds of mine"):
        over_seeds([1.0, 2.0], checkpoint(0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("measured", "over", "n"),
    [
        (Interval(1.0, 0.5, 1.5, 5), "seeds", 5),
        (Interval(1.0, 0.5, 1.5, 7), "seeds that copy", 7),
        (Interval(1.0, 0.5, 1.5, 900), "prompts", None),
        (1.0, "3 seeds", 3),
        (Interval(1.0, 0.5, 1.5, 900), "prompts, best of 10 seeds", 10),
        (1.0, "seed 0", None),
        ("7 of 8 seeds", "", None),
    ],
)
def test_the_number_of_seeds(measured, over, n):
    assert Row("loss", None, measured, over).n_seeds == n


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"), (3e-17, "rounding"), (-3e-17, "rounding"), (2e-9, "2e-09"), (1.0, "1"), (math.nan, "nan"),
        (Interval(1e-13, -1e-13, 3e-13, 5), "rounding"), (Interval(0.0, 0.0, 0.0, 5), "0"),
        (Interval(1e-13, 1e-13, 1e-13, 5), "rounding"), (Interval(1.0, 1.0, 1.0, 5), "1"),
        (Interval(1 + 1e-9, 1 - 1e-9, 1 + 3e-9, 5), "1 (to rounding)"),
        (Interval(0.5, 0.2, 2.0, 5, 0.95, "median"), "0.50 (0.20 to 2.00)"),
    ],
)  # fmt: skip
def test_what_is_rounding_says_so(value, words):
    assert in_words(value) == words


def test_a_median_stays_one_in_files():
    row = Row("steps", None, Interval(160.0, 120.0, 1400.0, 5, 0.95, "median"), "seeds")
    assert Row.from_json(row.to_json()) == row
    mean = Row("loss", None, Interval(1.0, 0.5, 1.5, 5), "seeds")
    assert "middle" not in mean.to_json()["measured"]
    assert Row.from_json(mean.to_json()) == mean
