"""Figures of condition numbers draw the numbers of the results."""

from typing import Any

import pytest
import torch

from mechicl import viz
from mechicl.analysis import measure_conditioning
from mechicl.analysis.weights import EigenvalueRange, transformed_eigenvalues
from mechicl.tasks import LinearRegression
from tests.viz.traces import lines

GRID = [0.15 * i for i in range(8)]
OBSERVED = {"n = 5": 0.3, "n = 12": 0.2}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    samples = {f"n = {n}": LinearRegression(x_dim=3, n_context=n).sample(200, seed=n) for n in (5, 12)}
    return {name: measure_conditioning(prompts, GRID) for name, prompts in samples.items()}


def test_the_map_is_solid_over_the_range_and_dotted_past_the_root():
    ranges = {"a": EigenvalueRange(0.1, 2.0), "b": EigenvalueRange(0.5, 9.0)}
    figure: Any = viz.eigenvalue_map(ranges, {"a": 0.25, "b": 0.25})
    # the second range already reaches beyond 4 / 3γ: nothing is left to dot
    assert [trace.line.dash for trace in figure.data] == ["solid", "dot", "solid", "dash"]
    (solid_x, solid_y), (dotted_x, _) = lines(figure, "a, γ = 0.25")
    assert (min(solid_x), max(solid_x), max(dotted_x)) == pytest.approx((0.1, 2.0, 16 / 3))
    expected = transformed_eigenvalues(torch.tensor(solid_x, dtype=torch.float64), 0.25)
    assert solid_y == pytest.approx(expected.tolist())


def test_condition_numbers_of_ranges_and_of_prompts(results):
    figure: Any = viz.condition_numbers(results, OBSERVED)
    for name, result in results.items():
        (_, above), (_, below) = lines(figure, name)
        span = result.extremes
        finite = span.condition_numbers(GRID).tolist()
        assert above == [None if value == float("inf") else pytest.approx(value) for value in finite]
        assert None in above  # γ beyond 1/λ_max
        assert below == pytest.approx(result.quantiles([0.5])[0].tolist())
        assert lines(figure, f"{name}: no transformation") == [([0], [pytest.approx(span.largest / span.smallest)])]
        assert lines(figure, f"{name}: least")[0][0] == [pytest.approx(span.heuristic_gamma)]
    assert sorted(shape.x0 for shape in figure.layout.shapes) == [0.2, 0.2, 0.3, 0.3]


def test_the_distribution_has_one_violin_for_each_gamma_and_one_before(results):
    result = results["n = 12"].at([0.1, 0.2])
    figure: Any = viz.condition_number_distribution(result)
    assert [trace.name for trace in figure.data] == ["before", "0.1", "0.2"]
    for trace, values in zip(figure.data, [result.before, *result.after], strict=True):
        drawn = torch.tensor(trace.y, dtype=torch.float64)
        assert drawn.median().item() == pytest.approx(values.log10().median().item(), abs=0.01)
        assert values.log10().min() <= drawn.min() <= drawn.max() <= values.log10().max()


@pytest.mark.parametrize("gammas", [{}, {"n = 5": 0.3}, {**OBSERVED, "n = 7": 0.1}, {**OBSERVED, "n = 5": 0.0}])
def test_names_and_gammas_must_fit(results, gammas):
    ranges = {name: result.extremes for name, result in results.items()}
    for draw, drawn in ((viz.condition_numbers, results), (viz.eigenvalue_map, ranges)):
        with pytest.raises(ValueError, match=r"one γ for each|positive and finite"):
            draw(drawn, gammas)
