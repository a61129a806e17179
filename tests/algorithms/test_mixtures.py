"""Bayes over mixtures and finite pools, by the densities of each model."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.prompts import Prompts
from mechicl.tasks import SparseLinearRegression, TaskPool

from .reference import make_prompts, over_prefixes


def average(models):
    """Average the models' posterior means by the density of the context under each: inputs, noise, weights."""

    def predict(xs, ys, query):
        logs, means = [], []
        for inputs, noise_std, weight_std in models:
            some = xs[:, inputs]
            covariance = weight_std**2 * some @ some.T + noise_std**2 * np.eye(len(xs))
            log = 0.0
            for k in range(ys.shape[1]):
                log += scipy.stats.multivariate_normal(cov=covariance).logpdf(ys[:, k])
            logs.append(log)
            means.append(weight_std**2 * query[inputs] @ some.T @ np.linalg.solve(covariance, ys))
        posterior = np.exp(np.array(logs) - max(logs))
        return (posterior / posterior.sum()) @ np.array(means)

    return predict


@pytest.mark.parametrize("y_dim", [1, 2])
def test_mixture_bayes_weights_ridge_regressions_by_their_evidence(y_dim):
    prompts = make_prompts(y_dim=y_dim)
    settings = [(list(range(4)), 0.1, 1.0), (list(range(4)), 0.7, 2.0), (list(range(4)), 3.0, 0.3)]
    fitted = algorithms.mixture_bayes(prompts, noise_stds=(0.1, 0.7, 3.0), weight_stds=(1.0, 2.0, 0.3))
    predictions = fitted.predictions[0]
    np.testing.assert_allclose(predictions.numpy(), over_prefixes(prompts, average(settings)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("sparsity", "y_dim"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_sparse_bayes_weights_all_choices_of_inputs_by_their_evidence(sparsity, y_dim):
    prompts = make_prompts(y_dim=y_dim)
    models = [(list(inputs), 0.3, 1.5) for inputs in itertools.combinations(range(4), sparsity)]
    predictions = algorithms.sparse_bayes(prompts, sparsity=sparsity, noise_std=0.3, weight_std=1.5).predictions[0]
    np.testing.assert_allclose(predictions.numpy(), over_prefixes(prompts, average(models)), rtol=1e-6, atol=1e-9)


def test_one_setting_is_ridge_and_all_inputs_are_plain_bayes():
    prompts = make_prompts()
    ridge = algorithms.ridge(prompts, penalty=0.25).predictions
    torch.testing.assert_close(algorithms.mixture_bayes(prompts, noise_stds=[0.5]).predictions, ridge)
    torch.testing.assert_close(algorithms.sparse_bayes(prompts, sparsity=4, noise_std=0.5).predictions, ridge)


def test_without_noise_one_point_more_than_weights_settles_them():
    task = SparseLinearRegression(x_dim=6, n_context=8, sparsity=2)
    prompts = task.sample(200, seed=0, dtype=torch.float64)
    errors = (algorithms.sparse_bayes(prompts, sparsity=2).predictions[0] - prompts.ys).abs()[..., 0]
    assert errors[:, 3:].median(0).values.max() < 1e-6
    assert errors[:, 4:].max() < 1e-3  # some inputs are tiny
    assert errors[:, 2].median() > 0.01


# ---- finite pools ----


def posterior_mean(pool: np.ndarray, noise_std: float):
    """Go through the tasks: the likelihood of each is the product over points of Gaussian densities."""

    def predict(xs: np.ndarray, ys: np.ndarray, query: np.ndarray) -> np.ndarray:
        densities = []
        for weights in pool:
            density = 1.0
            for x, y in zip(xs, ys, strict=True):
                for k in range(len(y)):
                    density *= math.exp(-((y[k] - x @ weights[:, k]) ** 2) / (2 * noise_std**2))
            densities.append(density)
        return np.sum([d * (query @ w) for d, w in zip(densities, pool, strict=True)], axis=0) / sum(densities)

    return predict


@pytest.mark.parametrize("y_dim", [1, 2])
@pytest.mark.parametrize("noise_std", [0.5, 2.0])
def test_dmmse_is_the_posterior_mean_on_every_prefix(y_dim, noise_std):
    prompts = make_prompts(y_dim=y_dim)
    pool = np.random.default_rng(0).normal(size=(6, 4, y_dim))
    expected = over_prefixes(prompts, posterior_mean(pool, noise_std), empty=True)
    weights = torch.from_numpy(pool)
    for shaped in (weights, weights[..., 0]) if y_dim == 1 else (weights,):
        trajectory = algorithms.dmmse(prompts, pool=shaped, noise_std=noise_std)
        np.testing.assert_allclose(trajectory.predictions[0].numpy(), expected, rtol=1e-9, atol=1e-12)


def test_unlikely_contexts_do_not_underflow():
    task = TaskPool(x_dim=3, n_context=12, n_tasks=4, noise_std=1e-3)
    prompts = task.replace(seed=1).sample(20, seed=0, dtype=torch.float64)  # of other tasks: likelihoods like e^(-1e6)
    costs = (prompts.ys[:, :-1] - prompts.xs[:, :-1] @ task.weights.T).square().sum(1)
    nearest = task.weights[costs.argmin(-1)].double()
    predicted = algorithms.dmmse(prompts, pool=task.weights, noise_std=1e-3).query()[0, :, 0]
    torch.testing.assert_close(predicted, (prompts.query.xs * nearest).sum(-1))


def test_without_a_context_it_is_the_mean_of_the_pool_and_with_one_task_that_task():
    prompts = make_prompts()
    pool = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = algorithms.dmmse(prompts.prefix(0), pool=pool, noise_std=0.5).predictions[0]
    torch.testing.assert_close(first[..., 0], prompts.xs[:, :1] @ pool.mean(0))
    one = algorithms.dmmse(prompts, pool=pool[:1], noise_std=0.5).predictions[0]
    torch.testing.assert_close(one[..., 0], prompts.xs @ pool[0])


def test_without_noise_it_is_the_limit_of_little_noise_and_keeps_all_tasks_that_fit():
    task = TaskPool(x_dim=3, n_context=6, n_tasks=50, noise_std=0.0)
    prompts = task.sample(30, seed=0, dtype=torch.float64)
    exact = algorithms.dmmse(prompts, pool=task.weights, noise_std=0.0).predictions
    nearly = algorithms.dmmse(prompts, pool=task.weights, noise_std=1e-4).predictions
    torch.testing.assert_close(nearly[:, :, 2:], exact[:, :, 2:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exact[0, :, 2:], prompts.ys[:, 2:], rtol=1e-9, atol=1e-9)
    pool = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0]])  # the first input fits the first two tasks
    xs = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    fitted = algorithms.dmmse(Prompts(xs, xs @ pool[0][:, None]), pool=pool, noise_std=0.0, with_weights=True)
    assert fitted.weights is not None
    torch.testing.assert_close(fitted.weights[0, 0, :, :, 0], torch.stack([pool.mean(0), pool[:2].mean(0)]))


def test_with_many_tasks_it_comes_near_to_ridge():
    task = TaskPool(x_dim=2, n_context=6, n_tasks=20_000)
    prompts = task.new_tasks.sample(50, seed=0, dtype=torch.float64)
    pooled = algorithms.dmmse(prompts, pool=task.weights, noise_std=0.5).predictions
    ridge = algorithms.ridge(prompts, penalty=0.25).predictions
    assert (pooled - ridge).square().mean() < 1e-3 * ridge.square().mean()


@given(st.integers(0, 2**31), st.floats(1e-6, 1e6), st.integers(1, 20))
def test_weights_are_between_those_of_the_pool_whatever_the_noise(seed, noise_std, n_tasks):
    task = TaskPool(x_dim=2, n_context=5, n_tasks=n_tasks, seed=seed)
    fitted = algorithms.dmmse(task.sample(3, seed=seed), pool=task.weights, noise_std=noise_std, with_weights=True)
    assert fitted.weights is not None
    low, high = task.weights.amin(0), task.weights.amax(0)
    assert ((fitted.weights[0, ..., 0] >= low - 1e-5) & (fitted.weights[0, ..., 0] <= high + 1e-5)).all()
