"""Algorithms that forget, against plain float64 loops and closed forms, and the cards that recover their parameters."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.algorithms.card import FitProblem, cards
from mechicl.algorithms.stepwise import Hypothesis
from mechicl.analysis import identify
from mechicl.learners import AlgorithmLearner
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import make_prompts, over_prefixes, prompts_of_any_size


def recursion(penalty, discount):
    """The textbook recursion of recursive least squares: weights and an inverse, point by point."""

    def predict(xs, ys, query):
        weights, inverse = np.zeros((query.size, ys.shape[1])), np.eye(query.size) / penalty
        for x, y in zip(xs, ys, strict=True):
            gain = inverse @ x / (discount + x @ inverse @ x)
            weights = weights + np.outer(gain, y - x @ weights)
            inverse = (inverse - np.outer(gain, x @ inverse)) / discount
        return query @ weights

    return predict


def weighted_ridge(penalty, discount, fading):
    """Ridge regression on points that are scaled by the root of their weight."""

    def predict(xs, ys, query):
        n = len(xs)
        roots = discount ** (0.5 * np.arange(n - 1, -1, -1))[:, None]
        scaled = penalty * discount**n if fading else penalty
        padded = np.concatenate([xs * roots, np.sqrt(scaled) * np.eye(query.size)])
        targets = np.concatenate([ys * roots, np.zeros((query.size, ys.shape[1]))])
        return query @ np.linalg.lstsq(padded, targets, rcond=None)[0]

    return predict


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.6])
def test_the_closed_form_is_the_recursion_and_weighted_ridge(discount):
    prompts = make_prompts(y_dim=2)
    options = {"penalty": 0.3, "discount": discount}
    fading = algorithms.recursive_least_squares(prompts, **options).predictions[0]
    np.testing.assert_allclose(fading, over_prefixes(prompts, recursion(0.3, discount)), rtol=1e-7, atol=1e-9)
    for kept in (True, False):
        predictions = algorithms.recursive_least_squares(prompts, **options, fading=kept).predictions[0]
        expected = over_prefixes(prompts, weighted_ridge(0.3, discount, kept))
        np.testing.assert_allclose(predictions, expected, rtol=1e-7, atol=1e-9)


@settings(max_examples=20)
@given(prompts_of_any_size())
def test_without_forgetting_they_are_the_plain_algorithms(prompts):
    pairs = [
        (algorithms.recursive_least_squares(prompts, penalty=0.7), algorithms.ridge(prompts, penalty=0.7)),
        (
            algorithms.discounted_gradient_descent(prompts, step_size=0.1),
            algorithms.gradient_descent(prompts, step_size=0.1),
        ),
        (algorithms.discounted_averaging(prompts), algorithms.averaging(prompts)),
        (algorithms.normalized_lms(prompts), algorithms.online_gradient_descent(prompts)),
    ]
    for forgetting, plain in pairs:
        scale = max(1.0, plain.predictions.abs().max().item())
        torch.testing.assert_close(forgetting.predictions, plain.predictions, rtol=0, atol=1e-7 * scale)


def normalised(step_size, offset):
    def predict(xs, ys, query):
        weights = np.zeros((query.size, ys.shape[1]))
        for x, y in zip(xs, ys, strict=True):
            size = offset + x @ x
            weights = weights - (step_size / size if x @ x else 0.0) * np.outer(x, x @ weights - y)
        return query @ weights

    return predict


def decayed(step_size, discount):
    def predict(xs, ys, query):
        weights = np.zeros((query.size, ys.shape[1]))
        for x, y in zip(xs, ys, strict=True):
            weights = discount * weights
            weights = weights - step_size * np.outer(x, x @ weights - y)
        return query @ weights

    return predict


def moments(step_size, discount, normalize=False):
    def predict(xs, ys, query):
        total, weight = np.zeros((query.size, ys.shape[1])), 0.0
        for x, y in zip(xs, ys, strict=True):
            total, weight = discount * total + np.outer(x, y), discount * weight + 1
        return step_size * query @ total / (weight if normalize and weight else 1.0)

    return predict


@pytest.mark.parametrize(
    ("predictions", "loop"),
    [
        (lambda p: algorithms.normalized_lms(p, step_size=0.4, offset=0.3), normalised(0.4, 0.3)),
        (lambda p: algorithms.normalized_lms(p, step_size=0.4), normalised(0.4, 0.0)),
        (lambda p: algorithms.online_gradient_descent(p, step_size=0.1, discount=0.8), decayed(0.1, 0.8)),
        (lambda p: algorithms.discounted_gradient_descent(p, step_size=0.1, discount=0.7), moments(0.1, 0.7)),
        (lambda p: algorithms.discounted_averaging(p, discount=0.7), moments(1.0, 0.7, normalize=True)),
    ],
    ids=["normalised LMS", "without offset", "weight decay", "discounted descent", "discounted average"],
)
def test_every_prefix_is_the_plain_loop(predictions, loop):
    prompts = make_prompts(y_dim=2)
    prompts.xs[0, 2] = 0
    np.testing.assert_allclose(
        predictions(prompts).predictions[0], over_prefixes(prompts, loop), rtol=1e-10, atol=1e-12
    )


@given(st.floats(0.3, 1.0), st.integers(0, 3))
@settings(max_examples=10)
def test_scaling_inputs_and_the_penalty_together_changes_nothing(discount, seed):
    prompts = LinearRegression(x_dim=3, n_context=6, inputs="gaussian").sample(4, seed=seed, dtype=torch.float64)
    scaled = Prompts(3 * prompts.xs, prompts.ys)
    a = algorithms.recursive_least_squares(prompts, penalty=0.5, discount=discount).predictions
    b = algorithms.recursive_least_squares(scaled, penalty=4.5, discount=discount).predictions
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


TASK = LinearRegression(x_dim=4, n_context=10, inputs="gaussian", noise_std=0.3)
FORGETTING = {
    "recursive least squares": (algorithms.recursive_least_squares, {"penalty": 0.4, "discount": 0.85}),
    "normalised LMS": (algorithms.normalized_lms, {"step_size": 0.6, "offset": 1.5}),
    "discounted gradient descent": (algorithms.discounted_gradient_descent, {"step_size": 0.1, "discount": 0.8}),
    "discounted averaging": (algorithms.discounted_averaging, {"discount": 0.8}),
}


@pytest.mark.parametrize("family", FORGETTING)
def test_cards_recover_parameters_from_predictions(family):
    function, options = FORGETTING[family]
    learner = AlgorithmLearner(function, options)
    fitting, held_out = (TASK.sample(500, seed=seed, dtype=torch.float64) for seed in (0, 1))
    card = next(card for card in cards() if card.name == family)
    (member,) = card.members(FitProblem(fitting, learner.predict(fitting)[None], 1))
    assert member.hyperparameters == pytest.approx(options, rel=1e-2)
    distance = (member.learner.predict(held_out) - learner.predict(held_out)).square().mean()
    assert distance < 1e-6 * learner.predict(held_out).square().mean()


def test_identify_tells_forgetting_from_ridge():
    forgetting = AlgorithmLearner(*FORGETTING["recursive least squares"])
    options = {"steps": 1, "n_prompts": 128, "with_limits": False, "progress": False}
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
