import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from mechicl import algorithms
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.tasks import MixedRegression, SparseLinearRegression

from .reference import make_prompts, over_prefixes


def average(models):
    """The models' posterior means, weighted by the density of the context under each: inputs, noise, weights."""

    def predict(xs, ys, query):
        logs, means = [], []
        for inputs, noise_std, weight_std in models:
            some = xs[:, inputs]
            covariance = weight_std**2 * some @ some.T + noise_std**2 * np.eye(len(xs))
            log = 0.0
            for k in range(ys.shape[1] if len(xs) else 0):
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


def test_no_other_reference_is_better():
    for task in (
        MixedRegression(x_dim=4, n_context=8, noise_stds=(0.1, 2.0)),
        SparseLinearRegression(x_dim=8, n_context=12, sparsity=2, noise_std=0.3),
    ):
        prompts = task.sample(500, seed=0)
        losses = {
            name: squared_errors(learner, prompts, at="points").mean().item()
            for name, learner in algorithms.references(task).items()
        }
        assert next(iter(losses)) == "bayes"
        assert all(losses["bayes"] < loss for name, loss in losses.items() if name != "bayes"), losses


@pytest.mark.parametrize("name", ["mixture_bayes", "sparse_bayes"])
def test_the_query_alone_parts_and_weights_agree_with_the_whole(name, monkeypatch):
    hyperparameters = {"noise_stds": (0.5, 1.0)} if name == "mixture_bayes" else {"sparsity": 2, "noise_std": 0.5}
    learner = AlgorithmLearner(getattr(algorithms, name), hyperparameters)
    prompts = make_prompts(y_dim=2)
    whole = learner.trajectory(prompts, with_weights=True)
    assert whole.weights is not None
    torch.testing.assert_close(torch.einsum("npx,npxy->npy", prompts.xs, whole.weights[0]), whole.predictions[0])
    monkeypatch.setattr("mechicl.algorithms.spectra.CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(learner.trajectory(prompts).predictions, whole.predictions)
    torch.testing.assert_close(learner.predict(prompts), whole.predictions[0, :, -1])
    assert learner.trajectory(prompts[:0]).predictions.shape == (1, 0, 8, 2)
    assert learner.predict(prompts.to(torch.float32)).dtype == torch.float32
    assert learner.predict_prefixes(prompts.prefix(0)).abs().max() == 0


@pytest.mark.parametrize(
    ("name", "hyperparameters", "message"),
    [
        ("mixture_bayes", {"noise_stds": ()}, "one or more noise_stds"),
        ("mixture_bayes", {"noise_stds": (0.1, 0.2), "weight_stds": (1.0, 1.0, 1.0)}, "as many weight_stds"),
        ("mixture_bayes", {"noise_stds": (0.1, 0.0)}, "noise_std must be positive"),
        ("sparse_bayes", {"sparsity": 0}, "sparsity must be an int"),
        ("sparse_bayes", {"sparsity": 5}, "sparsity must be 1 to x_dim=4, got 5"),
        ("sparse_bayes", {"sparsity": 1, "noise_std": math.nan}, "noise_std must be a finite number, got nan"),
        ("sparse_bayes", {"sparsity": 1, "weight_std": 0.0}, "weight_std must be positive"),
    ],
)
def test_settings_out_of_range_are_refused(name, hyperparameters, message):
    with pytest.raises(ValueError, match=message):
        getattr(algorithms, name)(make_prompts(), **hyperparameters)
