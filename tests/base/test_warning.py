"""Every warning of the library points at the line of the user that called it."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mechicl.algorithms import gradient_descent, ols
from mechicl.analysis import align, identify
from mechicl.analysis.dynamics import Sampler, learning_coefficient
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=2, n_context=4)
PROMPTS = TASK.sample(16, seed=0)
NEARLY_COLLINEAR = Prompts(PROMPTS.xs.double() * torch.tensor([1.0, 1e-9]).double(), PROMPTS.ys.double())
DIVERGING = AlgorithmLearner(gradient_descent, {"steps": 2, "step_size": 50.0})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, tokens):
        return self.layer(tokens) * torch.inf


def undefined(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.inf)
    return model


MODELS = [
    undefined(HookedTransformer(TransformerConfig(x_dim=2, n_context=4, n_layers=1, n_heads=1), seed=0)),
    undefined(HookedLSTM(LSTMConfig(x_dim=2, n_context=4, n_layers=1, d_model=4), seed=0)),
]
QUICK: dict[str, Any] = {"sampler": Sampler(2, 8, 0, step_size=1e-9), "progress": False}
CALLS = {
    "a function that is checked": lambda: gradient_descent(PROMPTS, 2, step_size=50.0),
    "a method that is checked": lambda: DIVERGING.predict(PROMPTS),
    "a trajectory": lambda: DIVERGING.trajectory(PROMPTS),
    "an analysis without gradients": lambda: squared_errors(DIVERGING, PROMPTS),
    "an analysis": lambda: align(DIVERGING, DIVERGING, PROMPTS),
    "least squares": lambda: ols(NEARLY_COLLINEAR),
    "a transformer": lambda: MODELS[0].predict(PROMPTS),
    "a transformer's prefixes": lambda: MODELS[0].predict_prefixes(PROMPTS),
    "a recurrent model": lambda: MODELS[1].predict(PROMPTS),
    "chains": lambda: learning_coefficient(
        nn.Linear(2, 1), (torch.ones(9, 2),), loss=lambda m, x: m(x).square().mean(), **QUICK
    ),
    "identify": lambda: identify(
        AlgorithmLearner(lambda prompts: 9 + prompts.query.ys * 0),
        TASK,
        n_prompts=16,
        with_limits=False,
        with_references=False,
        progress=False,
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_warning_points_at_the_users_line(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        CALLS[call]()
    assert found
    assert {each.filename for each in found} == {__file__}
