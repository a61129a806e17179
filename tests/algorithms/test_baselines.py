"""Averaging, nearest neighbours, the lasso and greedy trees against plain loops and scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.algorithms import averaging, greedy_tree, lasso, nearest_neighbours, ols, references
from mechicl.learners import squared_errors
from mechicl.prompts import Prompts
from mechicl.tasks import DecisionTrees, SparseLinearRegression

from .reference import awkward, make_prompts, over_prefixes


def average(xs, ys, query):
    return query @ (sum(np.outer(x, y) for x, y in zip(xs, ys, strict=True)) / len(xs))


def nearest(n_neighbours):
    def predict(xs, ys, query):
        order = sorted(range(len(xs)), key=lambda i: (((xs[i] - query) ** 2).sum(), i))
        return np.mean([ys[i] for i in order[:n_neighbours]], axis=0)

    return predict


@given(x_dim=st.integers(1, 4), y_dim=st.integers(1, 3), n_context=st.integers(0, 7), k=st.integers(1, 9))
def test_averages_and_neighbours_of_any_shape(x_dim, y_dim, n_context, k):
    prompts = make_prompts(n_prompts=2, n_context=n_context, x_dim=x_dim, y_dim=y_dim)
    for got, expected in ((averaging(prompts), average), (nearest_neighbours(prompts, n_neighbours=k), nearest(k))):
        np.testing.assert_allclose(got.predictions[0], over_prefixes(prompts, expected), rtol=1e-12, atol=1e-13)


def test_ties_between_neighbours_go_to_the_earlier_points():
    prompts = make_prompts(n_context=5)
    prompts.xs[:] = 1.0
    got = nearest_neighbours(prompts, n_neighbours=2).predictions[0]
    torch.testing.assert_close(got[:, -1], prompts.ys[:, :2].mean(1))


# ---- the lasso ----


@pytest.mark.parametrize("penalty", [0.01, 0.1, 1.0])
def test_the_lasso_is_that_of_scikit_learn_on_every_prefix(penalty):
    linear_model = pytest.importorskip("sklearn.linear_model")
    prompts = make_prompts(n_context=9)

    def predict(xs, ys, query):
        model = linear_model.Lasso(alpha=penalty, fit_intercept=False, tol=1e-14, max_iter=1_000_000)
        return model.fit(xs, ys[:, 0]).predict(query[None])

    predictions = lasso(prompts, penalty=penalty).predictions[0].numpy()
    np.testing.assert_allclose(predictions, over_prefixes(prompts, predict), rtol=0, atol=1e-8)


def assert_optimal(prompts, penalty, tolerance=1e-7):
    """The gradient of the squared error is -penalty times the sign of a weight, and no larger where that is 0."""
    weights = lasso(prompts, penalty=penalty, with_weights=True).weights
    assert weights is not None
    for t in range(1, prompts.n_context + 1):
        xs, ys, w = prompts.xs[:, :t], prompts.ys[:, :t], weights[0, :, t]
        gradient = xs.mT @ (xs @ w - ys) / t
        scale = tolerance * (1 + (xs.mT @ ys).norm() + penalty)
        assert (gradient.abs() <= penalty + scale).all()
        on = w != 0
        assert ((gradient + penalty * w.sign())[on].abs() <= scale).all()


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.floats(1e-3, 10.0), st.integers(1, 3))
def test_lasso_weights_satisfy_the_optimality_conditions(seed, penalty, y_dim):
    assert_optimal(make_prompts(n_context=6, y_dim=y_dim, seed=seed), penalty)


@awkward
@pytest.mark.parametrize("penalty", [1e-3, 0.1])
def test_the_lasso_solves_awkward_contexts(prompts, penalty):
    assert_optimal(prompts, penalty, tolerance=1e-6)


def test_a_large_penalty_leaves_no_weight_and_a_tiny_one_is_least_squares():
    prompts = make_prompts(n_context=9)
    assert lasso(prompts, penalty=1e6).predictions.abs().max() == 0
    torch.testing.assert_close(lasso(prompts, penalty=1e-9).query(), ols(prompts).query(), rtol=1e-5, atol=1e-5)


def test_the_lasso_needs_fewer_points_than_least_squares_where_functions_are_sparse():
    prompts = SparseLinearRegression(x_dim=10, n_context=8, sparsity=1).sample(300, seed=0)
    errors = [fitted.step_errors(prompts)[0, :, -1].mean() for fitted in (lasso(prompts, penalty=0.01), ols(prompts))]
    assert errors[0] < 0.2 * errors[1]


# ---- greedy trees ----


def grow(depth):
    """Grow the whole tree by recursion, trying every input in turn."""

    def error(ys):
        return ((ys - ys.mean(0)) ** 2).sum() if len(ys) else 0.0

    def predict(xs, ys, query):
        for _ in range(depth):
            splits = []
            for j in range(query.size):
                above = xs[:, j] > 0
                if 0 < above.sum() < len(xs):
                    splits.append((error(ys[above]) + error(ys[~above]), j))
            if not splits or min(splits)[0] > error(ys) - 1e-9:
                break
            least = min(splits)[0]
            best = next(j for after, j in splits if after < least + 1e-9)
            same = (xs[:, best] > 0) == (query[best] > 0)
            xs, ys = xs[same], ys[same]
        return ys.mean(0)

    return predict


def assert_grown(prompts, depth):
    predictions = greedy_tree(prompts, depth=depth).predictions[0].numpy()
    np.testing.assert_allclose(predictions, over_prefixes(prompts, grow(depth)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("y_dim", [1, 2])
def test_a_tree_is_grown_by_recursion_on_every_prefix(depth, y_dim):
    assert_grown(make_prompts(n_prompts=10, n_context=25, y_dim=y_dim), depth)


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(0, 8))
def test_a_tree_of_whole_numbers_and_ties(seed, depth, n_context):
    random = np.random.default_rng(seed)
    xs = random.integers(-1, 2, (2, n_context + 1, 3)).astype(float)
    assert_grown(Prompts(xs, random.integers(0, 2, (2, n_context + 1, 1)).astype(float)), depth)


def test_it_is_the_regression_tree_of_scikit_learn_on_signs():
    tree = pytest.importorskip("sklearn.tree")
    prompts = make_prompts(n_prompts=20, n_context=40)
    signs = (prompts.xs > 0).numpy()
    expected = [
        tree.DecisionTreeRegressor(max_depth=3).fit(x[:-1], y[:-1, 0]).predict(x[-1:])
        for x, y in zip(signs, prompts.ys.numpy(), strict=True)
    ]
    np.testing.assert_allclose(greedy_tree(prompts, depth=3).query()[0].numpy(), expected)


def test_with_enough_points_it_grows_the_tree_that_made_them():
    task = DecisionTrees(x_dim=4, n_context=400, depth=1)
    assert squared_errors(references(task)["greedy tree"], task.sample(20, seed=0)).max() < 1e-9
