"""Ready-made sweeps: every combination is a training that its measure takes; tables are trained, kept and read."""

import pandas as pd
import pytest

from mechicl.models import TransformerConfig
from mechicl.sweeps import MEASURES, SWEEPS
from mechicl.sweeps.measuring import read_measures
from mechicl.sweeps.presets import SweepPreset, ready_table
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig


@pytest.mark.parametrize("name", sorted(SWEEPS))
def test_every_combination_is_a_training(name):
    preset = SWEEPS[name]
    sweep = preset.sweep()
    assert sum(len(cell.places) for cell in sweep.cells) == len(sweep)
    assert read_measures(preset.measure)
    assert preset.summary


def test_measures_that_need_snapshots_get_them():
    for preset in SWEEPS.values():
        if "markov" in ([preset.measure] if isinstance(preset.measure, str) else preset.measure):
            assert all(cell.config.snapshot_steps for cell in preset.sweep().cells)


def test_measures_have_their_names():
    names = "loss regret alignment identify transition pool depth descent markov copying"
    assert set(names.split()) == set(MEASURES)


def final_loss(checkpoint) -> dict[str, float]:
    return {"final": checkpoint.final_losses[0], "third": 1 / 3}


def test_a_table_is_trained_kept_and_read(tmp_path, monkeypatch):
    config = TrainingConfig(
        task=LinearRegression(x_dim=2, n_context=3), model=TransformerConfig(x_dim=2, n_context=3), steps=2,
        batch_size=8, eval_every=2, eval_prompts=20,
    )  # fmt: skip
    over = {"sink": {"none": {"learning_rate": 1e-3}, "more": {"learning_rate": 1e-2}}, "seed": (0, 1)}
    monkeypatch.setitem(SWEEPS, "tiny", SweepPreset("a test", config, over, final_loss))
    kept = tmp_path / "results" / "tiny.csv"
    with pytest.raises(FileNotFoundError, match="is not there: train the sweep 'tiny'"):
        ready_table("tiny", kept)
    trained = ready_table("tiny", kept, tmp_path / "tiny")
    again = ready_table("tiny", kept)
    pd.testing.assert_frame_equal(trained.frame, again.frame)
    assert again.axes == ("sink", "seed")
    assert again.frame["sink"].tolist() == ["none", "none", "more", "more"]  # a word, though pandas knows it as missing
    assert again.frame["third"].tolist() == [0.333333] * 4
    assert again.frame["diverged_at"].isna().all()


def test_an_unknown_sweep_is_refused_with_those_that_there_are(tmp_path):
    with pytest.raises(KeyError, match=r"no ready-made sweep 'dept': there are \[.*'depth', 'diversity'"):
        ready_table("dept", tmp_path / "dept.csv")
