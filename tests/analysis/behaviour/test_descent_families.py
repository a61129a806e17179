"""Momentum, shared preconditioners and intercepts: filters against loops, and each recognised among all families."""

import numpy as np
import pytest
import torch

from mechicl.algorithms.card import FitProblem
from mechicl.algorithms.gradient_descent import momentum_filter
from mechicl.algorithms.preconditioned import PRECONDITIONED, descend_on_features
from mechicl.algorithms.stepwise import ResidualDescent
from mechicl.analysis import identify
from mechicl.analysis.behaviour import SpectralLearner
from mechicl.learners import AlgorithmLearner
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=8, y_dim=2)
MATRIX = torch.tensor([[2.0, 0.5, 0.0], [0.0, 3.0, 0.5], [0.1, 0.0, 1.0]], dtype=torch.float64)
AFFINE = torch.tensor([[0.5, 0.2, 0.0, 0.1], [0.2, 1.0, 0.0, 0.0], [0, 0, 0.7, 0], [0, 0.3, 0, 0.4]]).double()


def test_momentum_is_that_of_the_algorithm_step_by_step():
    prompts = TASK.sample(20, seed=0, dtype=torch.float64)
    for steps in (1, 2, 5):
        learner = SpectralLearner(lambda s, k=steps: momentum_filter(s, k, 0.1, 0.4), "momentum")
        expected = ResidualDescent(steps, step_size=0.1, momentum=0.4).predict(prompts)
        torch.testing.assert_close(learner.predict(prompts), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("matrix", "constant"), [(MATRIX, False), (AFFINE, True)])
def test_descent_on_features_is_a_plain_loop(matrix, constant):
    prompts = TASK.sample(5, seed=1, dtype=torch.float64)
    predicted = descend_on_features(prompts, matrix=matrix, steps=3, constant=constant)
    for i, (xs, ys) in enumerate(zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True)):
        features = np.hstack([np.ones((len(xs), 1)), xs]) if constant else xs
        weights = np.zeros((features.shape[1], 2))
        for _ in range(3):
            errors = ys[:-1] - features[:-1] @ weights
            weights = weights + matrix.numpy() @ (features[:-1].T @ errors) / (len(xs) - 1)
        np.testing.assert_allclose(predicted[i].numpy(), features[-1] @ weights, atol=1e-12)


@pytest.mark.parametrize(
    ("learner", "name", "steps"),
    [
        (
            SpectralLearner(lambda s: momentum_filter(s, 3, 0.12, 0.5), "momentum"),
            "gradient descent with momentum, 3 steps",
            4,
        ),
        (
            AlgorithmLearner(descend_on_features, {"matrix": MATRIX, "steps": 2, "constant": False}),
            "preconditioned gradient descent, 2 steps",
            2,
        ),
        (
            AlgorithmLearner(descend_on_features, {"matrix": AFFINE, "steps": 1, "constant": True}),
            "kernel gradient descent on 1 and x, 1 step",
            1,
        ),
    ],
)
def test_each_is_recognised_among_all_families(learner, name, steps):
    result = identify(learner, TASK, steps=steps, n_prompts=150, with_limits=False, progress=False)
    assert result.best.name == name
    assert result.distance(result.best).mean < 1e-8
    assert result.answer.name == name
    if "momentum" in name:
        assert result.best.hyperparameters == pytest.approx({"step_size": 0.12, "momentum": 0.5}, rel=1e-3)
    assert result.best.sensitivity_cosine.min() > 0.999


def test_too_many_numbers_in_a_matrix_are_not_fitted():
    wide = LinearRegression(x_dim=25, n_context=3).sample(40, seed=0, dtype=torch.float64)
    problem = FitProblem(wide, wide.query.ys[None], steps=3)
    assert [member.name for member in PRECONDITIONED.members(problem)] == ["preconditioned gradient descent, 1 step"]
