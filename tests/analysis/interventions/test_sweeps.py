"""Shares recovered, by hand."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.interventions import Sweep, ablate, patch
from mechicl.statistics import ratio_interval, student_t_quantile
from tests.analysis.interventions.oracles import inputs, model_of

MODEL = model_of("gpt")
CLEAN, CORRUPTED = inputs(MODEL, 0, 6), inputs(MODEL, 1, 6)
SWEPT = patch(MODEL, CLEAN, CORRUPTED, metrics={"first": lambda p: p[:, 0], "square": lambda p: p[:, 0] ** 2})


def two_runs(unpatched: list[float], source: list[float], dtype: torch.dtype = torch.float64) -> Sweep:
    """Three cells, which change the metric of every prompt by 0, 1 and 2."""
    before, after = (torch.tensor(of, dtype=dtype) for of in (unpatched, source))
    values = before + torch.arange(3, dtype=dtype)[:, None]
    return Sweep("made", ("layer",), ((0, 1, 2),), None, before[:, None], after[:, None], {"m": values}, {"m": before},
                 {"m": after})  # fmt: skip


def test_nothing_is_recovered_where_both_runs_agree():
    for unpatched, source in [
        ([1.0, 2.0], [1.0, 2.0]),
        ([1.0, 2.0], [2.0, 1.0]),  # in the mean
        ([1.0, 2.0], [1.0 + 1e-9, 2.0 - 3e-9]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([1e-9, 1e-9], [1e-9, 1e-9 + 1e-20]),
    ]:
        assert two_runs(unpatched, source).recovered().isnan().all()
    assert two_runs([0.1, 0.2], [0.1 + 1e-8, 0.2], torch.float32).recovered().isnan().all()
    assert patch(MODEL, CLEAN, CLEAN).recovered().isnan().all()


def test_small_differences_of_two_runs_are_not_rounding():
    assert_close(two_runs([1.0, 2.0], [3.0, 4.0]).recovered(), torch.tensor([0, 0.5, 1]).double())
    assert_close(two_runs([1.0, 2.0], [1.001, 2.001]).recovered(), torch.tensor([0, 1000, 2000]).double())
    assert_close(two_runs([0.0, 0.0], [1e-12, 1e-12]).recovered() * 1e-12, torch.tensor([0, 1, 2]).double())


@pytest.mark.parametrize("metric", ["first", "square"])
@pytest.mark.parametrize("level", [0.95, 0.5])
def test_the_interval_of_a_share_is_that_of_a_ratio_of_means(metric, level):
    whole = SWEPT.source_values[metric] - SWEPT.unpatched_values[metric]
    for layer in range(2):
        for head in range(2):
            effect = SWEPT.effect(metric)[layer, head]
            found = SWEPT.recovered_interval(layer, head, metric=metric, level=level)
            assert found == ratio_interval(effect, whole, level)
            assert found.mean == pytest.approx(SWEPT.recovered(metric)[layer, head].item())
            rest = (effect - found.mean * whole) / whole.mean()
            half = student_t_quantile((1 + level) / 2, 5) * rest.std().item() / math.sqrt(6)
            assert (found.low, found.high) == (pytest.approx(found.mean - half), pytest.approx(found.mean + half))
            assert (found.n, found.level) == (6, level)
    assert SWEPT.recovered_interval(1, 0) == SWEPT.recovered_interval(1, 0, metric="first")


def test_shares_that_there_are_not():
    refused: list[tuple[str, Any]] = [
        ("index for each", lambda: SWEPT.recovered_interval(1)),
        ("index for each", lambda: SWEPT.recovered_interval(0, 1, 0)),
        ("no metric 'firs'", lambda: SWEPT.recovered_interval(0, 1, metric="firs")),
        ("no run that activations were taken from", lambda: ablate(MODEL, CLEAN).recovered_interval(0, 0)),
        ("no run that activations were taken from", lambda: ablate(MODEL, CLEAN).recovered()),
    ]
    for message, ask in refused:
        with pytest.raises(ValueError, match=message):
            ask()
