"""Transitions against curves made by hand and a plain loop."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mechicl.analysis import find_transitions
from mechicl.analysis.dynamics import Transitions
from mechicl.statistics import interval


def of_one(losses: list[float], steps: list[int] | None = None, **options) -> tuple[float, ...]:
    """Before, after, start and end of one seed's curve, evaluated every ten steps."""
    steps = [10 * i for i in range(len(losses))] if steps is None else steps
    result = find_transitions(steps, [[loss] for loss in losses], **options)
    return tuple(field.item() for field in (result.before, result.after, result.start, result.end))


def test_each_seed_has_its_own_crossings():
    # from 1 to 0: a tenth is done at 0.9, half at 0.5, nine tenths at 0.1
    falling = [1.0, 0.95, 0.85, 0.6, 0.3, 0.2, 0.05, 0.0]
    late = [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.5, 0.5]
    steps = [0, 1, 10, 20, 30, 45, 60, 100]
    result = find_transitions(steps, list(zip(falling, late, strict=True)))
    assert result.plateau.tolist() == [1, 2]
    assert result.final.tolist() == [0, 0.5]
    assert result.before.tolist() == [20, 45]
    assert result.after.tolist() == [30, 60]
    assert result.start.tolist() == [10, 60]
    assert result.end.tolist() == [60, 60]
    assert result.steps.tolist() == [25, 52.5]
    assert result.fell.tolist() == [True, True]
    assert result.spread() == 52.5 / 25
    assert result.mean_step(0.9) == interval(torch.tensor([25.0, 52.5]), 0.9)


NAN = math.nan
PLUNGE = [1.0] * 10 + [0.0] * 29


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0, 0.7, 0.2, 0.0, 0.0], {}, (40, 50, 40, 60)),  # it falls at its last crossing
        ([1.0, 0.0, 0.2, 0.0, 0.0], {}, (0, 10, 10, 30)),  # back above a tenth, not above the half
        ([1.0, 0.5, 0.5, 0.0], {}, (0, 10, 10, 30)),  # just at the threshold
        ([*PLUNGE, 0.8], {}, (NAN,) * 4),  # above it at the last evaluation
        ([*PLUNGE, 0.3], {}, (90, 100, 100, NAN)),  # half of the fall is over, nine tenths are not
        ([0.0] * 5, {"fall": 0.0}, (NAN,) * 4),
        ([1.0, 1.2, 1.4, 1.5], {"fall": 0.0}, (NAN,) * 4),
        ([1.0, 0.95, 0.93, 0.92], {}, (NAN,) * 4),  # too little
        ([1.0, 0.95, 0.93, 0.92], {"fall": 0.0}, (0, 10, 10, 30)),
        ([1.0, 0.75, 0.75], {"fall": 0.25}, (0, 10, 10, 10)),
        ([1.0, 0.75, 0.75], {"fall": 0.26}, (NAN,) * 4),
        ([4.0, 2.0, 1.2, 0.9, 0.3, 0.0], {}, (0, 10, 10, 40)),
        ([4.0, 2.0, 1.2, 0.9, 0.3, 0.0], {"plateau": 2.0}, (20, 30, 20, 50)),  # 0.3 is not below a tenth of 2
        ([0.3, 0.3, 0.1, 0.0], {"plateau": 2.0, "steps": [5, 10, 15, 20]}, (5, 5, 5, 15)),  # below from the first on
    ],
)
def test_where_a_curve_falls(losses, options, expected):
    assert of_one(losses, **options) == pytest.approx(expected, nan_ok=True)


def test_the_final_value_is_a_median_of_the_last_twentieth():
    losses = [1.0] * 30 + [0.6] * 27 + [0.0, 0.9, 0.4]
    result = find_transitions(range(60), [[loss] for loss in losses])
    assert result.final.item() == 0.4
    assert result.after.item() == 59


def test_seeds_without_a_transition_are_left_out_of_the_mean():
    result = find_transitions([0, 10, 20], [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    assert result.fell.tolist() == [True, False, True]
    assert result.mean_step().n == 2
    assert result.mean_step().mean == 10
    assert result.spread() == 3


@pytest.mark.parametrize(("losses", "mean"), [([[1.0], [0.0]], 0.5), ([[1.0], [1.0]], math.nan)])
def test_one_seed_has_neither_spread_nor_interval(losses, mean):
    result = find_transitions([0, 1], losses)
    assert math.isnan(result.spread())
    assert result.mean_step().mean == pytest.approx(mean, nan_ok=True)
    assert math.isnan(result.mean_step().low)


def test_a_transition_before_the_first_step_makes_no_infinite_spread():
    result = find_transitions([0, 9, 11], [[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]], plateau=1.0)
    assert result.steps.tolist() == [0, 10]
    assert result.spread() == 10


def by_loop(steps: list[int], losses: list[float], fall: float) -> tuple[float, ...]:
    """Before, after, start, end by walking back from the end."""
    tail = sorted(losses[len(losses) - max(1, len(losses) // 20) :])
    plateau, final = losses[0], tail[(len(tail) - 1) // 2]
    nan = math.nan
    if final >= plateau or plateau - final < fall * plateau:
        return nan, nan, nan, nan
    after = []
    for share in (0.1, 0.5, 0.9):
        i = len(losses)
        while i > 0 and losses[i - 1] <= plateau - share * (plateau - final):
            i -= 1
        after.append(i)
    if after[1] == len(losses):
        return nan, nan, nan, nan
    end = steps[after[2]] if after[2] < len(losses) else nan
    return steps[after[1] - 1], steps[after[1]], steps[after[0]], end


LEVELS = st.sampled_from([0.0, 0.1, 0.3, 0.45, 0.6, 0.85, 1.0, 2.0])


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 3), LEVELS), min_size=2, max_size=70),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.integers(1, 4),
)
@example([(1, 1.0)] * 30 + [(1, 0.0)] * 9 + [(1, 1.0)], 0.1, 1)
def test_a_plain_loop_finds_the_same(pieces, fall, repeats):
    gaps = [gap for gap, _ in pieces for _ in range(repeats)]
    losses = [loss for _, loss in pieces for _ in range(repeats)]
    steps = [sum(gaps[:i]) for i in range(len(gaps))]
    assert of_one(losses, steps, fall=fall) == pytest.approx(by_loop(steps, losses, fall), nan_ok=True)


def test_no_seeds_have_no_transitions():
    result = find_transitions([0, 1], torch.zeros(2, 0))
    assert result.steps.shape == (0,)
    assert math.isnan(result.mean_step().mean)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    result = find_transitions([0, 9, 11], [[1.0, 1.0], [0.0, 1.0], [0.0, 0.5]])
    loaded = Transitions.load(result.save(tmp_path / "result"))
    assert loaded.to_dataframe().equals(result.to_dataframe())


@pytest.mark.parametrize(
    ("steps", "losses", "options", "named"),
    [
        ([0], [[1.0]], {}, "2 steps"),
        ([0, 1, 2], [[1.0], [0.5]], {}, "with 3 >= 2 steps"),
        ([0, 0], [[1.0], [0.5]], {}, "steps must increase"),
        ([0, 1], [[1.0], [math.nan]], {}, r"losses\[1\]\[0\] must be a finite number, got nan"),
        ([0, 1], [[1.0], [0.5]], {"plateau": 0.0}, "plateau must be"),
        ([0, 1], [[1.0], [0.5]], {"fall": 1.1}, "fall must be"),
    ],
)
def test_errors_name_the_argument(steps, losses, options, named):
    with pytest.raises(ValueError, match=named):
        find_transitions(steps, losses, **options)
