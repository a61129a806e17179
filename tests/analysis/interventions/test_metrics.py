"""Metrics against formulas, one prompt at a time."""

import math

import pytest
import torch
from torch.testing import assert_close

from mechicl import algorithms
from mechicl.analysis.interventions import distance_to, logit_difference, next_token_loss, squared_error
from mechicl.analysis.interventions.metrics import evaluate_metric
from mechicl.learners import AlgorithmLearner
from mechicl.tasks import LinearRegression

PROMPTS = LinearRegression(x_dim=3, n_context=4, y_dim=2).sample(5, seed=0, dtype=torch.float64)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_squared_errors_of_the_query_and_of_all_points(dtype):
    error = squared_error(PROMPTS)
    query, points = draw(5, 2, dtype=dtype), draw(5, 5, 2, dtype=dtype)
    assert error(query).dtype == error(points).dtype == dtype
    for i in range(5):
        one = sum((query[i, y].item() - PROMPTS.ys[i, -1, y].item()) ** 2 for y in range(2)) / 2
        every = sum((points[i, t, y].item() - PROMPTS.ys[i, t, y].item()) ** 2 for y in range(2) for t in range(5)) / 10
        assert error(query)[i].item() == pytest.approx(one, rel=1e-5)
        assert error(points)[i].item() == pytest.approx(every, rel=1e-5)


def test_the_distance_to_another_learner():
    learner = AlgorithmLearner(algorithms.ols)
    theirs, ours = learner.predict(PROMPTS), draw(5, 2)
    distance = distance_to(learner, PROMPTS)(ours)
    for i in range(5):
        assert distance[i].item() == pytest.approx(math.dist(ours[i].tolist(), theirs[i].tolist()))
    assert distance_to(learner, PROMPTS)(ours.float()).dtype == torch.float32
    with pytest.raises(ValueError, match="predictions must"):
        distance_to(learner, PROMPTS[:1])(ours)  # the reference of one prompt does not fit all


def test_differences_of_logits_and_losses():
    logits, right, wrong = draw(5, 7), torch.tensor([0, 1, 2, 6, 6]), torch.tensor([1, 1, 0, 5, 0])
    difference, loss = logit_difference(right, wrong)(logits), next_token_loss(right)(logits)
    for i in range(5):
        assert difference[i].item() == pytest.approx((logits[i, right[i]] - logits[i, wrong[i]]).item())
        total = sum(math.exp(value) for value in logits[i].tolist())
        assert loss[i].item() == pytest.approx(-math.log(math.exp(logits[i, right[i]].item()) / total))


def test_the_loss_over_positions_leaves_out_positions_without_target():
    logits = draw(2, 3, 4)
    targets = torch.tensor([[1, -100, 3], [-100, -100, 0]])
    nats = -logits.log_softmax(-1)
    assert_close(next_token_loss(targets)(logits), torch.stack([(nats[0, 0, 1] + nats[0, 2, 3]) / 2, nats[1, 2, 0]]))


def test_values_of_a_metric_are_converted_to_floats():
    predictions = draw(3, 2)
    counted = evaluate_metric("sign", lambda p: p[:, 0] > 0, predictions)
    assert_close(counted, (predictions[:, 0] > 0).double())
    assert evaluate_metric("wide", lambda p: p[:, 0].double(), predictions.float()).dtype == torch.float64
