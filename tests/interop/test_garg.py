"""Imported models against GPT-2 itself, put together as the original does it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import yaml
from transformers import GPT2Config, GPT2Model

from mechicl.checkpoints import load, load_checkpoint
from mechicl.cli import main
from mechicl.interop import from_garg, load_garg
from mechicl.interop.garg import garg_task, load_garg_state
from mechicl.tasks import DecisionTrees, LinearRegression, QuadraticRegression, ReluNetworks, SparseLinearRegression

CONFIG = {"n_dims": 5, "n_positions": 11, "n_embd": 32, "n_layer": 3, "n_head": 4, "family": "gpt2"}
TRAINING = {"task": "linear_regression", "data": "gaussian", "curriculum": {"points": {"start": 3, "end": 9}}}


class Original(nn.Module):
    """A linear map into GPT-2's stream, GPT-2, a linear map out; predictions at the x tokens."""

    def __init__(self, n_dims: int, n_positions: int, n_embd: int, n_layer: int, n_head: int, family: str):
        super().__init__()
        self._read_in = nn.Linear(n_dims, n_embd)
        self._backbone = GPT2Model(
            GPT2Config(n_positions=2 * n_positions, n_embd=n_embd, n_layer=n_layer, n_head=n_head, vocab_size=10)
        )
        self._read_out = nn.Linear(n_embd, 1)

    def forward(self, xs, ys):
        tokens = xs.new_zeros(xs.shape[0], 2 * xs.shape[1], xs.shape[2])
        tokens[:, 0::2], tokens[:, 1::2, 0] = xs, ys[..., 0]
        hidden = self._backbone(inputs_embeds=self._read_in(tokens)).last_hidden_state
        return self._read_out(hidden)[:, ::2]


@pytest.fixture(scope="module")
def original() -> Original:
    torch.manual_seed(0)
    model = Original(**CONFIG).eval()
    with torch.no_grad():  # nothing at its initial zero or one, so that every entry is tested
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize("config", [CONFIG, {"model": CONFIG, "training": {"batch_size": 64}}])
def test_predictions_are_the_originals(original, config):
    prompts = LinearRegression(x_dim=5, n_context=10, inputs="gaussian").sample(16, seed=0)
    model = from_garg(original.state_dict(), config)
    with torch.no_grad():
        expected = original(prompts.xs, prompts.ys)
        torch.testing.assert_close(model.predict_prefixes(prompts), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(model.predict(prompts), expected[:, -1], rtol=0, atol=1e-5)
    assert not model.training


def test_files_without_weights_are_refused(tmp_path: Path):
    path = tmp_path / "state.pt"
    torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="model_state_dict"):
        load_garg_state(path)
    with pytest.raises(FileNotFoundError):
        load_garg_state(tmp_path / "nothing.pt")


@pytest.mark.parametrize("training", [None, {}, {"curriculum": 3}])
def test_a_config_that_does_not_say_its_task(training):
    assert garg_task({"model": CONFIG, "training": training}) is None
    assert garg_task(CONFIG) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"task": "a_new_task"}, "task='a_new_task'"), ({"data": "uniform"}, "inputs are 'uniform'"),
     ({"num_tasks": 64}, "pool of num_tasks=64 tasks, which"), ({"curriculum": 3}, "points has no 'end'"),
     ({"curriculum": {"points": None}}, "points has no 'end'"), ({"task_kwargs": {"bias": 1}}, "{'bias': 1}"),
     ({"task_kwargs": {"scale": "big"}}, "weight_scale must be"),
     ({"task": "decision_tree", "curriculum": {"points": {"end": 9}, "dims": {"end": 3}}}, "3 of 5 inputs"),
     ({"task": "relu_2nn_regression", "task_kwargs": {"scale": 2}}, "with task_kwargs={'scale': 2}"),
     ({"task": "sparse_linear_regression", "task_kwargs": {"valid_coords": 2}}, "valid_coords"),
     ({"task": "noisy_linear_regression", "task_kwargs": {"renormalize_ys": True}}, "{'renormalize_ys': True}")],
)  # fmt: skip
def test_a_task_that_is_not_known_is_none_and_says_why(changes, reason):
    with pytest.warns(UserWarning, match=re.escape(reason)):
        assert garg_task({"model": CONFIG, "training": TRAINING | changes}) is None


LINEAR, SIZES = LinearRegression(x_dim=5, n_context=8, inputs="gaussian"), {"x_dim": 5, "n_context": 8}
OTHER_TASKS: list[tuple[str, dict[str, Any], Any]] = [
    ("noisy_linear_regression", {"noise_std": 0.5}, LINEAR.replace(noise_std=0.5)),
    ("sparse_linear_regression", {"sparsity": 2}, SparseLinearRegression(**SIZES, sparsity=2)),
    ("quadratic_regression", {}, QuadraticRegression(**SIZES)),
    ("relu_2nn_regression", {"hidden_layer_size": 7}, ReluNetworks(**SIZES, n_hidden=7)),
    ("decision_tree", {"depth": 3}, DecisionTrees(**SIZES, depth=3)),
]


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, LINEAR),
    ({"task_kwargs": {"scale": 3}}, LINEAR.replace(weight_scale=3.0)),
    ({"curriculum": {"points": {"end": 9}, "dims": {"end": 3}}}, LINEAR.replace(active_dims=3)),
    ({"curriculum": {"points": {"end": 9}, "dims": {"end": 5}}}, LINEAR),
    ({"num_training_examples": 100, "num_tasks": None}, LINEAR),
    *(({"task": name, "task_kwargs": arguments}, task) for name, arguments, task in OTHER_TASKS),
])  # fmt: skip
def test_the_task_is_the_runs(changes, expected):
    assert garg_task({"model": CONFIG, "training": TRAINING | changes}) == expected


@pytest.mark.parametrize("n_steps", [1, 10, 11, 20, 21, 1000])
def test_the_curriculum_is_where_training_ended(n_steps):
    schedules = {"points": {"start": 3, "end": 9, "inc": 2, "interval": 10},
                 "dims": {"start": 2, "end": 4, "inc": 1, "interval": 10}}  # fmt: skip
    now = {kind: schedule["start"] for kind, schedule in schedules.items()}
    for done in range(n_steps):  # as the original counts: a step of training, then the curriculum's
        used = dict(now)
        if (done + 1) % 10 == 0:
            now = {kind: min(now[kind] + each["inc"], each["end"]) for kind, each in schedules.items()}
    training = TRAINING | {"curriculum": schedules, "train_steps": n_steps}
    task = garg_task({"model": CONFIG, "training": training})
    assert task == garg_task({"model": CONFIG, "training": training | {"train_steps": 5000}}, step=n_steps - 1)
    assert isinstance(task, LinearRegression)
    assert (task.n_context + 1, task.active_dims) == (used["points"], used["dims"])


def test_a_snapshot_of_training(original, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": CONFIG, "training": TRAINING}))
    torch.save(original.state_dict(), tmp_path / "model_500.pt")
    prompts = LinearRegression(x_dim=5, n_context=10, inputs="gaussian").sample(4, seed=0)
    model, task = load_garg(tmp_path, step=500)
    with torch.no_grad():
        torch.testing.assert_close(model.predict(prompts), original(prompts.xs, prompts.ys)[:, -1], rtol=0, atol=1e-5)
    assert task == LinearRegression(x_dim=5, n_context=8, inputs="gaussian")
    with pytest.raises(FileNotFoundError, match=r"state.pt; there are snapshots of step= \[500\]"):
        load_garg(tmp_path)


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [({}, {"n_layer": "3"}, "n_layer must be an int of at least 1, got '3'"), ({}, {"n_head": None}, "n_head must be"),
     ({}, {"family": "lstm"}, "family must be 'gpt2', got 'lstm'"), ({}, {"n_dims": 6}, r"_read_in\.weight must be"),
     ({"_read_out.bias": torch.tensor([torch.nan])}, {}, r"'_read_out\.bias'\] has 1 of 1 values that are not finite"),
     ({"_read_out.bias": None}, {}, r"missing: _read_out\.bias"), ({}, {"n_layer": 2}, r"not used: _backbone\.h\.2\."),
     # nothing is made of the sizes that a config claims
     ({}, {"n_layer": 4}, r"missing: _backbone\.h\.3\."), ({}, {"n_dims": 10**100}, "n_dims must be an int"),
     ({}, {"n_embd": 20_000}, r"_read_in\.weight must be \(20000, 5\)"),
     ({}, {"n_positions": 10**9}, r"wpe\.weight must be \(2000000000, 32\)")],
)  # fmt: skip
def test_entries_that_do_not_fit_are_named(original, weights, config, message):
    state = {name: weight for name, weight in (original.state_dict() | weights).items() if weight is not None}
    with pytest.raises(ValueError, match=message):
        from_garg(state, CONFIG | config)


def test_a_run_folder_becomes_a_checkpoint_by_the_command_line(original, tmp_path: Path, capsys):
    run, out = tmp_path / "run", tmp_path / "imported"
    run.mkdir()
    torch.save({"model_state_dict": original.state_dict(), "train_step": 7}, run / "state.pt")
    (run / "config.yaml").write_text(yaml.safe_dump({"model": CONFIG, "training": TRAINING}))
    main(["import", str(run), "--out", str(out)])
    assert str(out) in capsys.readouterr().out
    prompts = LinearRegression(x_dim=5, n_context=10, inputs="gaussian").sample(4, seed=0)
    with torch.no_grad():
        expected = original(prompts.xs, prompts.ys)
        torch.testing.assert_close(load(out).predict_prefixes(prompts), expected, rtol=0, atol=1e-5)
    record = load_checkpoint(out).record
    assert load_checkpoint(out).task == LinearRegression(x_dim=5, n_context=8, inputs="gaussian")
    assert record["imported"] == "in-context-learning"
    assert "import" in record["command"]
