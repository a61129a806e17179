"""Algorithms that forget, and their fits."""

from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch

from mechicl import algorithms
from mechicl.algorithms.card import FitProblem, cards
from mechicl.algorithms.least_squares import ridge_filter
from mechicl.algorithms.recursive import discounted_spectra, error_of
from mechicl.algorithms.stepwise import Hypothesis
from mechicl.analysis import identify
from mechicl.learners import AlgorithmLearner
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=4, n_context=10, inputs="gaussian", noise_std=0.3)


def test_identify_tells_forgetting_from_ridge():
    forgetting = AlgorithmLearner(algorithms.recursive_least_squares, {"penalty": 0.4, "discount": 0.85})
    options = {"steps": 1, "n_prompts": 64, "with_limits": False, "progress": False}
    assert identify(forgetting, TASK, **options).answer.family == "recursive least squares"
    assert identify(AlgorithmLearner(algorithms.ridge, {"penalty": 0.4}), TASK, **options).answer.family == "ridge"


def test_step_forms_are_fitted_to_a_model_of_several_layers():
    prompts = TASK.sample(300, seed=0, dtype=torch.float64)
    target = algorithms.stepwise.DiscountedDescent(3, step_size=0.05, discount=0.9)
    problem = FitProblem(prompts, target.predict(prompts)[None], 3, causal=True)
    card = next(card for card in cards() if card.name == "discounted gradient descent")
    assert card.step_forms is not None
    one, several = card.step_forms(problem)
    assert (one.n_steps, several.n_steps) == (1, 3)
    torch.testing.assert_close(several.predict(prompts), target.predict(prompts), rtol=0, atol=1e-3)
    assert Hypothesis(several).n_layers == 3


@pytest.mark.parametrize("n_context", [3, 9])
def test_the_fit_in_the_eigenbasis_has_the_error_of_the_algorithm(n_context: int):
    prompts = LinearRegression(x_dim=4, y_dim=2, n_context=n_context, noise_std=0.3).sample(20, seed=0)
    problem = FitProblem(prompts.to(torch.float64), prompts.query.ys[None].double(), steps=1)
    for discount in (0.5, 0.9, 1.0):
        spectral = discounted_spectra(problem, discount)
        for penalty in (1e-3, 0.2, 5.0):
            filtered = ridge_filter(spectral.eigenvalues, penalty * discount**n_context, n_context=n_context)
            plain = error_of(problem, algorithms.recursive_least_squares, discount=discount, penalty=penalty)
            assert spectral.error(filtered).item() == pytest.approx(plain, rel=1e-8)


@pytest.mark.parametrize(("discount", "right"), [(0.7, True), (0.05, False)])
def test_digits_that_fade_into_rounding_noise_are_reported(discount: float, right: bool):
    """The reference is the recursion in rational numbers."""
    prompts = LinearRegression(x_dim=10, n_context=14, inputs="gaussian").sample(3, seed=0, dtype=torch.float64)
    with nullcontext() if right else pytest.warns(algorithms.ConditioningWarning, match="is right to about"):
        weights = algorithms.recursive_least_squares(prompts, penalty=0.1, discount=discount, with_weights=True).weights
    assert weights is not None
    expected = torch.stack([recursion(prompt, Fraction(discount), Fraction(0.1)) for prompt in prompts.split(1)])
    assert ((weights[0, :, -1, :, 0] - expected).abs().max() < 1e-6 * expected.abs().max()) == right


def test_directions_without_points_have_neither_weights_nor_warnings():
    few = LinearRegression(x_dim=8, n_context=3, inputs="gaussian").sample(4, seed=0, dtype=torch.float64)
    found = algorithms.recursive_least_squares(few, penalty=1e-10, at="query").query()
    torch.testing.assert_close(found, algorithms.ols(few, at="query").query(), rtol=1e-8, atol=1e-8)
    unused = LinearRegression(x_dim=5, n_context=20, active_dims=3).sample(4, seed=0, dtype=torch.float64)
    used = Prompts(unused.xs[..., :3], unused.ys)
    options = {"penalty": 1.0, "discount": 0.2, "at": "query"}
    found, expected = (algorithms.recursive_least_squares(each, **options).query() for each in (unused, used))
    torch.testing.assert_close(found, expected)


def recursion(prompt: Prompts, discount: Fraction, penalty: Fraction) -> torch.Tensor:
    d = prompt.x_dim
    weights, inverse = [Fraction(0)] * d, [[Fraction(i == j) / penalty for j in range(d)] for i in range(d)]
    for x, y in zip(prompt.xs[0, :-1].tolist(), prompt.ys[0, :-1, 0].tolist(), strict=True):
        at = [Fraction(value) for value in x]
        spread = [sum(a * b for a, b in zip(row, at, strict=True)) for row in inverse]
        scale = discount + sum(a * b for a, b in zip(at, spread, strict=True))
        error = Fraction(y) - sum(a * b for a, b in zip(at, weights, strict=True))
        weights = [w + s * error / scale for w, s in zip(weights, spread, strict=True)]
        inverse = [[(inverse[i][j] - spread[i] * spread[j] / scale) / discount for j in range(d)] for i in range(d)]
    return torch.tensor([float(w) for w in weights], dtype=torch.float64)
