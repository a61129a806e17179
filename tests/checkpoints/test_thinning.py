"""Snapshots of some steps only."""

import pytest
import torch

from mechicl.checkpoints import CheckpointError, Snapshots, load_checkpoint, save, stack_models, thin_snapshots
from mechicl.models import TransformerConfig, build

STEPS = (0, 3, 10, 30)
CURVE = {"eval_step": [0, 30], "eval_loss": [[1.5, 2.5], [0.1, 0.2]]}


CFG = TransformerConfig(x_dim=2, n_context=3)


def weights_at(step):
    """Two models' weights, others at each step."""
    return stack_models([build(CFG, 10 * step + i) for i in range(2)])


@pytest.fixture
def folder(tmp_path):
    """Two models, and other weights at four steps."""
    models = [build(CFG, seed) for seed in range(2)]
    at_steps = [weights_at(step) for step in STEPS]
    weights = {name: torch.stack([stacked[name] for stacked in at_steps]) for name in at_steps[0]}
    return save(tmp_path / "whole", models, {"seeds": [4, 7], "curve": CURVE}, Snapshots(STEPS, weights))


@pytest.mark.parametrize("kept", [(), (10,), (30, 0), (0, 3, 10, 30)])
def test_kept_snapshots_models_and_record_are_as_they_were(folder, tmp_path, kept):
    whole, thin = load_checkpoint(folder), load_checkpoint(thin_snapshots(folder, kept, tmp_path / "thin"))
    for name in ("weights.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "thin" / name).read_bytes()
    assert thin.record["dropped_snapshots"] == [step for step in STEPS if step not in kept]
    for name in ("seeds", "curve"):
        assert thin.record[name] == whole.record[name]
    if not kept:
        assert thin.snapshots is None
        return
    assert thin.snapshots is not None
    assert thin.snapshots.steps == tuple(sorted(kept))
    for i, step in enumerate(thin.snapshots.steps):
        for name, stacked in weights_at(step).items():
            assert torch.equal(thin.snapshots.weights[name][i], stacked)


def test_a_checkpoint_thinned_in_its_place_remembers_all_that_was_dropped(folder):
    thin_snapshots(folder, (0, 10, 30), folder)
    size = (folder / "snapshots.safetensors").stat().st_size
    thin_snapshots(folder, (10,), folder)
    assert load_checkpoint(folder).record["dropped_snapshots"] == [0, 3, 30]
    assert (folder / "snapshots.safetensors").stat().st_size < size


def test_steps_without_a_snapshot_are_refused_and_nothing_is_written(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"no snapshots of the steps \[5\]; it has \[0, 3, 10, 30\]"):
        thin_snapshots(folder, (0, 5), tmp_path / "thin")
    assert not (tmp_path / "thin").exists()
    thin_snapshots(folder, (), folder)
    with pytest.raises(CheckpointError, match="saved without snapshots: there is nothing to thin"):
        thin_snapshots(folder, (0,), folder)


def test_the_shipped_ones_say_what_is_left_out():
    for name in ("copy-2l", "copy-2l-one-hot", "induction-2l"):
        checkpoint = load_checkpoint(name)
        assert checkpoint.snapshots is not None
        dropped, kept = checkpoint.record["dropped_snapshots"], checkpoint.snapshots.steps
        assert not set(dropped) & set(kept)
        assert len(dropped) + len(kept) == checkpoint.record["training"]["n_snapshots"]
        assert kept[0] == 0
        assert kept[-1] == checkpoint.record["steps_done"]
