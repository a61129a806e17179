"""Two steps in a layer, ridge in closed form and induction: what they predict, layer by layer where that is more."""

import torch

from mechicl import algorithms
from mechicl.constructions.circuits import (
    previous_token_then_induction,
    ridge_by_cramers_rule,
    two_steps_in_a_layer,
)
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=5, n_context=20)


def test_two_steps_in_a_layer_are_two_steps_of_gradient_descent():
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
    assert (errors < 1e-2).double().mean() > 0.9  # but where two are as near


def test_variables_are_where_the_hypotheses_say():
    prompts = TASK.sample(4, seed=0, dtype=torch.float64)
    for model, hypothesis in (
        two_steps_in_a_layer(x_dim=5, n_context=20, step_size=0.14, layers=2),
        previous_token_then_induction(x_dim=5, n_context=20),
    ):
        stream = model.run_with_cache(prompts)[1]["blocks.0.hook_resid_post"]
        state = hypothesis.algorithm.states(prompts)[hypothesis.schedule[1][1]]
        if model.cfg.prompt_format == "paired":
            places = {"x": state["x"], "residual": state["residual"]}
        else:  # what targets remember, with its squared norm
            stream, previous = stream[:, 1::2], state["previous"][:, :-1]
            places = {"previous": torch.cat([previous, previous.square().sum(-1, keepdim=True)], dim=-1)}
        for name, value in places.items():
            torch.testing.assert_close(stream @ hypothesis.subspaces[name], value)
