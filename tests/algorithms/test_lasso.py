import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.prompts import Prompts
from mechicl.tasks import SparseLinearRegression

from .reference import awkward_prompts, make_prompts, over_prefixes


@pytest.mark.parametrize("penalty", [0.01, 0.1, 1.0])
def test_lasso_is_that_of_scikit_learn_on_every_prefix(penalty):
    linear_model = pytest.importorskip("sklearn.linear_model")
    prompts = make_prompts(n_context=9)

    def predict(xs, ys, query):
        if not len(xs):
            return np.zeros(1)
        model = linear_model.Lasso(alpha=penalty, fit_intercept=False, tol=1e-14, max_iter=1_000_000)
        return model.fit(xs, ys[:, 0]).predict(query[None])

    predictions = algorithms.lasso(prompts, penalty=penalty).predictions[0].numpy()
    np.testing.assert_allclose(predictions, over_prefixes(prompts, predict), rtol=0, atol=1e-8)


def assert_optimal(prompts, penalty, tolerance=1e-7):
    """The gradient of the squared error is -penalty times the sign of a weight, and no larger where that is 0."""
    weights = algorithms.lasso(prompts, penalty=penalty, with_weights=True).weights
    assert weights is not None
    for t in range(1, prompts.n_context + 1):
        xs, ys, w = prompts.xs[:, :t], prompts.ys[:, :t], weights[0, :, t]
        gradient = xs.mT @ (xs @ w - ys) / t
        scale = tolerance * (1 + (xs.mT @ ys).norm() + penalty)
        assert (gradient.abs() <= penalty + scale).all()
        on = w != 0
        assert ((gradient + penalty * w.sign())[on].abs() <= scale).all()


@hypothesis.given(st.integers(0, 2**31), st.floats(1e-3, 10.0), st.integers(1, 3))
@hypothesis.settings(max_examples=25)
def test_weights_satisfy_the_optimality_conditions(seed, penalty, y_dim):
    assert_optimal(make_prompts(n_context=6, y_dim=y_dim, seed=seed), penalty)


@pytest.mark.parametrize("penalty", [1e-3, 0.1])
@pytest.mark.parametrize("prompts", awkward_prompts().values(), ids=awkward_prompts().keys())
def test_awkward_contexts_are_solved_too(prompts, penalty):
    assert_optimal(prompts, penalty, tolerance=1e-6)


def test_a_large_penalty_leaves_nothing_and_a_tiny_one_is_least_squares():
    prompts = make_prompts(n_context=9)
    assert algorithms.lasso(prompts, penalty=1e6).predictions.abs().max() == 0
    full = algorithms.lasso(prompts, penalty=1e-9).query()
    torch.testing.assert_close(full, algorithms.ols(prompts).query(), rtol=1e-5, atol=1e-5)
    xs = torch.zeros(1, 3, 2, dtype=torch.float64)
    assert algorithms.lasso(Prompts(xs, torch.ones(1, 3, 1, dtype=torch.float64)), penalty=0.1).predictions.max() == 0


def test_it_needs_fewer_points_than_least_squares_where_functions_are_sparse():
    prompts = SparseLinearRegression(x_dim=10, n_context=8, sparsity=1).sample(300, seed=0)
    errors = {
        name: (fitted.query()[0] - prompts.query.ys).square().mean()
        for name, fitted in (("lasso", algorithms.lasso(prompts, penalty=0.01)), ("ols", algorithms.ols(prompts)))
    }
    assert errors["lasso"] < 0.2 * errors["ols"]


def test_gradients_flow_to_the_query():
    prompts = make_prompts(n_context=9)
    query = prompts.query.xs.clone().requires_grad_()
    fitted = algorithms.lasso(prompts.with_query(query), penalty=0.1, with_weights=True)
    (gradient,) = torch.autograd.grad(fitted.query().sum(), query)
    assert fitted.weights is not None
    torch.testing.assert_close(gradient, fitted.weights[0, :, -1, :, 0])


@pytest.mark.parametrize("penalty", [0.0, -1.0, math.inf])
def test_a_penalty_out_of_range_is_refused(penalty):
    with pytest.raises(ValueError, match=r"penalty must be positive and finite, .* use ols"):
        algorithms.lasso(make_prompts(), penalty=penalty)
