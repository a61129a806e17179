"""The contents of a checkpoint: its best and stuck seeds, and untrained models in place of trained ones."""

import math

import pytest
import torch

import mechicl
from mechicl.checkpoints import (
    Checkpoint,
    CheckpointError,
    are_weights_random,
    load,
    load_checkpoint,
    random_weights,
    untrained,
)
from mechicl.checkpoints.stacks import stack_models
from mechicl.models import TransformerConfig, build

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


def test_new_weights_are_drawn_as_a_training_would():
    with random_weights():
        model = load("gpt2-8l")
    expected = build(model.cfg, 0)
    for name, weight in model.named_parameters():
        if weight.numel() > 1000:
            assert weight.std().item() == pytest.approx(dict(expected.named_parameters())[name].std().item(), rel=0.1)


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
    assert 0 in softmax.stuck_seeds
    assert torch.equal(weights(mechicl.load("softmax-1h")), weights(softmax.best))
    assert softmax.final_losses[softmax.models.index(softmax.best)] == min(softmax.final_losses)


@pytest.mark.parametrize("record", [{}, {"curve": {}}, {"curve": {"eval_loss": []}}])
def test_without_a_curve_the_first_is_the_best(record):
    mine = Checkpoint("mine", [build(CFG, i) for i in range(2)], record)
    assert mine.best is mine.models[0]
    assert mine.stuck_seeds == mine.stuck == mine.final_losses == []


def test_seeds_more_than_a_tenth_above_the_best_are_stuck():
    mine = checkpoint([0.5, 0.549, 0.551, 2.0])
    assert (mine.stuck_seeds, mine.stuck, mine.select([0, 1]).stuck) == ([12, 13], [2, 3], [])
    mine = checkpoint([math.nan, 0.5, None])  # type: ignore[list-item] - null in a record
    assert (mine.best, mine.stuck_seeds) == (mine.models[1], [10, 12])
    both = checkpoint([0.5, 0.6, 9.0, 9.1], training={"task": {}, "more_tasks": [{}]})  # each by its own task
    assert (both.best, both.stuck) == (both.models[0], [1])
    with pytest.raises(CheckpointError, match="by_task"):
        assert both.stuck_seeds
    with pytest.raises(IndexError):
        mine.select([3])
