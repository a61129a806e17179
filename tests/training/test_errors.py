"""Configs and runs that are refused, by the name of the field."""

import math
from pathlib import Path

import pytest
import torch

from mechicl.algorithms.stepwise import Hypothesis, ResidualDescent
from mechicl.models import TransformerConfig
from mechicl.tasks import FixedTasks, SineRegression
from mechicl.training import PRESETS, SOAP, Curriculum, Ramp, TrainingConfig, train, train_interchange
from mechicl.training.data import losses
from tests.training.runs import INTERLEAVED, LSTM, MODEL, READER, TASK, WORDS, reading, small

GPT2, GAUSSIAN = PRESETS["gpt2-8l"], TASK.replace(inputs="gaussian")
TWO_LAYERS = TransformerConfig(x_dim=3, n_context=4, n_layers=2, d_model=6, read_in="linear", read_out="linear")


def interchange(config: TrainingConfig, n_layers: int = 2, **options: int) -> None:
    train_interchange(config, Hypothesis(ResidualDescent(n_layers, step_size=0.8)), progress=False, **options)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(({name: value}, name) for name, value in [
            ("steps", -1), ("batch_size", 0), ("batch_size", True), ("eval_every", 0), ("eval_seed", -1),
            ("eval_seed", 2**63), ("save_every", 0), ("learning_rate", 0.0), ("learning_rate", math.inf),
            ("learning_rate", "fast"), ("gradient_clip", 0.0), ("gradient_clip", [1.0]), ("target_loss", math.nan),
            ("target_loss", math.inf), ("target_loss", "low"), ("seeds", ()), ("seeds", (1, 1)), ("seeds", (-1,)),
            ("seeds", (0.5,)), ("seeds", 5), ("seeds", (2**63,)), ("schedule", "linear"), ("loss", "tokens"),
            ("snapshots_between", 5), ("snapshots_between", (1,)), ("snapshots_between", ("a", "b")),
            ("snapshots_between", (5, 5)), ("snapshots_between", (8, 2)), ("snapshots_between", (-1, 3)),
            ("tf32", "yes"), ("cpu", 1), ("tracker", 3), ("curriculum", 3), ("more_tasks", 3),
            ("task", 3), ("model", {"x_dim": 3}),
        ]),
        ({"loss": "points"}, "interleaved prompts and causal keys"),
        *(({"model": m.replace(device="meta")}, "device=.*'meta' has no numbers") for m in (MODEL, LSTM)),
        *(({"more_tasks": (GAUSSIAN, task)}, named) for task, named in [
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
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked_types")
def test_a_config_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        small(**change)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
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
    ],
)
def test_a_config_that_does_not_fit_sequences_of_tokens_is_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        reading(**changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
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
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked_types")
def test_data_that_no_config_wrote_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        TrainingConfig.from_dict(small().to_dict() | change if isinstance(change, dict) else change)


@pytest.mark.parametrize(
    ("config", "size", "named"),
    [
        (PRESETS["induction-2l"], {"x_dim": 4}, "RepeatedTokens has no x_dim that can be set to 4"),
        (PRESETS["sine-lsa"], {"x_dim": 2}, "SineRegression has no x_dim"),
        (PRESETS["gpt2-8l-ill"], {"x_dim": 4}, "eigenvalues must be x_dim=4 numbers"),
        (GPT2, {"n_context": -1}, "n_context must be an int of at least 0"),
        (GPT2, {"x_dim": 0}, "x_dim must be an int of at least 1, got 0"),
        (GPT2, {"steps": -1}, "steps"),
    ],
)
def test_sizes_that_a_task_cannot_have_are_refused(config, size, named):
    with pytest.raises(ValueError, match=named):
        config.resized(**size)


@pytest.mark.parametrize(
    ("call", "named"),
    [
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
        (
            lambda at: train(small(fused_attention=True, model=INTERLEAVED.replace(sink="learned")), at),
            "this model has an attention sink",
        ),
        (lambda at: interchange(small(model=TWO_LAYERS), 3), "3 layers, the model has 2"),
        (lambda at: interchange(small(model=TWO_LAYERS, curriculum=Curriculum())), "no curriculum"),
        (lambda at: interchange(small(model=LSTM)), "LSTMConfig"),
        (lambda at: interchange(small(model=TWO_LAYERS), n_interventions=0), "n_interventions"),
    ],
)  # fmt: skip
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
