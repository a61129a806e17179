"""Forgetting, order and span on learners for which the answer is known."""

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.analysis import Lens, measure_forgetting, measure_order_sensitivity
from mechicl.analysis.behaviour import measure_outside_span
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression
from tests.analysis.behaviour.conftest import Bare

TASK = LinearRegression(x_dim=4, n_context=6, inputs="gaussian", noise_std=0.2)
PROMPTS = TASK.sample(30, seed=0, dtype=torch.float64)
ONLINE = AlgorithmLearner(algorithms.online_gradient_descent)
MODEL = HookedTransformer(
    TransformerConfig(
        x_dim=4, n_context=6, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=12, d_mlp=24,
        attention="softmax", normalization_type="LN", initializer_range=0.4, dtype="float64",
    ), seed=5,
).eval()  # fmt: skip


def test_online_gradient_descent_forgets_all_but_the_last_point():
    errors = measure_forgetting(ONLINE, PROMPTS)
    assert errors.gaps == [5, 4, 3, 2, 1, 0]
    assert errors.squared_errors[-1].max() < 1e-20  # fitted exactly as it passes
    assert errors.to_dataframe()["squared_errors_low"][0] > 0
    for p in range(3):
        w = np.zeros((4, 1))
        for x, y in zip(PROMPTS.xs[p, :-1].numpy(), PROMPTS.ys[p, :-1].numpy(), strict=True):
            w = w - x[:, None] @ (x[None] @ w - y) / (x @ x)
        expected = ((PROMPTS.xs[p, :-1].numpy() @ w - PROMPTS.ys[p, :-1].numpy()) ** 2)[:, 0]
        np.testing.assert_allclose(errors.squared_errors[:, p].numpy(), expected, atol=1e-12)


def test_least_squares_with_fewer_points_than_dimensions_forgets_nothing():
    assert measure_forgetting(AlgorithmLearner(algorithms.ols), PROMPTS.prefix(3)).squared_errors.max() < 1e-18


def test_forgetting_of_a_model_is_that_of_separate_prompts():
    expected = measure_forgetting(Bare(MODEL), PROMPTS).squared_errors
    for learner in (Lens(MODEL), MODEL):
        torch.testing.assert_close(measure_forgetting(learner, PROMPTS, memory=7 * 2e5).squared_errors, expected)


def test_order_does_not_matter_to_batch_learners_and_does_to_online_ones():
    for algorithm, options in (("gradient_descent", {"steps": [5], "step_size": 0.05}), ("newton", {"steps": [3]})):
        learner = AlgorithmLearner(getattr(algorithms, algorithm), options)
        assert measure_order_sensitivity(learner, PROMPTS).relative().mean < 1e-20
    sensitivity = measure_order_sensitivity(ONLINE, PROMPTS, n_orders=5, seed=3)
    assert sensitivity.relative().low > 0.01
    answers = np.stack([ONLINE.predict(PROMPTS.permuted(seed=3 + i))[:, 0].numpy() for i in range(5)])
    np.testing.assert_allclose(sensitivity.variance.numpy(), answers.var(0, ddof=1), rtol=1e-9)
    np.testing.assert_allclose(sensitivity.signal.numpy(), (answers**2).mean(0), rtol=1e-9)


def test_weights_of_newton_stay_in_the_span_and_those_of_a_random_model_do_not():
    newton = measure_outside_span(AlgorithmLearner(algorithms.newton, {"steps": [1, 6]}), PROMPTS)
    assert newton.share.shape == (2, 7, 30)
    assert newton.share[:, 1:].max() < 1e-18
    assert newton.share[:, 0].isnan().all()  # no points, no weights
    random = measure_outside_span(Lens(MODEL), PROMPTS)
    assert random.share[-1, 0].allclose(torch.ones(30, dtype=torch.float64))
    assert random.share[-1, 1:4].min() > 1e-6
    assert random.share[:, 4:].max() < 1e-18  # four points span all four dimensions
    weights = Lens(MODEL).trajectory(PROMPTS, with_weights=True).weights
    assert weights is not None
    weights = weights[-1, 7, 2]
    q, _ = np.linalg.qr(PROMPTS.xs[7, :2].numpy().T)
    outside = weights.numpy() - q @ (q.T @ weights.numpy())
    assert random.share[-1, 2, 7].item() == pytest.approx((outside**2).sum() / (weights**2).sum().item())
    assert random.by_point()[2].mean == pytest.approx(random.share[-1, 2].mean().item())


def test_repeated_points_span_no_more_than_one():
    xs = PROMPTS.xs.clone()
    xs[:, 1] = xs[:, 0]
    repeated = type(PROMPTS)(xs, PROMPTS.ys)
    share = measure_outside_span(Lens(MODEL), repeated).share[-1, 2]
    assert share.min() > 1e-6
    direction = xs[:, 0] / xs[:, 0].norm(dim=1, keepdim=True)
    weights = Lens(MODEL).trajectory(repeated, with_weights=True).weights
    assert weights is not None
    weights = weights[-1, :, 2, :, 0]
    inside = (weights * direction).sum(1) ** 2 / weights.square().sum(1)
    torch.testing.assert_close(share, 1 - inside)
