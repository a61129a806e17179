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


def run(folder, **changes):
    """Train and save one run."""
    result = train(dataclasses.replace(CONFIG, **changes), folder.with_name(f"{folder.name}-run"), progress=False)
    record = {**result.record, "command": f"mechicl train {folder.name}"}
    return save(folder, result.models, record, Snapshots(result.snapshot_steps, result.snapshots))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        "whole": run(folder / "whole"), "a": run(folder / "a", seeds=(0,)), "b": run(folder / "b", seeds=(1, 2)),
        "again": run(folder / "again", seeds=(2,)), "longer": run(folder / "longer", seeds=(3,), steps=30),
        "rate": run(folder / "rate", seeds=(3,), learning_rate=0.5),
        "logged": run(folder / "logged", seeds=(3,), save_every=7),
        "wider": run(folder / "wider", seeds=(3,), model=TransformerConfig(x_dim=2, n_context=3, n_heads=2)),
    }  # fmt: skip


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
    assert record["command"] == "mechicl train a; mechicl train b"
    assert record["name"] == "all"
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
    ],
)
def test_what_is_not_more_of_the_same_is_refused(runs, names, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        join([runs[name] for name in names], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def changed(folder, out, **record):
    """A copy with something else in its record."""
    loaded = load_checkpoint(folder)
    kept = {key: value for key, value in loaded.record.items() if key not in ("sha256", *record)}
    return save(out, loaded.models, kept | {k: v for k, v in record.items() if v is not None}, loaded.snapshots)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"steps_done": 10}, "has done 10 steps, .* 20"),
        ({"training": None}, "no 'training' in its record"),
        ({"curve": {"eval_step": [0], "eval_loss": [[1.0, 1.0]]}}, "curve of .* other steps"),
    ],
)
def test_records_that_do_not_fit_are_refused(runs, record, message, tmp_path):
    other = changed(runs["b"], tmp_path / "other", **record)
    with pytest.raises(CheckpointError, match=message):
        join([runs["a"], other], tmp_path / "all")


def test_several_tasks_at_once_are_not_joined(tmp_path):
    both = run(tmp_path / "both", seeds=(0,), more_tasks=(LinearRegression(x_dim=2, n_context=3, noise_std=1.0),))
    with pytest.raises(CheckpointError, match="several tasks"):
        join([both, both], tmp_path / "all")


def test_snapshots_at_other_steps_are_refused(runs, tmp_path):
    loaded = load_checkpoint(runs["b"])
    bare = save(tmp_path / "bare", loaded.models, {k: v for k, v in loaded.record.items() if k != "sha256"})
    with pytest.raises(CheckpointError, match="snapshots"):
        join([runs["a"], bare], tmp_path / "all")


def test_a_field_that_an_older_version_did_not_have_is_no_difference(runs, tmp_path):
    loaded = load_checkpoint(runs["b"])
    training = {key: value for key, value in loaded.record["training"].items() if key != "mixed_precision"}
    older = changed(runs["b"], tmp_path / "older", training=training)
    assert load_checkpoint(join([older, runs["a"]], tmp_path / "all")).record["seeds"] == [1, 2, 0]
