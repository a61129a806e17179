"""Induced weights against finite differences, closed forms and a regression that passes each query by itself."""

import numpy as np
import torch

from mechicl import algorithms
from mechicl.analysis import Lens
from mechicl.analysis.behaviour import induced_weights, regressed_weights
from mechicl.analysis.behaviour.induced_weights import predict_queries_one_by_one
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=5, inputs="gaussian")
PROMPTS = TASK.sample(4, seed=0, dtype=torch.float64)
QUERIES = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CFG = TransformerConfig(
    x_dim=3, n_context=5, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=12, d_mlp=24, attention="softmax",
    normalization_type="LN", initializer_range=0.4, dtype="float64",
)  # fmt: skip


def test_of_least_squares_they_are_numpys_solution():
    weights = induced_weights(AlgorithmLearner(algorithms.ols), PROMPTS)
    for p in range(4):
        for t in range(6):
            expected = np.linalg.pinv(PROMPTS.xs[p, :t].numpy()) @ PROMPTS.ys[p, :t].numpy()
            np.testing.assert_allclose(weights[0, p, t].numpy(), expected, atol=1e-9)


def test_of_a_linear_learner_regression_gives_the_same():
    newton = AlgorithmLearner(algorithms.newton, {"steps": [1, 4]})
    exact = induced_weights(newton, PROMPTS)
    torch.testing.assert_close(regressed_weights(newton, PROMPTS, QUERIES), exact, atol=1e-8, rtol=1e-8)


def test_of_a_bare_model_they_are_its_sensitivities():
    model = HookedTransformer(CFG, seed=1).eval()
    whole = induced_weights(model, PROMPTS)
    by_layer = induced_weights(Lens(model), PROMPTS)
    assert whole.shape == (1, 4, 6, 3, 1)
    torch.testing.assert_close(whole[0], by_layer[-1], atol=1e-9, rtol=1e-7)


def test_sharing_the_context_gives_what_passes_of_their_own_give():
    lens = Lens(HookedTransformer(CFG, seed=2).eval())
    shared = regressed_weights(lens, PROMPTS, QUERIES, memory=3 * 13 * lens.bytes_per_prompt(PROMPTS))
    with torch.no_grad():
        predictions = predict_queries_one_by_one(lens, PROMPTS, QUERIES)
    expected = torch.linalg.lstsq(QUERIES.expand(*predictions.shape[:3], 12, 3), predictions).solution
    torch.testing.assert_close(shared, expected, atol=1e-9, rtol=1e-9)
