"""Seeds of several runs, joined to one checkpoint."""

import dataclasses

import pytest
import torch

from mechicl.checkpoints import CheckpointError, Snapshots, join, load_checkpoint, save
from mechicl.models import TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig, train

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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "two checkpoints or more, got 1"),
        (["b", "again"], r"seeds \[2\] are in more than one"),
        (["a", "longer"], "trained otherwise.*steps 30 instead of 20"),
        (["a", "rate"], "trained otherwise.*learning_rate 0.5 instead of 0.001"),
        (["a", "wider"], "another model.*n_heads 2 instead of 1"),
        (["both", "both"], "several tasks"),
        (["a", {"steps_done": 10}], "has done 10 steps, .* 20"),
        (["a", {"training": None}], "no 'training'"),
        (["a", {"curve": {"eval_step": [0], "eval_loss": [[1.0, 1.0]]}}], "curve of .* other steps"),
        (["a", {"bare": True}], "snapshots"),
    ],
)
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
