"""Predictions over random orders of the context, against a plain loop."""

import numpy as np
import torch

from analyses.support.seeds import over_orders
from mechicl import algorithms
from mechicl.learners import AlgorithmLearner
from mechicl.tasks import LinearRegression

PROMPTS = LinearRegression(x_dim=4, n_context=6, inputs="gaussian", noise_std=0.2).sample(
    30, seed=0, dtype=torch.float64
)
ONLINE = AlgorithmLearner(algorithms.online_gradient_descent)


def test_order_does_not_matter_to_batch_learners_and_does_to_online_ones():
    for algorithm, options in (("gradient_descent", {"steps": [5], "step_size": 0.05}), ("newton", {"steps": [3]})):
        variance, signal = over_orders(AlgorithmLearner(getattr(algorithms, algorithm), options), PROMPTS, n_orders=16)
        assert variance.mean() < 1e-20 * signal.mean()
    variance, signal = over_orders(ONLINE, PROMPTS, n_orders=5, seed=3)
    assert variance.mean() > 0.01 * signal.mean()
    answers = np.stack([ONLINE.predict(PROMPTS.permuted(seed=3 + i))[:, 0].numpy() for i in range(5)])
    np.testing.assert_allclose(variance.numpy(), answers.var(0, ddof=1), rtol=1e-9)
    np.testing.assert_allclose(signal.numpy(), (answers**2).mean(0), rtol=1e-9)
