"""Kernels are drawn as they are given."""

from typing import Any

import pytest
import torch

from mechicl import constructions
from mechicl.analysis.weights.kernels import KernelView, view_kernel
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
