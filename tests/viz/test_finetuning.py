"""Figures of fine-tuning draw the numbers of the comparisons."""

from typing import Any

import pytest
import torch

from mechicl import viz
from mechicl.analysis import FineTuning, compare_with_finetuning
from mechicl.analysis.finetuning import draw_texts
from mechicl.statistics import Interval
from mechicl.text import TEXT_TASKS, text_shots, topic_tokenizer
from tests.text.models import reader
from tests.viz.traces import heatmaps, lines


@pytest.fixture(scope="module")
def comparison():
    texts = draw_texts(TEXT_TASKS["farm"], n_demonstrations=4, n_queries=6, n_held_out=2, seed=0)
    shots = text_shots(topic_tokenizer(), texts.demonstrations, texts.queries)
    return compare_with_finetuning(reader(), shots, FineTuning(0.3))


def test_settings_are_bars_with_their_intervals_and_chance():
    scores = {
        "zero-shot": {"farm": Interval(0.5, 0.4, 0.6, 9), "home": Interval(0.3, 0.3, 0.3, 1)},
        "in context": {"farm": Interval(0.9, 0.8, 1.0, 9), "home": Interval(0.7, 0.5, 0.9, 9)},
    }
    figure: Any = viz.settings_figure(scores, chance=[0.5, 1 / 3])
    assert lines(figure, "zero-shot") == [(["farm", "home"], [0.5, 0.3])]
    assert [round(half, 9) for half in figure.data[0].error_y.array] == [0.1, 0.0]  # one sample has no interval
    assert [shape.y0 for shape in figure.layout.shapes] == [0.5, 1 / 3]
    with pytest.raises(ValueError, match="at least one setting"):
        viz.settings_figure({})


def test_lines_by_layer_are_the_means_over_queries(comparison):
    for draw, names in (
        (viz.update_similarity_figure, {"tuned": "update_similarity", "random change": "random_update_similarity"}),
        (viz.map_similarity_figure, {"tuned": "map_similarity_after", "before fine-tuning": "map_similarity_before"}),
    ):
        figure = draw({"tuned": comparison})
        for line, name in names.items():
            assert lines(figure, line) == [([line], [pytest.approx(getattr(comparison, name)[0].mean().item())])]
        with pytest.raises(ValueError, match="no comparison to draw"):
            draw({})


def test_heads_are_cells(comparison):
    (cells,) = heatmaps(viz.head_similarity_figure(comparison))
    torch.testing.assert_close(cells, comparison.head_update_similarity.mean(-1).double())
