"""Calls that causal tests refuse, with the argument or the cause that the error names."""

from typing import Any

import pytest
import torch
from torch import nn

from mechicl import analysis, wrap
from mechicl.algorithms.stepwise import Hypothesis, ResidualDescent
from mechicl.analysis.causes.hypotheses import candidate_algorithms
from mechicl.analysis.causes.interchange import interchange_each
from mechicl.constructions import known_models
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=5, n_context=20)
PROMPTS = TASK.sample(6, seed=0, dtype=torch.float64)
SOURCES = analysis.sample_sources(TASK, PROMPTS, seed=1)
KNOWN = {known.name: known for known in known_models()}
TWO, FOUR = (KNOWN[f"gradient descent, {n} steps"] for n in (2, 4))
SMALL = ResidualDescent(2, step_size=0.1)
HUGE = [Prompts(1e80 * each.xs, each.ys) for each in (PROMPTS, SOURCES)]
FEW: dict[str, Any] = {"n_fitting": 8, "n_prompts": 8, "iterations": 1, "restarts": 0, "progress": False}


def exchange(hypothesis=TWO.hypothesis, prompts=PROMPTS, sources=SOURCES, model: Any = TWO.model, **options: Any):
    return analysis.interchange(model, hypothesis, prompts, sources, progress=False, **options)


def fit(variables: Any = "residual", hypothesis=FOUR.hypothesis, model: Any = FOUR.model, **options: Any):
    return analysis.fit_subspace(model, hypothesis, variables, TASK, **(FEW | options))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: exchange(sources=TASK.sample(6, seed=1, dtype=torch.float64)), "sources must have the prompts' quer"),
        (lambda: exchange(FOUR.hypothesis), "ends after 4 layers, and the model has 2"),
        (lambda: exchange(sources=SOURCES[:5]), "same shape"),
        (lambda: exchange(point=20), "point must be"),
        (lambda: exchange(interventions=["head exchanged"]), "'head exchanged'"),
        (lambda: exchange(prompts=HUGE[0], sources=HUGE[1]), "predictions are not all finite"),
        (lambda: exchange(Hypothesis(ResidualDescent(2, step_size=1e200))), "not finite after [12] steps"),
        (lambda: exchange(sources=PROMPTS), "the same for all prompts and their sources"),
        (lambda: exchange(Hypothesis(SMALL, subspaces={"x": torch.eye(4, 2).double()})), "4 rows, and the stream 6"),
        (lambda: exchange(prompts=PROMPTS.prefix(0), sources=SOURCES.prefix(0)), "n_context must be 1 or more"),
        (lambda: interchange_each(TWO.model, [], PROMPTS, SOURCES), "no hypotheses"),
        (lambda: exchange(model=wrap(nn.Linear(3, 1), encode="paired")), "layers"),
        (lambda: analysis.test_hypotheses(TWO.model, TASK, [Hypothesis(SMALL)] * 2), "called 'gradient descent, 2"),
        (lambda: analysis.test_hypotheses(TWO.model, TASK, []), "no hypotheses"),
        (lambda: analysis.test_hypotheses(TWO.model, TASK.replace(n_context=0)), "n_context"),
        (lambda: candidate_algorithms(PROMPTS, torch.full((2, 6, 1), torch.nan)), "not finite"),
        (lambda: fit("velocity"), r"not \['velocity'\]"),
        (lambda: fit([]), r"not \[\]"),
        (lambda: fit(dims=11), r"width 6; got \[11\]"),
        *[(lambda dims=dims: fit(dims=dims), "dims must rise") for dims in ((), (0, 1), (2, 1), (1, 1))],
        (lambda: fit(hypothesis=Hypothesis(SMALL, ((0, 0), (2, 1), (4, 2))), layers=1), r"\[0, 2, 4\]; got \[1\]"),
        (lambda: fit(hypothesis=Hypothesis(SMALL), layers=1), "ends after 2 layers"),
        (lambda: fit("x"), "does not change the prediction"),  # the sources have the same queries
        (lambda: fit(hypothesis=Hypothesis(ResidualDescent(4, step_size=1e200))), "not finite"),
        (lambda: fit(untrained=TWO.model), r"untrained model has \(layers, d_model\) = \(2, 6\)"),
        (lambda: fit(memory=1000), "at least"),
        (lambda: fit(model=nn.Linear(2, 1)), "hooks"),
        (lambda: fit(model=wrap(nn.Linear(6, 1), encode="paired")), "layers"),
        (lambda: fit(layers=2, dims=(1, 2)).subspace(2, 3), "dim must be one of 1, 2; got 3"),
        (lambda: fit(layers=2, dims=1).r2(2, 1, "twin"), "search must be one of 'model', .*; got 'twin'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_or_the_cause(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
