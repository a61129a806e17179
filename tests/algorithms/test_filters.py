"""Filters of the spectral algorithms with tensors for parameters; test_gradient_descent and others check the values."""

import numpy as np
import pytest
import torch

from mechicl.algorithms.gradient_descent import gd_plus_plus_filters, gradient_descent_filter
from mechicl.algorithms.least_squares import ridge_filter
from mechicl.algorithms.newton import newton_filter

EIGENVALUES = torch.tensor([0.0, 1e-9, 0.01, 0.4, 0.5, 1.3, 2.9, 3.0], dtype=torch.float64)


def number(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_ridge_without_penalty_leaves_out_what_is_noise_for_so_many_points():
    eigenvalues = torch.tensor([[0.0, 1e-10, 1.0]], dtype=torch.float64)
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0), [[0.0, 1e10, 1.0]])
    np.testing.assert_allclose(ridge_filter(eigenvalues, 0.0, n_context=10_000), [[0.0, 0.0, 1.0]])


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
        lambda a: gd_plus_plus_filters(eigenvalues, [a, a], [0.1, 0.0])[1],
        lambda a: gd_plus_plus_filters(eigenvalues, [a, a], [0.1, 0.0])[2],
    ):
        one_by_one = torch.stack([family(value) for value in values.tolist()])
        torch.testing.assert_close(family(values[:, None, None]), one_by_one, rtol=1e-12, atol=0)


def test_other_numbers_of_step_sizes_and_gammas_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        gd_plus_plus_filters(EIGENVALUES, [0.1, 0.4], [0.05])
