"""Sensitivities, similarities and induced weights against plain loops and closed forms."""

import itertools

import numpy as np
import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.analysis import Lens, align
from mechicl.analysis.behaviour import induced_weights, regressed_weights, sensitivities
from mechicl.analysis.behaviour.alignment import predict_queries_one_by_one, similarity_of_errors, similarity_of_weights
from mechicl.learners import AlgorithmLearner, Trajectory
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression


def prompts(n: int = 5, **fields) -> Prompts:
    return LinearRegression(x_dim=3, n_context=4).replace(**fields).sample(n, seed=3, dtype=torch.float64)


def gd_weights(xs: torch.Tensor, ys: torch.Tensor, steps: int, step_size: float) -> torch.Tensor:
    """The linear model that gradient descent learns from one context, by a plain loop."""
    weights = torch.zeros(xs.shape[1], ys.shape[1], dtype=torch.float64)
    for _ in range(steps):
        gradient = torch.zeros_like(weights)
        for x, y in zip(xs, ys, strict=True):
            gradient += torch.outer(x, x @ weights - y)
        weights = weights - step_size * gradient
    return weights


@pytest.mark.parametrize(("y_dim", "steps"), [(1, 4), (2, 1)])
def test_sensitivity_of_gradient_descent_is_the_model_that_it_learned(y_dim: int, steps: int):
    p = prompts(y_dim=y_dim)
    learner = AlgorithmLearner(algorithms.gradient_descent, {"steps": [steps], "step_size": 0.3})
    construction = constructions.gradient_descent(x_dim=3, y_dim=y_dim, n_context=4, step_size=0.3, steps=steps)
    for measured in (sensitivities(learner, p), sensitivities(construction, p)):
        for i in range(len(p)):
            expected = gd_weights(p.context.xs[i], p.context.ys[i], steps, 0.3).T
            torch.testing.assert_close(measured[i], expected, rtol=1e-10, atol=1e-12)


def test_sensitivity_of_a_nonlinear_model_matches_finite_differences():
    cfg = TransformerConfig(x_dim=3, n_context=4, attention="softmax", d_model=8, n_heads=2, d_mlp=16,
                            normalization_type="LN", dtype="float64", initializer_range=0.5)  # fmt: skip
    model, p, h = HookedTransformer(cfg), prompts(), 1e-6
    exact = sensitivities(model, p)
    for j in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[j] = h
        high, low = (model.predict(p.with_query(p.query.xs + s)) for s in (step, -step))
        torch.testing.assert_close(exact[:, :, j], ((high - low) / (2 * h)).detach(), rtol=1e-6, atol=1e-8)


def test_opposite_learners_have_cosine_minus_one_and_their_distances():
    p = prompts()
    plus = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.2})
    minus = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": -0.2})
    result = align(plus, minus, p, memory=1e5)
    weights = torch.stack([gd_weights(x, y, 1, 0.2)[:, 0] for x, y in zip(*p.context, strict=True)])
    torch.testing.assert_close(result.sensitivity_cosine, -torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(result.sensitivity_distance, 2 * weights.norm(dim=1))
    torch.testing.assert_close(result.prediction_distance, 2 * (weights * p.query.xs).sum(1).abs())


def test_without_context_the_cosine_is_nan():
    learner = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.2})
    result = align(learner, learner, prompts(n_context=0))
    assert result.sensitivity_cosine.isnan().all()
    assert result.prediction_distance.max() == 0


def test_alignment_does_not_change_a_model_and_splits_prompts_to_fit_memory():
    model = HookedTransformer(TransformerConfig(x_dim=3, n_context=4, initializer_range=0.3)).train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    sizes = []
    model.blocks[0].register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    p = prompts().to(torch.float32)
    result = align(model, model, p, memory=2.5 * 8 * model.bytes_per_prompt(p))
    assert sizes == [2, 2, 2, 2, 1, 1]
    assert not any(values.requires_grad for values in result.samples().values())  # no batch's graph is kept
    assert result.prediction_distance.max() == 0
    assert result.sensitivity_cosine.allclose(torch.ones(5, dtype=torch.float64))
    assert model.training
    for name, weight in model.named_parameters():
        assert weight.grad is None
        assert torch.equal(weight, before[name])


NOISY = LinearRegression(x_dim=3, n_context=5, inputs="gaussian", noise_std=0.3)
SIZES = pytest.mark.parametrize(("y_dim", "n_context"), [(1, 1), (1, 6), (2, 4)])


def cosine_of(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@SIZES
def test_similarity_of_errors_is_a_cosine_over_points_two_to_the_last(y_dim, n_context):
    prompts = NOISY.replace(y_dim=y_dim, n_context=n_context).sample(3, seed=0, dtype=torch.float64)
    a = algorithms.newton(prompts, [0, 2])
    b = algorithms.gradient_descent(prompts, [1, 4, 9], step_size=0.02)
    measured = similarity_of_errors(a, b, prompts)
    assert measured.shape == (2, 3, 3)
    errors_a, errors_b = ((t.predictions - prompts.ys)[:, :, 1:].flatten(2).numpy() for t in (a, b))
    for i, j, p in itertools.product(range(2), range(3), range(3)):
        assert measured[i, j, p].item() == pytest.approx(cosine_of(errors_a[i, p], errors_b[j, p]), abs=1e-9)


@SIZES
def test_similarity_of_weights_is_a_cosine_for_each_number_of_points(y_dim, n_context):
    prompts = NOISY.replace(y_dim=y_dim, n_context=n_context).sample(2, seed=1, dtype=torch.float64)
    a = algorithms.newton(prompts, [1, 3], with_weights=True)
    b = algorithms.ridge(prompts, penalty=0.5, with_weights=True)
    measured = similarity_of_weights(a, b)
    assert measured.shape == (2, 1, 2, n_context)
    assert a.weights is not None
    assert b.weights is not None
    for i, p, t in itertools.product(range(2), range(2), range(1, n_context + 1)):
        expected = cosine_of(a.weights[i, p, t].flatten().numpy(), b.weights[0, p, t].flatten().numpy())
        assert measured[i, 0, p, t - 1].item() == pytest.approx(expected, abs=1e-9)


def test_trajectories_of_the_query_alone_are_compared():
    prompts = NOISY.sample(4, seed=0)
    a = algorithms.newton(prompts, [1], at="query", with_weights=True)
    b = algorithms.ols(prompts, at="query", with_weights=True)
    signs = similarity_of_errors(a, b, prompts)
    assert signs.abs().allclose(torch.ones(1, 1, 4, dtype=torch.float64))
    assert similarity_of_weights(a, b).shape == (1, 1, 4, 1)


def test_a_learner_without_error_has_no_direction():
    prompts = NOISY.sample(4, seed=0, dtype=torch.float64)
    perfect = Trajectory((1,), prompts.ys[None].clone())
    assert similarity_of_errors(perfect, algorithms.ols(prompts), prompts).isnan().all()


TASK = LinearRegression(x_dim=3, n_context=5, inputs="gaussian")
PROMPTS = TASK.sample(4, seed=0, dtype=torch.float64)
QUERIES = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CFG = TransformerConfig(
    x_dim=3, n_context=5, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=12, d_mlp=24, attention="softmax",
    normalization_type="LN", initializer_range=0.4, dtype="float64",
)  # fmt: skip


def test_induced_weights_of_least_squares_are_numpys_solution():
    weights = induced_weights(AlgorithmLearner(algorithms.ols), PROMPTS)
    for p in range(4):
        for t in range(6):
            expected = np.linalg.pinv(PROMPTS.xs[p, :t].numpy()) @ PROMPTS.ys[p, :t].numpy()
            np.testing.assert_allclose(weights[0, p, t].numpy(), expected, atol=1e-9)


def test_regressed_weights_of_a_linear_learner_are_its_induced_weights():
    newton = AlgorithmLearner(algorithms.newton, {"steps": [1, 4]})
    exact = induced_weights(newton, PROMPTS)
    torch.testing.assert_close(regressed_weights(newton, PROMPTS, QUERIES), exact, atol=1e-8, rtol=1e-8)


def test_induced_weights_of_a_model_are_those_of_its_last_layer():
    model = HookedTransformer(CFG, seed=1).eval()
    whole = induced_weights(model, PROMPTS)
    by_layer = induced_weights(Lens(model), PROMPTS)
    assert whole.shape == (1, 4, 6, 3, 1)
    torch.testing.assert_close(whole[0], by_layer[-1], atol=1e-9, rtol=1e-7)


def test_sharing_the_context_gives_the_same_as_separate_passes():
    lens = Lens(HookedTransformer(CFG, seed=2).eval())
    shared = regressed_weights(lens, PROMPTS, QUERIES, memory=3 * 13 * lens.bytes_per_prompt(PROMPTS))
    with torch.no_grad():
        predictions = predict_queries_one_by_one(lens, PROMPTS, QUERIES)
    expected = torch.linalg.lstsq(QUERIES.expand(*predictions.shape[:3], 12, 3), predictions).solution
    torch.testing.assert_close(shared, expected, atol=1e-9, rtol=1e-9)
