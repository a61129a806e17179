"""Similarities against plain loops over prompts, steps and points."""

import itertools

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.analysis.behaviour.similarity import similarity_of_errors, similarity_of_weights
from mechicl.learners import Trajectory
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=5, inputs="gaussian", noise_std=0.3)
SIZES = pytest.mark.parametrize(("y_dim", "n_context"), [(1, 1), (1, 6), (2, 4)])


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@SIZES
def test_similarity_of_errors_is_a_cosine_over_points_two_to_the_last(y_dim, n_context):
    prompts = TASK.replace(y_dim=y_dim, n_context=n_context).sample(3, seed=0, dtype=torch.float64)
    a = algorithms.newton(prompts, [0, 2])
    b = algorithms.gradient_descent(prompts, [1, 4, 9], step_size=0.02)
    measured = similarity_of_errors(a, b, prompts)
    assert measured.shape == (2, 3, 3)
    errors_a, errors_b = ((t.predictions - prompts.ys)[:, :, 1:].flatten(2).numpy() for t in (a, b))
    for i, j, p in itertools.product(range(2), range(3), range(3)):
        assert measured[i, j, p].item() == pytest.approx(_cosine(errors_a[i, p], errors_b[j, p]), abs=1e-9)


@SIZES
def test_similarity_of_weights_is_a_cosine_for_each_number_of_points(y_dim, n_context):
    prompts = TASK.replace(y_dim=y_dim, n_context=n_context).sample(2, seed=1, dtype=torch.float64)
    a = algorithms.newton(prompts, [1, 3], with_weights=True)
    b = algorithms.ridge(prompts, penalty=0.5, with_weights=True)
    measured = similarity_of_weights(a, b)
    assert measured.shape == (2, 1, 2, n_context)
    assert a.weights is not None
    assert b.weights is not None
    for i, p, t in itertools.product(range(2), range(2), range(1, n_context + 1)):
        expected = _cosine(a.weights[i, p, t].flatten().numpy(), b.weights[0, p, t].flatten().numpy())
        assert measured[i, 0, p, t - 1].item() == pytest.approx(expected, abs=1e-9)


def test_the_query_alone_can_be_compared():
    prompts = TASK.sample(4, seed=0)
    a = algorithms.newton(prompts, [1], at="query", with_weights=True)
    b = algorithms.ols(prompts, at="query", with_weights=True)
    signs = similarity_of_errors(a, b, prompts)
    assert signs.abs().allclose(torch.ones(1, 1, 4, dtype=torch.float64))
    assert similarity_of_weights(a, b).shape == (1, 1, 4, 1)


def test_a_learner_without_error_has_no_direction():
    prompts = TASK.sample(4, seed=0, dtype=torch.float64)
    perfect = Trajectory((1,), prompts.ys[None].clone())
    assert similarity_of_errors(perfect, algorithms.ols(prompts), prompts).isnan().all()
