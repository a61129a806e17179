from typing import Any

import pytest
import torch

from mechicl import viz
from mechicl.analysis import FineTuning, compare_with_finetuning, draw_texts
from mechicl.statistics import Interval, interval
from mechicl.text import TEXT_TASKS, text_shots, topic_tokenizer
from tests.text.models import reader


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
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [bar.name for bar in bars] == ["zero-shot", "in context"]
    assert list(bars[0].y) == [0.5, 0.3]
    assert [round(half, 9) for half in bars[0].error_y.array] == [0.1, 0.0]  # one sample has no interval
    assert [shape.y0 for shape in figure.layout.shapes] == [0.5, 1 / 3]
    with pytest.raises(ValueError, match="at least one setting"):
        viz.settings_figure({})


def test_lines_by_layer_are_the_means_over_queries(comparison):
    figure: Any = viz.update_similarity_figure({"fine-tuned": comparison})
    lines = {trace.name: list(trace.y) for trace in figure.data if trace.name}
    assert lines["fine-tuned"] == [pytest.approx(comparison.update_similarity[0].mean().item())]
    assert lines["random change"] == [pytest.approx(comparison.random_update_similarity[0].mean().item())]
    figure = viz.map_similarity_figure({"fine-tuned": comparison})
    lines = {trace.name: list(trace.y) for trace in figure.data if trace.name}
    assert lines["before fine-tuning"] == [pytest.approx(interval(comparison.map_similarity_before).mean)]
    assert lines["fine-tuned"] == [pytest.approx(interval(comparison.map_similarity_after).mean)]
    for draw in (viz.update_similarity_figure, viz.map_similarity_figure):
        with pytest.raises(ValueError, match="no comparison to draw"):
            draw({})


def test_heads_are_cells(comparison):
    figure: Any = viz.head_similarity_figure(comparison)
    cells = torch.tensor(figure.data[0].z)
    torch.testing.assert_close(cells, comparison.head_update_similarity.mean(-1).to(cells.dtype))
    assert (figure.data[0].zmin, figure.data[0].zmax) == (-1, 1)
