"""Figures of condition numbers draw the numbers of the results."""

from typing import Any

import pytest
import torch

from mechicl import viz
from mechicl.analysis import EigenvalueRange, measure_conditioning, transformed_eigenvalues
from mechicl.tasks import LinearRegression
from mechicl.viz.page import plot

GRID = [0.15 * i for i in range(8)]
RESULTS = {
    f"n = {n}": measure_conditioning(LinearRegression(x_dim=3, n_context=n).sample(200, seed=n), GRID) for n in (5, 12)
}
OBSERVED = {"n = 5": 0.3, "n = 12": 0.2}


def test_the_map_is_solid_over_the_range_and_dotted_past_the_root():
    ranges = {"a": EigenvalueRange(0.1, 2.0), "b": EigenvalueRange(0.5, 9.0)}
    figure: Any = viz.eigenvalue_map(ranges, {"a": 0.25, "b": 0.25})
    traces = [(t.name, t.line.dash, t.showlegend) for t in figure.data]
    # the second range already reaches beyond 4 / 3γ: nothing is left to dot
    assert traces == [("a, γ = 0.25", "solid", True), ("a, γ = 0.25", "dot", False), ("b, γ = 0.25", "solid", True),
                      ("unchanged", "dash", None)]  # fmt: skip
    solid, dotted = figure.data[:2]
    assert (min(solid.x), max(solid.x)) == pytest.approx((0.1, 2.0))
    assert (min(dotted.x), max(dotted.x)) == pytest.approx((2.0, 16 / 3))
    expected = transformed_eigenvalues(torch.tensor(solid.x, dtype=torch.float64), 0.25)
    assert list(solid.y) == pytest.approx(expected.tolist())
    assert figure.layout.yaxis.range[1] > 9 * (1 - 0.25 * 9) ** 2


def test_condition_numbers_of_ranges_and_of_prompts():
    figure: Any = viz.condition_numbers(RESULTS, OBSERVED)
    for name, result in RESULTS.items():
        above, below = (t for t in figure.data if t.name == name)
        span = result.extremes
        finite = span.condition_numbers(GRID).tolist()
        assert list(above.y) == [None if value == float("inf") else pytest.approx(value) for value in finite]
        assert None in above.y  # γ beyond 1/λ_max
        assert list(below.y) == pytest.approx(result.quantiles([0.5])[0].tolist())
        (star,) = (t for t in figure.data if t.name == f"{name}: no transformation")
        (diamond,) = (t for t in figure.data if t.name == f"{name}: least")
        assert (star.x[0], star.y[0]) == pytest.approx((0, span.largest / span.smallest))
        assert diamond.x[0] == pytest.approx(span.heuristic_gamma)
        assert above.line.color == below.line.color == star.marker.color
        marked = [s for s in figure.layout.shapes if s.line.color == above.line.color]
        assert [(s.x0, s.line.dash) for s in marked] == [(OBSERVED[name], "dot")] * 2
    assert (figure.layout.yaxis.type, figure.layout.yaxis2.type) == ("log", "log")
    assert sum(t.showlegend is not False for t in figure.data) == 2
    assert "plotly" in plot(figure)


def test_the_distribution_has_one_violin_for_each_gamma_and_one_before():
    result = RESULTS["n = 12"].at([0.1, 0.2])
    figure: Any = viz.condition_number_distribution(result)
    assert [t.name for t in figure.data] == ["before", "0.1", "0.2"]
    for trace, values in zip(figure.data, [result.before, *result.after], strict=True):
        drawn = torch.tensor(trace.y, dtype=torch.float64)
        assert drawn.median().item() == pytest.approx(values.log10().median().item(), abs=0.01)
        assert values.log10().min() <= drawn.min() <= drawn.max() <= values.log10().max()
    assert list(figure.layout.yaxis.ticktext)[:2] == ["10<sup>0</sup>", "10<sup>1</sup>"]


def test_names_and_gammas_must_fit():
    ranges = {name: result.extremes for name, result in RESULTS.items()}
    for gammas in ({}, {"n = 5": 0.3}, {**OBSERVED, "n = 7": 0.1}):
        with pytest.raises(ValueError, match="one γ for each"):
            viz.condition_numbers(RESULTS, gammas)
        with pytest.raises(ValueError, match="one γ for each"):
            viz.eigenvalue_map(ranges, gammas)
    with pytest.raises(ValueError, match="one γ for each"):
        viz.eigenvalue_map({}, {})
    for bad in (0.0, -0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive and finite"):
            viz.eigenvalue_map(ranges, {**OBSERVED, "n = 5": bad})
