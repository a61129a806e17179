"""The picture of learned subspaces shows what the result holds."""

from typing import Any

from mechicl import viz
from mechicl.algorithms.stepwise import Hypothesis, ResidualDescent
from mechicl.analysis.causes import SubspaceSearch, fit_subspace
from mechicl.constructions import gradient_descent
from mechicl.tasks import LinearRegression
from tests.viz.traces import lines


def searched() -> SubspaceSearch:
    task = LinearRegression(x_dim=2, n_context=5)
    model = gradient_descent(x_dim=2, n_context=5, step_size=0.4, steps=3)
    hypothesis = Hypothesis(ResidualDescent(3, step_size=0.4))
    few: dict[str, Any] = {"n_fitting": 8, "n_prompts": 8, "iterations": 2, "restarts": 0}
    return fit_subspace(model, hypothesis, "residual", task, dims=(1, 2), **few, progress=False)


def test_subspaces_stand_with_their_rests_and_controls():
    result = searched()
    figure: Any = viz.plot(result)
    for s, search in enumerate(result.searches):
        by_layer = [result.curves(s, i) for i in range(2)]
        for rest, name in enumerate((search, f"{search}, its rest")):
            curve, drawn = [layer[rest] for layer in by_layer], lines(figure, name)
            assert [x for x, _ in drawn] == [["1", "2"]] * 2
            assert [y for _, y in drawn] == [[r2.mean for r2 in layer] for layer in curve]
    assert "residual" in figure.layout.title.text
