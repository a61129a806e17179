"""Figures of training, fine-tuning, weights and paths draw the given numbers."""

from typing import Any

import pytest
import torch

from mechicl import constructions, viz
from mechicl.analysis import FineTuning, compare_with_finetuning, find_transitions, interpolate, read_weight_products
from mechicl.analysis.dynamics.training import AlignmentOverTraining, HeadsOverTraining, OverTraining
from mechicl.analysis.finetuning import draw_texts
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression
from mechicl.text import TEXT_TASKS, text_shots, topic_tokenizer
from mechicl.viz import alignments_over_training, losses_over_training, training_history
from tests.text.models import reader
from tests.viz.traces import heatmaps, lines

STEPS = [0, 10, 20, 30]
ONE = [[1.0, 2.0], [1.0, 0.4], [0.2, 0.2], [0.2, 0.2]]


def test_every_seed_is_drawn_at_its_loss_or_half_of_it():
    figure: Any = losses_over_training(STEPS, {"a": ONE, "b": [[4.0]] * 4}, references={"best": 0.3}, half=True)
    assert lines(figure, "a") == [
        (STEPS, pytest.approx([0.5, 0.5, 0.1, 0.1])),
        (STEPS, pytest.approx([1.0, 0.2, 0.1, 0.1])),
    ]
    assert lines(figure, "b") == [(STEPS, pytest.approx([2.0] * 4))]
    assert lines(figure, "best") == [([0, 30], [0.15, 0.15])]
    figure = losses_over_training(STEPS, {"a": ONE}, references={"best": 0.3}, log_x=True, log_y=True)
    assert lines(figure, "a")[0] == ([10, 20, 30], pytest.approx([1.0, 0.2, 0.2]))  # a logarithm has no place for 0
    assert lines(figure, "best") == [([10, 30], [0.3, 0.3])]
    figure = losses_over_training(STEPS, {"a": [[1.0], [None], [4.0], [None]]})
    assert lines(figure, "a") == [(STEPS, [1.0, None, 4.0, None])]


def test_losses_without_a_step_to_draw_are_an_empty_figure():
    figure = losses_over_training([0], {"a": [[1.0]]}, references={"best": 1.0}, log_x=True)
    assert lines(figure, "best") == [([], [])]
    assert not lines(losses_over_training([], {"a": []}), "a")


def test_transitions_are_marked_half_way_down():
    losses = [[1.0, 2.0, 1.0], [1.0, 0.4, 1.0], [0.2, 0.2, 1.0], [0.2, 0.2, 1.0]]
    transitions = {"a": find_transitions(STEPS, losses)}
    figure = losses_over_training(STEPS, {"a": losses, "b": losses}, transitions=transitions)
    assert lines(figure, "transition, a") == [([15, 5], pytest.approx([(1 + 0.2) / 2, (2 + 0.2) / 2]))]
    assert not lines(figure, "transition, b")


@pytest.mark.parametrize(("steps", "places"), [([0], [1]), ([5], [5]), ([0, 1], [0.5, 1]), ([10, 100], [10, 100])])
def test_only_step_0_is_moved_and_seeds_that_agree_have_no_band(steps, places):
    values = torch.ones(len(steps), 2, dtype=torch.float64)
    figure: Any = alignments_over_training({"run": AlignmentOverTraining(tuple(steps), values, values, values, values)})
    assert all(x == places for x, _ in lines(figure, "run"))
    assert {y for trace in figure.data if trace.fill == "toself" for y in trace.y} <= {1.0}


def test_cosines_and_distances_have_bands_if_there_are_several_seeds():
    cosine = torch.tensor([[0.0, 0.5], [0.8, 1.0]], dtype=torch.float64)
    distance = torch.tensor([[2.0, 4.0], [0.1, 0.3]], dtype=torch.float64)
    two = AlignmentOverTraining((0, 100), distance, cosine, 3 * distance, distance)
    one = AlignmentOverTraining((0, 100), distance[:, :1], cosine[:, :1], distance[:, :1], distance[:, :1])
    figure: Any = alignments_over_training({"two": two, "one": one})
    assert [y for _, y in lines(figure, "two")] == [pytest.approx(y) for y in ([0.25, 0.9], [3.0, 0.2], [9.0, 0.6])]
    assert [y for _, y in lines(figure, "one")] == [pytest.approx(y) for y in ([0.0, 0.8], [2.0, 0.1], [2.0, 0.1])]
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    assert [band.xaxis for band in bands] == ["x", "x2", "x3"]
    first, second = interval(cosine[0]), interval(cosine[1])
    assert list(bands[0].x) == [50, 100, 100, 50]
    assert list(bands[0].y) == pytest.approx([first.high, second.high, second.low, first.low])


def test_a_history_draws_loss_transitions_and_quantities_in_panels_with_one_axis():
    curve = {"eval_step": [0, 10, 100], "eval_loss": [[4.0, 3.0], [2.0, 2.9], [0.1, 0.2]]}
    scores = HeadsOverTraining((0, 50), {"previous_token": torch.tensor([[0.1, 0.3], [0.5, 0.7]], dtype=torch.float64)})
    other = OverTraining((0, 100), {"mine": torch.tensor([[1.0, 3.0], [0.0, 1.0]])})
    falls = find_transitions(curve["eval_step"], curve["eval_loss"])
    figure: Any = training_history(curve, {"heads": scores, "other": other}, transitions=falls, loss="loss (nats)")
    assert lines(figure, "each seed") == [([5, 10, 100], [4.0, 2.0, 0.1]), ([5, 10, 100], [3.0, 2.9, 0.2])]
    assert lines(figure, "previous token") == [([5, 50], pytest.approx([0.2, 0.6]))]  # step 0 as for the loss
    assert lines(figure, "mine") == [([5, 100], pytest.approx([2.0, 0.5]))]
    axes = {trace.name: (trace.xaxis, trace.yaxis) for trace in figure.data if trace.name}
    assert axes == {"each seed": ("x", "y"), "previous token": ("x2", "y2"), "mine": ("x3", "y3")}
    assert [figure.layout[f"xaxis{i}"].matches for i in ("", 2)] == ["x3", "x3"]
    assert [note.text for note in figure.layout.annotations] == ["loss (nats)", "heads", "other"]
    marks = [(line.x0, line.xref) for line in figure.layout.shapes]
    assert marks == [(step, axis) for step in (5.0, 55.0) for axis in ("x", "x2", "x3")]
    assert falls.steps.tolist() == [5.0, 55.0]
    alone: Any = training_history({}, {"heads": scores})
    assert [note.text for note in alone.layout.annotations] == ["heads"]
    assert lines(alone, "previous token") == [([25, 50], pytest.approx([0.2, 0.6]))]


# ---- fine-tuning ----
def test_settings_are_bars_with_their_intervals_and_chance():
    scores = {
        "zero-shot": {"farm": Interval(0.5, 0.4, 0.6, 9), "home": Interval(0.3, 0.3, 0.3, 1)},
        "in context": {"farm": Interval(0.9, 0.8, 1.0, 9), "home": Interval(0.7, 0.4, 0.8, 9)},
    }
    figure: Any = viz.settings_figure(scores, chance=[0.5, 1 / 3])
    assert lines(figure, "zero-shot") == [(["farm", "home"], [0.5, 0.3])]
    assert [round(half, 9) for half in figure.data[0].error_y.array] == [0.1, 0.0]  # one sample has no interval
    assert figure.data[1].error_y.array == pytest.approx([0.1, 0.1])
    assert figure.data[1].error_y.arrayminus == pytest.approx([0.1, 0.3])
    assert [shape.y0 for shape in figure.layout.shapes] == [0.5, 1 / 3]


def test_similarities_are_means_over_queries_by_layer_and_head():
    texts = draw_texts(TEXT_TASKS["farm"], n_demonstrations=4, n_queries=6, n_held_out=2, seed=0)
    shots = text_shots(topic_tokenizer(), texts.demonstrations, texts.queries)
    comparison = compare_with_finetuning(reader(), shots, FineTuning(0.3))
    for draw, names in (
        (viz.update_similarity_figure, {"tuned": "update_similarity", "random change": "random_update_similarity"}),
        (viz.map_similarity_figure, {"tuned": "map_similarity_after", "before fine-tuning": "map_similarity_before"}),
    ):
        figure = draw({"tuned": comparison})
        for line, name in names.items():
            assert lines(figure, line) == [([line], [pytest.approx(getattr(comparison, name)[0].mean().item())])]
    (cells,) = heatmaps(viz.head_similarity_figure(comparison))
    torch.testing.assert_close(cells, comparison.head_update_similarity.mean(-1).double())


# ---- figures of weights and paths draw the given numbers ----
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
