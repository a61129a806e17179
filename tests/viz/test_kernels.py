"""Kernels and adapted functions are drawn as they are given."""

from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.analysis.weights import view_kernel
from mechicl.analysis.weights.kernels import KernelView
from mechicl.tasks import SineRegression
from mechicl.viz.weights import kernel_heatmaps
from tests.viz.traces import heatmaps

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
    for drawn, shown in zip(heatmaps(figure), views.values(), strict=True):
        torch.testing.assert_close(drawn, shown.kernel)
    scale = figure.layout.coloraxis
    assert scale.cmax == -scale.cmin == pytest.approx(views["fast"].kernel.abs().max().item())
    torch.testing.assert_close(heatmaps(kernel_heatmaps(views, part="through_values"))[0], views["slow"].through_values)
    for unlike in ({}, {"a": view(), "b": view(grid=2 * GRID)}, {"a": view(), "b": view(grid=GRID[1:])}):
        with pytest.raises(ValueError, match="one grid"):
            kernel_heatmaps(unlike)


def test_functions_are_drawn_prompt_by_prompt():
    functions = {name: adapted_functions(model(a), PROMPTS, GRID) for name, a in (("slow", 0.1), ("fast", 0.2))}
    initial = {"slow": initial_function(model(), GRID).detach(), "another": GRID}
    truth = functions["slow"] + 1
    figure = adapted_functions_figure(PROMPTS, GRID, functions, initial=initial, truth=truth, columns=2)
    x = GRID[:, 0].tolist()
    assert lines(figure, "slow") == [(x, each[:, 0].tolist()) for each in functions["slow"]]
    assert lines(figure, "fast") == [(x, each[:, 0].tolist()) for each in functions["fast"]]
    assert lines(figure, "true function") == [(x, each[:, 0].tolist()) for each in truth]
    assert lines(figure, "slow, before") == [(x, initial["slow"][:, 0].tolist())] * 5
    assert lines(figure, "another, before") == [(x, x)] * 5
    context = PROMPTS.context
    assert lines(figure, "context") == [(context.xs[i, :, 0].tolist(), context.ys[i, :, 0].tolist()) for i in range(5)]
    assert len({(trace.xaxis, trace.yaxis) for trace in figure.data}) == 5  # a panel a prompt  # type: ignore[attr-defined]
    for prompts, columns in ((PROMPTS[:0], 3), (PROMPTS, 0), (PROMPTS[:2], 3)):
        with pytest.raises((ValueError, TypeError)):  # the shape hook's error in these tests
            adapted_functions_figure(prompts, GRID, functions, columns=columns)
