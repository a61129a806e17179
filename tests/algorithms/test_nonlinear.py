"""Features, logistic regression and small networks against numpy, scikit-learn, a grid and PyTorch's own training."""

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.prompts import Prompts
from mechicl.tasks import LogisticRegression, QuadraticRegression, SineRegression

from .reference import make_prompts, over_prefixes

# ---- features ----


def test_least_squares_on_features_is_least_squares_in_the_features():
    prompts = make_prompts()

    def features(xs):
        return torch.cat([xs**2, xs[..., :1].exp()], -1)

    def predict(xs, ys, query):
        mapped = features(torch.from_numpy(np.vstack([xs, query]))).numpy()
        return mapped[-1] @ np.linalg.pinv(mapped[:-1], rcond=1e-7) @ ys

    trajectory = algorithms.on_features(prompts, features=features)
    np.testing.assert_allclose(trajectory.predictions[0].numpy(), over_prefixes(prompts, predict), rtol=0, atol=1e-7)
    assert trajectory.name == "OLS on features"


def test_any_algorithm_and_its_hyperparameters_may_follow():
    prompts = make_prompts(dtype=torch.float32)
    options = {"algorithm": algorithms.gradient_descent, "hyperparameters": {"steps": [1, 5], "step_size": 0.01}}
    learner = AlgorithmLearner(algorithms.on_features, {"features": torch.square, **options})
    trajectory = learner.trajectory(prompts)
    assert trajectory.steps == (1, 5)
    assert trajectory.predictions.dtype == torch.float32
    squared = Prompts(prompts.xs.double() ** 2, prompts.ys.double())
    expected = algorithms.gradient_descent(squared, steps=[1, 5], step_size=0.01).predictions
    torch.testing.assert_close(trajectory.predictions, expected.float())
    torch.testing.assert_close(learner.predict(prompts), expected[-1, :, -1].float())
    with pytest.raises(ValueError, match="has no weights"):
        learner.trajectory(prompts, with_weights=True)


def test_sines_are_settled_by_two_points_and_quadratics_by_one_a_dimension():
    for task, n in ((SineRegression(n_context=2), 2), (QuadraticRegression(x_dim=3, n_context=3), 3)):
        best = next(iter(algorithms.references(task).values()))
        errors = squared_errors(best, task.sample(200, seed=0, dtype=torch.float64), at="points")
        assert errors[:, n].median() < 1e-12
        assert errors[:, n - 1].median() > 1e-6


# ---- logistic regression ----

SIGNS = LogisticRegression(x_dim=3, n_context=12).sample(4, seed=0, dtype=torch.float64)


@pytest.mark.parametrize("weight_std", [0.3, 1.0, 30.0])
def test_the_mode_is_the_solution_of_scikit_learn(weight_std):
    linear_model = pytest.importorskip("sklearn.linear_model")

    def predict(xs, ys, query):
        if len(np.unique(ys)) < 2:
            return np.full(1, np.nan)  # scikit-learn needs both classes
        model = linear_model.LogisticRegression(C=weight_std**2, fit_intercept=False, tol=1e-10, max_iter=10_000)
        return model.fit(xs, ys[:, 0]).predict_proba(query[None])[:, 1] * 2 - 1

    expected = over_prefixes(SIGNS, predict)
    predictions = algorithms.logistic(SIGNS, weight_std=weight_std, posterior="mode").predictions[0].numpy()
    both = np.isfinite(expected)
    assert both.sum() > 30
    np.testing.assert_allclose(predictions[both], expected[both], rtol=0, atol=2e-4)


@pytest.mark.parametrize("weight_std", [0.1, 1.0, 100.0])
def test_at_the_mode_the_posterior_is_flat_on_every_prefix(weight_std):
    for t in range(13):
        prefix = SIGNS.prefix(t)
        # weights from the predictions of unit queries, tanh(w / 2); the prior's scale keeps them away from 1
        units = [prefix.with_query(torch.eye(3).double()[i].expand(4, 3) / weight_std) for i in range(3)]
        mode = [algorithms.logistic(each, weight_std=weight_std, posterior="mode").query()[0, :, 0] for each in units]
        w = (2 * weight_std * torch.stack(mode, -1).atanh()).requires_grad_()
        margins = SIGNS.ys[:, :t, 0] * torch.einsum("npx,nx->np", SIGNS.xs[:, :t], w)
        cost = torch.nn.functional.softplus(-margins).sum() + w.square().sum() / (2 * weight_std**2)
        (gradient,) = torch.autograd.grad(cost, w)
        assert gradient.abs().max() < 1e-7 * (1 + w.abs().max())


def test_the_laplace_average_is_nearer_to_exact_bayes_than_the_mode():
    task = LogisticRegression(x_dim=1, n_context=6, weight_scale=2.0)
    prompts = task.sample(200, seed=1, dtype=torch.float64)
    grid = np.linspace(-16, 16, 4001)
    prior = -(grid**2) / 8

    def predict(xs, ys, query):
        logs = prior - np.logaddexp(0, -np.outer(grid, xs[:, 0] * ys[:, 0])).sum(1)
        density = np.exp(logs - logs.max())
        return np.atleast_1d((density * np.tanh(grid * query[0] / 2)).sum() / density.sum())

    exact = torch.from_numpy(over_prefixes(prompts, predict))
    laplace, mode = (
        (algorithms.logistic(prompts, weight_std=2.0, posterior=kind).predictions[0] - exact)[:, 1:].square().mean()
        for kind in ("laplace", "mode")
    )
    assert laplace < 0.07**2
    assert laplace < 0.8**2 * mode


def test_separable_labels_stay_finite():
    xs = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(1, 9, 1) + 0.01
    mode = algorithms.logistic(Prompts(xs, xs.sign()), weight_std=1e4, posterior="mode").predictions[0, 0]
    assert mode.isfinite().all()
    assert mode[-1] > 0.999


def test_targets_of_several_dimensions_the_query_alone_and_parts(monkeypatch):
    two = Prompts(SIGNS.xs, torch.cat([SIGNS.ys, -SIGNS.ys], -1))
    learner = AlgorithmLearner(algorithms.logistic)
    whole = learner.predict_prefixes(two)
    assert whole[:, 0].abs().max() < 1e-12
    torch.testing.assert_close(whole[..., :1], learner.predict_prefixes(SIGNS))
    torch.testing.assert_close(whole[..., 0], -whole[..., 1])
    monkeypatch.setattr("mechicl.algorithms.spectra.CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(learner.predict(two), whole[:, -1])
    assert learner.predict_prefixes(two[:0]).shape == (0, 13, 2)
    assert learner.predict(two.to(torch.float32)).dtype == torch.float32


# ---- networks ----

OPTIONS = {"n_hidden": 7, "steps": 12, "learning_rate": 0.05}


@pytest.mark.parametrize("y_dim", [1, 2])
def test_it_is_pytorchs_network_and_adam_trained_on_each_prefix_alone(y_dim):
    prompts = make_prompts(y_dim=y_dim)
    everything = algorithms.network_descent(prompts, **OPTIONS)
    assert everything.steps == (12,)
    generator = torch.Generator().manual_seed(0)
    values = [
        2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
        for shape in ((4, 7), (1, 7), (7, y_dim), (1, y_dim))
    ]
    for n in range(3):
        for t in (1, 4, 7):
            first, second = torch.nn.Linear(4, 7), torch.nn.Linear(7, y_dim)
            network = torch.nn.Sequential(first, torch.nn.ReLU(), second).double()
            with torch.no_grad():
                first.weight.copy_(values[0].T / 2)
                first.bias.copy_(values[1][0] / 2)
                second.weight.copy_(values[2].T / 7**0.5)
                second.bias.copy_(values[3][0] / 7**0.5)
            optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
            for _ in range(12):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(network(prompts.xs[n, :t]), prompts.ys[n, :t]).backward()
                optimizer.step()
            torch.testing.assert_close(everything.predictions[0, n, t], network(prompts.xs[n, t]), rtol=1e-7, atol=1e-9)


def test_other_seeds_are_other_networks_and_gradients_are_not_needed():
    prompts = make_prompts()
    zero, one = (algorithms.network_descent(prompts, **OPTIONS, seed=seed).predictions for seed in (0, 1))
    assert not torch.allclose(one, zero)
    with torch.no_grad():
        torch.testing.assert_close(algorithms.network_descent(prompts, **OPTIONS).predictions, zero)
