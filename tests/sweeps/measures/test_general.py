"""Measures of sweeps against plain loops, and against models whose algorithm is known."""

import functools
import math

import numpy as np
import pytest
import torch

from mechicl.algorithms import references
from mechicl.checkpoints import CheckpointError
from mechicl.sweeps.measures import general as measures
from mechicl.sweeps.measures.general import HELD_OUT
from tests.sweeps.made import POOL, REGRESSION, checkpoint, step, untrained


def test_regret_is_the_difference_of_mean_errors():
    made = checkpoint(untrained(REGRESSION), REGRESSION)
    measured = measures.mean_regret(made, n_prompts=40)
    prompts = REGRESSION.sample(40, seed=HELD_OUT, dtype=torch.float64)
    predicted = made.models[0].predict(prompts).detach().numpy()
    error = np.mean([(a - b) ** 2 for a, b in zip(predicted, prompts.query.ys.numpy(), strict=True)])
    assert measured["held_out_loss"] == pytest.approx(error)
    assert measured["regret"] == pytest.approx(measured["held_out_loss"] - measured["best_known_loss"])
    assert measures.loss(made, n_prompts=40).items() <= measured.items()


def test_alignment_is_with_the_learner_that_is_named():
    made = checkpoint(untrained(POOL), POOL)
    prompts = POOL.sample(20, seed=HELD_OUT)
    ridge = references(POOL)["ridge"]
    expected = (made.models[0].predict(prompts) - ridge.predict(prompts)).norm(dim=1).mean().item()
    named = functools.partial(measures.alignment, learner="ridge", n_prompts=20)
    assert named(made)["prediction_distance"] == pytest.approx(expected, rel=1e-5)
    assert measures.alignment(made, n_prompts=20) != named(made)
    with pytest.raises(KeyError, match="TaskPool has no reference learner 'rigde'; it has"):
        measures.alignment(made, learner="rigde")


def test_families_are_as_near_as_identify_says():
    model, _ = step()
    measured = measures.identified(checkpoint(model.float(), REGRESSION), n_prompts=200)
    assert measured["relative_distance: gradient descent"] < 1e-4 < measured["relative_distance: least squares"]
    assert 0 < measured["confidence"] <= 1


def test_a_transition_is_read_off_the_curve():
    curve = {"eval_step": [0, 10, 20, 30, 40], "eval_loss": [[1.0], [1.0], [0.2], [0.0], [0.0]]}
    falls = measures.transition(checkpoint(untrained(POOL), POOL, record={"curve": curve}))
    assert falls == {"transition_step": 15.0, "transition_width": 10.0, "fell": 1.0, "final_loss": 0.0}
    flat = curve | {"eval_loss": [[1.0]] * 5}
    stays = measures.transition(checkpoint(untrained(POOL), POOL, record={"curve": flat}))
    assert stays["fell"] == 0.0
    assert math.isnan(stays["transition_step"])
    with pytest.raises(CheckpointError, match="has no curve"):
        measures.transition(checkpoint(untrained(POOL), POOL))
