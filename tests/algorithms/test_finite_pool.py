import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.algorithms.mixtures import pool_posterior
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.tasks import TaskPool

from .reference import make_prompts, over_prefixes


def posterior_mean(pool: np.ndarray, noise_std: float):
    """One task after the other: its likelihood is the product over points of Gaussian densities."""

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
    expected = over_prefixes(prompts, posterior_mean(pool, noise_std))
    weights = torch.from_numpy(pool)
    shapes = [weights, weights[..., 0]] if y_dim == 1 else [weights]
    for shaped in shapes:
        trajectory = algorithms.dmmse(prompts, pool=shaped, noise_std=noise_std)
        np.testing.assert_allclose(trajectory.predictions[0].numpy(), expected, rtol=1e-9, atol=1e-12)


def test_unlikely_contexts_do_not_underflow():
    task = TaskPool(x_dim=3, n_context=12, n_tasks=4, noise_std=1e-3)
    prompts = task.replace(seed=1).sample(20, seed=0, dtype=torch.float64)  # of other tasks: likelihoods like e^(-1e6)
    posterior = pool_posterior(prompts, pool=task.weights, noise_std=1e-3)
    torch.testing.assert_close(posterior.sum(-1), torch.ones(20, 13, dtype=torch.float64))
    costs = (prompts.ys[:, :-1] - prompts.xs[:, :-1] @ task.weights.T).square().sum(1)
    assert torch.equal(posterior[:, -1].argmax(-1), costs.argmin(-1))


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
    twins = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0]])  # the first input tells the third from the others only
    xs = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    posterior = pool_posterior(type(prompts)(xs, xs @ twins[0][:, None]), pool=twins, noise_std=0.0)
    assert posterior[0].tolist() == [[1 / 3] * 3, [0.5, 0.5, 0.0]]


def test_with_many_tasks_it_comes_near_to_ridge():
    task = TaskPool(x_dim=2, n_context=6, n_tasks=20_000)
    prompts = task.new_tasks.sample(50, seed=0, dtype=torch.float64)
    pooled = algorithms.dmmse(prompts, pool=task.weights, noise_std=0.5).predictions
    ridge = algorithms.ridge(prompts, penalty=0.25).predictions
    assert (pooled - ridge).square().mean() < 1e-3 * ridge.square().mean()


def test_no_other_learner_has_a_smaller_loss_on_the_pool():
    task = TaskPool(n_tasks=16)
    prompts = task.sample(2000, seed=0)
    losses = {name: squared_errors(each, prompts).mean() for name, each in algorithms.references(task).items()}
    assert list(losses) == ["dmmse", "ridge", "ols"]
    assert losses["dmmse"] < 0.9 * losses["ridge"] < losses["ols"]
    new = task.new_tasks.sample(2000, seed=0)
    losses = {name: squared_errors(each, new).mean() for name, each in algorithms.references(task).items()}
    assert losses["ridge"] < 0.5 * losses["dmmse"]


def test_parts_of_the_prompts_the_query_alone_and_weights_agree_with_the_whole(monkeypatch):
    prompts = make_prompts(y_dim=2)
    pool = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = {"pool": pool, "noise_std": 0.5, "with_weights": True}
    whole = algorithms.dmmse(prompts, **options)
    monkeypatch.setattr("mechicl.algorithms.spectra.CHUNK_ELEMENTS", 1)
    monkeypatch.setattr("mechicl.algorithms.mixtures.CHUNK_ELEMENTS", 1)
    parts, query = algorithms.dmmse(prompts, **options), algorithms.dmmse(prompts, **options, at="query")
    assert whole.weights is not None
    assert parts.weights is not None
    assert query.weights is not None
    torch.testing.assert_close(parts.weights, whole.weights)
    torch.testing.assert_close(query.weights, whole.weights[:, :, -1:])
    torch.testing.assert_close(query.predictions, whole.predictions[:, :, -1:])
    torch.testing.assert_close(
        torch.einsum("npx,npxy->npy", prompts.xs, whole.weights[0]), whole.predictions[0], rtol=1e-9, atol=1e-9
    )
    assert algorithms.dmmse(prompts[:0], **options).predictions.shape == (1, 0, 8, 2)
    assert algorithms.dmmse(prompts.to(torch.float32), **options).predictions.dtype == torch.float32


@hypothesis.given(st.integers(0, 2**31), st.floats(1e-6, 1e6), st.integers(1, 20))
def test_a_posterior_is_a_distribution_whatever_the_noise(seed, noise_std, n_tasks):
    task = TaskPool(x_dim=2, n_context=5, n_tasks=n_tasks, seed=seed)
    prompts = task.sample(3, seed=seed)
    posterior = pool_posterior(prompts, pool=task.weights, noise_std=noise_std)
    torch.testing.assert_close(posterior.sum(-1), torch.ones(3, 6, dtype=torch.float64))
    assert (posterior >= 0).all()


@pytest.mark.parametrize(
    ("pool", "noise_std", "message"),
    [
        (torch.zeros(3, 5), 0.5, "got the shape"),
        (torch.zeros(0, 4), 0.5, "at least one task"),
        (torch.zeros(3, 4, 2), 0.5, "x, y = \\(4, 1\\)"),
        (torch.full((3, 4), torch.nan), 0.5, "finite"),
        (torch.zeros(3, 4), -1.0, "noise_std must be >= 0"),
        (torch.zeros(3, 4), math.inf, "noise_std must be >= 0"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(pool, noise_std, message):
    with pytest.raises(ValueError, match=message):
        algorithms.dmmse(make_prompts(), pool=pool, noise_std=noise_std)


def test_the_name_of_a_learner_shows_a_pool_by_its_shape():
    learner = AlgorithmLearner(algorithms.dmmse, {"pool": torch.zeros(3, 4), "noise_std": 0.5})
    assert learner.name == "dmmse(pool=[3 x 4], noise_std=0.5)"
