"""Ready-made sweeps fit together: every combination is a training that its measure takes."""

import pytest

from mechicl.sweeps import MEASURES, SWEEPS
from mechicl.sweeps.measuring import read_measures


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
