import json
from pathlib import Path

import pytest

from mechicl import cli
from mechicl.training import PRESETS, TrainingConfig
from mechicl.training.presets import SUMMARIES


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_json_and_ends_with_a_snapshot(name):
    preset = PRESETS[name]
    assert TrainingConfig.from_dict(json.loads(json.dumps(preset.to_dict()))) == preset
    end = preset.snapshots_between[1] if preset.snapshots_between else preset.steps
    assert preset.snapshot_steps[-1:] in ((), (end,))


def test_every_preset_has_a_line_in_the_help():
    assert list(SUMMARIES) == list(PRESETS)
    help_of_train = Path(cli.__file__).with_name("presets.json")
    assert json.loads(help_of_train.read_text(encoding="utf-8")) == SUMMARIES, "copy SUMMARIES to it"
    assert all("\n" not in line and line for line in SUMMARIES.values())


def test_lsa_1l_is_the_published_one_layer_setting():
    preset = PRESETS["lsa-1l"]
    assert (preset.task.x_dim, preset.task.n_context, preset.model.n_layers) == (10, 10, 1)
    assert (preset.batch_size, preset.learning_rate, preset.gradient_clip) == (2048, 1e-3, 10.0)
    assert len(preset.seeds) == 5
