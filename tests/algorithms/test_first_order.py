"""Preconditioned, Chebyshev and online gradient descent against plain loops and known optimality."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl.algorithms import chebyshev, ols, online_gradient_descent, preconditioned_gd
from tests.algorithms.reference import make_prompts, over_prefixes, precondition


@pytest.mark.filterwarnings("ignore::mechicl.algorithms.DivergenceWarning")
@pytest.mark.parametrize("y_dim", [1, 2])
def test_preconditioned_steps_are_the_plain_loop(y_dim):
    prompts = make_prompts(y_dim=y_dim)
    matrices = [
        0.3 * torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)
    ]
    trajectory = preconditioned_gd(prompts, [0, 1, 3], preconditioner=matrices)
    for k, predictions in zip((0, 1, 3), trajectory.predictions, strict=True):
        expected = over_prefixes(prompts, precondition([m.numpy() for m in matrices[:k]]))
        np.testing.assert_allclose(predictions, expected, rtol=1e-10, atol=1e-12)
    query = preconditioned_gd(prompts, [3], preconditioner=matrices, at="query")
    torch.testing.assert_close(query.predictions[:, :, 0], trajectory.predictions[2:, :, -1])


def conjugate_interval_residual(eigenvalues: np.ndarray, steps: int) -> np.ndarray:
    """T_k(z(λ)) / T_k(z(0)) by numpy's Chebyshev series."""
    low, high = eigenvalues.min(), eigenvalues.max()
    series = np.polynomial.Chebyshev.basis(steps)
    return series((high + low - 2 * eigenvalues) / (high - low)) / series((high + low) / (high - low))


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 30])
def test_chebyshev_is_the_polynomial_of_the_full_context(steps):
    prompts = make_prompts(n_context=9)
    got = chebyshev(prompts, [steps], at="query").predictions[0, :, 0].numpy()
    for i in range(len(prompts)):
        xs, ys = prompts.context.xs[i].numpy(), prompts.context.ys[i].numpy()
        values, vectors = np.linalg.eigh(xs.T @ xs)
        progress = (1 - conjugate_interval_residual(values, steps)) / values
        expected = prompts.query.xs[i].numpy() @ vectors @ np.diag(progress) @ vectors.T @ xs.T @ ys
        np.testing.assert_allclose(got[i], expected, rtol=1e-8, atol=1e-10)


@given(x_dim=st.integers(1, 5), n_context=st.integers(0, 7))
def test_chebyshev_reaches_least_squares_on_any_prefix(x_dim, n_context):
    prompts = make_prompts(n_prompts=2, n_context=n_context, x_dim=x_dim)
    got = chebyshev(prompts, [0, 20_000]).predictions
    assert got[0].abs().max() == 0
    torch.testing.assert_close(got[1], ols(prompts).predictions[0], rtol=1e-4, atol=1e-5)


def descend_online(step_size):
    def predict(xs, ys, query):
        weights = np.zeros((query.size, ys.shape[1]))
        for x, y in zip(xs, ys, strict=True):
            rate = step_size if step_size is not None else (1 / (x @ x) if x @ x > 0 else 0.0)
            weights = weights - rate * np.outer(x, x @ weights - y)
        return query @ weights

    return predict


@pytest.mark.parametrize("step_size", [None, 0.3])
def test_online_descent_passes_the_points_in_order(step_size):
    prompts = make_prompts(y_dim=2)
    prompts.xs[0, 2] = 0
    trajectory = online_gradient_descent(prompts, step_size=step_size)
    expected = over_prefixes(prompts, descend_online(step_size))
    np.testing.assert_allclose(trajectory.predictions[0], expected, rtol=1e-10, atol=1e-12)
    query = online_gradient_descent(prompts, step_size=step_size, at="query")
    torch.testing.assert_close(query.predictions[:, :, 0], trajectory.predictions[:, :, -1], rtol=1e-12, atol=1e-12)
