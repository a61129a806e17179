"""Kernels and adapted functions are drawn as they are given."""

from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.analysis import KernelView, adapted_functions, initial_function, view_kernel
from mechicl.tasks import SineRegression
from mechicl.viz import adapted_functions_figure, kernel_heatmaps

GRID = torch.linspace(-5, 5, 7, dtype=torch.float64)[:, None]
PROMPTS = SineRegression(n_context=4).sample(5, seed=0, dtype=torch.float64)


def model(step_size: float = 0.1):
    weights = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64)
    return constructions.kernel_gradient_descent(weights=weights, n_context=4, step_size=step_size)


def view(step_size: float = 0.1, grid=GRID) -> KernelView:
    return view_kernel(model(step_size), grid, PROMPTS)


def test_heatmaps_show_the_kernels_in_one_scale():
    views = {"slow": view(0.1), "fast": view(0.2)}
    figure: Any = kernel_heatmaps(views)
    for heat, shown in zip(figure.data, views.values(), strict=True):
        torch.testing.assert_close(torch.tensor(heat.z, dtype=torch.float64), shown.kernel)
        assert list(heat.x) == list(heat.y) == GRID[:, 0].tolist()
        assert heat.coloraxis == "coloraxis"
    layout = figure.to_dict()["layout"]
    scale = layout["coloraxis"]
    assert scale["cmax"] == -scale["cmin"] == pytest.approx(views["fast"].kernel.abs().max().item())
    assert "effective rank" in layout["annotations"][0]["text"]
    figure: Any = kernel_heatmaps(views, part="through_values")
    part = figure.data[0].z
    torch.testing.assert_close(torch.tensor(part, dtype=torch.float64), views["slow"].through_values)


def test_views_that_cannot_be_compared_are_refused():
    for views in ({}, {"a": view(), "b": view(grid=2 * GRID)}, {"a": view(), "b": view(grid=GRID[1:])}):
        with pytest.raises(ValueError, match="one grid"):
            kernel_heatmaps(views)
    with pytest.raises((ValueError, TypeError)):  # the type hook's error in these tests
        kernel_heatmaps({"a": view()}, part="scores")  # type: ignore[arg-type]


def test_functions_are_drawn_prompt_by_prompt():
    functions = {
        "slow": adapted_functions(model(), PROMPTS, GRID),
        "fast": adapted_functions(model(0.2), PROMPTS, GRID),
    }
    initial = {"slow": initial_function(model(), GRID).detach(), "another": GRID}
    truth = functions["slow"] + 1
    figure: Any = adapted_functions_figure(PROMPTS, GRID, functions, initial=initial, truth=truth, columns=2)
    names = ["true function", "slow, before", "another, before", "slow", "fast", "context"]
    assert [trace.name for trace in figure.data] == names * 5
    for i in range(5):
        drawn = {trace.name: trace for trace in figure.data[6 * i : 6 * i + 6]}
        assert list(drawn["slow"].y) == functions["slow"][i, :, 0].tolist()
        assert list(drawn["fast"].x) == GRID[:, 0].tolist()
        assert list(drawn["slow, before"].y) == initial["slow"][:, 0].tolist()
        assert drawn["slow, before"].line.dash == "dash"
        assert drawn["slow, before"].line.color == drawn["slow"].line.color
        assert list(drawn["true function"].y) == truth[i, :, 0].tolist()
        assert list(drawn["context"].x) == PROMPTS.context.xs[i, :, 0].tolist()
        assert list(drawn["context"].y) == PROMPTS.context.ys[i, :, 0].tolist()
        assert all(trace.showlegend == (i == 0) for trace in drawn.values())
    assert [a["text"] for a in figure.to_dict()["layout"]["annotations"]] == [f"prompt {i + 1}" for i in range(5)]
    alone: Any = adapted_functions_figure(PROMPTS[:1], GRID, {"slow": functions["slow"][:1]})
    assert [trace.name for trace in alone.data] == ["slow", "context"]


def test_functions_that_do_not_fit_are_refused():
    functions = {"a": adapted_functions(model(), PROMPTS, GRID)}
    for call in (
        lambda: adapted_functions_figure(PROMPTS[:0], GRID, functions),
        lambda: adapted_functions_figure(PROMPTS, GRID, functions, columns=0),
        lambda: adapted_functions_figure(PROMPTS[:2], GRID, functions),
        lambda: adapted_functions_figure(PROMPTS, GRID, functions, initial={"a": GRID[1:]}),
        lambda: adapted_functions_figure(PROMPTS, GRID, functions, truth=functions["a"][1:]),
    ):
        with pytest.raises((ValueError, TypeError)):  # the shape hook's error in these tests
            call()
