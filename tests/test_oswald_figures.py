"""Figures of the scripts on von Oswald et al. 2023 show the given numbers."""

from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.analysis import measure_conditioning
from mechicl.analysis.weights import adapted_functions, initial_function
from mechicl.analysis.weights.conditioning import EigenvalueRange, transformed_eigenvalues
from mechicl.tasks import LinearRegression, SineRegression
from tests.scripts import import_script
from tests.viz.traces import lines

GRID = [0.15 * i for i in range(8)]
STEPS = [0, 10, 20, 30]
OBSERVED = {"n = 5": 0.3, "n = 12": 0.2}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    samples = {f"n = {n}": LinearRegression(x_dim=3, n_context=n).sample(200, seed=n) for n in (5, 12)}
    return {name: measure_conditioning(prompts, GRID) for name, prompts in samples.items()}


def test_the_map_is_solid_over_the_range_and_dotted_past_the_root():
    ranges = {"a": EigenvalueRange(0.1, 2.0), "b": EigenvalueRange(0.5, 9.0)}
    figure: Any = import_script("oswald_conditioning").eigenvalue_map(ranges, {"a": 0.25, "b": 0.25})
    # the second range already reaches beyond 4 / 3γ: nothing is left to dot
    assert [trace.line.dash for trace in figure.data] == ["solid", "dot", "solid", "dash"]
    (solid_x, solid_y), (dotted_x, _) = lines(figure, "a, γ = 0.25")
    assert (min(solid_x), max(solid_x), max(dotted_x)) == pytest.approx((0.1, 2.0, 16 / 3))
    expected = transformed_eigenvalues(torch.tensor(solid_x, dtype=torch.float64), 0.25)
    assert solid_y == pytest.approx(expected.tolist())


def test_condition_numbers_of_ranges_and_of_prompts(results):
    figure: Any = import_script("oswald_conditioning").condition_numbers(results, OBSERVED)
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
    figure: Any = import_script("oswald_conditioning").condition_number_distribution(result)
    assert [trace.name for trace in figure.data] == ["before", "0.1", "0.2"]
    for trace, values in zip(figure.data, [result.before, *result.after], strict=True):
        drawn = torch.tensor(trace.y, dtype=torch.float64)
        assert drawn.median().item() == pytest.approx(values.log10().median().item(), abs=0.01)
        assert values.log10().min() <= drawn.min() <= drawn.max() <= values.log10().max()


def test_functions_are_drawn_prompt_by_prompt():
    grid = torch.linspace(-5, 5, 7, dtype=torch.float64)[:, None]
    prompts = SineRegression(n_context=4).sample(5, seed=0, dtype=torch.float64)
    weights = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64)

    def model(step_size: float = 0.1):
        return constructions.kernel_gradient_descent(weights=weights, n_context=4, step_size=step_size)

    functions = {name: adapted_functions(model(a), prompts, grid) for name, a in (("slow", 0.1), ("fast", 0.2))}
    initial = {"slow": initial_function(model(), grid).detach(), "another": grid}
    truth = functions["slow"] + 1
    figure = import_script("oswald_sine").adapted_functions_figure(
        prompts, grid, functions, initial=initial, truth=truth, columns=2
    )
    x = grid[:, 0].tolist()
    assert lines(figure, "slow") == [(x, each[:, 0].tolist()) for each in functions["slow"]]
    assert lines(figure, "fast") == [(x, each[:, 0].tolist()) for each in functions["fast"]]
    assert lines(figure, "true function") == [(x, each[:, 0].tolist()) for each in truth]
    assert lines(figure, "slow, before") == [(x, initial["slow"][:, 0].tolist())] * 5
    assert lines(figure, "another, before") == [(x, x)] * 5
    context = prompts.context
    assert lines(figure, "context") == [(context.xs[i, :, 0].tolist(), context.ys[i, :, 0].tolist()) for i in range(5)]
    assert len({(trace.xaxis, trace.yaxis) for trace in figure.data}) == 5  # a panel a prompt  # type: ignore[attr-defined]


def test_norms_stand_over_the_loss():
    norms = {"itself": [1.0, 2.0, 3.0], "next": [0.0, 0.5, 1.0], "other": [0.1, 0.2, 0.3], "fourth": [5.0, 5.0, 5.0]}
    figure: Any = import_script("oswald_copying_order").sensitivity_over_training(
        [0, 8, 30], norms, STEPS, [2.0, 1.0, 0.6, 0.4], gd_mse=0.5
    )
    for name, values in norms.items():
        assert lines(figure, name) == [([4, 8, 30], values)]
    assert lines(figure, "loss") == [([10, 20, 30], [0.5, 0.3, 0.2])]
    assert [trace.yaxis for trace in figure.data] == ["y"] * 4 + ["y2"]
    assert (figure.layout.shapes[0].y0, figure.layout.shapes[0].yref) == (0.25, "y2")
