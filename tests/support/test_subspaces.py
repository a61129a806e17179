"""Learned subspaces in a report: a row for each layer and number of dimensions, and its controls."""

import pytest

from mechicl.algorithms.stepwise import ResidualDescent
from mechicl.analysis.causes import fit_hypotheses
from mechicl.constructions import gradient_descent
from mechicl.reports import Row
from mechicl.statistics import Interval
from mechicl.tasks import LinearRegression
from support.subspaces import subspaces_part


def test_rows_say_what_the_searches_are_beside_their_controls():
    task = LinearRegression(x_dim=2, n_context=5)
    model = gradient_descent(x_dim=2, n_context=5, step_size=0.4, steps=3)
    (hypothesis,) = fit_hypotheses(model, task, {"three steps": ResidualDescent(3, step_size=0.4)}, progress=False)
    assert tuple(hypothesis.schedule) == ((0, 0), (1, 1), (2, 2), (3, 3))
    rows, sections, data = subspaces_part(
        model, [(hypothesis, "residual")], task, layers=(1, 7), dims=(1, 3), n_fitting=16, n_prompts=16, iterations=5,
        restarts=0, progress=False,
    )  # fmt: skip
    assert [row.quantity[:25] for row in rows] == ["residual in 1 dimensions ", "residual in 3 dimensions "]
    first: Row = rows[0]
    assert isinstance(first.measured, Interval)
    assert first.measured.mean > 0.99
    assert "three steps; of the rest 1.0000" in first.note
    assert "random targets" in first.note
    assert "untrained model" in first.note
    assert "three steps" in sections[0].title
    numbers = data["subspaces"][0]["rows"]
    assert len(numbers) == 6
    assert numbers[0]["r2"] == pytest.approx(first.measured.mean)
