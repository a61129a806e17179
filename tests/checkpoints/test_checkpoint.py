"""Best and stuck seeds, untrained models in place of trained ones, and seeds of several runs joined."""

import dataclasses
import math

import pytest
import torch

import mechicl
from mechicl.checkpoints import (
    Checkpoint,
    CheckpointError,
    Snapshots,
    are_weights_random,
    join,
    load,
    load_checkpoint,
    random_weights,
    save,
    untrained,
)
from mechicl.checkpoints.checkpoint import stack_models
from mechicl.models import HookedTransformer, TransformerConfig, build
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig, train

CFG = TransformerConfig(x_dim=3, n_context=4)


def checkpoint(losses: list[float], **record) -> Checkpoint:
    """Seeds 10, 11, ... that ended at these held-out losses."""
    models = [build(CFG, i).eval() for i in range(len(losses))]
    curve = {"eval_step": [0, 9], "eval_loss": [[5.0] * len(losses), losses], "step": [4], "loss": [losses]}
    seeds = [10 + i for i in range(len(losses))]
    return Checkpoint("mine", models, {"seeds": seeds, "curve": curve, **record})


def weights(model) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def test_within_random_weights_every_checkpoint_is_untrained():
    trained = load_checkpoint("lsa-1l")
    cfg = trained.models[0].cfg
    assert not are_weights_random()
    with random_weights():
        assert are_weights_random()
        twin, model = load_checkpoint("lsa-1l"), load("lsa-1l")
    assert not are_weights_random()
    assert [each.cfg for each in twin.models] == [each.cfg for each in trained.models]
    assert not any(each.training for each in twin.models)
    new = torch.stack([weights(each) for each in twin.models])
    assert len(new.unique(dim=0)) == len(twin.models) == len(trained.models)
    for seed in trained.record["seeds"]:  # no training started from these weights
        assert not any(torch.equal(weights(build(cfg, seed)), row) for row in new)
    assert any(torch.equal(weights(model), row) for row in new)
    assert torch.equal(weights(load_checkpoint("lsa-1l").models[0]), weights(trained.models[0]))
    drawn = []
    for seed in (0, 0, 1):
        with random_weights(seed):
            drawn.append(weights(load("lsa-1l")))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with pytest.raises(KeyError), random_weights():
        raise KeyError
    assert not are_weights_random()


def test_curve_and_snapshots_of_untrained_models_are_flat():
    trained = load_checkpoint("copy-2l-one-hot")
    assert trained.snapshots is not None
    twin = untrained(trained)
    assert twin.snapshots is not None
    assert twin.snapshots.steps == trained.snapshots.steps
    for name, stacked in stack_models(twin.models).items():
        assert all(torch.equal(snapshot, stacked) for snapshot in twin.snapshots.weights[name])
    curve, before = twin.record["curve"], trained.record["curve"]
    for name in ("eval_loss", "loss"):
        assert curve[name] == [before[name][0]] * len(before[name])
    assert curve["eval_step"] == before["eval_step"]
    assert before["eval_loss"][0] != before["eval_loss"][-1]  # the trained one's is not changed
    assert untrained(Checkpoint("bare", trained.models)).record == {}


def test_the_best_seed_represents_a_checkpoint():
    mine = checkpoint([0.5, 0.2, 0.9])
    assert mine.best is mine.model() is mine.models[1]
    assert mine.model(12) is mine.models[2]
    softmax = load_checkpoint("softmax-1h")  # its seed 0 did not learn
    assert 0 in softmax.stuck
    assert torch.equal(weights(mechicl.load("softmax-1h")), weights(softmax.best))
    assert softmax.final_losses[softmax.models.index(softmax.best)] == min(softmax.final_losses)


@pytest.mark.parametrize("record", [{}, {"curve": {}}, {"curve": {"eval_loss": []}}])
def test_without_a_curve_the_first_is_the_best(record):
    mine = Checkpoint("mine", [build(CFG, i) for i in range(2)], record)
    assert mine.best is mine.models[0]
    assert mine.stuck == mine.final_losses == []


def test_seeds_more_than_a_tenth_above_the_best_are_stuck():
    mine = checkpoint([0.5, 0.549, 0.551, 2.0])
    assert (mine.stuck, mine.select([0, 1]).stuck) == ([2, 3], [])
    mine = checkpoint([math.nan, 0.5, None])  # type: ignore[list-item] - null in a record
    assert (mine.best, mine.stuck) == (mine.models[1], [0, 2])
    assert checkpoint([None, math.nan]).stuck == [0, 1]  # type: ignore[list-item]
    both = checkpoint([0.5, 0.6, 9.0, 9.1], training={"task": {}, "more_tasks": [{}]})  # each by its own task
    assert (both.best, both.stuck) == (both.models[0], [1])
    with pytest.raises(IndexError):
        mine.select([3])


def test_a_selection_from_the_end_keeps_the_task():
    both = checkpoint([0.5, 0.6], training={"task": {"x_dim": 1}, "more_tasks": [{"x_dim": 2}], "seeds": [0]})
    assert both.select([-1]).record["training"] == {"task": {"x_dim": 2}, "more_tasks": [], "seeds": [0]}
    assert both.select([-2]).record["training"]["task"] == {"x_dim": 1}


# ---- seeds of several runs, joined to one checkpoint ----
CONFIG = TrainingConfig(
    task=LinearRegression(x_dim=2, n_context=3), model=TransformerConfig(x_dim=2, n_context=3), steps=20, batch_size=8,
    eval_every=10, eval_prompts=16, log_every=5, n_snapshots=3, seeds=(0, 1, 2),
)  # fmt: skip
RUNS = {
    "whole": {}, "a": {"seeds": (0,)}, "b": {"seeds": (1, 2)}, "again": {"seeds": (2,)},
    "longer": {"seeds": (3,), "steps": 30}, "rate": {"seeds": (3,), "learning_rate": 0.5},
    "logged": {"seeds": (3,), "save_every": 7},
    "wider": {"seeds": (3,), "model": TransformerConfig(x_dim=2, n_context=3, n_heads=2)},
    "both": {"seeds": (3,), "more_tasks": (LinearRegression(x_dim=2, n_context=3, noise_std=1.0),)},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    saved = {}
    for name, changes in RUNS.items():
        result = train(dataclasses.replace(CONFIG, **changes), folder / f"{name}-run", progress=False)
        record = {**result.record, "command": f"mechicl train {name}"}
        snapshots = Snapshots(result.snapshot_steps, result.snapshots)
        saved[name] = save(folder / name, result.models, record, snapshots)
    return saved


def changed(folder, out, *, bare=False, **record):
    """A copy with other entries in its record; None removes one."""
    loaded = load_checkpoint(folder)
    kept = {key: value for key, value in (loaded.record | record).items() if key != "sha256" and value is not None}
    return save(out, loaded.models, kept, None if bare else loaded.snapshots)


def test_joined_runs_are_the_run_of_all_seeds(runs, tmp_path):
    joined, whole = load_checkpoint(join([runs["a"], runs["b"]], tmp_path / "all")), load_checkpoint(runs["whole"])
    assert joined.record["seeds"] == whole.record["seeds"] == [0, 1, 2]
    for ours, theirs in zip(joined.models, whole.models, strict=True):
        for name, weight in theirs.named_parameters():
            assert torch.allclose(dict(ours.named_parameters())[name], weight, atol=1e-6)
    for name in ("eval_step", "step"):
        assert joined.record["curve"][name] == whole.record["curve"][name]
    for name in ("eval_loss", "loss"):
        ours, theirs = (torch.tensor(each.record["curve"][name]) for each in (joined, whole))
        assert torch.allclose(ours, theirs, rtol=1e-4)
    assert joined.snapshots is not None
    assert whole.snapshots is not None
    assert joined.snapshots.steps == whole.snapshots.steps
    for name, stacked in whole.snapshots.weights.items():
        assert torch.allclose(joined.snapshots.weights[name], stacked, atol=1e-6)
    assert joined.task == CONFIG.task
    assert len(joined.by_task()) == 1


def test_every_run_keeps_its_command_and_times(runs, tmp_path):
    record = load_checkpoint(join([runs["a"], runs["b"]], tmp_path / "all")).record
    assert [each["command"] for each in record["runs"]] == ["mechicl train a", "mechicl train b"]
    assert [each["seeds"] for each in record["runs"]] == [[0], [1, 2]]
    assert record["wall_time_s"] == pytest.approx(sum(each["wall_time_s"] for each in record["runs"]), abs=0.1)
    assert (record["command"], record["name"]) == ("mechicl train a; mechicl train b", "all")
    third = load_checkpoint(join([tmp_path / "all", runs["logged"]], tmp_path / "all")).record  # onto itself
    assert [each["seeds"] for each in third["runs"]] == [[0], [1, 2], [3]]
    assert third["seeds"] == [0, 1, 2, 3]


@pytest.mark.parametrize(("names", "message"), [
    (["a"], "two checkpoints or more, got 1"),
    (["b", "again"], r"seeds \[2\] are in more than one"),
    (["a", "longer"], "another training config.*steps 30 instead of 20"),
    (["a", "rate"], "another training config.*learning_rate 0.5 instead of 0.001"),
    (["a", "wider"], "another model.*n_heads 2 instead of 1"),
    (["both", "both"], "several tasks"),
    (["a", {"steps_done": 10}], "another number of steps .*steps_done 10 instead of 20"),
    (["a", {"training": None}], "no 'training'"),
    (["a", {"curve": {"eval_step": [0], "eval_loss": [[1.0, 1.0]]}}], "another learning curve .*eval_step"),
    (["a", {"bare": True}], "snapshots"),
])  # fmt: skip
def test_runs_that_differ_are_refused(runs, names, message, tmp_path):
    folders = [runs[name] if isinstance(name, str) else changed(runs["b"], tmp_path / "x", **name) for name in names]
    with pytest.raises(CheckpointError, match=message):
        join(folders, tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_field_that_an_older_version_did_not_have_is_no_difference(runs, tmp_path):
    training = load_checkpoint(runs["b"]).record["training"]
    training = {key: value for key, value in training.items() if key != "mixed_precision"}
    older = changed(runs["b"], tmp_path / "older", training=training)
    assert load_checkpoint(join([older, runs["a"]], tmp_path / "all")).record["seeds"] == [1, 2, 0]


@pytest.mark.parametrize("other", [{"score_scale": 3.0}, {"dtype": "float64"}])
def test_models_of_different_configs_are_not_stacked(other):
    cfg = TransformerConfig(x_dim=2, n_context=4, n_layers=1, n_heads=1)
    with pytest.raises(ValueError, match="one config, dtype and device, got 2"):
        stack_models([HookedTransformer(cfg, seed=0), HookedTransformer(cfg.replace(**other), seed=1)])
    with pytest.raises(ValueError, match="one config, dtype and device, got 2"):
        stack_models([HookedTransformer(cfg, seed=0), HookedTransformer(cfg, seed=1).double()])
