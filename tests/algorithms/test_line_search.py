"""Steepest descent and conjugate gradients against plain loops, known optimality, and least squares."""

import numpy as np
import pytest
import torch
from hypothesis import given

from mechicl.algorithms import conjugate_gradient, ols, steepest_descent
from mechicl.prompts import Prompts
from tests.algorithms.reference import awkward, make_prompts, over_prefixes, prompts_of_any_size

BOTH = pytest.mark.parametrize("algorithm", [steepest_descent, conjugate_gradient])


def search_lines(steps, *, conjugate):
    """Run the textbook loop on `S w = b`, target by target, until the residual is 0."""

    def predict(xs, ys, query):
        second = xs.T @ xs
        predicted = []
        for b in (xs.T @ ys).T:
            w, r = np.zeros_like(b), b.copy()
            p = r.copy()
            for _ in range(steps):
                if r @ r <= 1e-26 * (b @ b):
                    break
                a = (r @ r) / (p @ second @ p)
                w, before = w + a * p, r @ r
                r = b - second @ w
                p = r + (r @ r) / before * p if conjugate else r
            predicted.append(query @ w)
        return np.array(predicted)

    return predict


def errors_on_context(prompts, trajectory):
    """Squared errors of each step's weights on the context, `[step prompt]`."""
    fitted = torch.einsum("pnx,spxy->spny", prompts.context.xs, trajectory.weights[:, :, -1])
    return (fitted - prompts.context.ys).square().sum((2, 3))


@BOTH
@pytest.mark.parametrize("y_dim", [1, 2])
def test_every_prefix_is_the_plain_loop(algorithm, y_dim):
    prompts = make_prompts(y_dim=y_dim)
    numbers = [0, 1, 2, 4, 9]
    for k, predictions in zip(numbers, algorithm(prompts, numbers).predictions, strict=True):
        expected = over_prefixes(prompts, search_lines(k, conjugate=algorithm is conjugate_gradient))
        np.testing.assert_allclose(predictions, expected, rtol=1e-8, atol=1e-9)


@given(prompts=prompts_of_any_size())
def test_conjugate_gradients_end_at_least_squares(prompts):
    reached = conjugate_gradient(prompts, 3 * prompts.x_dim).predictions
    torch.testing.assert_close(reached, ols(prompts).predictions, rtol=1e-6, atol=1e-6)


def test_conjugate_gradients_have_the_least_error_in_the_span_of_k_gradients():
    prompts = make_prompts(n_context=9, x_dim=5)
    weights = conjugate_gradient(prompts, [1, 2, 3, 5], at="query", with_weights=True).weights
    assert weights is not None
    for i in range(len(prompts)):
        xs, ys = prompts.context.xs[i].numpy(), prompts.context.ys[i].numpy()
        second, gradients = xs.T @ xs, [(xs.T @ ys)[:, 0]]
        for _ in range(4):
            gradients.append(second @ gradients[-1])
        for j, k in enumerate([1, 2, 3, 5]):
            basis = np.linalg.qr(np.stack(gradients[:k], axis=1))[0]
            best = basis @ np.linalg.lstsq(xs @ basis, ys[:, 0], rcond=None)[0]
            np.testing.assert_allclose(weights[j, i, 0, :, 0], best, rtol=1e-7, atol=1e-9)


@BOTH
@given(prompts=prompts_of_any_size())
def test_no_step_raises_the_error_on_the_context(algorithm, prompts):
    errors = errors_on_context(prompts, algorithm(prompts, [0, 1, 2, 3, 5, 40], with_weights=True))
    assert (errors[1:] <= errors[:-1] * (1 + 1e-9) + 1e-9).all()


@BOTH
@awkward
def test_predictions_stay_finite_on_awkward_contexts(algorithm, prompts):
    trajectory = algorithm(prompts, [0, 1, 50], with_weights=True)
    assert trajectory.predictions.isfinite().all()
    assert trajectory.weights is not None
    assert trajectory.weights.isfinite().all()
    assert (trajectory.predictions[0] == 0).all()


@BOTH
@pytest.mark.parametrize("scale", [1e-70, 1e70])
def test_the_size_of_inputs_and_targets_changes_nothing_else(algorithm, scale):
    prompts = make_prompts()
    plain = algorithm(prompts, [1, 3]).predictions
    larger = algorithm(Prompts(scale * prompts.xs, prompts.ys / scale), [1, 3]).predictions
    torch.testing.assert_close(larger * scale, plain)
