import itertools
import json
import math
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from mechicl.algorithms.stepwise import Hypothesis, ResidualDescent
from mechicl.models import TransformerConfig
from mechicl.tasks import FixedTasks, SineRegression
from mechicl.training import PRESETS, SOAP, Curriculum, Ramp, TrainingConfig, train, train_interchange
from mechicl.training.data import losses
from tests.training.runs import INTERLEAVED, LSTM, MODEL, READER, TASK, WORDS, reading, small


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
    assert config.replace(n_snapshots=0, snapshots_between=None).snapshot_steps == ()


# ---- JSON ----
@pytest.mark.parametrize("config", [
    TrainingConfig(),
    small(seeds=(3, 1), curriculum=Curriculum(points=Ramp(2, 5, 1, 2)), target_loss=0.1, loss="query"),
    small(n_snapshots=3, curriculum=Curriculum(dims=Ramp(1, 3, 1, 1)), snapshots_between=(4, 8)),
    small(task=FixedTasks(TASK, 7, seed=2), gradient_clip=None, schedule="cosine", tracker="tensorboard"),
    small(task=TASK.replace(inputs=("uniform", "gaussian")), model=LSTM),
    small(more_tasks=(GAUSSIAN, FIXED), seeds=(0, 1), model=MODEL.replace(n_layers=2, attention="softmax,linear")),
    reading(seeds=(2, 0), target_loss=0.5),
    reading(more_tasks=(WORDS.replace(min_period=3, max_period=3),)),
])  # fmt: skip
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


# ---- configs and runs that are refused, by the name of the field ----
ERRORS_GPT2, ERRORS_GAUSSIAN = PRESETS["gpt2-8l"], TASK.replace(inputs="gaussian")
TWO_LAYERS = TransformerConfig(x_dim=3, n_context=4, n_layers=2, d_model=6, read_in="linear", read_out="linear")


def interchange(config: TrainingConfig, n_layers: int = 2, **options: int) -> None:
    train_interchange(config, Hypothesis(ResidualDescent(n_layers, step_size=0.8)), progress=False, **options)


@pytest.mark.parametrize(("change", "named"), [
    *(({name: value}, name) for name, value in [
        ("batch_size", True), ("eval_seed", 2**63), ("gradient_clip", [1.0]), ("seeds", ()), ("seeds", (1, 1)),
        ("seeds", (-1,)), ("seeds", (0.5,)), ("seeds", (2**63,)), ("snapshots_between", (1,)),
        ("snapshots_between", ("a", "b")), ("snapshots_between", (5, 5)), ("snapshots_between", (8, 2)),
        ("snapshots_between", (-1, 3)), ("snapshots_between", (4, 8)), ("more_tasks", 3), ("task", 3),
        ("model", {"x_dim": 3}),
    ]),
    ({"loss": "points"}, "interleaved prompts and causal keys"),
    *(({"model": m.replace(device="meta")}, "device=.*'meta' has no numbers") for m in (MODEL, LSTM)),
    *(({"more_tasks": (ERRORS_GAUSSIAN, task)}, named) for task, named in [
        (TASK.replace(x_dim=2), r"x_dim=2.*x_dim=3"), (TASK.replace(y_dim=2), r"y_dim=2.*y_dim=1"),
        (SineRegression(n_context=4), r"x_dim=1.*x_dim=3"),
        (TASK.replace(n_context=5), "lengths 4 and 5 cannot be trained together"),
        (FixedTasks(TASK.replace(n_context=3), 8), "lengths 4 and 3 cannot be trained together"),
    ]),
    *(({"curriculum": curriculum}, named) for curriculum, named in [
        (Curriculum(dims=Ramp(1, 2, 1, 1)), r"curriculum\.dims ends at 2, but the task has x_dim=3.*resized"),
        (Curriculum(dims=Ramp(1, 4, 1, 1)), r"curriculum\.dims ends at 4, but the task has x_dim=3"),
        (Curriculum(points=Ramp(2, 4, 1, 1)), r"curriculum\.points ends at 4, but the task has n_context=4, .* 5"),
        (Curriculum(dims=Ramp(1, 3, 1, 6)), r"curriculum\.dims ends at step 12, but the run has steps=12"),
        (Curriculum(points=Ramp(2, 5, 2, 9)), r"curriculum\.points ends at step 18, .*curriculum=None"),
    ]),
    ({"task": FixedTasks(TASK, 8), "curriculum": Curriculum(points=Ramp(2, 4))}, "curriculum cannot change"),
    ({"model": INTERLEAVED, "task": TASK.replace(n_context=9)}, "9 context points, but the model has n_context=4"),
])  # fmt: skip
@pytest.mark.usefixtures("unchecked_types")
def test_a_config_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        small(**change)


@pytest.mark.parametrize(("changes", "named"), [
    ({"task": TASK}, "LinearRegression does not fit a model with prompt_format='token_ids'"),
    ({"more_tasks": (TASK,)}, "LinearRegression does not fit a model with prompt_format='token_ids'"),
    ({"model": MODEL}, "RepeatedTokens does not fit a model with prompt_format='paired'"),
    ({"model": LSTM}, "RepeatedTokens does not fit a model with prompt_format='interleaved'"),
    ({"task": WORDS.replace(d_vocab=6)}, "the task has d_vocab=6, the model d_vocab=7: they must agree"),
    ({"more_tasks": (WORDS.replace(n_ctx=11),)}, "tasks of lengths 12 and 11 cannot be trained together"),
    ({"task": WORDS.replace(n_ctx=13)}, "prompts of 13 tokens, but the model has n_ctx=12"),
    ({"model": READER.replace(keys="full")}, "keys='full'"),
    ({"loss": "query"}, "loss='query' is for prompts of points"),
    ({"curriculum": Curriculum(dims=Ramp(1, 2))}, r"cannot change \['active_dims'\] of RepeatedTokens"),
])  # fmt: skip
def test_a_config_that_does_not_fit_sequences_of_tokens_is_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        reading(**changes)


@pytest.mark.parametrize(("change", "named"), [
    ({"speed": 1}, "no field.*speed"),
    ({"task": {"type": "Chess"}}, "task: .*Chess"),
    *(({"task": junk}, "task: .*must be a dictionary of strings to anything") for junk in (None, [3])),
    *(({"model": junk}, "model: .*must be a dictionary of strings to anything") for junk in (None, "lsa")),
    ({"model": {"architecture": [1]}}, r"model: architecture=\[1\]"),
    ({"model": {"x_dim": 3, "n_context": 4, "n_wings": 2}}, "n_wings"),
    ({"model": {"architecture": "lstm", "x_dim": "a", "n_context": 2, "d_model": 3}}, "model: .*x_dim"),
    ({"model": {"x_dim": 3, "n_context": 4, "d_model": 10**400}}, "model"),
    *(({"curriculum": junk}, "curriculum: ") for junk in ({"dims": 3}, {"points": {"start": 2}}, {"noise": None})),
    ({"more_tasks": [{"type": "Chess"}]}, "more_tasks: .*Chess"),
    ({"more_tasks": 3}, "more_tasks: "),
    ({"more_tasks": [3]}, "more_tasks: .*got 3"),
    ({"steps": -3}, "steps"),
    ({"seeds": None}, "seeds"),
    ({"seeds": [[1]]}, "seeds"),
    (None, "data must be a dictionary"),
    ([["task", {}]], "data must be a dictionary"),
])  # fmt: skip
@pytest.mark.usefixtures("unchecked_types")
def test_data_that_no_config_wrote_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        TrainingConfig.from_dict(small().to_dict() | change if isinstance(change, dict) else change)


@pytest.mark.parametrize(("config", "size", "named"), [
    (PRESETS["induction-2l"], {"x_dim": 4}, "RepeatedTokens has no x_dim that can be set to 4"),
    (PRESETS["sine-lsa"], {"x_dim": 2}, "SineRegression has no x_dim"),
    (PRESETS["gpt2-8l-ill"], {"x_dim": 4}, "eigenvalues must be x_dim=4 numbers"),
    (ERRORS_GPT2, {"n_context": -1}, "n_context must be an int of at least 0"),
    (ERRORS_GPT2, {"x_dim": 0}, "x_dim must be an int of at least 1, got 0"),
    (ERRORS_GPT2, {"steps": -1}, "steps"),
])  # fmt: skip
def test_sizes_that_a_task_cannot_have_are_refused(config, size, named):
    with pytest.raises(ValueError, match=named):
        config.resized(**size)


@pytest.mark.parametrize(("call", "named"), [
    *((lambda at, bad=bad: Ramp(**bad), named) for bad, named in [
        ({"start": 0, "end": 2}, "start"), ({"start": 3, "end": 2}, "start <= end"),
        ({"start": 1, "end": 2, "increment": 0}, "increment"), ({"start": 1, "end": 2, "interval": 0}, "interval"),
    ]),
    (lambda at: SOAP(torch.zeros(2, 13), [torch.Size((3, 4))], lr=0.1), "make 12 weights, but a row .* has 13"),
    (lambda at: train(small(model=MODEL.replace(device="cuda")), at), "device='cuda', but the training is on cpu"),
    (lambda at: train(small(steps=10**6), at), r"1,250,002 lines .* larger log_every \(now 1\)"),
    (lambda at: train(small(tf32=True), at), "NVIDIA GPU of the Ampere generation or later, and this is cpu"),
    (lambda at: train(small(fused_attention=True, seeds=(0, 1)), at), "one seed at a time, got 2 models"),
    (lambda at: train(small(fused_attention=True), at), "this model has linear attention"),
    (lambda at: train(small(fused_attention=True, model=INTERLEAVED.replace(sink="learned")), at), "attention sink"),
    (lambda at: train(PRESETS["table-regression"].replace(seeds=(0, 1), eval_prompts=2), at), "one seed at a time"),
    (lambda at: interchange(small(model=TWO_LAYERS), 3), "3 layers, the model has 2"),
    (lambda at: interchange(small(model=TWO_LAYERS, curriculum=Curriculum())), "no curriculum"),
    (lambda at: interchange(small(model=LSTM)), "LSTMConfig"),
    (lambda at: interchange(small(model=TWO_LAYERS), n_interventions=0), "n_interventions"),
])  # fmt: skip
def test_runs_that_cannot_be_made_are_refused_before_training(tmp_path, call, named):
    with pytest.raises(ValueError, match=named):
        call(Path(tmp_path))


def test_a_model_with_nothing_to_predict_is_an_error_and_no_nan():
    outputs, targets = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, dtype=torch.long)
    targets[1] = -100
    with pytest.raises(ValueError, match=r"no token to predict for model \[1\]"):
        losses(outputs, targets)
    targets[1, 0, 0] = 2
    assert losses(outputs, targets).isfinite().all()
