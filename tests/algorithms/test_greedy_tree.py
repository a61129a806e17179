import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.learners import squared_errors
from mechicl.prompts import Prompts
from mechicl.tasks import DecisionTrees

from .reference import make_prompts, over_prefixes


def grow(depth):
    """The whole tree by recursion, every input tried in turn."""

    def error(ys):
        return ((ys - ys.mean(0)) ** 2).sum() if len(ys) else 0.0

    def predict(xs, ys, query):
        if not len(xs):
            return np.zeros(ys.shape[1])
        for _ in range(depth):
            splits = []
            for j in range(query.size):
                above = xs[:, j] > 0
                if 0 < above.sum() < len(xs):
                    splits.append((error(ys[above]) + error(ys[~above]), j))
            if not splits or min(splits)[0] > error(ys) - 1e-9:
                break
            least = min(splits)[0]
            best = next(j for left, j in splits if left < least + 1e-9)
            same = (xs[:, best] > 0) == (query[best] > 0)
            xs, ys = xs[same], ys[same]
        return ys.mean(0)

    return predict


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("y_dim", [1, 2])
def test_it_is_the_tree_that_recursion_grows_on_every_prefix(depth, y_dim):
    prompts = make_prompts(n_prompts=10, n_context=25, y_dim=y_dim)
    predictions = algorithms.greedy_tree(prompts, depth=depth).predictions[0].numpy()
    np.testing.assert_allclose(predictions, over_prefixes(prompts, grow(depth)), rtol=1e-9, atol=1e-9)


@hypothesis.given(st.integers(0, 2**31), st.integers(1, 3), st.integers(0, 8))
def test_whole_numbers_and_ties_are_no_trouble(seed, depth, n_context):
    random = np.random.default_rng(seed)
    xs = random.integers(-1, 2, (2, n_context + 1, 3)).astype(float)
    prompts = Prompts(xs, random.integers(0, 2, (2, n_context + 1, 1)).astype(float))
    predictions = algorithms.greedy_tree(prompts, depth=depth).predictions[0].numpy()
    np.testing.assert_allclose(predictions, over_prefixes(prompts, grow(depth)), rtol=1e-9, atol=1e-9)


def test_it_is_the_regression_tree_of_scikit_learn_on_signs():
    tree = pytest.importorskip("sklearn.tree")
    prompts = make_prompts(n_prompts=20, n_context=40)
    signs = (prompts.xs > 0).numpy()
    expected = [
        tree.DecisionTreeRegressor(max_depth=3).fit(x[:-1], y[:-1, 0]).predict(x[-1:])
        for x, y in zip(signs, prompts.ys.numpy(), strict=True)
    ]
    np.testing.assert_allclose(algorithms.greedy_tree(prompts, depth=3).query()[0].numpy(), expected)


def test_with_enough_points_it_grows_the_tree_that_made_them():
    task = DecisionTrees(x_dim=4, n_context=400, depth=1)
    prompts = task.sample(20, seed=0)
    assert squared_errors(next(iter(algorithms.references(task).values())), prompts).max() < 1e-9
    task = DecisionTrees(x_dim=4, n_context=60, depth=3)
    losses = [squared_errors(each, task.sample(300, seed=0)).mean() for each in algorithms.references(task).values()]
    assert losses[0] < 0.7 * min(losses[1:])


def test_the_query_alone_and_parts_agree_with_the_whole(monkeypatch):
    prompts = make_prompts(y_dim=2)
    whole = algorithms.greedy_tree(prompts, depth=2).predictions
    monkeypatch.setattr("mechicl.algorithms.spectra.CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(algorithms.greedy_tree(prompts, depth=2, at="query").predictions, whole[:, :, -1:])
    assert algorithms.greedy_tree(prompts[:0], depth=2).predictions.shape == (1, 0, 8, 2)
    with pytest.raises(ValueError, match="depth"):
        algorithms.greedy_tree(prompts, depth=0)
