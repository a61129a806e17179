"""The filters of the spectral algorithms against plain formulas, and their gradients against finite differences."""

import math

import numpy as np
import pytest
import torch

from mechicl.algorithms.first_order import chebyshev_filter
from mechicl.algorithms.gradient_descent import gd_plus_plus_filters, gradient_descent_filter
from mechicl.algorithms.least_squares import ridge_filter
from mechicl.algorithms.newton import newton_filter

EIGENVALUES = torch.tensor([0.0, 1e-9, 0.01, 0.4, 0.5, 1.3, 2.9, 3.0], dtype=torch.float64)
POSITIVE = [value for value in EIGENVALUES.tolist() if value > 0]
STEPS = [0, 1, 2, 7, 40]


def number(value, *, grad=True):
    return torch.tensor(value, dtype=torch.float64, requires_grad=grad)


def assert_filter(ours, at_zero, others):
    assert ours.dtype == torch.float64
    np.testing.assert_allclose(ours.detach().numpy(), [at_zero, *others], rtol=1e-9, atol=1e-12)


# ---- values ----


@pytest.mark.parametrize("step_size", [-0.2, 0.0, 0.1, 0.3, 0.66, 0.9])
@pytest.mark.parametrize("steps", STEPS)
def test_gradient_descent_is_the_geometric_sum(steps, step_size):
    expected = [math.fsum(step_size * (1 - step_size * v) ** i for i in range(steps)) for v in POSITIVE]
    for value in (step_size, number(step_size)):
        assert_filter(gradient_descent_filter(EIGENVALUES, steps, value), steps * step_size, expected)


def plus_plus(eigenvalue, step_sizes, gammas):
    """One example `(√λ, √λ)` of a one-dimensional task, whose tokens are rewritten step by step."""
    x = y = math.sqrt(eigenvalue) if eigenvalue else 1.0
    query, prediction, after = x, 0.0, [0.0]
    for a, g in zip(step_sizes, gammas, strict=True):
        weight = a * x * y
        prediction, y = prediction + query * weight, y - x * weight
        x, query = x - g * x**3, query - g * query * x**2
        after.append(prediction / eigenvalue**1.5)
    return after


def test_gd_plus_plus_is_the_transformation_of_one_example():
    step_sizes, gammas = [0.1, 0.4, -0.2, 0.6], [0.05, 0.0, 0.3, -0.1]
    expected = np.transpose([plus_plus(v, step_sizes, gammas) for v in POSITIVE])
    tensors = (torch.tensor(step_sizes, dtype=torch.float64), torch.tensor(gammas, dtype=torch.float64))
    for parameters in ((step_sizes, gammas), tensors):
        ours = gd_plus_plus_filters(EIGENVALUES, *parameters)
        assert ours.shape == (5, 8)
        np.testing.assert_allclose(ours[:, 1:], expected, rtol=1e-9)
        np.testing.assert_allclose(ours[:, 0], np.cumsum([0, *step_sizes]), rtol=1e-12)
    with pytest.raises(ValueError, match="shorter"):
        gd_plus_plus_filters(EIGENVALUES, step_sizes, gammas[:3])


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.2])
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_newton_is_the_scalar_iteration(steps, alpha):
    expected = []
    for v in POSITIVE:
        m = alpha * v
        for _ in range(steps):
            m = 2 * m - v * m * m
        expected.append(m)
    for value in (alpha, number(alpha)):
        assert_filter(newton_filter(EIGENVALUES, steps, value), 0.0, expected)


@pytest.mark.parametrize("penalty", [1e-3, 0.5, 20.0])
def test_ridge_is_the_inverse(penalty):
    for value in (penalty, number(penalty)):
        assert_filter(ridge_filter(EIGENVALUES, value), 1 / penalty, [1 / (v + penalty) for v in POSITIVE])


def test_ridge_without_penalty_leaves_out_what_is_noise_for_so_many_points():
    eigenvalues = torch.tensor([[0.0, 1e-10, 1.0]], dtype=torch.float64)
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0), [[0.0, 1e10, 1.0]])
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0, n_context=10_000), [[0.0, 0.0, 1.0]])


@pytest.mark.parametrize("degree", STEPS)
def test_chebyshev_is_numpys_series(degree):
    eigenvalues = torch.tensor([0.0, 0.1, 0.3, 1.0, 2.5], dtype=torch.float64)
    series, present = np.polynomial.Chebyshev.basis(degree), eigenvalues.numpy()[1:]
    expected = (1 - series((2.6 - 2 * present) / 2.4) / series(2.6 / 2.4)) / present
    np.testing.assert_allclose(chebyshev_filter(eigenvalues, degree), [0.0, *expected], rtol=1e-9, atol=1e-12)


# ---- gradients and families ----

FAMILIES = {
    **{f"GD {k}": (lambda a, k=k: gradient_descent_filter(EIGENVALUES, k, a), [0.3]) for k in (0, 1, 2, 7)},
    "GD beyond its bound": (lambda a: gradient_descent_filter(EIGENVALUES, 6, a), [1.1]),
    "GD that climbs": (lambda a: gradient_descent_filter(EIGENVALUES, 6, a), [-0.4]),
    "GD that stands still": (lambda a: gradient_descent_filter(EIGENVALUES, 6, a), [0.0]),
    "GD++": (lambda *p: gd_plus_plus_filters(EIGENVALUES, p[:3], p[3:]), [0.1, 0.4, 0.3, 0.05, 0.2, 0.1]),
    **{f"Newton {k}": (lambda a, k=k: newton_filter(EIGENVALUES, k, a), [0.15]) for k in (0, 1, 2, 5)},
    "ridge": (lambda p: ridge_filter(EIGENVALUES, p), [0.7]),
}


@pytest.mark.parametrize(("filters", "values"), FAMILIES.values(), ids=FAMILIES)
def test_gradients_are_the_finite_differences(filters, values):
    assert torch.autograd.gradcheck(filters, tuple(number(value) for value in values))


@pytest.mark.parametrize("value", [-0.05, 1e-3, 0.05, 0.6])
@pytest.mark.parametrize("steps", [1, 50, 4096])
def test_gradients_of_many_steps_are_those_of_the_geometric_sum(steps, value):
    step_size = number(value)
    ours = gradient_descent_filter(EIGENVALUES, steps, step_size)
    for i, eigenvalue in enumerate(EIGENVALUES.tolist()):
        (gradient,) = torch.autograd.grad(ours[i], step_size, retain_graph=True)
        assert gradient.item() == pytest.approx(steps * (1 - value * eigenvalue) ** (steps - 1), rel=1e-7, abs=1e-12)


def test_tensors_of_parameters_are_families_of_filters():
    values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    each = values[:, None, None]
    eigenvalues = EIGENVALUES.reshape(2, 4)
    pairs = (
        (gradient_descent_filter(eigenvalues, 5, each), [gradient_descent_filter(eigenvalues, 5, v) for v in values]),
        (newton_filter(eigenvalues, 3, each), [newton_filter(eigenvalues, 3, v) for v in values]),
        (ridge_filter(eigenvalues, each), [ridge_filter(eigenvalues, v) for v in values]),
        (
            gd_plus_plus_filters(eigenvalues, [each, each], [0.1, 0.0]).transpose(0, 1),
            [gd_plus_plus_filters(eigenvalues, [v, v], [0.1, 0.0]) for v in values],
        ),
    )
    for together, one_by_one in pairs:
        torch.testing.assert_close(together, torch.stack(one_by_one), rtol=1e-14, atol=0)
