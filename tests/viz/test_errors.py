"""Faulty arguments of figures: the error names the argument."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

from mechicl import viz
from mechicl.analysis.heads import HeadScores
from mechicl.statistics.grids import GridTable
from mechicl.viz.html import Html
from mechicl.viz.weights import kernel_heatmaps
from tests.viz.test_attention import model_and_prompts
from tests.viz.test_causes import exchanged
from tests.viz.test_interventions import swept
from tests.viz.test_weights import GRID, path, view

any_viz: Any = viz
FRAME = pd.DataFrame({"n": [1, 2, 1, 2], "m": [1, 1, 2, 2], "seed": [0] * 4, "loss": [2.0, -1.0, 1.0, 3.0]})
ONES = torch.ones(3, 1)
LINE = go.Figure(go.Scatter(x=[0, 1], y=[0, 1]))


def attention(**options: Any) -> Any:
    model, prompts = model_and_prompts()
    return viz.prompt_attention(model, options.pop("prompt", prompts[:1]), **options)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: attention(prompt=model_and_prompts()[1]), "one prompt"),
        (lambda: attention(layer=3), r"no hook 'blocks.3.attn.hook_pattern'"),
        (lambda: attention(layer=[]), "layer"),
        (lambda: attention(labels=["a"]), "label per position"),
        (lambda: viz.attention_figure(torch.eye(2)[None], ["a", "b"], ["h", "i"]), "head_names"),
        (lambda: viz.counterfactual_scatter(exchanged()[0], ["head exchanged"]), "interventions"),
        (lambda: viz.settings_figure({}), "scores"),
        (lambda: viz.update_similarity_figure({}), "comparisons"),
        (lambda: viz.map_similarity_figure({}), "comparisons"),
        (lambda: viz.losses_over_training([0, 1], {"b": [[1.0]]}), "losses"),
        (lambda: viz.phase_diagram(FRAME, "n", "m", "loss", log=True), "'loss' has values that are not positive"),
        (lambda: viz.phase_diagram(FRAME, "n", "n", "loss"), "x and y"),
        (lambda: viz.phase_diagram(FRAME, "n", "m", "regret"), "no column 'regret'; it has n, m"),
        (lambda: viz.lines(GridTable(FRAME, ("n", "m", "seed")), "n", "loss"), "the table varies in 'm' too"),
        (lambda: any_viz.lines(FRAME, "n", "loss", "m", middle="mode"), "middle"),
        (lambda: viz.head_table(HeadScores({}, {})), "scores"),
        (lambda: viz.composition_figure(torch.zeros(1, 2, 1, 2), "Q"), "scores"),
        (lambda: viz.patching_grid(swept(("layer",), ((0, 1),))), "2 to 4 axes"),
        (lambda: viz.patching_grid(swept(("a", "b", "c", "d", "e"), ((0,),) * 5)), "2 to 4 axes"),
        (lambda: viz.patching_grid(swept(("head", "pos"), ((0, 1), (0, 1)))), "with layers"),
        (lambda: viz.patching_grid(swept(("layer", "pos"), ((0,), (0, 1))), labels=["A"]), "labels"),
        (lambda: viz.patching_grid(swept(("layer", "pos"), ((0,), (0,))), recovered=True), "come from a run"),
        (lambda: viz.connectivity_paths({}), "paths"),
        (lambda: viz.connectivity_paths({"a": path(3), "b": path(5)}), "same alphas"),
        (lambda: viz.roll_outs({}), "by_damping"),
        (lambda: viz.roll_outs({0.5: {"trained": ONES}}), r"by_damping.*got \['trained'\]"),
        (lambda: viz.roll_outs({0.5: {"gradient_descent": ONES, "other": ONES}}), "may have gradient_descent, tr"),
        (lambda: kernel_heatmaps({}), "views"),
        (lambda: kernel_heatmaps({"a": view(), "b": view(grid=2 * GRID)}), "views"),
        (lambda: kernel_heatmaps({"a": view(), "b": view(grid=GRID[1:])}), "views"),
        (lambda: viz.plot({}), r"Circuit, .*InterventionSweep.*got dict: pass the object"),
        (lambda: viz.save(LINE, "line.gif"), r"path must end in .*got 'line.gif'"),
        (lambda: viz.save(Html("<p>a box</p>"), "box.png"), "path"),
        (lambda: any_viz.save(LINE, "line.png", width="colum"), "width"),
        *((lambda name=name: any_viz.save(LINE, "line.png", **{name: -1}), name)
          for name in ("width", "height", "font_size", "dpi")),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Callable[[], Any], named: str):
    with pytest.raises((ValueError, KeyError, TypeError), match=named):
        call()
