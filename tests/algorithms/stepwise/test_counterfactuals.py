"""Counterfactual predictions against a plain loop in which the same variables are changed by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.algorithms.stepwise import NewtonSteps, QueryDescent, ResidualDescent, Runs
from mechicl.prompts import Prompts
from tests.algorithms.stepwise.loops import PlainDescent

STEPS, STEP_SIZE = 4, 0.1


def pair(n_context: int = 5, x_dim: int = 3, y_dim: int = 2, seed: int = 0) -> tuple[Prompts, Prompts]:
    generator = torch.Generator().manual_seed(seed)
    xs, ys = (torch.randn(2, 3, n_context + 1, d, generator=generator, dtype=torch.float64) for d in (x_dim, y_dim))
    base = Prompts(xs[0], ys[0])
    return base, Prompts(xs[1], ys[1]).with_query(base.query.xs)


def plain(prompts: Prompts, row: int) -> PlainDescent:
    xs, ys = prompts.xs[row].numpy(), prompts.ys[row].numpy()
    return PlainDescent(xs[:-1], ys[:-1], xs[-1], STEP_SIZE)


def runs_of(algorithm, base: Prompts, source: Prompts) -> Runs:
    return Runs(algorithm, algorithm.states(base), algorithm.states(source))


@settings(max_examples=25)
@given(st.integers(0, STEPS), st.integers(1, 6), st.integers(1, 3), st.integers(0, 100))
def test_exchanges_are_those_of_a_plain_loop(after, n_context, y_dim, seed):
    base, source = pair(n_context, y_dim=y_dim, seed=seed)
    runs = runs_of(ResidualDescent(STEPS, step_size=STEP_SIZE), base, source)
    point = seed % n_context
    for row in range(len(base)):
        # the query's running prediction comes from the source
        a, b = plain(source, row).run(after), plain(base, row).run(after)
        b.prediction = a.prediction
        expected = b.run(STEPS - after).prediction
        np.testing.assert_allclose(runs.exchange(after, "query")[row], expected, atol=1e-9)
        np.testing.assert_allclose(runs.exchange(after, "query", ("residual",))[row], expected, atol=1e-9)
        # the context's points
        a, b = plain(source, row).run(after), plain(base, row).run(after)
        b.xs, b.residuals = a.xs, a.residuals
        np.testing.assert_allclose(runs.exchange(after, "context")[row], b.run(STEPS - after).prediction, atol=1e-9)
        # their residuals alone, and one point alone
        a, b = plain(source, row).run(after), plain(base, row).run(after)
        b.residuals = a.residuals
        expected = b.run(STEPS - after).prediction
        np.testing.assert_allclose(runs.exchange(after, "context", ("residual",))[row], expected, atol=1e-9)
        a, b = plain(source, row).run(after), plain(base, row).run(after)
        b.xs[point], b.residuals[point] = a.xs[point], a.residuals[point]
        expected = b.run(STEPS - after).prediction
        np.testing.assert_allclose(runs.exchange(after, "context", point=point)[row], expected, atol=1e-9)


@pytest.mark.parametrize("after", range(STEPS))
def test_skipped_repeated_and_frozen_steps_are_those_of_a_plain_loop(after):
    base, source = pair()
    runs = runs_of(ResidualDescent(STEPS, step_size=STEP_SIZE), base, source)
    one, rest = range(after, after + 1), STEPS - after - 1
    for row in range(len(base)):
        before = lambda row=row: plain(base, row).run(after)  # noqa: E731
        skipped = before().run(1, query=False).run(rest)
        np.testing.assert_allclose(runs.skip(one, "query")[row], skipped.prediction, atol=1e-9)
        skipped = before().run(1, context=False).run(rest)
        np.testing.assert_allclose(runs.skip(one, "context")[row], skipped.prediction, atol=1e-9)
        twice = before().run(1, context=False).run(1).run(rest)  # the query reads the same context twice
        np.testing.assert_allclose(runs.repeat(one, "query")[row], twice.prediction, atol=1e-9)
        twice = before().run(1).run(1, query=False).run(rest)
        np.testing.assert_allclose(runs.repeat(one, "context")[row], twice.prediction, atol=1e-9)
        frozen = before().run(STEPS - after, context=False)
        np.testing.assert_allclose(runs.freeze(range(after, STEPS + 1), "context")[row], frozen.prediction, atol=1e-9)
        np.testing.assert_allclose(runs.freeze(range(after, STEPS + 1), "query")[row], before().prediction, atol=1e-9)
        np.testing.assert_allclose(runs.stop_reading(after)[row], before().prediction, atol=1e-9)


def test_the_three_newtons_differ_in_what_the_query_carries():
    base, source = pair(n_context=8)
    ends = {}
    for answer in ("at the end", "anew", "running"):
        algorithm = NewtonSteps(3, answer=answer)
        runs = runs_of(algorithm, base, source)
        ends[answer] = [algorithm.read({k: v[:, -1:] for k, v in run[-1].items()}) for run in (runs.base, runs.source)]
        torch.testing.assert_close(ends[answer], ends["at the end"], rtol=0, atol=1e-9)
        for after in range(1, algorithm.n_steps):
            exchanged = runs.exchange(after, "query")
            expected = ends[answer][0]
            if answer == "running":  # what the base adds after the exchange, on top of the source's prediction
                expected = expected + runs.source[after]["prediction"][:, -1] - runs.base[after]["prediction"][:, -1]
            torch.testing.assert_close(exchanged, expected, rtol=0, atol=1e-9)


def test_both_forms_of_gradient_descent_part_when_the_context_is_frozen():
    base, source = pair()
    by_residuals = runs_of(ResidualDescent(STEPS, step_size=STEP_SIZE), base, source)
    by_query = runs_of(QueryDescent(STEPS, step_size=STEP_SIZE), base, source)
    end = by_query.freeze((STEPS,), "query")
    torch.testing.assert_close(by_residuals.freeze((STEPS,), "query"), end)
    torch.testing.assert_close(by_query.freeze(range(STEPS + 1), "context"), end)
    assert (by_residuals.freeze(range(STEPS + 1), "context") - end).abs().min() > 1e-3
