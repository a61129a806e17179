"""Filters of eigenvalues against loops, and fits of their parameters against least squares."""

import numpy as np
import pytest
import torch

from mechicl.algorithms.card import FitProblem
from mechicl.algorithms.gradient_descent import gd_plus_plus_filters, momentum_filter
from mechicl.algorithms.preconditioned import PRECONDITIONED, descend_on_features
from mechicl.algorithms.spectral_fit import SpectralProblem, hats, polynomials
from mechicl.algorithms.stepwise import ResidualDescent
from mechicl.analysis.behaviour import SpectralLearner
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression


def _damped(eigenvalues):
    return 1 / (eigenvalues + 0.3)


def _by_hand(prompts: Prompts, function) -> np.ndarray:
    """`x f(S) B` of every prefix, one eigendecomposition at a time."""
    xs, ys = prompts.xs.double().numpy(), prompts.ys.double().numpy()
    predictions = np.zeros_like(ys)
    for i in range(xs.shape[0]):
        for t in range(xs.shape[1]):
            context, targets = xs[i, :t], ys[i, :t]
            values, vectors = np.linalg.eigh(context.T @ context)
            matrix = vectors @ np.diag(function(np.maximum(values, 0))) @ vectors.T
            predictions[i, t] = xs[i, t] @ matrix @ context.T @ targets
    return predictions


@pytest.mark.parametrize(("d", "n", "m"), [(1, 0, 1), (5, 3, 2), (2, 7, 3)])
def test_predictions_apply_the_filter_to_the_second_moments_of_every_prefix(d, n, m):
    prompts = LinearRegression(x_dim=d, n_context=n, y_dim=m, inputs="gaussian").sample(3, seed=0, dtype=torch.float64)
    expected = _by_hand(prompts, _damped)
    learner = SpectralLearner(_damped, "damped")
    np.testing.assert_allclose(learner.predict_prefixes(prompts).numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(learner.predict(prompts).numpy(), expected[:, -1], atol=1e-10)
    trajectory = learner.trajectory(prompts, with_weights=True)
    assert trajectory.steps == (1,)
    assert trajectory.name == "damped"
    assert trajectory.weights is not None
    implied = torch.einsum("ptx,ptxy->pty", prompts.xs, trajectory.weights[0])
    np.testing.assert_allclose(implied.numpy(), expected, atol=1e-10)


def test_predictions_are_differentiable_in_the_query_and_keep_its_dtype():
    prompts = LinearRegression(x_dim=4, n_context=3).sample(5, seed=0)
    query = prompts.query.xs.clone().requires_grad_()
    predictions = SpectralLearner(_damped, "damped").predict(prompts.with_query(query))
    assert predictions.dtype == torch.float32
    (slope,) = torch.autograd.grad(predictions.sum(), query)
    context = [part.double().numpy() for part in prompts.context]
    weights = [np.linalg.solve(x.T @ x + 0.3 * np.eye(4), x.T @ y) for x, y in zip(*context, strict=True)]
    np.testing.assert_allclose(slope.numpy(), np.array(weights)[..., 0], atol=1e-5)


PROMPTS = LinearRegression(x_dim=4, n_context=6, y_dim=2).sample(60, seed=1, dtype=torch.float64)


def _descended(steps: int, a: list[float], gamma: list[float]) -> torch.Tensor:
    """Predictions of GD++, its own moves on the points themselves."""
    predictions = []
    for xs, ys in zip(PROMPTS.xs.numpy(), PROMPTS.ys.numpy(), strict=True):
        x, q, y = xs[:-1].copy(), xs[-1].copy(), ys[:-1].copy()
        total = np.zeros(2)
        for i in range(steps):
            change, second = a[i] * x.T @ y, x.T @ x
            total = total + q @ change
            y = y - x @ change
            x, q = x - gamma[i] * x @ second, q - gamma[i] * q @ second
        predictions.append(total)
    return torch.from_numpy(np.array(predictions))


def test_the_problem_is_the_context_in_its_eigenbasis():
    problem = SpectralProblem.from_prompts(PROMPTS, PROMPTS.query.ys)
    for i, xs in enumerate(PROMPTS.context.xs.numpy()):
        np.testing.assert_allclose(problem.eigenvalues[i].numpy(), np.linalg.eigvalsh(xs.T @ xs), atol=1e-12)
    ones = problem.contributions.sum(1)  # f = 1 predicts x B
    expected = torch.einsum("px,pnx,pny->py", PROMPTS.query.xs, PROMPTS.context.xs, PROMPTS.context.ys)
    torch.testing.assert_close(ones, expected)
    error = problem.error(_damped(problem.eigenvalues)).item()
    assert error == pytest.approx(np.square(_by_hand(PROMPTS, _damped)[:, -1] - PROMPTS.query.ys.numpy()).mean())


def test_a_descent_finds_gd_plus_plus_with_parameters_of_its_own_in_each_step():
    a, gamma = [0.3, 0.7], [0.1, 0.0]
    problem = SpectralProblem.from_prompts(PROMPTS, _descended(2, a, gamma))

    def family(parameters: torch.Tensor) -> torch.Tensor:
        return gd_plus_plus_filters(
            problem.eigenvalues, parameters[:2], torch.stack([parameters[2], 0 * parameters[2]])
        )[-1]

    for start in ([0.4, 0.4, 0.05], [0.5, 0.5, 0.3]):  # other parameters predict nearly the same
        assert problem.descend(family, torch.tensor(start, dtype=torch.float64))[1] < 1e-11
    best, error = problem.descend(family, torch.tensor([0.3, 0.6, 0.12], dtype=torch.float64))
    torch.testing.assert_close(best, torch.tensor([0.3, 0.7, 0.1], dtype=torch.float64), rtol=1e-4, atol=1e-4)
    assert error < 1e-20


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_linear_coefficients_are_those_of_least_squares(degree):
    problem = SpectralProblem.from_prompts(PROMPTS, PROMPTS.query.ys)
    largest = problem.eigenvalues.max().item()
    basis = polynomials(degree, largest)
    values = basis(problem.eigenvalues).numpy()
    z = 2 * problem.eigenvalues.numpy() / largest - 1
    for k in range(degree):
        np.testing.assert_allclose(values[..., k], np.cos(k * np.arccos(np.clip(z, -1, 1))), atol=1e-7)
    powers = np.stack([problem.eigenvalues.numpy() ** k for k in range(degree)], -1)
    design = np.einsum("pxk,pxy->pyk", powers, problem.contributions.numpy()).reshape(-1, degree)
    best, *_ = np.linalg.lstsq(design, problem.targets.numpy().ravel(), rcond=None)
    coefficients = problem.linear(basis)
    assert coefficients.shape == (degree,)
    np.testing.assert_allclose(values @ coefficients.numpy(), powers @ best, atol=1e-8)  # the same function


def test_hats_are_a_partition_of_unity_that_interpolates():
    knots = torch.tensor([0.0, 0.5, 2.0, 3.5], dtype=torch.float64)
    basis = hats(knots)
    torch.testing.assert_close(basis(knots), torch.eye(4, dtype=torch.float64))
    at = torch.linspace(-1, 6, 57, dtype=torch.float64).reshape(3, 19)
    values = basis(at)
    assert values.shape == (3, 19, 4)
    assert (values >= 0).all()
    torch.testing.assert_close(values.sum(-1), torch.ones_like(at))
    heights = torch.tensor([1.0, -2.0, 0.3, 5.0], dtype=torch.float64)
    expected = np.interp(at.numpy(), knots.numpy(), heights.numpy())  # constant outside as well
    np.testing.assert_allclose((values @ heights).numpy(), expected, atol=1e-12)


DOUBLE = LinearRegression(x_dim=3, n_context=8, y_dim=2)
MATRIX = torch.tensor([[2.0, 0.5, 0.0], [0.0, 3.0, 0.5], [0.1, 0.0, 1.0]], dtype=torch.float64)
AFFINE = torch.tensor([[0.5, 0.2, 0.0, 0.1], [0.2, 1.0, 0.0, 0.0], [0, 0, 0.7, 0], [0, 0.3, 0, 0.4]]).double()


def test_momentum_is_that_of_the_algorithm_step_by_step():
    prompts = DOUBLE.sample(20, seed=0, dtype=torch.float64)
    for steps in (1, 2, 5):
        learner = SpectralLearner(lambda s, k=steps: momentum_filter(s, k, 0.1, 0.4), "momentum")
        expected = ResidualDescent(steps, step_size=0.1, momentum=0.4).predict(prompts)
        torch.testing.assert_close(learner.predict(prompts), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("matrix", "constant"), [(MATRIX, False), (AFFINE, True)])
def test_descent_on_features_is_a_plain_loop(matrix, constant):
    prompts = DOUBLE.sample(5, seed=1, dtype=torch.float64)
    predicted = descend_on_features(prompts, matrix=matrix, steps=3, constant=constant)
    for i, (xs, ys) in enumerate(zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True)):
        features = np.hstack([np.ones((len(xs), 1)), xs]) if constant else xs
        weights = np.zeros((features.shape[1], 2))
        for _ in range(3):
            errors = ys[:-1] - features[:-1] @ weights
            weights = weights + matrix.numpy() @ (features[:-1].T @ errors) / (len(xs) - 1)
        np.testing.assert_allclose(predicted[i].numpy(), features[-1] @ weights, atol=1e-12)


def test_too_many_numbers_in_a_matrix_are_not_fitted():
    wide = LinearRegression(x_dim=25, n_context=3).sample(40, seed=0, dtype=torch.float64)
    problem = FitProblem(wide, wide.query.ys[None], steps=3)
    assert [member.name for member in PRECONDITIONED.members(problem)] == ["preconditioned gradient descent, 1 step"]
