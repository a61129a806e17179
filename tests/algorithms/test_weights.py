"""The weights that algorithms return are those that their predictions come from."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.prompts import Prompts

ALGORITHMS = {
    "gradient_descent": {"steps": [0, 1, 7], "step_size": 0.05},
    "gd_plus_plus": {"steps": [1, 3], "step_size": 0.05, "gamma": 0.01},
    "newton": {"steps": [0, 2, 5]},
    "ols": {},
    "ridge": {"penalty": 0.3},
    "bayes": {"noise_std": 0.2},
    "chebyshev": {"steps": [1, 2]},
    "preconditioned_gd": {"steps": [1, 2], "preconditioner": 0.3 * torch.eye(3)},
    "online_gradient_descent": {},
    "averaging": {},
}


def _prompts(n_prompts: int, n_context: int, y_dim: int, seed: int) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(n_prompts, n_context + 1, 3, generator=generator, dtype=torch.float64)
    return Prompts(xs, torch.randn(n_prompts, n_context + 1, y_dim, generator=generator, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore::mechicl.algorithms.DivergenceWarning")  # true where it diverges, too
@pytest.mark.parametrize("name", ALGORITHMS)
@given(n_context=st.integers(0, 6), y_dim=st.integers(1, 2), seed=st.integers(0, 99))
def test_weights_are_the_predictions_of_unit_queries(name, n_context, y_dim, seed):
    prompts = _prompts(2, n_context, y_dim, seed)
    algorithm = getattr(algorithms, name)
    trajectory = algorithm(prompts, **ALGORITHMS[name], with_weights=True)
    weights = trajectory.weights
    assert weights is not None
    assert weights.shape == (*trajectory.predictions.shape[:3], 3, y_dim)
    for t in range(n_context + 1):
        prefix = prompts.prefix(t)
        for i in range(3):
            unit = torch.eye(3, dtype=torch.float64)[i].expand(2, 3)
            asked = algorithm(prefix.with_query(unit), **ALGORITHMS[name], at="query").predictions[:, :, 0]
            torch.testing.assert_close(weights[:, :, t, i], asked, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_query_alone_has_the_last_prefix_weights(name):
    prompts = _prompts(4, 5, 1, 0)
    algorithm = getattr(algorithms, name)
    everything = algorithm(prompts, **ALGORITHMS[name], with_weights=True)
    query = algorithm(prompts, **ALGORITHMS[name], with_weights=True, at="query")
    torch.testing.assert_close(query.weights, everything.weights[:, :, -1:])
    torch.testing.assert_close(query.predictions, everything.predictions[:, :, -1:])
    assert algorithm(prompts, **ALGORITHMS[name]).weights is None


def test_weights_of_least_squares_are_those_of_numpy():
    prompts = _prompts(3, 6, 2, 1)
    weights = algorithms.ols(prompts, with_weights=True).weights
    assert weights is not None
    for p in range(3):
        for t in range(7):
            expected = np.linalg.pinv(prompts.xs[p, :t].numpy()) @ prompts.ys[p, :t].numpy()
            np.testing.assert_allclose(weights[0, p, t].numpy(), expected, atol=1e-9)


def test_weights_start_at_the_initial_ones():
    prompts = _prompts(2, 4, 1, 2)
    start = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    trajectory = algorithms.gradient_descent(prompts, [0, 3], step_size=0.1, initial_weights=start, with_weights=True)
    assert trajectory.weights is not None
    torch.testing.assert_close(trajectory.weights[0], start.expand(2, 5, 3, 1))
    asked = (prompts.xs[:, :, None] @ trajectory.weights[1])[:, :, 0]
    torch.testing.assert_close(asked, trajectory.predictions[1])
