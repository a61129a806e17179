"""Interchange training: its interventions are those of the analysis, and its models come to contain algorithms."""

import pytest
import torch

from mechicl import analysis
from mechicl.algorithms.stepwise import Hypothesis, QueryDescent, ResidualDescent
from mechicl.checkpoints import load_checkpoint, save
from mechicl.constructions import known_models
from mechicl.models import TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig, TrainingDivergedError, train_interchange
from mechicl.training.interchange import interchange_r2

TASK = LinearRegression(x_dim=2, n_context=5)
MODEL = TransformerConfig(
    x_dim=2, n_context=5, n_layers=2, n_heads=1, d_model=6, read_in="linear", read_out="linear", initializer_range=0.2
)
CONFIG = TrainingConfig(
    TASK, MODEL, steps=30, batch_size=16, optimizer="soap", learning_rate=2e-2, eval_every=20, eval_prompts=64
)
TWO = Hypothesis(ResidualDescent(2, step_size=0.8))


@pytest.mark.parametrize("name", ["GD++, 3 steps", "copying, then gradient descent, 1 step", "Newton, 3 iterations"])
def test_interventions_are_those_of_the_analysis(name):
    known = next(known for known in known_models() if known.name == name)
    prompts = known.task.sample(6, seed=0, dtype=torch.float64)
    sources = analysis.sample_sources(known.task, prompts, seed=1)
    model = known.model
    for layer in range(model.cfg.n_layers):  # no longer the algorithm
        model.blocks[layer].attn.W_O.data *= 1.1 + layer / 10
    result = analysis.interchange(model, known.hypothesis, prompts, sources, progress=False)
    measured = interchange_r2(model, known.hypothesis, prompts, sources)
    distances = (result.predictions - result.expected).square().mean((1, 2))
    states = [known.hypothesis.algorithm.predict(each) for each in (prompts, sources)]
    apart = (states[1] - states[0]).square().mean()
    others = [value for name, value in measured.items() if not name.startswith("point")]
    mine = torch.tensor(others, dtype=torch.float64)
    theirs = torch.stack(
        [d for cell, d in zip(result.cells, distances, strict=True) if cell.intervention != "point exchanged"]
    )
    torch.testing.assert_close(((1 - mine) * apart).sort().values, theirs.sort().values, rtol=1e-6, atol=1e-12)
    assert len(measured) == len(result.cells)
    assert len({round(value, 9) for value in measured.values()}) > 5  # they differ, so that a mix-up would show


def test_a_model_that_runs_it_has_nothing_to_learn():
    known = known_models()[1]
    prompts = known.task.sample(8, seed=0, dtype=torch.float64)
    sources = analysis.sample_sources(known.task, prompts, seed=1)
    assert min(interchange_r2(known.model, known.hypothesis, prompts, sources).values()) > 1 - 1e-9
    other = Hypothesis(QueryDescent(2, step_size=0.14))  # the same predictions
    measured = interchange_r2(known.model, other, prompts, sources)
    assert measured["prediction"] > 1 - 1e-9
    assert min(measured.values()) < 0.99


@pytest.mark.parametrize("optimizer", ["adam", "soap"])
def test_training_brings_model_and_algorithm_nearer(optimizer, tmp_path):
    config = CONFIG.replace(optimizer=optimizer, learning_rate=2e-2 if optimizer == "soap" else 1e-2)
    result = train_interchange(config, TWO, progress=False)
    losses = [row[0] for row in result.record["curve"]["loss"]]
    assert losses[-1] < 0.5 * losses[0]
    measured = result.record["interchange"]["r2"][0]
    assert losses[-1] == pytest.approx(sum(1 - value for value in measured.values()) / len(measured))
    folder = save(tmp_path / "mine", result.models, result.record)
    assert load_checkpoint(folder).task == TASK
    assert not result.models[0].training


def test_each_seed_is_trained_as_if_alone():
    both = train_interchange(CONFIG.replace(seeds=(3, 4), steps=3), TWO, progress=False)
    alone = train_interchange(CONFIG.replace(seeds=(4,), steps=3), TWO, progress=False)
    assert both.models[1].W_Q.equal(alone.models[0].W_Q)
    assert not both.models[0].W_Q.equal(both.models[1].W_Q)
    assert [len(row) for row in both.record["curve"]["loss"]] == [2, 2]


def test_divergence_is_named():
    config = CONFIG.replace(steps=40, optimizer="adam", learning_rate=1e9, gradient_clip=None)
    with pytest.raises(TrainingDivergedError, match="smaller learning_rate"):
        train_interchange(config, TWO, progress=False)
