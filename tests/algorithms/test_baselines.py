"""Baselines, kernel smoothing and nonlinear learners against plain loops, scikit-learn and PyTorch."""

import math

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.algorithms import baselines
from mechicl.algorithms.spectra import ConditioningWarning
from mechicl.learners import AlgorithmLearner
from mechicl.prompts import Prompts
from mechicl.tasks import LogisticRegression
from tests.algorithms.reference import average, awkward, make_prompts, over_prefixes


# ---- baselines ----
def nearest(n_neighbours):
    def predict(xs, ys, query):
        order = sorted(range(len(xs)), key=lambda i: (((xs[i] - query) ** 2).sum(), i))
        return np.mean([ys[i] for i in order[:n_neighbours]], axis=0)

    return predict


@given(x_dim=st.integers(1, 4), y_dim=st.integers(1, 3), n_context=st.integers(0, 7), k=st.integers(1, 9))
def test_averages_and_neighbours_of_any_shape(x_dim, y_dim, n_context, k):
    prompts = make_prompts(n_prompts=2, n_context=n_context, x_dim=x_dim, y_dim=y_dim)
    for got, expected in (
        (algorithms.averaging(prompts), average),
        (algorithms.nearest_neighbours(prompts, n_neighbours=k), nearest(k)),
    ):
        np.testing.assert_allclose(got.predictions[0], over_prefixes(prompts, expected), rtol=1e-12, atol=1e-13)


def test_ties_between_neighbours_go_to_the_earlier_points():
    prompts = make_prompts(n_context=5)
    prompts.xs[:] = 1.0
    got = algorithms.nearest_neighbours(prompts, n_neighbours=2).predictions[0]
    torch.testing.assert_close(got[:, -1], prompts.ys[:, :2].mean(1))


def assert_optimal(prompts, penalty, tolerance=1e-7):
    """The gradient of the squared error is -penalty times the sign of a weight, and no larger where that is 0."""
    weights = algorithms.lasso(prompts, penalty=penalty, with_weights=True).weights
    assert weights is not None
    for t in range(1, prompts.n_context + 1):
        xs, ys, w = prompts.xs[:, :t], prompts.ys[:, :t], weights[0, :, t]
        gradient = xs.mT @ (xs @ w - ys) / t
        scale = tolerance * (1 + (xs.mT @ ys).norm() + penalty)
        assert (gradient.abs() <= penalty + scale).all()
        on = w.abs() > 1e-12
        assert ((gradient + penalty * w.sign())[on].abs() <= scale).all()


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.floats(1e-3, 10.0), st.integers(1, 3))
def test_lasso_weights_satisfy_the_optimality_conditions(seed, penalty, y_dim):
    assert_optimal(make_prompts(n_context=6, y_dim=y_dim, seed=seed), penalty)


@awkward
@pytest.mark.parametrize("penalty", [1e-3, 0.1])
def test_the_lasso_solves_awkward_contexts(prompts, penalty):
    assert_optimal(prompts, penalty, tolerance=1e-6)


@given(st.integers(0, 2**31), st.sampled_from([1e-3, 0.05, 0.5]), st.booleans())
def test_the_lasso_of_inputs_whose_correlations_tie(seed, penalty, boolean):
    random = np.random.default_rng(seed)
    xs = random.integers(-1, 2, (2, 9, 4)) if not boolean else random.choice([-1, 1], (2, 9, 4))
    assert_optimal(Prompts(xs.astype(float), random.integers(-1, 2, (2, 9, 1)).astype(float)), penalty)


def test_the_lasso_warns_where_its_path_does_not_end(monkeypatch):
    monkeypatch.setattr(baselines, "MOST_CHANGES", 0)
    with pytest.warns(ConditioningWarning, match="has not reached the penalty for"):
        algorithms.lasso(make_prompts(), penalty=1e-3)


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
    predictions = algorithms.greedy_tree(prompts, depth=depth).predictions[0].numpy()
    np.testing.assert_allclose(predictions, over_prefixes(prompts, grow(depth)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("y_dim", [1, 2])
def test_a_tree_is_grown_by_recursion_on_every_prefix(depth, y_dim):
    assert_grown(make_prompts(n_prompts=10, n_context=25, y_dim=y_dim), depth)


@pytest.mark.parametrize("mean", [1e3, -1e6])
def test_a_tree_splits_as_without_the_mean_of_the_targets(mean):
    prompts = make_prompts(n_prompts=10, n_context=25, y_dim=2)
    ys = (1024 * prompts.ys).round() / 1024  # to which the mean is added exactly
    expected = over_prefixes(Prompts(prompts.xs, ys), grow(3))
    predictions = algorithms.greedy_tree(Prompts(prompts.xs, ys + mean), depth=3).predictions[0, :, 1:]
    np.testing.assert_allclose(predictions - mean, expected[:, 1:], rtol=0, atol=1e-8)


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(0, 8))
def test_a_tree_of_whole_numbers_and_ties(seed, depth, n_context):
    random = np.random.default_rng(seed)
    xs = random.integers(-1, 2, (2, n_context + 1, 3)).astype(float)
    assert_grown(Prompts(xs, random.integers(0, 2, (2, n_context + 1, 1)).astype(float)), depth)


# ---- kernel smoothing ----
def smoother(h):
    def predict(xs, ys, query):
        total, weighted = 0.0, np.zeros(ys.shape[1])
        for x, y in zip(xs, ys, strict=True):
            weight = math.exp(-((x - query) ** 2).sum() / (2 * h * h))
            total, weighted = total + weight, weighted + weight * y
        return weighted / total

    return predict


@settings(max_examples=15)
@given(
    x_dim=st.integers(1, 4),
    y_dim=st.integers(1, 3),
    n_context=st.integers(0, 7),
    bandwidth=st.floats(0.3, 30),
)
def test_any_shape(x_dim, y_dim, n_context, bandwidth):
    prompts = make_prompts(n_prompts=2, n_context=n_context, x_dim=x_dim, y_dim=y_dim)
    got = algorithms.kernel_smoothing(prompts, bandwidth).predictions[0]
    np.testing.assert_allclose(got, over_prefixes(prompts, smoother(bandwidth)), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("bandwidth", [1e12, 1e300])
def test_a_wide_kernel_gives_the_mean(bandwidth):
    prompts = make_prompts(y_dim=2)
    constant = Prompts(torch.ones_like(prompts.xs[..., :1]), prompts.ys)  # their averaging estimator is the mean
    got = algorithms.kernel_smoothing(prompts, bandwidth).predictions
    torch.testing.assert_close(got, algorithms.averaging(constant).predictions)


@pytest.mark.parametrize("bandwidth", [1e-6, 1e-200])
def test_a_narrow_kernel_gives_the_nearest_neighbour(bandwidth):
    prompts = make_prompts(n_context=9)
    got = algorithms.kernel_smoothing(prompts, bandwidth).predictions
    torch.testing.assert_close(got, algorithms.nearest_neighbours(prompts, n_neighbours=1).predictions)


def test_gradients_of_query_and_context():
    prompts = make_prompts(n_prompts=2, n_context=4, x_dim=2)

    def predict(xs, ys):
        return algorithms.kernel_smoothing(Prompts(xs, ys), 0.7).predictions

    assert torch.autograd.gradcheck(predict, (prompts.xs.requires_grad_(), prompts.ys.requires_grad_()))


# ---- nonlinear ----
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


SIGNS = LogisticRegression(x_dim=3, n_context=12).sample(4, seed=0, dtype=torch.float64)


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


@pytest.mark.parametrize("y_dim", [1, 2])
def test_it_is_pytorchs_network_and_adam_trained_on_each_prefix_alone(y_dim):
    prompts = make_prompts(y_dim=y_dim)
    everything = algorithms.network_descent(prompts, n_hidden=7, steps=12, learning_rate=0.05, seed=3)
    generator = torch.Generator().manual_seed(3)
    shapes = (4, 7), (1, 7), (7, y_dim), (1, y_dim)
    values = [2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1 for shape in shapes]
    for n in range(3):
        for t in (1, 4, 7):
            first, second = torch.nn.Linear(4, 7), torch.nn.Linear(7, y_dim)
            network = torch.nn.Sequential(first, torch.nn.ReLU(), second).double()
            starts = values[0].T / 2, values[1][0] / 2, values[2].T / 7**0.5, values[3][0] / 7**0.5
            for parameter, start in zip(network.parameters(), starts, strict=True):
                parameter.data.copy_(start)
            optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
            for _ in range(12):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(network(prompts.xs[n, :t]), prompts.ys[n, :t]).backward()
                optimizer.step()
            torch.testing.assert_close(everything.predictions[0, n, t], network(prompts.xs[n, t]), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("weight_std", [0.7, 3.0])
def test_logistic_regression_on_one_point_in_closed_form(weight_std):
    prompts = Prompts(torch.tensor([[[1.5], [2.0]]]).double(), torch.tensor([[[1.0], [0.0]]]).double())
    found = {
        kind: algorithms.logistic(prompts, weight_std=weight_std, posterior=kind).predictions[0, 0, :, 0]
        for kind in ("mode", "laplace")
    }
    # the derivative of the log density at the mode: 1.5 / (1 + exp(1.5 w)) = w / weight_std²
    mode = scipy.optimize.brentq(lambda w: 1.5 / (1 + math.exp(1.5 * w)) - w / weight_std**2, 0, 100)
    share = 1 / (1 + math.exp(-1.5 * mode))
    spread = 2.0 / math.sqrt(1 / weight_std**2 + 1.5**2 * share * (1 - share))
    mean, _ = scipy.integrate.quad(
        lambda z: math.tanh((2 * mode + spread * z) / 2) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi), -12, 12
    )
    assert found["mode"].tolist() == pytest.approx([0, math.tanh(mode)], abs=1e-9)
    assert found["laplace"].tolist() == pytest.approx([0, mean], abs=1e-4)
