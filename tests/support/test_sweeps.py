"""The scripts on ready-made sweeps: tables, and rows over seeds."""

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechicl.models import TransformerConfig
from mechicl.statistics import Interval
from mechicl.sweeps import SWEEPS
from mechicl.sweeps.presets import SweepPreset
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig
from support.sweeps import SweepArgs, change, count, coverage_words, over_seeds


@dataclass(frozen=True)
class Args(SweepArgs):
    """Arguments of a script in this file's folder."""


def test_a_table_is_read_beside_the_script_and_trained_into_the_results(tmp_path, monkeypatch):
    config = TrainingConfig(
        task=LinearRegression(x_dim=2, n_context=3), model=TransformerConfig(x_dim=2, n_context=3), steps=2,
        batch_size=8, eval_every=2, eval_prompts=20,
    )  # fmt: skip
    monkeypatch.setitem(SWEEPS, "tiny", SweepPreset("a test", config, {"seed": (0, 1)}, None))
    with pytest.raises(FileNotFoundError) as error:
        Args().table("tiny")
    assert str(Path(__file__).parent / "results" / "sweep_tiny.csv") in str(error.value)
    table = Args(out=tmp_path / "out", folder=tmp_path / "runs").table("tiny")
    assert len(table.frame) == 2
    assert (tmp_path / "out" / "sweep_tiny.csv").is_file()
    assert (tmp_path / "runs" / "tiny" / "sweep.json").is_file()


def test_rows_leave_out_missing_measurements():
    row = over_seeds("loss", pd.Series([3.0, math.nan, 1.0, 2.0]), "one diverged")
    assert row.measured == Interval(2.0, 1.0, 3.0, 3, 0.75, "median")
    assert (row.quantity, row.note, row.over) == ("loss", "one diverged", "seeds")


def test_a_difference_is_established_only_beyond_its_interval_and_the_grid():
    first, second = pd.Series([100.0, 110, 120]), pd.Series([150.0, 160, 170])
    # 50 with the standard error sqrt(200 / 3) and 4 degrees of freedom: 27.3 to 72.7
    assert change("later", first, second).note == "established"
    assert change("later", first, second, 25).note == "established"
    assert change("later", first, second, 30).note == "not established"
    assert change("earlier", second, first, 25).note == "established"
    measured = change("later", first, second, 30).measured
    assert isinstance(measured, Interval)
    assert measured.half_width == pytest.approx(2.7764451 * math.sqrt(100 / 3 + 100 / 3), rel=1e-4)


def test_words():
    assert [count(1, "head"), count(3, "head")] == ["1 head", "3 heads"]
    assert "75%" in coverage_words(3)
    assert "94%" in coverage_words(5)


@pytest.mark.parametrize("n", [3, 5])
def test_the_level_of_few_seeds_is_how_often_their_range_holds_the_median(n):
    rng = torch.Generator().manual_seed(n)
    draws = torch.randn(4000, n, generator=rng).exp() - 1  # skewed; the median is 0
    inside = ((draws.amin(1) <= 0) & (draws.amax(1) >= 0)).double().mean().item()
    few = over_seeds("x", pd.Series(draws[0].tolist())).measured
    assert isinstance(few, Interval)
    assert (few.low, few.high) == pytest.approx((draws[0].min().item(), draws[0].max().item()))
    assert few.level == pytest.approx(inside, abs=0.02)
    many = over_seeds("x", pd.Series(range(40))).measured
    assert isinstance(many, Interval)
    assert many.level == 0.95
