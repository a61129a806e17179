"""Counterfactual predictions against plain loops in which the same variables are changed by hand."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.algorithms.stepwise import (
    KernelReading,
    NewtonSteps,
    OnlineDescent,
    QueryDescent,
    ResidualDescent,
    RidgePath,
    Runs,
    StepwiseAlgorithm,
)
from mechicl.algorithms.stepwise.counterfactuals import Place
from mechicl.algorithms.stepwise.descent import nearest
from mechicl.algorithms.stepwise.inverses import RidgeByDirections
from mechicl.prompts import Prompts
from tests.algorithms.stepwise import loops

X_DIM = 3
MATRIX = torch.eye(X_DIM, dtype=torch.float64) + 0.3 * torch.ones(X_DIM, X_DIM).double().triu(1)
PENALTIES = (3.0, 1.0, 0.1)
CASES: dict[str, Callable[[int], tuple[StepwiseAlgorithm, loops.Step]]] = {
    "descent": lambda n: (ResidualDescent(4, step_size=0.1), loops.descent(0.1)),
    "causal descent": lambda n: (ResidualDescent(3, step_size=0.1, causal=True), loops.descent(0.1)),
    "GD++": lambda n: (ResidualDescent(3, step_size=0.1, gamma=0.02), loops.descent(0.1, gamma=0.02)),
    "GD++, clipped": lambda n: (
        ResidualDescent(3, step_size=0.1, gamma=0.02, clip=1.5),
        loops.descent(0.1, gamma=0.02, clip=1.5),
    ),
    "momentum": lambda n: (ResidualDescent(3, step_size=0.1, momentum=0.4), loops.descent(0.1, momentum=0.4)),
    "preconditioned": lambda n: (
        ResidualDescent(2, step_size=0.1, preconditioner=MATRIX),
        loops.descent(0.1, matrix=MATRIX.numpy()),
    ),
    "by the query": lambda n: (QueryDescent(3, step_size=0.1), loops.query_descent(0.1)),
    "Newton": lambda n: (NewtonSteps(3), loops.newton(5, None, "at the end")),
    "Newton, causal": lambda n: (NewtonSteps(2, causal=True), loops.newton(4, None, "at the end")),
    "Newton, alpha": lambda n: (NewtonSteps(2, alpha=0.002, causal=True), loops.newton(4, 0.002, "at the end")),
    "Newton anew": lambda n: (NewtonSteps(2, answer="anew"), loops.newton(4, None, "anew")),
    "Newton running": lambda n: (NewtonSteps(2, answer="running"), loops.newton(4, None, "running")),
    "online": lambda n: (OnlineDescent(n), loops.online(None)),
    "online, longer": lambda n: (OnlineDescent(n + 2, step_size=0.1), loops.online(0.1)),
    "ridge path": lambda n: (RidgePath(PENALTIES), loops.ridge_path(PENALTIES)),
    "eigendirections": lambda n: (RidgeByDirections(X_DIM), loops.eigendirections()),
    "nearest neighbour": lambda n: (KernelReading(nearest, 2), loops.nearest_neighbour()),
}


def pair(n_context: int = 5, y_dim: int = 2, seed: int = 0) -> tuple[Prompts, Prompts]:
    generator = torch.Generator().manual_seed(seed)
    xs, ys = (torch.randn(2, 2, n_context + 1, d, generator=generator, dtype=torch.float64) for d in (X_DIM, y_dim))
    base = Prompts(xs[0], ys[0])
    return base, Prompts(xs[1], ys[1]).with_query(base.query.xs)


def runs_of(algorithm: StepwiseAlgorithm, base: Prompts, source: Prompts) -> Runs:
    return Runs(algorithm, algorithm.states(base), algorithm.states(source))


@pytest.mark.parametrize("name", list(CASES))
@settings(max_examples=6)
@given(n_context=st.integers(X_DIM, 6), y_dim=st.integers(1, 2), seed=st.integers(0, 10_000), data=st.data())
def test_counterfactuals_are_those_of_a_plain_loop(name, n_context, y_dim, seed, data):
    algorithm, step = CASES[name](n_context)
    last = algorithm.n_steps
    after = data.draw(st.integers(0, last), label="after")
    point = data.draw(st.integers(0, n_context - 1), label="point")
    variable = data.draw(st.sampled_from(algorithm.variables), label="variable")
    base, source = pair(n_context, y_dim=y_dim, seed=seed)
    runs, row = runs_of(algorithm, base, source), seed % 2

    def start(prompts: Prompts) -> loops.PlainRun:
        state = {key: value[row].numpy() for key, value in algorithm.start(prompts).items()}
        points = [{key: value[j] for key, value in state.items()} for j in range(n_context + 1)]
        return loops.PlainRun(step, points, algorithm.causal)

    def compare(what: torch.Tensor, expected: loops.PlainRun) -> None:
        points = expected.points[-1:]
        wanted = algorithm.read({k: torch.as_tensor(np.stack([p[k] for p in points])[None]) for k in points[0]})[0]
        torch.testing.assert_close(what[row], wanted, rtol=1e-9, atol=1e-9)

    rest = range(after, last)
    places: dict[Place, slice] = {"query": slice(n_context, None), "context": slice(0, n_context)}
    for place, where in places.items():
        for variables in (None, (variable,)):
            expected = start(base).run(range(after)).take(start(source).run(range(after)), where, variables).run(rest)
            compare(runs.exchange(after, place, variables), expected)
    one = slice(point, point + 1)
    expected = start(base).run(range(after)).take(start(source).run(range(after)), one).run(rest)
    compare(runs.exchange(after, "context", None, point), expected)
    before = lambda: start(base).run(range(after))  # noqa: E731
    compare(runs.stop_reading(rest), before().run(rest, reads=False))
    compare(runs.isolate(rest), before().run(rest, alone=True))
    compare(runs.freeze(range(after, last + 1), "context"), before().run(rest, context=False))
    compare(runs.freeze(range(after, last + 1), "query"), before())
    if after < last:
        this, others = range(after, after + 1), range(after + 1, last)
        compare(runs.stop_reading(this), before().run(this, reads=False).run(others))
        compare(runs.skip(this, "query"), before().run(this, query=False).run(others))
        compare(runs.skip(this, "context"), before().run(this, context=False).run(others))
        twice = before().run(this, context=False).run(this).run(others)  # the query reads the same context twice
        compare(runs.repeat(this, "query"), twice)
        whole = before().run(this)
        again = start(base).run(range(after + 1)).take(before(), places["query"]).run(this)
        compare(runs.repeat(this, "context"), again.take(whole, places["query"]).run(others))


def test_both_forms_of_gradient_descent_part_when_the_context_is_frozen():
    base, source = pair()
    by_residuals = runs_of(ResidualDescent(4, step_size=0.1), base, source)
    by_query = runs_of(QueryDescent(4, step_size=0.1), base, source)
    end = by_query.freeze((4,), "query")
    torch.testing.assert_close(by_residuals.freeze((4,), "query"), end)
    torch.testing.assert_close(by_query.freeze(range(5), "context"), end)
    assert (by_residuals.freeze(range(5), "context") - end).abs().min() > 1e-3
