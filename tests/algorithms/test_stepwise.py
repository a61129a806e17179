"""Algorithms step by step: predictions, counterfactuals against plain loops, and hypotheses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.algorithms.stepwise import (
    AfterCopying,
    DiscountedDescent,
    Hypothesis,
    Induction,
    KernelReading,
    NewtonSteps,
    OnlineDescent,
    QueryDescent,
    RecursiveSteps,
    ResidualDescent,
    ResidualRidge,
    RidgePath,
    Runs,
    StepwiseAlgorithm,
)
from mechicl.algorithms.stepwise.counterfactuals import Place
from mechicl.algorithms.stepwise.descent import nearest
from mechicl.algorithms.stepwise.hypothesis import variables_of
from mechicl.algorithms.stepwise.inverses import MomentsThenRidge, RidgeByDirections
from mechicl.learners import Learner, Trajectory
from mechicl.prompts import Prompts
from tests.algorithms import loops
from tests.algorithms.reference import prompts_of_any_size


# ---- steps ----
@settings(max_examples=20)
@given(prompts_of_any_size())
def test_predictions_are_those_of_the_algorithms(prompts):
    n, x_dim = prompts.n_context, prompts.x_dim
    ones = torch.ones(x_dim, x_dim, dtype=torch.float64)
    matrix: dict[str, Any] = {"preconditioner": 0.1 * torch.eye(x_dim) + 0.05 * ones.triu(1)}
    rates: dict[str, Any] = {"step_size": (0.05, 0.04, 0.1), "gamma": (0.03, 0.02, 0.0)}
    lms: dict[str, Any] = {"step_size": 0.5, "offset": 0.2}
    recursive: dict[str, Any] = {"penalty": 0.5, "discount": 0.9}
    forgetting: dict[str, Any] = {"step_size": 0.1, "discount": 0.8}
    pairs: list[tuple[StepwiseAlgorithm, Trajectory]] = [
        (ResidualDescent(3, step_size=0.05), algorithms.gradient_descent(prompts, 3, step_size=0.05)),
        (QueryDescent(3, step_size=0.05), algorithms.gradient_descent(prompts, 3, step_size=0.05)),
        (ResidualDescent(3, **rates), algorithms.gd_plus_plus(prompts, 3, **rates)),
        (ResidualDescent(2, step_size=1 / max(n, 1), **matrix), algorithms.preconditioned_gd(prompts, 2, **matrix)),
        *((NewtonSteps(4, answer=how), algorithms.newton(prompts, 4)) for how in ("at the end", "anew", "running")),
        (NewtonSteps(2, alpha=1e-4), algorithms.newton(prompts, 2, alpha=1e-4)),
        (RidgePath((10.0, 0.3)), algorithms.ridge(prompts, penalty=0.3)),
        (RidgeByDirections(x_dim, penalty=0.3), algorithms.ridge(prompts, penalty=0.3)),
        (MomentsThenRidge(penalty=0.3), algorithms.ridge(prompts, penalty=0.3)),
        (ResidualRidge(1, penalty=0.3), algorithms.ridge(prompts, penalty=0.3)),
    ]
    if n:
        pairs += [
            (OnlineDescent(n), algorithms.online_gradient_descent(prompts)),
            (OnlineDescent(n, step_size=0.1), algorithms.online_gradient_descent(prompts, step_size=0.1)),
            (OnlineDescent(n, **lms), algorithms.online_gradient_descent(prompts, **lms)),
            (RecursiveSteps(n, **recursive), algorithms.recursive_least_squares(prompts, **recursive)),
            (DiscountedDescent(1, **forgetting), algorithms.discounted_gradient_descent(prompts, **forgetting)),
            (AfterCopying(pairs[2][0]), pairs[2][1]),
            (KernelReading(nearest), algorithms.nearest_neighbours(prompts, n_neighbours=1)),
        ]
    for algorithm, expected in pairs:
        assert isinstance(algorithm, Learner)
        wanted = expected.query()[0]
        scale = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(algorithm.predict(prompts), wanted, rtol=0, atol=1e-7 * scale, msg=algorithm.name)


def test_every_step_of_a_trajectory_and_every_prefix():
    prompts = Prompts(*(0.5 * torch.randn(2, 3, 5, d, dtype=torch.float64)[0] for d in (2, 1)))
    reached = QueryDescent(3, step_size=0.1).trajectory(prompts)
    expected = algorithms.gradient_descent(prompts, [0, 1, 2, 3], step_size=0.1)
    torch.testing.assert_close(reached.predictions, expected.predictions)
    torch.testing.assert_close(ResidualDescent(3, step_size=0.1).predict_prefixes(prompts), expected.predictions[-1])


def test_causal_points_read_only_what_came_before():
    prompts = Prompts(torch.randn(2, 6, 3).double(), torch.randn(2, 6, 1).double())
    algorithm = ResidualDescent(3, step_size=0.1, causal=True)
    state = algorithm.states(prompts)[2]
    for t in range(1, 5):  # what follows a point does not change what it carries
        shorter = algorithm.states(prompts.prefix(t))[2]
        for name, value in shorter.items():
            torch.testing.assert_close(state[name][:, :t], value[:, :t])
    # a point sees itself
    own = prompts.ys[:, 0] - 0.1 * prompts.ys[:, 0] * prompts.xs[:, 0].square().sum(-1, keepdim=True)
    torch.testing.assert_close(algorithm.states(prompts)[1]["residual"][:, 0], own)


def test_before_copying_targets_are_at_tokens_of_their_own():
    prompts = Prompts(torch.randn(2, 4, 3), torch.randn(2, 4, 1))
    algorithm = AfterCopying(ResidualDescent(2, step_size=0.1))
    before, after = algorithm.states(prompts)[:2]
    assert not before["residual"].any()
    torch.testing.assert_close(before["target"][:, :-1], prompts.context.ys.double())
    torch.testing.assert_close(after["residual"], before["target"])


def test_normalized_weights_are_those_of_the_points_that_are_seen():
    prompts = Prompts(torch.randn(2, 6, 3).double(), torch.randn(2, 6, 1).double())

    def weights(readers: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return (readers @ points.mT).exp()

    algorithm = KernelReading(weights, normalized=True)
    algorithm.causal = True
    residuals = algorithm.states(prompts)[1]["residual"]
    for row in range(2):
        for j in range(6):
            seen = slice(0, min(j + 1, 5))
            shares = (prompts.xs[row, seen] @ prompts.xs[row, j]).softmax(0)
            start = prompts.ys[row, j] if j < 5 else 0.0
            torch.testing.assert_close(residuals[row, j], start - shares @ prompts.ys[row, seen])


def test_moments_are_collected_before_anything_is_solved():
    prompts = Prompts(torch.randn(2, 6, 3).double(), torch.randn(2, 6, 2).double())
    state = MomentsThenRidge(penalty=0.5).states(prompts)[1]
    products = prompts.xs[:, :, :, None] * torch.cat([prompts.xs, prompts.ys], -1)[:, :, None]
    torch.testing.assert_close(state["moments"], products[:, :-1].sum(1).flatten(1)[:, None].expand(-1, 6, -1))
    assert not state["prediction"].any()


def test_induction_takes_the_target_of_the_nearest_input_that_a_target_remembers():
    prompts = Prompts(torch.randn(4, 6, 3).double(), torch.randn(4, 6, 2).double())
    algorithm = Induction()
    start, remembered, end = algorithm.states(prompts)
    assert not start["previous"].any()
    torch.testing.assert_close(remembered["previous"], prompts.xs)
    for row in range(4):
        distances = [((x - prompts.xs[row, -1]) ** 2).sum().item() for x in prompts.context.xs[row]]
        best = prompts.ys[row, int(np.argmin(distances))]
        torch.testing.assert_close(algorithm.read({k: v[:, -1:] for k, v in end.items()})[row], best)
    # without the first step nothing tells the targets apart
    skipped = Runs(algorithm, algorithm.states(prompts), algorithm.states(prompts)).skip(range(1), "context")
    torch.testing.assert_close(skipped, prompts.context.ys.mean(1))


DESCENT = ResidualDescent(3, step_size=0.1)


def test_by_default_a_layer_is_a_step():
    hypothesis = Hypothesis(DESCENT)
    assert hypothesis.schedule == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert hypothesis.between == ((1, 1), (2, 2))
    assert hypothesis.segments[1] == (range(1, 2), range(1, 2))
    assert hypothesis.name == DESCENT.name


def test_layers_may_share_steps_and_steps_layers():
    hypothesis = Hypothesis(DESCENT, schedule=((0, 0), (2, 0), (3, 2), (5, 3)), name="mine")
    assert hypothesis.n_layers == 5
    assert hypothesis.segments == ((range(2), range(0)), (range(2, 3), range(2)), (range(3, 5), range(2, 3)))


def test_the_rest_is_the_complement_of_all_subspaces():
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    hypothesis = Hypothesis(DESCENT, subspaces={"x": basis[:, :3], "residual": basis[:, 3:4]})
    assert hypothesis.rest is not None
    torch.testing.assert_close(hypothesis.rest @ hypothesis.rest.T, basis[:, 4:] @ basis[:, 4:].T)
    assert Hypothesis(DESCENT).rest is None
    assert Hypothesis(DESCENT, subspaces={"x": basis}).rest is None
    assert variables_of("x, residual") == ("x", "residual")


# ---- counterfactuals ----
X_DIM = 3
MATRIX = torch.eye(X_DIM, dtype=torch.float64) + 0.3 * torch.ones(X_DIM, X_DIM).double().triu(1)
PENALTIES = (3.0, 1.0, 0.1)
PLUS: dict[str, Any] = {"step_size": 0.1, "gamma": 0.02}
HEAVY: dict[str, Any] = {"step_size": 0.1, "momentum": 0.4}
CASES: dict[str, Callable[[int], tuple[StepwiseAlgorithm, loops.Step]]] = {
    "descent": lambda n: (ResidualDescent(4, step_size=0.1), partial(loops.descent, step_size=0.1)),
    "causal": lambda n: (ResidualDescent(3, step_size=0.1, causal=True), partial(loops.descent, step_size=0.1)),
    "GD++": lambda n: (ResidualDescent(3, **PLUS), partial(loops.descent, **PLUS)),
    "GD++, clipped": lambda n: (ResidualDescent(3, **PLUS, clip=1.5), partial(loops.descent, **PLUS, clip=1.5)),
    "momentum": lambda n: (ResidualDescent(3, **HEAVY), partial(loops.descent, **HEAVY)),
    "preconditioned": lambda n: (
        ResidualDescent(2, step_size=0.1, preconditioner=MATRIX),
        partial(loops.descent, step_size=0.1, matrix=MATRIX.numpy()),
    ),
    "by the query": lambda n: (QueryDescent(3, step_size=0.1), partial(loops.query_descent, step_size=0.1)),
    "Newton": lambda n: (NewtonSteps(3), partial(loops.newton, n_steps=5)),
    "Newton, causal": lambda n: (NewtonSteps(2, causal=True), partial(loops.newton, n_steps=4)),
    "Newton, alpha": lambda n: (NewtonSteps(2, alpha=0.002), partial(loops.newton, n_steps=4, alpha=0.002)),
    "Newton anew": lambda n: (NewtonSteps(2, answer="anew"), partial(loops.newton, n_steps=4, answer="anew")),
    "Newton running": lambda n: (NewtonSteps(2, answer="running"), partial(loops.newton, n_steps=4, answer="running")),
    "online": lambda n: (OnlineDescent(n), loops.online),
    "online, longer": lambda n: (OnlineDescent(n + 2, step_size=0.1), partial(loops.online, step_size=0.1)),
    "normalised LMS": lambda n: (
        OnlineDescent(n, step_size=0.5, offset=0.2),
        partial(loops.online, step_size=0.5, offset=0.2),
    ),
    "recursive": lambda n: (RecursiveSteps(n, penalty=0.5, discount=0.9), partial(loops.recursive, discount=0.9)),
    "recursive, causal": lambda n: (
        RecursiveSteps(n + 1, penalty=0.5, discount=0.8, causal=True),
        partial(loops.recursive, discount=0.8),
    ),
    "discounted": lambda n: (
        DiscountedDescent(3, step_size=0.1, discount=0.8),
        partial(loops.discounted, step_size=0.1, discount=0.8),
    ),
    "online, causal, twice": lambda n: (
        OnlineDescent(n, step_size=0.1, passes=2, causal=True),
        lambda k, *points: loops.online(k % (n + 1), *points, step_size=0.1),
    ),
    "ridge of residuals": lambda n: (ResidualRidge(2, penalty=0.5), partial(loops.residual_ridge, penalty=0.5)),
    "ridge of residuals, causal": lambda n: (
        ResidualRidge(2, penalty=0.5, causal=True),
        partial(loops.residual_ridge, penalty=0.5),
    ),
    "ridge path": lambda n: (RidgePath(PENALTIES), partial(loops.ridge_path, penalties=PENALTIES)),
    "eigendirections": lambda n: (RidgeByDirections(X_DIM), loops.eigendirections),
    "nearest neighbour": lambda n: (KernelReading(nearest, 2), loops.nearest_neighbour),
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
