"""Metrics against formulas, one prompt at a time."""

import math
from typing import Any

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
    for wrong in (draw(5, 1), draw(5, 9, 2)):
        with pytest.raises(ValueError, match="for targets"):
            error(wrong)


def test_the_distance_to_another_learner():
    learner = AlgorithmLearner(algorithms.ols)
    theirs, ours = learner.predict(PROMPTS), draw(5, 2)
    distance = distance_to(learner, PROMPTS)(ours)
    for i in range(5):
        assert distance[i].item() == pytest.approx(math.dist(ours[i].tolist(), theirs[i].tolist()))
    assert distance_to(learner, PROMPTS)(ours.float()).dtype == torch.float32
    with pytest.raises(ValueError, match="predictions must be"):
        distance_to(learner, PROMPTS[:1])(ours)  # one prompt's reference is not that of all


def test_differences_of_logits_and_losses():
    logits, right, wrong = draw(5, 7), torch.tensor([0, 1, 2, 6, 6]), torch.tensor([1, 1, 0, 5, 0])
    difference, loss = logit_difference(right, wrong)(logits), next_token_loss(right)(logits)
    for i in range(5):
        assert difference[i].item() == pytest.approx((logits[i, right[i]] - logits[i, wrong[i]]).item())
        total = sum(math.exp(value) for value in logits[i].tolist())
        assert loss[i].item() == pytest.approx(-math.log(math.exp(logits[i, right[i]].item()) / total))


def test_the_loss_over_positions_leaves_out_what_is_not_scored():
    logits = draw(2, 3, 4)
    targets = torch.tensor([[1, -100, 3], [-100, -100, 0]])
    nats = -logits.log_softmax(-1)
    assert_close(next_token_loss(targets)(logits), torch.stack([(nats[0, 0, 1] + nats[0, 2, 3]) / 2, nats[1, 2, 0]]))


def test_what_a_metric_returns_is_checked():
    predictions = draw(3, 2)
    counted = evaluate_metric("sign", lambda p: p[:, 0] > 0, predictions)
    assert counted.dtype == torch.float64
    assert_close(counted, (predictions[:, 0] > 0).double())
    assert evaluate_metric("wide", lambda p: p[:, 0].double(), predictions.float()).dtype == torch.float64
    unfit: list[Any] = [lambda p: p, lambda p: p.mean(), lambda p: p[:, :1], lambda p: p[:2, 0], lambda p: [1.0] * 3]
    for bad in unfit:
        with pytest.raises(ValueError, match=r"'bad' must return a number a prompt, \[3\].* got"):
            evaluate_metric("bad", bad, predictions)


def test_logits_of_another_shape_are_refused_with_what_to_read():
    one, every = torch.tensor([0, 1, 2, 6, 6]), torch.ones(5, 3, dtype=torch.int64)
    query, positions = draw(5, 7), draw(5, 3, 7)
    for logits in (positions, draw(4, 7)):
        with pytest.raises(ValueError, match=r"for targets \(5,\): these need at='query'"):
            next_token_loss(one)(logits)
        with pytest.raises(ValueError, match=r"5 correct and 5 wrong tokens.*at='query'"):
            logit_difference(one, one)(logits)
    for logits in (query, draw(4, 3, 7), draw(5, 4, 7)):
        with pytest.raises(ValueError, match=r"for targets \(5, 3\): these need at='positions'"):
            next_token_loss(every)(logits)


def test_a_class_is_no_metric():
    with pytest.raises(TypeError, match="'bad' must be a function of predictions, got <class 'float'>"):
        evaluate_metric("bad", float, torch.zeros(3, 1))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("targets", [[1, -100], [[-100, 2], [-100, -100]]])
def test_a_prompt_without_a_target_is_refused(targets):
    with pytest.raises(ValueError, match="every prompt needs a target that is not -100"):
        next_token_loss(torch.tensor(targets))


def test_ids_outside_the_vocabulary_are_named():
    logits, good = torch.randn(2, 5), torch.tensor([0, 4])
    for beyond in (torch.tensor([0, -1]), torch.tensor([0, 5])):
        with pytest.raises(ValueError, match=r"correct must be .*, got (-1|5)"):
            logit_difference(beyond, good)(logits)
        with pytest.raises(ValueError, match=r"wrong must be .*, got (-1|5)"):
            logit_difference(good, beyond)(logits)
        with pytest.raises(ValueError, match=r"targets must be .*, got (-1|5)"):
            next_token_loss(beyond)(logits)
    positions = torch.tensor([[1, 2], [3, 5]])
    with pytest.raises(ValueError, match="targets must be ids in the vocabulary, 0 to 4, got 5"):
        next_token_loss(positions)(torch.randn(2, 2, 5))
