"""Measures of sweeps against plain loops, and against models whose algorithm is known."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch

from mechicl.algorithms import references
from mechicl.checkpoints import CheckpointError, Snapshots
from mechicl.learners.token_learners import as_token_learner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.sweeps.measures import general as measures
from mechicl.sweeps.measures.general import HELD_OUT, _phases, markov_phases
from mechicl.tasks import MarkovChains
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


def test_distances_to_families_are_those_of_identify():
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


# ---- Markov chains ----

CHAINS = MarkovChains(d_vocab=3, n_ctx=6)


READER = TransformerConfig(prompt_format="token_ids", d_vocab=3, n_ctx=6, n_layers=1, n_heads=1, d_model=8)


def reader(seed: int) -> HookedTransformer:
    return HookedTransformer(READER, seed=seed).eval()


def test_phases_are_those_of_the_nearest_learner():
    def at(*divergences: float) -> dict[str, float]:
        return dict(zip(("uniform", "unigram", "bigram"), divergences, strict=True))

    both = [at(0.0, 1, 2), at(0.5, 0.1, 1), at(0.6, 0.2, 0.9), at(2, 1, 0.1)]
    phases = _phases((0, 10, 20, 30), both)
    assert phases == {
        "unigram_from": 10.0, "bigram_from": 30.0, "unigram_snapshots": 2.0, "least_to_unigram": 0.1,
        "final_to_unigram": 1, "final_to_bigram": 0.1, "order": 1.0,
    }  # fmt: skip
    at_once = _phases((0, 10), [at(0.0, 1, 2), at(2.0, 1, 0)])
    assert at_once["order"] == 0.0
    assert math.isnan(at_once["unigram_from"])
    assert math.isnan(_phases((0,), [at(0.0, 1, 2)])["order"])


def test_divergences_are_those_of_a_plain_loop():
    models = [reader(0), reader(1)]
    names = list(models[0].state_dict())
    weights = {name: torch.stack([torch.stack([m.state_dict()[name]]) for m in models]) for name in names}
    made = checkpoint(models[1], CHAINS, snapshots=Snapshots((0, 5), weights))
    measured = markov_phases(made, n_prompts=8)
    sequences = CHAINS.sample(8, seed=HELD_OUT)
    total, logs = 0.0, as_token_learner(models[1], "made").log_probabilities(sequences)
    for ids, own in zip(sequences.ids.tolist(), logs.double(), strict=True):
        for position in range(6):
            follows = [1.0, 1.0, 1.0]
            for a, b in itertools.pairwise(ids[: position + 1]):
                follows[b] += a == ids[position]
            for token in range(3):
                chance = follows[token] / sum(follows)
                total += chance * (math.log(chance) - own[position, token].item())
    assert measured["final_to_bigram"] == pytest.approx(total / 48, rel=1e-5)
    assert measured["apart"] > 0


def test_other_tasks_and_checkpoints_without_snapshots_are_refused():
    with pytest.raises(ValueError, match="is for models of MarkovChains; this one was trained on TaskPool"):
        markov_phases(checkpoint(untrained(POOL), POOL))
    with pytest.raises(CheckpointError, match="set n_snapshots"):
        markov_phases(checkpoint(reader(0), CHAINS))
