"""Condition numbers of contexts against those of transformed data."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from analyses.support.conditioning import FLOOR, EigenvalueRange, measure_conditioning, transformed_eigenvalues
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=4, n_context=7)
PROMPTS = TASK.sample(300, seed=0, dtype=torch.float64)


def clamped(xs: np.ndarray) -> np.ndarray:
    """Eigenvalues of XᵀX by numpy, raised to `FLOOR`."""
    return np.maximum(np.linalg.eigvalsh(xs.T @ xs), FLOOR)


@given(
    n=st.integers(1, 8), d=st.integers(1, 5), rank=st.integers(1, 5), seed=st.integers(0, 2**20),
    gamma=st.floats(0, 2), scale=st.floats(0.1, 2),
)  # fmt: skip
def test_the_condition_number_is_that_of_the_transformed_data(n, d, rank, seed, gamma, scale):
    rng = np.random.default_rng(seed)
    xs = scale * rng.standard_normal((3, n + 1, min(rank, d))) @ rng.standard_normal((3, min(rank, d), d))
    conditioning = measure_conditioning(Prompts(xs, np.zeros((3, n + 1, 1))), [gamma, 0.0])
    assert conditioning.after.shape == (2, 3)
    assert conditioning.eigenvalues.shape == (d, 3)
    torch.testing.assert_close(conditioning.after[1], conditioning.before)
    assert (conditioning.after >= 1).all()
    for p in range(3):
        context = xs[p, :-1]
        transformed = context @ (np.eye(d) - gamma * context.T @ context)
        eigenvalues, mapped = clamped(context), clamped(transformed)
        size = max(1.0, eigenvalues[-1])
        np.testing.assert_allclose(conditioning.eigenvalues[:, p].numpy(), eigenvalues, atol=1e-12 * size)
        image = transformed_eigenvalues(torch.from_numpy(eigenvalues), gamma).numpy()
        np.testing.assert_allclose(np.maximum(np.sort(image), FLOOR), mapped, atol=1e-11 * max(size, mapped[-1]))
        if mapped[0] > 1e-5 * mapped[-1] or mapped[0] == FLOOR == eigenvalues[0]:
            np.testing.assert_allclose(conditioning.after[0, p].item(), mapped[-1] / mapped[0], rtol=1e-4)
        if n >= d and eigenvalues[0] > max(FLOOR, 1e-5 * eigenvalues[-1]):  # else numpy's is of the span
            np.testing.assert_allclose(conditioning.before[p].item(), np.linalg.cond(context) ** 2, rtol=1e-4)


def test_too_few_points_have_eigenvalues_of_the_least_size():
    conditioning = measure_conditioning(PROMPTS.prefix(1), [0.5, 1.0])
    assert (conditioning.eigenvalues[0] == FLOOR).all()
    largest = PROMPTS.xs[:, 0].square().sum(-1)
    torch.testing.assert_close(conditioning.eigenvalues[-1], largest)
    torch.testing.assert_close(conditioning.after[0], transformed_eigenvalues(largest, 0.5) / FLOOR)
    # γ = 1 maps a point of length 1 to 0, like all other directions
    unit = Prompts(torch.eye(3)[None, :2], torch.zeros(1, 2, 1))
    assert measure_conditioning(unit, [1.0]).after.item() == 1


@given(low=st.floats(0.01, 3), width=st.floats(0, 8), gamma=st.floats(0, 1.5))
@example(low=1.0, width=0.0, gamma=1.0)
def test_the_range_s_condition_number_is_that_of_a_dense_spectrum(low, width, gamma):
    span = EigenvalueRange(low, low + width)
    dense = transformed_eigenvalues(torch.linspace(low, low + width, 20_001, dtype=torch.float64), gamma)
    (number,) = span.condition_numbers([gamma]).tolist()
    if gamma and low <= 1 / gamma <= low + width:
        assert number == math.inf
    else:
        ratio = (dense.max() / dense.min()).item()
        assert number == pytest.approx(ratio, rel=1e-3)


@given(low=st.floats(1e-4, 3), width=st.floats(0.01, 20))
def test_the_heuristic_is_the_least_ratio_below_the_root(low, width):
    span = EigenvalueRange(low, low + width)
    best = span.heuristic_gamma
    grid = torch.linspace(1e-3, 0.9999, 3000, dtype=torch.float64) / span.largest
    values = span.condition_numbers(grid.tolist())
    assert span.condition_numbers([best]).item() <= values.min().item() * (1 + 1e-9)
    assert abs(grid[values.argmin()].item() - best) <= 2 * (grid[1] - grid[0]).item()
    ends = transformed_eigenvalues(torch.tensor([span.smallest, span.largest], dtype=torch.float64), best)
    assert ends[0].item() == pytest.approx(ends[1].item(), rel=1e-6)


def test_statistics_are_those_of_numpy():
    conditioning = measure_conditioning(PROMPTS, [0.1, 0.3])
    after = conditioning.after.numpy()
    assert [m.mean for m in conditioning.medians()] == pytest.approx(np.median(after, axis=1))
    assert conditioning.median_before().mean == pytest.approx(np.median(conditioning.before.numpy()))
    quantiles = np.quantile(after, [0.1, 0.9], axis=1)
    np.testing.assert_allclose(conditioning.quantiles([0.1, 0.9]).numpy(), quantiles, rtol=1e-12)
    assert [s.mean for s in conditioning.improved()] == pytest.approx((after < conditioning.before.numpy()).mean(1))
    beyond = [(gamma * conditioning.eigenvalues[-1].numpy() > 1).mean() for gamma in (0.1, 0.3)]
    assert [s.mean for s in conditioning.beyond_root()] == pytest.approx(beyond)
    ends = conditioning.eigenvalues.min().item(), conditioning.eigenvalues.max().item()
    assert conditioning.extremes == EigenvalueRange(*ends)
    torch.testing.assert_close(conditioning.at([0.3, 0.2]).after[0], conditioning.after[1])


def test_the_coverage_of_the_median_s_interval():
    rng = np.random.default_rng(0)
    xs = torch.from_numpy(np.sqrt(rng.uniform(1, 2, (400, 41))))  # S = diag(u, 1) has the condition number u
    hits = 0
    for of_prompts in xs:
        contexts = torch.zeros(41, 3, 2, dtype=torch.float64)
        contexts[:, 0, 0], contexts[:, 1, 1] = of_prompts, 1
        hits += 1.5 in measure_conditioning(Prompts(contexts, torch.zeros(41, 3, 1).double()), [0.0]).median_before()
    assert 0.92 <= hits / 400 <= 0.995
    few = measure_conditioning(PROMPTS[:3], [0.0]).median_before()
    assert math.isnan(few.low)
    assert few.mean == pytest.approx(measure_conditioning(PROMPTS[:3], [0.0]).before.median().item())


def test_the_best_gamma_has_the_least_mean_log_condition_number():
    prompts = LinearRegression(x_dim=4, n_context=30).sample(400, seed=3)
    conditioning = measure_conditioning(prompts, [0.1])
    best = conditioning.best_gamma(seed=1)
    assert best.low <= best.mean <= best.high
    assert best.low < best.high
    assert best.n == 400
    grid = (best.mean * np.linspace(0.2, 2, 200)).tolist()
    around = conditioning.at([best.mean, *grid]).after.log().mean(1)
    assert around[0] <= around[1:].min()
    assert conditioning.best_gamma(seed=1) == best
    assert conditioning.best_gamma(seed=2) != best
