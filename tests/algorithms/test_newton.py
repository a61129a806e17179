"""Iterative Newton against the matrix iteration written out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.algorithms import newton, newton_moments, ols
from mechicl.prompts import Prompts
from tests.algorithms.reference import awkward, iterate, make_prompts, over_prefixes, prompts_of_any_size


@awkward
@pytest.mark.parametrize("alpha", [None, 0.01])
def test_every_step_and_prefix_is_the_matrix_iteration(prompts, alpha):
    steps = [0, 1, 2, 5, 12]
    trajectory = newton(prompts, steps, alpha=alpha)
    for k, predictions in zip(steps, trajectory.predictions, strict=True):
        np.testing.assert_allclose(predictions, over_prefixes(prompts, iterate(k, alpha)), rtol=1e-8, atol=1e-10)


@settings(max_examples=15)
@given(prompts_of_any_size(), st.integers(0, 10), st.sampled_from([1e-3, 1, 30]))
def test_any_shape_and_scale(prompts, steps, scale):
    prompts = Prompts(scale * prompts.xs, prompts.ys)
    expected = over_prefixes(prompts, iterate(steps))
    got = newton(prompts, [steps]).predictions[0].numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8 * max(1.0, float(np.abs(expected).max())))


def test_the_printed_alpha_is_on_the_boundary_and_refused():
    # Fu et al. 2024, A.1 (eq. 10) and C.3 print 2 / ‖S Sᵀ‖₂, with which the top direction never converges
    prompts = make_prompts(n_prompts=1, n_context=8)
    xs = prompts.xs[0, :-1].numpy()
    second = xs.T @ xs
    printed = float(2 / np.linalg.norm(second @ second.T, 2))
    inverse = printed * second
    for _ in range(40):
        inverse = 2 * inverse - inverse @ second @ inverse
    assert np.linalg.norm(inverse @ second - np.eye(4), 2) == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(ValueError, match="does not converge"):
        newton(prompts, [1], alpha=printed * (1 + 1e-9), at="query")
    below = newton(prompts, [60], alpha=0.99 * printed, at="query")
    torch.testing.assert_close(below.predictions, ols(prompts, at="query").predictions, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_moments_are_the_coefficients_of_the_iteration(steps):
    alpha = 0.05
    polynomial = np.polynomial.Polynomial([0, alpha])
    for _ in range(steps):
        polynomial = 2 * polynomial - polynomial * np.polynomial.Polynomial([0, 1]) * polynomial
    coefficients = np.zeros(2 ** (steps + 1))
    coefficients[1::2] = newton_moments(steps, alpha)
    np.testing.assert_allclose(coefficients, np.asarray(polynomial.coef, dtype=float), rtol=1e-12, atol=1e-18)
