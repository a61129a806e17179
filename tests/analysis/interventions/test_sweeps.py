"""Results of sweeps: shares recovered by hand, tables, files."""

import math

import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.interventions import InterventionSweep, patch
from mechicl.analysis.interventions.session import PatchingSession
from mechicl.statistics import load_result
from mechicl.statistics.intervals import student_t_quantile
from tests.analysis.interventions.oracles import model_of, pair

MODEL = model_of("gpt")
CLEAN, CORRUPTED = pair(MODEL, 6)
SWEPT = patch(MODEL, CLEAN, CORRUPTED, metrics={"first": lambda p: p[:, 0], "square": lambda p: p[:, 0] ** 2})


def two_runs(unpatched: list[float], source: list[float], dtype: torch.dtype = torch.float64) -> InterventionSweep:
    """Three cells, which change the metric of every prompt by 0, 1 and 2."""
    before, after = (torch.tensor(metric, dtype=dtype) for metric in (unpatched, source))
    values = before + torch.arange(3, dtype=dtype)[:, None]
    return InterventionSweep(
        "made", ("layer",), ((0, 1, 2),), None, before[:, None], after[:, None], {"m": values}, {"m": before},
        {"m": after},
    )  # fmt: skip


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


@pytest.mark.parametrize(("metric", "level"), [("first", 0.95), ("square", 0.5)])
def test_the_interval_of_a_share_is_that_of_a_ratio_of_means(metric, level):
    whole = SWEPT.source_values[metric] - SWEPT.unpatched_values[metric]
    for layer in range(2):
        for head in range(2):
            effect = SWEPT.effect(metric)[layer, head]
            share = SWEPT.recovered_interval(layer, head, metric=metric, level=level)
            assert share.mean == pytest.approx(SWEPT.recovered(metric)[layer, head].item())
            rest = (effect - share.mean * whole) / whole.mean()
            half = student_t_quantile((1 + level) / 2, 5) * rest.std().item() / math.sqrt(6)
            assert (share.low, share.high) == (pytest.approx(share.mean - half), pytest.approx(share.mean + half))
            assert (share.n, share.level) == (6, level)


def test_its_patching_result_has_transformer_lens_statistics():
    result = SWEPT.to_patching_result("square")
    assert_close(result.effect(), SWEPT.effect("square"))
    table = result.to_dataframe()
    assert list(table.columns) == ["metric", "layer", "head", "example", "value"]
    row = table[(table["layer"] == 1) & (table["head"] == 1) & (table["example"] == 3)]
    assert row["value"].item() == pytest.approx(SWEPT.values["square"][1, 1, 3].item())


def test_tables_intervals_and_the_strongest():
    chosen = patch(MODEL, CLEAN, CORRUPTED, metrics=lambda p: p[:, 0], only={"layer": [1], "head": [1, 0]})
    assert list(chosen.to_dataframe()["head"]) == [1, 0]
    table = SWEPT.to_dataframe()
    assert len(table) == 4
    one = table[(table["layer"] == 1) & (table["head"] == 0)].iloc[0]
    assert one["first"] == pytest.approx(SWEPT.values["first"][1, 0].mean().item())
    interval = SWEPT.interval(1, 0)
    assert interval.mean == pytest.approx(SWEPT.effect()[1, 0].mean().item())
    columns = ("first_effect", "first_effect_low", "first_effect_high")
    assert [one[column] for column in columns] == pytest.approx([interval.mean, interval.low, interval.high])
    strongest = SWEPT.strongest(2)["first_effect"].abs().tolist()
    assert strongest == sorted(table["first_effect"].abs(), reverse=True)[:2]
    assert "first_effect[1, 0]" in str(SWEPT)


@pytest.mark.parametrize("kind", ["sweep", "session"])
def test_results_are_saved_and_loaded(kind, tmp_path):
    result = SWEPT if kind == "sweep" else PatchingSession(MODEL, CLEAN, CORRUPTED).result()
    loaded = load_result(result.save(tmp_path / kind))
    assert str(loaded) == str(result)
    assert loaded.to_dataframe().equals(result.to_dataframe())
