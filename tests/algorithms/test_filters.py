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


def number(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


# ---- values ----


def newton_iteration(steps):
    def iterate(eigenvalue, alpha):
        m = alpha * eigenvalue
        for _ in range(steps):
            m = 2 * m - eigenvalue * m * m
        return m

    return iterate


FILTERS = [  # the filter, its parameters, and its value at 0 and at other eigenvalues
    *(
        (
            lambda a, k=k: gradient_descent_filter(EIGENVALUES, k, a),
            [-0.2, 0.0, 0.3, 0.66, 0.9],
            lambda a, k=k: k * a,
            lambda v, a, k=k: math.fsum(a * (1 - a * v) ** i for i in range(k)),
        )
        for k in (0, 1, 2, 7, 40)
    ),
    *(
        (lambda a, k=k: newton_filter(EIGENVALUES, k, a), [0.02, 0.2], lambda a: 0.0, newton_iteration(k))
        for k in (0, 1, 2, 9)
    ),
    (lambda p: ridge_filter(EIGENVALUES, p), [1e-3, 0.5, 20.0], lambda p: 1 / p, lambda v, p: 1 / (v + p)),
]


@pytest.mark.parametrize(("ours", "parameters", "at_zero", "elsewhere"), FILTERS)
def test_filters_are_their_formulas(ours, parameters, at_zero, elsewhere):
    for parameter in parameters:
        for value in (parameter, number(parameter)):
            filters = ours(value)
            assert filters.dtype == torch.float64
            expected = [at_zero(parameter), *(elsewhere(v, parameter) for v in POSITIVE)]
            np.testing.assert_allclose(filters.detach().numpy(), expected, rtol=1e-9, atol=1e-12)


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


def test_ridge_without_penalty_leaves_out_what_is_noise_for_so_many_points():
    eigenvalues = torch.tensor([[0.0, 1e-10, 1.0]], dtype=torch.float64)
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0), [[0.0, 1e10, 1.0]])
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0, n_context=10_000), [[0.0, 0.0, 1.0]])


@pytest.mark.parametrize("degree", [0, 1, 2, 7, 40])
def test_chebyshev_is_numpys_series(degree):
    eigenvalues = torch.tensor([0.0, 0.1, 0.3, 1.0, 2.5], dtype=torch.float64)
    series, present = np.polynomial.Chebyshev.basis(degree), eigenvalues.numpy()[1:]
    expected = (1 - series((2.6 - 2 * present) / 2.4) / series(2.6 / 2.4)) / present
    np.testing.assert_allclose(chebyshev_filter(eigenvalues, degree), [0.0, *expected], rtol=1e-9, atol=1e-12)


# ---- gradients and families ----


@pytest.mark.parametrize(
    ("filters", "values"),
    [
        *((lambda a, k=k: gradient_descent_filter(EIGENVALUES, k, a), [0.3]) for k in (0, 1, 2, 7)),
        *((lambda a: gradient_descent_filter(EIGENVALUES, 6, a), [a]) for a in (1.1, -0.4, 0.0)),
        *((lambda a, k=k: newton_filter(EIGENVALUES, k, a), [0.15]) for k in (0, 1, 2, 5)),
        (lambda *p: gd_plus_plus_filters(EIGENVALUES, p[:3], p[3:]), [0.1, 0.4, 0.3, 0.05, 0.2, 0.1]),
        (lambda p: ridge_filter(EIGENVALUES, p), [0.7]),
    ],
)
def test_gradients_are_the_finite_differences(filters, values):
    assert torch.autograd.gradcheck(filters, tuple(number(value) for value in values))


@pytest.mark.parametrize("value", [-0.05, 1e-3, 0.6])
@pytest.mark.parametrize("steps", [50, 4096])
def test_gradients_of_many_steps_are_those_of_the_geometric_sum(steps, value):
    step_size = number(value)
    ours = gradient_descent_filter(EIGENVALUES, steps, step_size)
    for i, eigenvalue in enumerate(EIGENVALUES.tolist()):
        (gradient,) = torch.autograd.grad(ours[i], step_size, retain_graph=True)
        assert gradient.item() == pytest.approx(steps * (1 - value * eigenvalue) ** (steps - 1), rel=1e-7, abs=1e-12)


def test_tensors_of_parameters_are_families_of_filters():
    values, eigenvalues = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), EIGENVALUES.reshape(2, 4)
    for family in (
        lambda a: gradient_descent_filter(eigenvalues, 5, a),
        lambda a: newton_filter(eigenvalues, 3, a),
        lambda a: ridge_filter(eigenvalues, a),
        lambda a: gd_plus_plus_filters(eigenvalues, [a, a], [0.1, 0.0])[2],
    ):
        together, one_by_one = family(values[:, None, None]), torch.stack([family(value) for value in values])
        torch.testing.assert_close(together, one_by_one, rtol=1e-14, atol=0)
