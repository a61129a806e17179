"""Errors of the user's code name the learner, metric or loss, and the dtype of what it is given."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mechicl.algorithms import ols
from mechicl.analysis import align, identify, probe
from mechicl.analysis.behaviour import (
    induced_weights,
    match,
    regressed_weights,
    regret,
)
from mechicl.analysis.dynamics import measure_over_training
from mechicl.analysis.interventions import patch
from mechicl.analysis.language import stability
from mechicl.learners import AlgorithmLearner, TokenAlgorithmLearner, squared_errors, token_losses
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression, RepeatedTokens

TASK = LinearRegression(x_dim=2, n_context=3)
PROMPTS = TASK.sample(4, seed=0, dtype=torch.float64)
MODEL = AlgorithmLearner(ols)


class Predicting:
    """A learner of the user."""

    def __init__(self, predict):
        self.user = predict

    def predict(self, prompts):
        return self.user(prompts)

    predict_prefixes = predict


INTERLEAVED: dict[str, Any] = {"prompt_format": "interleaved", "keys": "causal", "d_model": 4, "d_head": 4}
PROBED = HookedTransformer(TransformerConfig(x_dim=2, n_context=3, n_heads=1, **INTERLEAVED), seed=0)
POINTS = PROMPTS.to(torch.float32)
NET = nn.Linear(2, 1)  # float32
FAULTS = {
    "wrong dtype": (lambda prompts: NET(prompts.query.xs), "RuntimeError.*(dtype|Float)"),
    "missing attribute": (lambda prompts: prompts.inputs, "AttributeError"),
    "None": (lambda prompts: None, "must return a tensor of floats .*got None"),
    "array": (lambda prompts: np.zeros((len(prompts), 1)), "tensor of floats.*got an array of float64"),
    "ints": (lambda prompts: torch.zeros(len(prompts), 1, dtype=torch.int64), "floats.*got a tensor of int64"),
    "shape": (
        lambda prompts: torch.zeros(len(prompts), dtype=torch.float64),
        r"floats.*got a tensor of float64 \[\d+\]",
    ),
    "transposed": (lambda prompts: torch.zeros(1, len(prompts)), r"floats.*got a tensor of float32 \[1, \d+\]"),
    "value error": (lambda prompts: np.zeros(3) @ np.zeros(4), "ValueError: .*mismatch"),
}
CALLS = {
    "align": lambda one: align(one, MODEL, PROMPTS),
    "align, second": lambda one: align(MODEL, one, PROMPTS),
    "squared_errors": lambda one: squared_errors(one, PROMPTS),
    "squared_errors of points": lambda one: squared_errors(one, PROMPTS, at="points"),
    "regret": lambda one: regret(one, TASK, n_prompts=4, progress=False),
    "match": lambda one: match(one, MODEL, PROMPTS),
    "induced": lambda one: induced_weights(one, PROMPTS),
    "regressed": lambda one: regressed_weights(one, PROMPTS, torch.randn(4, 2)),
    "identify": lambda one: identify(one, TASK, n_prompts=8, with_limits=False, progress=False),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_learner_that_fails_is_named(call, fault):
    predict, message = FAULTS[fault]
    named = "learner '(Predicting|model)', given prompts of torch.float64, failed: "
    with pytest.raises(ValueError, match=f"{named}.*{message}") as found:
        CALLS[call](Predicting(predict))
    assert found.value.__cause__ is not None


@pytest.mark.parametrize("call", ["squared_errors", "regret", "match", "identify"])
@pytest.mark.parametrize("change", [lambda p: p.ys.mul_(2), lambda p: np.multiply(p.xs, 2, out=p.xs.numpy())])
def test_prompts_that_a_learner_changes_are_noticed(call, change):
    learner = AlgorithmLearner(lambda prompts: (change(prompts), prompts.query.ys)[1])
    with pytest.raises(ValueError, match="changes the prompts in place"):
        CALLS[call](learner)


@pytest.mark.parametrize("fault", FAULTS)
def test_identify_names_the_learner_among_those_to_rank_too(fault):
    predict, message = FAULTS[fault]
    with pytest.raises(ValueError, match=f"learner 'mine', given prompts of torch.float64, failed: .*{message}"):
        identify(MODEL, TASK, also={"mine": Predicting(predict)}, n_prompts=8, with_limits=False,
                 with_references=False, progress=False)  # fmt: skip


def test_predictions_in_float32_are_compared_as_they_are():
    exact, single = (align(Predicting(lambda p, d=d: ols(p).query()[0].to(d)), MODEL, PROMPTS)
                     for d in (torch.float64, torch.float32))  # fmt: skip
    torch.testing.assert_close(single.prediction_distance, exact.prediction_distance, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("algorithm", "message"), [
    (lambda sequences: None, "got None"),
    (lambda sequences: sequences.words, "AttributeError"),
    (lambda sequences: np.zeros(3), "got an array"),
])  # fmt: skip
def test_a_learner_of_tokens_that_fails_is_named(algorithm, message):
    sequences = RepeatedTokens(d_vocab=8, n_ctx=8, min_period=2, max_period=4).sample(3, seed=0)
    with pytest.raises(ValueError, match=rf"learner '<lambda>\(\)'.*{message}|<lambda>\(\) must return.*{message}"):
        token_losses(TokenAlgorithmLearner(algorithm), sequences)


def test_a_metric_that_fails_is_named():
    model = HookedTransformer(TransformerConfig(x_dim=2, n_context=3, n_layers=1, n_heads=1), seed=0)
    clean, corrupted = PROMPTS.to(torch.float32), TASK.sample(4, seed=1)
    wrong = torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"metric 'metric', given predictions of torch.float32, failed: RuntimeError"):
        patch(model, clean, corrupted, "z", ("layer",), metrics=lambda found: found @ wrong, progress=False)


@pytest.mark.parametrize(("call", "name"), [
    (lambda broken: measure_over_training([NET], broken, progress=False), "measure"),
    (lambda broken: stability(broken, [1, 2], progress=False), "find"),
    (lambda broken: probe(PROBED, {"mine": broken}, POINTS, POINTS, progress=False),
     r"quantity 'mine' \(called with prompts in float64\)"),
])  # fmt: skip
def test_a_function_that_fails_is_named(call, name):
    def broken(_: object):
        raise KeyError("rate")

    with pytest.raises(ValueError, match=rf"{name} failed: KeyError: 'rate'"):
        call(broken)
