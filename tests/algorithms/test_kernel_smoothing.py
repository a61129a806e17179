"""Kernel smoothing against a plain loop, softmax attention, and its limits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.algorithms import averaging, kernel_smoothing, nearest_neighbours, tuned_bandwidth
from mechicl.prompts import Prompts
from mechicl.tasks import SineRegression
from tests.algorithms.reference import make_prompts, over_prefixes

PLAIN = {
    "gaussian": lambda x, other, h: math.exp(-((x - other) ** 2).sum() / (2 * h * h)),
    "exponential": lambda x, other, h: math.exp(x @ other / h),
}


def smoother(kernel, h):
    def predict(xs, ys, query):
        total, weighted = 0.0, np.zeros(ys.shape[1])
        for x, y in zip(xs, ys, strict=True):
            total += PLAIN[kernel](x, query, h)
            weighted += PLAIN[kernel](x, query, h) * y
        return weighted / total

    return predict


@settings(max_examples=15)
@given(
    x_dim=st.integers(1, 4),
    y_dim=st.integers(1, 3),
    n_context=st.integers(0, 7),
    bandwidth=st.floats(0.3, 30),
    kernel=st.sampled_from(sorted(PLAIN)),
)
def test_any_shape(x_dim, y_dim, n_context, bandwidth, kernel):
    prompts = make_prompts(n_prompts=2, n_context=n_context, x_dim=x_dim, y_dim=y_dim)
    got = kernel_smoothing(prompts, bandwidth, kernel=kernel).predictions[0]
    np.testing.assert_allclose(got, over_prefixes(prompts, smoother(kernel, bandwidth)), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kernel", sorted(PLAIN))
@pytest.mark.parametrize("bandwidth", [1e12, 1e300])
def test_a_wide_kernel_gives_the_mean(kernel, bandwidth):
    prompts = make_prompts(y_dim=2)
    constant = Prompts(torch.ones_like(prompts.xs[..., :1]), prompts.ys)  # their averaging estimator is the mean
    got = kernel_smoothing(prompts, bandwidth, kernel=kernel).predictions
    torch.testing.assert_close(got, averaging(constant).predictions)


@pytest.mark.parametrize("bandwidth", [1e-6, 1e-200])
def test_a_narrow_kernel_gives_the_nearest_neighbour(bandwidth):
    prompts = make_prompts(n_context=9)
    got = kernel_smoothing(prompts, bandwidth).predictions
    torch.testing.assert_close(got, nearest_neighbours(prompts, n_neighbours=1).predictions)


def test_a_function_stands_for_the_log_kernel():
    def laplace(points, others):
        return -torch.cdist(points, others, p=1)

    prompts = make_prompts()
    got = kernel_smoothing(prompts, 0.4, kernel=laplace)

    def predict(xs, ys, query):
        weights = np.exp(-np.abs(xs - query).sum(1) / 0.4)
        return weights @ ys / weights.sum()

    np.testing.assert_allclose(got.predictions[0], over_prefixes(prompts, predict), rtol=1e-10)
    assert got.name == "kernel smoothing (laplace)"


def test_where_the_kernel_is_zero_so_is_the_prediction():
    def box(points, others):
        inside = (points[:, :, None] - others[:, None]).norm(dim=-1) < 0.1
        return torch.zeros(inside.shape, dtype=torch.float64).masked_fill(~inside, -torch.inf)

    xs = torch.tensor([[0.0], [0.05], [3.0], [0.01]], dtype=torch.float64)[None]
    ys = torch.tensor([[1.0], [2.0], [4.0], [0.0]], dtype=torch.float64)[None]
    got = kernel_smoothing(Prompts(xs, ys), 1.0, kernel=box).predictions[0, 0, :, 0]
    torch.testing.assert_close(got, torch.tensor([0.0, 1.0, 0.0, 1.5], dtype=torch.float64))


@pytest.mark.parametrize("kernel", sorted(PLAIN))
def test_gradients_of_query_and_context(kernel):
    prompts = make_prompts(n_prompts=2, n_context=4, x_dim=2)

    def predict(xs, ys):
        return kernel_smoothing(Prompts(xs, ys), [0.7, 1.5], kernel=kernel).predictions

    assert torch.autograd.gradcheck(predict, (prompts.xs.requires_grad_(), prompts.ys.requires_grad_()))


@pytest.mark.parametrize("kernel", sorted(PLAIN))
def test_the_tuned_bandwidth_is_the_best_of_many(kernel):
    prompts = SineRegression().sample(300, seed=0, dtype=torch.float64)

    def error(bandwidth):
        return kernel_smoothing(prompts, bandwidth, kernel=kernel).step_errors(prompts)[..., -1].mean(-1)

    bandwidth = tuned_bandwidth(prompts, kernel=kernel)
    others = [bandwidth * 1.1**i for i in range(-60, 61)]
    assert error(bandwidth) <= error(others).min() + 1e-12
    if kernel == "gaussian":  # scales with the inputs
        wider = Prompts(10 * prompts.xs, prompts.ys)
        assert tuned_bandwidth(wider) == pytest.approx(10 * bandwidth, rel=1e-3)
