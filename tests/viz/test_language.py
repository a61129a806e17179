"""Figures of language models show means over prompts."""

from typing import Any

import numpy as np
import torch

from mechicl import viz
from mechicl.analysis.language import FewShotScores, FunctionVector, MatchedAblation
from mechicl.viz.interventions import ablation_bars, curves_by_layer, few_shot_curves, in_context_figure

RIGHT = (torch.arange(60).reshape(1, 2, 3, 10) % 7 > 2).float()
SCORES = FewShotScores(("capitals",), ("true", "shuffled"), (0, 2, 8), RIGHT, -RIGHT)
DRAWS = torch.linspace(0, 1, 24).reshape(4, 6)


def line(fig: Any, name: str) -> Any:
    return next(trace for trace in fig.data if trace.name == name and trace.y is not None and trace.fill is None)


def test_accuracy_by_demonstrations():
    fig = viz.plot(SCORES)
    np.testing.assert_allclose(line(fig, "shuffled labels").y, RIGHT[0, 1].mean(-1))
    assert line(fig, "true labels").x == (0, 2, 8)
    assert fig.layout == few_shot_curves(SCORES, "capitals").layout


def test_heads_and_layers_of_a_function_vector():
    effects = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    added = torch.stack([DRAWS[0], DRAWS[1], DRAWS[2]])
    vector = FunctionVector(
        "capitals", ((2, 1),), torch.ones(4), effects, DRAWS[0], DRAWS[1], DRAWS[2], added, added / 2
    )
    heatmap: Any = viz.plot(vector).data[0]
    np.testing.assert_allclose(heatmap.z, effects.mean(-1))
    np.testing.assert_allclose(line(curves_by_layer(vector), "random vector").y, added.mean(-1) / 2)


def test_bars_of_an_ablation():
    result = MatchedAblation(((0, 1),), DRAWS[3], DRAWS[0], DRAWS)
    bars: Any = ablation_bars({"induction heads": result}).data
    np.testing.assert_allclose([bar.y[0] for bar in bars], [DRAWS[3].mean(), DRAWS[0].mean(), DRAWS.mean()], rtol=1e-6)


def test_the_first_picture_has_all_tasks_and_names_distant_heads():
    effects = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(0))
    heads = ((1, 1), (2, 2), (6, 1), (1, 5))  # the second is too near to the first
    vector = FunctionVector(
        "capitals", heads, torch.ones(4), effects, DRAWS[0], DRAWS[1], DRAWS[2], DRAWS[:2], DRAWS[:2]
    )
    two = FewShotScores(("capitals", "plural"), SCORES.labels, SCORES.shots, torch.cat([RIGHT, 1 - RIGHT]), -RIGHT)
    fig: Any = in_context_figure(two, vector)
    np.testing.assert_allclose(line(fig, "true labels").y, [0.5, 0.5, 0.5])
    (heatmap,) = (trace for trace in fig.data if trace.type == "heatmap")
    np.testing.assert_allclose(heatmap.z, effects.mean(-1).T)
    assert [note.text for note in fig.layout.annotations if note.showarrow is not False] == ["1.1", "6.1", "1.5"]
