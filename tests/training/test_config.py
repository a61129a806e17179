import itertools
import json
import math
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from mechicl import cli
from mechicl.tasks import FixedTasks
from mechicl.training import PRESETS, Curriculum, Ramp, TrainingConfig
from tests.training.runs import INTERLEAVED, LSTM, MODEL, TASK, WORDS, reading, small

# ---- the learning rate ----


def test_the_learning_rate_warms_up_linearly_and_stays_or_falls_as_a_cosine_to_zero():
    config = small(learning_rate=0.4, warmup_steps=4, steps=10)
    assert [config.learning_rate_at(step) for step in range(7)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4])
    config = small(learning_rate=2.0, schedule="cosine", warmup_steps=10, steps=110)
    assert config.learning_rate_at(9) == pytest.approx(2.0)
    for quarter, cosine in [(0, 1.0), (1, math.sqrt(0.5)), (2, 0.0), (3, -math.sqrt(0.5)), (4, -1.0)]:
        assert config.learning_rate_at(10 + 25 * quarter) == pytest.approx(1 + cosine, abs=1e-12)


# ---- curricula ----


def test_a_ramp_climbs_by_its_increment_and_a_curriculum_sets_dimensions_and_points_with_the_query():
    assert [Ramp(5, 10, 2, 3).at(step) for step in range(12)] == [5, 5, 5, 7, 7, 7, 9, 9, 9, 10, 10, 10]
    config = small(curriculum=Curriculum(dims=Ramp(1, 3, 1, 10), points=Ramp(2, 5, 1, 20)), steps=100)
    for step, dims, context in [(0, 1, 1), (10, 2, 1), (20, 3, 2), (60, 3, 4), (100, 3, 4)]:
        assert config.tasks_at(step)[0] == TASK.replace(active_dims=dims, n_context=context)
    last = Curriculum(dims=Ramp(1, 3, 1, 6))  # ends with the last step, or the run has no steps
    assert small(curriculum=last, steps=13).tasks_at(12)[0].active_dims == 3
    assert small(curriculum=last, steps=0).tasks_at(0)[0].active_dims == 1


# ---- other sizes ----

GPT2 = PRESETS["gpt2-8l"]


def test_another_size_is_that_of_task_model_and_curriculum():
    config = GPT2.resized(x_dim=4, n_context=12)
    assert config.task == GPT2.task.replace(x_dim=4, n_context=12)
    assert config.model == GPT2.model.replace(x_dim=4, n_context=12)
    # 4/5 of 2 dimensions and 13/21 of 9 points at the start, 13/21 of 4 more at a time, in the same 3000 steps
    assert config.curriculum == Curriculum(dims=Ramp(2, 4, 1, 1500), points=Ramp(6, 13, 2, 750))
    assert config == GPT2.replace(task=config.task, model=config.model, curriculum=config.curriculum)
    half = GPT2.resized(steps=10_000)  # the same share of fewer steps, the same number of more
    assert half.curriculum == Curriculum(dims=Ramp(2, 5, 1, 500), points=Ramp(9, 21, 4, 500))
    assert (half.task, half.model, half.steps) == (GPT2.task, GPT2.model, 10_000)
    assert GPT2.resized(steps=90_000).curriculum == GPT2.curriculum


@hypothesis.given(
    ramp=st.builds(
        lambda start, climb, increment, interval: Ramp(start, start + climb, increment, interval),
        st.integers(1, 30), st.integers(0, 30), st.integers(1, 9), st.integers(1, 50),
    ),
    end=st.integers(1, 60),
    done_at=st.integers(0, 2000),
)  # fmt: skip
def test_a_resized_ramp_has_its_end_in_time_and_climbs_from_as_far_below(ramp, end, done_at):
    resized = ramp.resized(end, done_at)
    assert resized.end == end
    assert resized.done_at <= done_at
    assert resized.at(resized.done_at) == end
    assert resized.done_at == 0 or resized.at(resized.done_at - 1) < end
    if done_at:
        assert abs(resized.start - max(1, ramp.start * end / ramp.end)) <= 0.5
    assert ramp.resized(ramp.end, ramp.done_at).at(7) == ramp.at(7)


# ---- several tasks ----

GAUSSIAN = TASK.replace(inputs="gaussian", noise_std=0.5)
FIXED = FixedTasks(TASK, 16, seed=2)


def test_every_seed_has_a_model_on_each_task_and_the_seeds_of_a_task_are_together():
    config = small(more_tasks=(GAUSSIAN, FIXED), seeds=(4, 9))
    assert config.tasks == (TASK, GAUSSIAN, FIXED)
    assert config.members == ((0, 4), (0, 9), (1, 4), (1, 9), (2, 4), (2, 9))
    assert small(seeds=(4, 9)).members == ((0, 4), (0, 9))
    assert config.eval_tasks == (TASK, GAUSSIAN, TASK)
    assert (config.tasks_at(3)[0], config.eval_tasks[0]) == (TASK, TASK)
    assert small(task=FIXED, more_tasks=(TASK,)).eval_tasks[0] == TASK


# ---- what the loss and the evaluation are made of ----


def test_the_loss_is_of_all_points_where_one_pass_gives_them_and_else_of_the_query():
    assert small().loss_at == "query"
    assert small(model=INTERLEAVED).loss_at == "points"
    assert small(model=INTERLEAVED, loss="query").loss_at == "query"
    assert small(model=LSTM).loss_at == small(model=LSTM, loss="points").loss_at == "points"


def test_snapshots_are_geometrically_spaced_or_evenly_between_two_steps():
    steps = small(steps=10_000, n_snapshots=41).snapshot_steps
    assert (steps[0], steps[1], steps[-1], len(steps)) == (0, 50, 10_000, 41)
    ratios = [b / a for a, b in itertools.pairwise(steps[1:])]
    assert ratios == pytest.approx([200 ** (1 / 39)] * 39, rel=0.02)
    config = small(steps=100, n_snapshots=5, snapshots_between=(40, 80))
    assert config.snapshot_steps == (40, 50, 60, 70, 80)
    assert config.replace(steps=65).snapshot_steps == (40, 50, 60)
    assert config.replace(n_snapshots=0).snapshot_steps == ()


# ---- JSON ----


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig(),
        small(seeds=(3, 1), curriculum=Curriculum(points=Ramp(2, 5, 1, 2)), target_loss=0.1, loss="query"),
        small(n_snapshots=3, curriculum=Curriculum(dims=Ramp(1, 3, 1, 1)), snapshots_between=(4, 8)),
        small(task=FixedTasks(TASK, 7, seed=2), gradient_clip=None, schedule="cosine", tracker="tensorboard"),
        small(task=TASK.replace(inputs=("uniform", "gaussian")), model=LSTM),
        small(more_tasks=(GAUSSIAN, FIXED), seeds=(0, 1), model=MODEL.replace(n_layers=2, attention="softmax,linear")),
        reading(seeds=(2, 0), target_loss=0.5),
        reading(more_tasks=(WORDS.replace(min_period=3, max_period=3),)),
    ],
)
def test_a_config_survives_json(config):
    text = json.dumps(config.to_dict(), allow_nan=False)
    assert TrainingConfig.from_dict(json.loads(text)) == config
    if not config.more_tasks:  # as configs were before there were several tasks
        assert TrainingConfig.from_dict({k: v for k, v in json.loads(text).items() if k != "more_tasks"}) == config


# ---- presets ----


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_json_and_resizing_and_ends_with_a_snapshot_and_whole_prompts(name):
    preset = PRESETS[name]
    assert TrainingConfig.from_dict(json.loads(json.dumps(preset.to_dict()))) == preset
    sizes = {} if preset.on_tokens else {"x_dim": preset.task.x_dim, "n_context": preset.task.n_context}
    assert preset.resized(**sizes, steps=preset.steps) == preset.resized() == preset
    end = preset.snapshots_between[1] if preset.snapshots_between else preset.steps
    assert preset.snapshot_steps[-1:] in ((), (end,))
    config = preset.resized(steps=preset.steps // 10)
    last = config.tasks_at(config.steps - 1)[0]
    whole = preset.task if preset.curriculum is None else (preset.task.x_dim, preset.task.n_context)
    assert (last if preset.curriculum is None else (last.active_dims, last.n_context)) == whole


def test_every_preset_has_a_line_in_the_help():
    summaries = json.loads(Path(cli.__file__).with_name("presets.json").read_text(encoding="utf-8"))
    assert list(summaries) == list(PRESETS)
    assert all("\n" not in line and line for line in summaries.values())


def test_lsa_1l_is_the_published_one_layer_setting():
    preset = PRESETS["lsa-1l"]
    assert (preset.task.x_dim, preset.task.n_context, preset.model.n_layers) == (10, 10, 1)
    assert (preset.batch_size, preset.learning_rate, preset.gradient_clip) == (2048, 1e-3, 10.0)
    assert len(preset.seeds) == 5
