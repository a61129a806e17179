import copy
import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from mechicl.models import TransformerConfig
from mechicl.tasks import FixedTasks, LinearRegression, SineRegression, task_to_dict
from mechicl.training import PRESETS, Curriculum, Ramp, TrainingConfig
from tests.training.runs import LSTM, MODEL, READER, TASK, WORDS, reading, small

INTERLEAVED = TransformerConfig(
    x_dim=3, n_context=4, prompt_format="interleaved", d_model=8, n_heads=2, attention="softmax"
)


# ---- the learning rate ----


def test_a_constant_schedule_warms_up_linearly_and_then_stays():
    config = small(learning_rate=0.4, warmup_steps=4, steps=10)
    assert [config.learning_rate_at(step) for step in range(7)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4])


def test_the_cosine_falls_from_the_full_rate_after_warm_up_to_zero_at_the_end():
    config = small(learning_rate=2.0, schedule="cosine", warmup_steps=10, steps=110)
    assert config.learning_rate_at(9) == pytest.approx(2.0)
    assert config.learning_rate_at(10) == pytest.approx(2.0)
    for quarter, cosine in [(1, math.sqrt(0.5)), (2, 0.0), (3, -math.sqrt(0.5)), (4, -1.0)]:
        assert config.learning_rate_at(10 + 25 * quarter) == pytest.approx(1 + cosine, abs=1e-12)


# ---- curricula ----


def test_a_ramp_climbs_by_its_increment_every_interval_up_to_its_end():
    ramp = Ramp(start=5, end=10, increment=2, interval=3)
    assert [ramp.at(step) for step in range(12)] == [5, 5, 5, 7, 7, 7, 9, 9, 9, 10, 10, 10]


def test_a_curriculum_sets_dimensions_and_points_with_the_query_counted():
    config = small(curriculum=Curriculum(dims=Ramp(1, 3, 1, 10), points=Ramp(2, 5, 1, 20)), steps=100)
    for step, dims, context in [(0, 1, 1), (10, 2, 1), (20, 3, 2), (60, 3, 4), (100, 3, 4)]:
        assert config.tasks_at(step)[0] == TASK.replace(active_dims=dims, n_context=context)


@pytest.mark.parametrize("bad", [{"start": 0, "end": 2}, {"start": 3, "end": 2}, {"start": 1, "end": 2, "increment": 0},
                                 {"start": 1, "end": 2, "interval": 0}])  # fmt: skip
def test_a_ramp_that_does_not_climb_is_refused(bad):
    with pytest.raises(ValueError, match="ramp"):
        Ramp(**bad)


@pytest.mark.parametrize(
    ("task", "curriculum"),
    [
        (TASK, Curriculum(dims=Ramp(1, 4, 1, 1))),
        (SineRegression(), Curriculum(dims=Ramp(1, 1))),
        (FixedTasks(TASK, 8), Curriculum(points=Ramp(2, 4))),
    ],
)
def test_a_curriculum_that_the_task_cannot_follow_is_refused_before_training(task, curriculum):
    model = MODEL.replace(x_dim=task.x_dim)
    with pytest.raises(ValueError, match=r"active_dims|curriculum"):
        small(task=task, model=model, curriculum=curriculum)


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (Curriculum(dims=Ramp(1, 2, 1, 1)), r"curriculum\.dims ends at 2, but the task has x_dim=3.*resized"),
        (Curriculum(dims=Ramp(1, 4, 1, 1)), r"curriculum\.dims ends at 4, but the task has x_dim=3"),
        (
            Curriculum(points=Ramp(2, 4, 1, 1)),
            r"curriculum\.points ends at 4, but the task has n_context=4, .* 5",
        ),
        (Curriculum(points=Ramp(2, 6, 1, 1)), r"curriculum\.points ends at 6"),
        (Curriculum(dims=Ramp(1, 3, 1, 6)), r"curriculum\.dims ends at step 12, but the run has steps=12"),
        (Curriculum(points=Ramp(2, 5, 2, 9)), r"curriculum\.points ends at step 18, .*curriculum=None"),
    ],
)
def test_a_curriculum_that_ends_elsewhere_than_at_the_whole_task_is_refused_before_training(curriculum, message):
    with pytest.raises(ValueError, match=message):
        small(curriculum=curriculum)
    data = small().to_dict() | {"curriculum": dataclasses.asdict(curriculum)}
    with pytest.raises(ValueError, match=message):
        TrainingConfig.from_dict(data)


def test_a_curriculum_may_end_with_the_last_step_and_says_nothing_of_a_run_without_steps():
    last = Curriculum(dims=Ramp(1, 3, 1, 6))
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


def test_the_same_size_is_the_same_config():
    for preset in PRESETS.values():
        sizes = {} if preset.on_tokens else {"x_dim": preset.task.x_dim, "n_context": preset.task.n_context}
        assert preset.resized(**sizes, steps=preset.steps) == preset.resized() == preset


def test_of_fewer_steps_a_curriculum_takes_the_same_share_and_of_more_what_it_took():
    half = GPT2.resized(steps=10_000)
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


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_trains_on_the_whole_task_after_a_tenth_of_its_steps_too(name):
    config = PRESETS[name].resized(steps=PRESETS[name].steps // 10)
    assert config.tasks_at(config.steps)[0] == PRESETS[name].task or config.curriculum is not None
    if config.curriculum is not None:
        last = config.tasks_at(config.steps - 1)[0]
        assert (last.active_dims, last.n_context) == (config.task.x_dim, config.task.n_context)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (PRESETS["induction-2l"], {"x_dim": 4}, "RepeatedTokens has no x_dim that can be set to 4"),
        (PRESETS["sine-lsa"], {"x_dim": 2}, "SineRegression has no x_dim"),
        (PRESETS["gpt2-8l-ill"], {"x_dim": 4}, "eigenvalues must be 4 finite numbers"),
        (GPT2, {"n_context": -1}, "n_context must be an int of at least 0, got -1"),
        (GPT2, {"steps": -1}, "steps must be"),
    ],
)
def test_a_size_that_a_task_cannot_have_is_refused(config, size, message):
    with pytest.raises(ValueError, match=message):
        config.resized(**size)


def test_prompts_longer_than_the_models_positions_are_refused_before_training():
    with pytest.raises(ValueError, match="5 context points, but the model has n_context=4"):
        small(model=INTERLEAVED, task=TASK.replace(n_context=5), curriculum=Curriculum(points=Ramp(2, 6, 1, 1)))
    with pytest.raises(ValueError, match="9 context points"):
        small(model=INTERLEAVED, task=TASK.replace(n_context=9))
    small(task=TASK.replace(n_context=9))  # no positions, no bound
    small(model=LSTM, task=TASK.replace(n_context=9))


# ---- several tasks ----

GAUSSIAN = TASK.replace(inputs="gaussian", noise_std=0.5)
FIXED = FixedTasks(TASK, 16, seed=2)


def test_every_seed_has_a_model_on_each_task_and_the_seeds_of_a_task_stand_together():
    config = small(more_tasks=(GAUSSIAN, FIXED), seeds=(4, 9))
    assert config.tasks == (TASK, GAUSSIAN, FIXED)
    assert config.members == ((0, 4), (0, 9), (1, 4), (1, 9), (2, 4), (2, 9))
    assert small(seeds=(4, 9)).members == ((0, 4), (0, 9))
    assert config.eval_tasks == (TASK, GAUSSIAN, TASK)
    assert (config.tasks_at(3)[0], config.eval_tasks[0]) == (TASK, TASK)
    assert small(task=FIXED, more_tasks=(TASK,)).eval_tasks[0] == TASK


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TASK.replace(x_dim=2), r"x_dim=2.*x_dim=3"),
        (TASK.replace(y_dim=2), r"y_dim=2.*y_dim=1"),
        (SineRegression(n_context=4), r"x_dim=1.*x_dim=3"),
        (TASK.replace(n_context=5), "lengths 4 and 5 cannot be trained together"),
        (FixedTasks(TASK.replace(n_context=3), 8), "lengths 4 and 3 cannot be trained together"),
    ],
)
def test_tasks_whose_prompts_have_another_shape_are_refused(task, message):
    with pytest.raises(ValueError, match=message):
        small(more_tasks=(GAUSSIAN, task))
    with pytest.raises(ValueError, match=message):
        TrainingConfig.from_dict(small().to_dict() | {"more_tasks": [task_to_dict(task)]})


def test_a_config_written_before_there_were_several_tasks_has_one():
    data = json.loads(json.dumps(small().to_dict()))
    assert data.pop("more_tasks") == []
    assert TrainingConfig.from_dict(data) == small()


# ---- what the loss and the evaluation are made of ----


def test_the_loss_is_of_all_points_where_one_pass_gives_them_and_else_of_the_query():
    assert small().loss_at == "query"
    assert small(model=INTERLEAVED).loss_at == "points"
    assert small(model=INTERLEAVED, loss="query").loss_at == "query"
    assert small(model=LSTM).loss_at == small(model=LSTM, loss="points").loss_at == "points"
    with pytest.raises(ValueError, match="interleaved prompts and causal keys"):
        small(loss="points")


def test_snapshots_are_at_the_start_the_end_and_geometrically_between():
    steps = small(steps=10_000, n_snapshots=41).snapshot_steps
    assert steps[0] == 0
    assert steps[1] == 50
    assert steps[-1] == 10_000
    assert len(steps) == 41
    ratios = [b / a for a, b in itertools.pairwise(steps[1:])]
    assert ratios == pytest.approx([200 ** (1 / 39)] * 39, rel=0.02)


def test_snapshots_between_two_steps_are_evenly_spaced_up_to_the_end_of_the_run():
    config = small(steps=100, n_snapshots=5, snapshots_between=(40, 80))
    assert config.snapshot_steps == (40, 50, 60, 70, 80)
    assert config.replace(steps=65).snapshot_steps == (40, 50, 60)
    assert config.replace(n_snapshots=0).snapshot_steps == ()
    assert TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("steps", [(5, 5), (8, 2), (-1, 3)])
def test_snapshots_between_steps_that_are_no_stretch_of_a_run_are_refused(steps):
    with pytest.raises(ValueError, match=r"snapshots_between must be two whole steps >= 0"):
        small(n_snapshots=3, snapshots_between=steps)


# ---- sequences of tokens ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": TASK}, "LinearRegression does not fit a model with prompt_format='token_ids'"),
        ({"more_tasks": (TASK,)}, "LinearRegression does not fit a model with prompt_format='token_ids'"),
        ({"model": MODEL}, "RepeatedTokens does not fit a model with prompt_format='paired'"),
        ({"model": LSTM}, "RepeatedTokens does not fit a model with prompt_format='interleaved'"),
        ({"task": WORDS.replace(d_vocab=6)}, "the task has d_vocab=6, the model d_vocab=7: they must agree"),
        ({"model": READER.replace(d_vocab=9)}, "the task has d_vocab=7, the model d_vocab=9: they must agree"),
        ({"more_tasks": (WORDS.replace(n_ctx=11),)}, "tasks of lengths 12 and 11 cannot be trained together"),
        ({"task": WORDS.replace(n_ctx=13)}, "prompts of 13 tokens, but the model has n_ctx=12"),
        ({"loss": "query"}, "loss='query' is for prompts of points"),
        ({"loss": "points"}, "loss='points' is for prompts of points"),
        ({"curriculum": Curriculum(dims=Ramp(1, 2))}, r"cannot change \['active_dims'\] of RepeatedTokens"),
        ({"curriculum": Curriculum(points=Ramp(2, 4))}, r"cannot change \['n_context'\] of RepeatedTokens"),
    ],
)
def test_what_does_not_fit_sequences_of_tokens_is_refused_before_training(changes, message):
    with pytest.raises(ValueError, match=message):
        reading(**changes)


# ---- JSON ----


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig(),
        small(seeds=(3, 1), curriculum=Curriculum(points=Ramp(2, 5, 1, 2)), target_loss=0.1, loss="query"),
        small(n_snapshots=3, curriculum=Curriculum(dims=Ramp(1, 3, 1, 1))),
        small(task=FixedTasks(TASK, 7, seed=2), gradient_clip=None, schedule="cosine", tracker="tensorboard"),
        small(task=SineRegression(n_context=4), model=MODEL.replace(x_dim=1)),
        small(task=LinearRegression(x_dim=3, n_context=4, inputs=("uniform", "gaussian"))),
        small(model=LSTM),
        small(more_tasks=(GAUSSIAN, FIXED), seeds=(0, 1)),
        small(model=MODEL.replace(n_layers=2, attention="softmax,linear")),
        small(model=MODEL.replace(attention_weights="gradient_descent")),
        reading(seeds=(2, 0), target_loss=0.5),
        reading(more_tasks=(WORDS.replace(min_period=3, max_period=3),)),
    ],
)
def test_a_config_comes_back_from_json_as_it_was(config):
    text = json.dumps(config.to_dict(), allow_nan=False)
    assert TrainingConfig.from_dict(json.loads(text)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, "no field.*speed"),
        ({"task": {"type": "Chess"}}, "Chess"),
        ({"model": {"x_dim": 3, "n_context": 4, "n_wings": 2}}, "n_wings"),
        ({"curriculum": {"points": {"start": 2}}}, "curriculum"),
        ({"curriculum": {"noise": None}}, "curriculum"),
        ({"steps": -3}, "steps"),
        ({"more_tasks": [{"type": "Chess"}]}, "Chess"),
    ],
)
def test_a_dict_that_is_no_config_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig.from_dict(small().to_dict() | change)


# ---- bad values ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", -1),
        ("batch_size", 0),
        ("eval_every", 0),
        ("eval_seed", -1),
        ("save_every", 0),
        ("learning_rate", 0.0),
        ("learning_rate", math.inf),
        ("gradient_clip", 0.0),
        ("target_loss", math.nan),
        ("seeds", ()),
        ("seeds", (1, 1)),
        ("seeds", (-1,)),
        ("schedule", "linear"),
        ("loss", "tokens"),
        ("batch_size", True),
        ("seeds", (0.5,)),
        ("seeds", 5),
        ("seeds", (2**63,)),
        ("eval_seed", 2**63),
        ("learning_rate", "fast"),
        ("gradient_clip", [1.0]),
        ("target_loss", "low"),
        ("snapshots_between", 5),
        ("snapshots_between", (1,)),
        ("snapshots_between", ("a", "b")),
        ("tf32", "yes"),
        ("cpu", 1),
        ("tracker", 3),
        ("curriculum", {"dims": None}),
        ("more_tasks", 3),
        ("task", 3),
        ("model", {"x_dim": 3}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    config = copy.copy(small())
    object.__setattr__(config, field, value)
    with pytest.raises(ValueError, match=field):
        config.__post_init__()  # what the constructor calls, past the tests' own check of types


JUNK = [
    ({"more_tasks": 3}, "more_tasks must be a list"),
    ({"more_tasks": [3]}, "data must be a dictionary of strings to anything, got 3"),
    ({"task": None}, "task: .*must be a dictionary of strings to anything, got None"),
    ({"task": [3]}, "task: .*must be a dictionary of strings to anything, got the list"),
    ({"model": None}, "model: .*must be a dictionary of strings to anything, got None"),
    ({"model": "lsa"}, "model: .*must be a dictionary of strings to anything, got 'lsa'"),
    ({"model": {"architecture": [1]}}, r"model: architecture=\[1\]"),
    ({"curriculum": 3}, "curriculum: "),
    ({"curriculum": {"dims": 3}}, "curriculum: "),
    ({"seeds": 3}, "seeds must be a list, got 3"),
    ({"seeds": None}, "seeds must be a list, got None"),
    ({"seeds": [[1]]}, "seeds must be"),
    ({"snapshots_between": 3}, "snapshots_between must be a list"),
    (
        {"model": {"architecture": "lstm", "x_dim": "a", "n_context": 2, "d_model": 3}},
        "model: .*x_dim must be an int, got 'a'",
    ),
    (
        {"model": {"x_dim": 3, "n_context": 4, "d_model": 10**400}},
        "(model: |.*'model'.*d_model.* must be smaller than)",
    ),
    (None, "must be a mapping of its fields, got NoneType"),
    ([["task", {}]], "must be a mapping of its fields, got list"),
]
PLAIN = """
import json, sys
from mechicl.training import TrainingConfig
sys.set_int_max_str_digits(0)
config, junk = json.load(sys.stdin)
for change in junk:
    try:
        TrainingConfig.from_dict({**config, **change} if isinstance(change, dict) else change)
        print("accepted")
    except ValueError as error:
        print(type(error).__name__, error)
"""


def test_junk_is_refused_with_the_field_that_it_is_in():
    """In a process without the tests' own check of types, which would see some of it first."""
    data = json.dumps([small().to_dict(), [change for change, _ in JUNK]])
    done = subprocess.run([sys.executable, "-c", PLAIN], input=data, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(JUNK)
    for line, (_, message) in zip(lines, JUNK, strict=True):
        assert re.match(f"(ValueError|ArgumentError) .*{message}", line), (line, message)


@pytest.mark.parametrize(
    ("device", "message"), [("meta", "'meta' has no numbers"), ("abacus", "is no device|no device of torch's")]
)
@pytest.mark.parametrize("model", [MODEL, LSTM])
def test_a_model_on_a_device_without_numbers_is_refused(model, device, message):
    with pytest.raises(ValueError, match=f"device=.*{message}"):
        small(model=model.replace(device=device))
