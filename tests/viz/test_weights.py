"""Figures of weights, kernels and paths draw the given numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl import constructions, viz
from mechicl.analysis import interpolate, read_weight_products
from mechicl.analysis.weights.kernels import KernelView, view_kernel
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression, SineRegression
from mechicl.viz.weights import kernel_heatmaps
from tests.viz.traces import heatmaps, lines

GRID = torch.linspace(-5, 5, 7, dtype=torch.float64)[:, None]


def path(n_alphas: int):
    a, b = (constructions.gradient_descent(x_dim=3, n_context=5, step_size=a) for a in (0.5, 1.0))
    prompts = LinearRegression(x_dim=3, n_context=5).sample(30, seed=0, dtype=torch.float64)
    return interpolate(a, b, prompts, n_alphas=n_alphas)


def test_one_path_has_a_band_over_prompts_and_several_seeds_a_line_each():
    one = path(5)
    figure: Any = viz.connectivity_paths({"one": one, "seeds": [one, one]})
    means = pytest.approx(one.squared_errors.mean(-1).tolist(), rel=1e-12)
    assert lines(figure, "one") == [([0, 0.25, 0.5, 0.75, 1], means)]
    assert lines(figure, "seeds") == [([0, 0.25, 0.5, 0.75, 1], means)] * 2
    (band,) = [trace for trace in figure.data if trace.fill == "toself"]
    intervals = [interval(errors) for errors in one.squared_errors]
    assert list(band.y) == pytest.approx([i.high for i in intervals] + [i.low for i in reversed(intervals)])


def test_weights_are_drawn_entry_by_entry():
    products = read_weight_products(constructions.gradient_descent(x_dim=2, n_context=4, step_size=0.5))
    drawn = heatmaps(viz.weight_products_figure(products, products, ["x1", "x2", "y1"]))
    assert drawn[0].tolist() == drawn[1].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert drawn[2].tolist() == drawn[3].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, -0.5]]


def test_divergence_leaves_a_gap():
    losses = torch.tensor([1.0, 0.5, 1e9, float("nan")], dtype=torch.float64)[:, None]
    figure = viz.roll_outs({0.75: {"gradient_descent": losses, "trained": losses.expand(4, 2)}})
    assert lines(figure, "trained layer") == [([0, 1, 2, 3], [0.5, 0.25, None, None])] * 2


def view(step_size: float = 0.1, grid: Tensor = GRID) -> KernelView:
    weights = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64)
    model = constructions.kernel_gradient_descent(weights=weights, n_context=4, step_size=step_size)
    return view_kernel(model, grid, SineRegression(n_context=4).sample(5, seed=0, dtype=torch.float64))


def test_kernels_are_drawn_on_one_scale():
    views = {"slow": view(0.1), "fast": view(0.2)}
    figure: Any = kernel_heatmaps(views)
    for drawn, shown in zip(heatmaps(figure), views.values(), strict=True):
        torch.testing.assert_close(drawn, shown.kernel)
    scale = figure.layout.coloraxis
    assert scale.cmax == -scale.cmin == pytest.approx(views["fast"].kernel.abs().max().item())
    torch.testing.assert_close(heatmaps(kernel_heatmaps(views, part="through_values"))[0], views["slow"].through_values)
