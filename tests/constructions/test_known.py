"""Known models compute their algorithms, plain, hidden and trained; their variables are in the stated subspaces."""

import dataclasses
import json

import pytest
import torch

from mechicl import algorithms, analysis
from mechicl.algorithms.stepwise import Hypothesis
from mechicl.checkpoints import load_checkpoint
from mechicl.constructions import hide, known_models
from mechicl.constructions.circuits import previous_token_then_induction, ridge_by_cramers_rule, two_steps_in_a_layer
from mechicl.constructions.known import KnownModel
from mechicl.constructions.trained import RECIPES
from mechicl.models import HookedTransformer
from mechicl.tasks import LinearRegression

PLAIN, HIDDEN = known_models(), known_models(hidden=True)
TASK = LinearRegression(x_dim=5, n_context=20)


def test_there_are_enough_of_them_with_different_names():
    assert len(PLAIN) >= 20
    assert len({known.name for known in PLAIN}) == len(PLAIN)


@pytest.mark.parametrize("known", [*PLAIN, *HIDDEN], ids=lambda known: known.name)
def test_predictions_equal_those_of_the_algorithm(known):
    prompts = known.task.sample(32, seed=0, dtype=torch.float64)
    expected = known.hypothesis.algorithm.predict(prompts)
    tolerance = 1e-8 if known.exact else 1e-3
    error = (known.model.predict(prompts) - expected).abs().max()
    assert error < tolerance * expected.abs().max()


def test_two_steps_in_a_layer_are_gradient_descent():
    prompts = TASK.sample(16, seed=1, dtype=torch.float64)
    for layers in (1, 3):
        model, _ = two_steps_in_a_layer(x_dim=5, n_context=20, step_size=0.14, layers=layers)
        expected = algorithms.gradient_descent(prompts, 2 * layers, step_size=0.14).query()[0]
        torch.testing.assert_close(model.predict(prompts), expected)


def test_ridge_by_cramers_rule_is_ridge_regression():
    model, _ = ridge_by_cramers_rule(n_context=10, penalty=0.4, largest=25.0)
    prompts = LinearRegression(x_dim=2, n_context=10, noise_std=0.3).sample(16, seed=1, dtype=torch.float64)
    expected = algorithms.ridge(prompts, penalty=0.4).query()[0]
    torch.testing.assert_close(model.predict(prompts), expected)
    few = prompts.prefix(2)
    torch.testing.assert_close(model.predict(few), algorithms.ridge(few, penalty=0.4).query()[0])


def test_induction_on_continuous_tokens_copies_the_nearest_target():
    model, _ = previous_token_then_induction(x_dim=5, n_context=20)
    prompts = TASK.sample(200, seed=1, dtype=torch.float64)
    expected = algorithms.nearest_neighbours(prompts, n_neighbours=1).query()[0]
    errors = (model.predict(prompts) - expected).abs()[:, 0]
    assert errors.median() < 1e-6
    assert (errors < 1e-2).double().mean() > 0.9  # unless two are nearly equally near


def test_variables_are_in_the_subspaces_of_the_hypotheses():
    prompts = TASK.sample(4, seed=0, dtype=torch.float64)
    for model, hypothesis in (
        two_steps_in_a_layer(x_dim=5, n_context=20, step_size=0.14, layers=2),
        previous_token_then_induction(x_dim=5, n_context=20),
    ):
        stream = model.run_with_cache(prompts)[1]["blocks.0.hook_resid_post"]
        state = hypothesis.algorithm.states(prompts)[hypothesis.schedule[1][1]]
        if model.cfg.prompt_format == "paired":
            places = {"x": state["x"], "residual": state["residual"]}
        else:  # the previous input at targets, with its squared norm
            stream, previous = stream[:, 1::2], state["previous"][:, :-1]
            places = {"previous": torch.cat([previous, previous.square().sum(-1, keepdim=True)], dim=-1)}
        for name, value in places.items():
            torch.testing.assert_close(stream @ hypothesis.subspaces[name], value)


# ---- trained ----


@pytest.mark.parametrize("known", known_models(trained=True), ids=lambda known: known.name)
def test_trained_models_contain_their_algorithm(known):
    prompts = known.task.sample(200, seed=5, dtype=torch.float64)
    sources = analysis.sample_sources(known.task, prompts, seed=6)
    for model, hypothesis in ((known.model, known.hypothesis), rotated(known)):
        assert isinstance(model, HookedTransformer)
        result = analysis.interchange(model, hypothesis, prompts, sources, progress=False)
        assert result.score.mean >= 0.99, result.cells[result.weakest]
        assert result.effects.mean >= 0.99
    fresh = HookedTransformer(known.model.cfg, seed=1).double()
    control = analysis.interchange(fresh, known.hypothesis, prompts, sources, progress=False)
    assert control.r2[0].mean < 0.1


def rotated(known: KnownModel) -> tuple[HookedTransformer, Hypothesis]:
    hidden = hide(known.model, seed=1)
    subspaces = {name: hidden.stream.T @ columns for name, columns in known.hypothesis.subspaces.items()}
    return hidden.model, dataclasses.replace(known.hypothesis, subspaces=subspaces)


@pytest.mark.parametrize("name", RECIPES)
def test_records_agree_with_recipes(name):
    checkpoint, recipe = load_checkpoint(name), RECIPES[name]
    assert checkpoint.record["training"] == json.loads(json.dumps(recipe.config.to_dict()))
    assert checkpoint.record["interchange"]["hypothesis"] == recipe.hypothesis.name
    assert min(checkpoint.record["interchange"]["r2"][0].values()) >= 0.99
    assert checkpoint.record["command"] == f"python analyses/train_known.py {name} checkpoints/{name}"
