"""Alignment against sensitivities written out by hand."""

import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.analysis import align
from mechicl.analysis.behaviour import sensitivities
from mechicl.learners import AlgorithmLearner
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


def test_without_context_the_cosine_is_undefined_and_says_so():
    learner = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.2})
    result = align(learner, learner, prompts(n_context=0))
    assert result.sensitivity_cosine.isnan().all()
    assert result.prediction_distance.max() == 0


def test_alignment_leaves_a_model_as_it_was_and_splits_prompts_to_its_memory():
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
