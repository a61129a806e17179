"""The part of a report that tests hypotheses by interventions."""

import pytest
import torch

from mechicl.algorithms.card import step_kind
from mechicl.checkpoints import Checkpoint
from mechicl.constructions import gd_plus_plus
from mechicl.reports.causes import STAND, causal_part, interventions_as_text, shuffled
from mechicl.tasks import LinearRegression
from tests.reports import by_quantity

TASK = LinearRegression(x_dim=3, n_context=10)


@pytest.mark.slow
def test_a_construction_passes_and_its_controls_do_not():
    sizes = {"x_dim": 3, "n_context": 10}
    model = gd_plus_plus(**sizes, steps=2, step_size=(0.2, 0.5), gamma=(0.08, 0.2))  # type: ignore[arg-type]
    checkpoint = Checkpoint("made", [model], {"seeds": [0]}, None)
    rows, sections, data = causal_part(checkpoint, TASK, n_prompts=32, seed=0, progress=False)
    named = by_quantity(rows)
    assert rows[0].quantity == "effects explained: GD++"
    assert rows[0].ends[1] > 0.99  # its parameters are fitted
    assert named[STAND].note.startswith("GD++, 2 steps")
    for control in ("untrained", "weights shuffled"):
        assert named[f"{control}: largest R² of a hypothesis's weakest counterfactual"].ends[1] < 0.1
    assert named["moved by: context frozen from 1 layer on"].ends[1] == pytest.approx(0.0, abs=1e-9)
    words = interventions_as_text(rows)
    assert "No intervention contradicts GD++, 2 steps, parameters for each" in words
    assert f"explains {rows[0].measured}" in words
    assert sections[0].title == "Does it run the algorithm?"
    assert data["tests"][0]["hypotheses"][0]["hypothesis"] == "GD++, 2 steps, parameters for each"
    assert interventions_as_text([]) == ""


def test_every_candidate_has_a_family():
    names = {
        "copying, then gradient descent, 14 steps, by the query alone": "gradient descent by the query alone",
        "gradient descent, 2 steps, a step size each, by the query alone": "gradient descent by the query alone",
        "gradient descent, 7 steps, each point from its past": "gradient descent, residuals in the context",
        "gradient descent with momentum 0.2, 5 steps, residuals in the context": "gradient descent with momentum",
        "preconditioned gradient descent, 5 steps, a matrix each": "preconditioned gradient descent",
        "Newton, 9 iterations, running prediction": "Newton",
        "ridge by 5 eigendirections": "ridge by eigendirections",
        "ridge path, 12 penalties": "ridge path",
        "ridge regression in one step": "ridge regression in one step",
    }
    assert {name: step_kind(name) for name in names} == names


def test_shuffling_keeps_every_entry_of_every_weight():
    model = gd_plus_plus(x_dim=3, n_context=10, steps=2, step_size=0.2, gamma=0.05)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    other = dict(shuffled(model, seed=0).named_parameters())
    for name, weight in other.items():
        assert weight.flatten().sort().values.equal(before[name].flatten().sort().values)
    assert not all(weight.equal(before[name]) for name, weight in other.items())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
