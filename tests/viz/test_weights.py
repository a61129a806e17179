"""Figures of weights and of paths between them draw the numbers that they are given."""

from typing import Any

import pytest
import torch

from mechicl import constructions, viz
from mechicl.analysis import interpolate, read_weight_products
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from tests.viz.traces import heatmaps, lines


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
    for paths in ({}, {"a": path(3), "b": path(5)}):
        with pytest.raises(ValueError, match="same alphas"):
            viz.connectivity_paths(paths)


def test_weights_are_drawn_entry_by_entry():
    products = read_weight_products(constructions.gradient_descent(x_dim=2, n_context=4, step_size=0.5))
    drawn = heatmaps(viz.weight_products_figure(products, products, ["x1", "x2", "y1"]))
    assert drawn[0].tolist() == drawn[1].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert drawn[2].tolist() == drawn[3].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, -0.5]]


def test_what_diverged_leaves_a_gap():
    losses = torch.tensor([1.0, 0.5, 1e9, float("nan")], dtype=torch.float64)[:, None]
    figure = viz.roll_outs({0.75: {"gradient_descent": losses, "trained": losses.expand(4, 2)}})
    assert lines(figure, "trained layer") == [([0, 1, 2, 3], [0.5, 0.25, None, None])] * 2


def test_roll_outs_of_nothing_are_refused():
    losses = torch.ones(3, 1, dtype=torch.float64)
    for by_damping, words in (
        ({}, "by_damping needs 'gradient_descent'"),
        ({0.5: {"trained": losses}}, r"needs 'gradient_descent'.*got \['trained'\]"),
        ({0.5: {"gradient_descent": losses, "other": losses}}, "may have gradient_descent, trained"),
    ):
        with pytest.raises(ValueError, match=words):
            viz.roll_outs(by_damping)
