"""Figures of a training draw the numbers that they are given, each seed and kind, at its step."""

from typing import Any

import pytest
import torch

from mechicl.analysis import find_transitions
from mechicl.analysis.dynamics.snapshots import AlignmentOverTraining, HeadsOverTraining
from mechicl.statistics import interval
from mechicl.viz import (
    alignments_over_training,
    heads_during_training,
    losses_over_training,
    mean_patterns,
    sensitivity_over_training,
)

STEPS = [0, 10, 20, 30]
ONE = [[1.0, 2.0], [1.0, 0.4], [0.2, 0.2], [0.2, 0.2]]


def drawn(figure: Any, name: str) -> list[tuple[list, list]]:
    return [(list(trace.x), list(trace.y)) for trace in figure.data if trace.name == name]


# ---- losses ----


def test_every_seed_is_drawn_at_half_its_loss():
    figure: Any = losses_over_training(STEPS, {"a": ONE, "b": [[4.0]] * 4}, title="Losses")
    (first, second), (other,) = drawn(figure, "a"), drawn(figure, "b")
    assert first == (STEPS, pytest.approx([0.5, 0.5, 0.1, 0.1]))
    assert second == (STEPS, pytest.approx([1.0, 0.2, 0.1, 0.1]))
    assert other == (STEPS, pytest.approx([2.0] * 4))
    assert [trace.showlegend for trace in figure.data] == [True, False, True]
    assert figure.data[0].line.color == figure.data[1].line.color != figure.data[2].line.color
    assert figure.layout.title.text == "Losses"
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("linear", "linear")
    assert figure.layout.yaxis.rangemode == "tozero"


def test_step_0_has_no_place_on_a_logarithmic_axis():
    figure: Any = losses_over_training(STEPS, {"a": ONE}, references={"best": 0.3}, log_x=True, log_y=True)
    assert drawn(figure, "a")[0] == ([10, 20, 30], pytest.approx([0.5, 0.1, 0.1]))
    assert drawn(figure, "best") == [([10, 30], [0.15, 0.15])]
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert figure.layout.yaxis.rangemode is None


def test_transitions_are_marked_half_way_down_where_there_are_any():
    losses = [[1.0, 2.0, 1.0], [1.0, 0.4, 1.0], [0.2, 0.2, 1.0], [0.2, 0.2, 1.0]]
    found = find_transitions(STEPS, losses)
    figure: Any = losses_over_training(STEPS, {"a": losses, "b": losses}, found={"a": found})
    (marks,) = drawn(figure, "transition, a")
    assert marks == ([15, 5], pytest.approx([(1 + 0.2) / 4, (2 + 0.2) / 4]))
    assert not drawn(figure, "transition, b")


def test_no_kind_and_no_reference_is_left_out():
    kinds = {f"kind {i}": [[float(i)]] * 4 for i in range(6)}
    references = {f"reference {i}": 2.0 * i for i in range(5)}
    figure: Any = losses_over_training(STEPS, kinds, references=references)
    assert [trace.name for trace in figure.data] == [*kinds, *references]
    assert drawn(figure, "reference 4") == [([0, 30], [4.0, 4.0])]


def test_losses_of_other_steps_are_refused():
    with pytest.raises(ValueError, match="b has 3 evaluations for 4 steps"):
        losses_over_training(STEPS, {"a": ONE, "b": ONE[:3]})


# ---- sensitivities ----


def test_norms_stand_over_the_loss():
    norms = {"own": [1.0, 2.0, 3.0], "next": [0.0, 0.5, 1.0], "other": [0.1, 0.2, 0.3], "fourth": [5.0, 5.0, 5.0]}
    figure: Any = sensitivity_over_training([0, 8, 30], norms, STEPS, [2.0, 1.0, 0.6, 0.4], gd_mse=0.5, title="Norms")
    for name, values in norms.items():
        assert drawn(figure, name) == [([4, 8, 30], values)]
    assert drawn(figure, "loss") == [([10, 20, 30], [0.5, 0.3, 0.2])]
    assert [trace.yaxis for trace in figure.data] == ["y"] * 4 + ["y2"]
    (line,) = figure.layout.shapes
    assert (line.y0, line.y1, line.yref) == (0.25, 0.25, "y2")
    assert (figure.layout.xaxis.type, figure.layout.xaxis2.type) == ("log", "log")
    assert figure.layout.xaxis2.title.text == "optimisation step"
    assert figure.layout.yaxis2.title.text == "half mean squared error"
    assert figure.layout.title.text == "Norms"
    assert figure.layout.yaxis.domain[0] > figure.layout.yaxis2.domain[1]


@pytest.mark.parametrize(("steps", "places"), [([0], [1]), ([5], [5]), ([0, 1], [0.5, 1]), ([10, 100], [10, 100])])
def test_only_step_0_is_moved(steps, places):
    figure: Any = sensitivity_over_training(steps, {"own": [1.0] * len(steps)}, STEPS, [1.0] * 4, gd_mse=0.5)
    assert drawn(figure, "own")[0][0] == places
    values = torch.rand(len(steps), 2, dtype=torch.float64)
    figure = alignments_over_training({"run": AlignmentOverTraining(tuple(steps), values, values, values, values)})
    assert all(x == places for x, _ in drawn(figure, "run"))


def test_a_loss_for_each_evaluation_is_needed():
    with pytest.raises(ValueError, match="shorter"):
        sensitivity_over_training([0, 8], {"own": [1.0, 1.0]}, STEPS, [1.0] * 3, gd_mse=0.5)


# ---- patterns ----


def test_patterns_are_drawn_entry_by_entry_in_one_scale():
    panels = {"before": torch.tensor([[0.5, 0.25], [0.0, 1.0]]), "after": torch.tensor([[0.0, 2.0], [0.0, 0.0]])}
    figure: Any = mean_patterns(panels, ["x1", "y1"])
    assert [[list(row) for row in trace.z] for trace in figure.data] == [panel.tolist() for panel in panels.values()]
    assert all((list(t.x), list(t.y)) == (["x1", "y1"], ["x1", "y1"]) for t in figure.data)
    assert [text.text for text in figure.layout.annotations] == ["before", "after"]
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 2)
    assert all(trace.coloraxis == "coloraxis" for trace in figure.data)
    assert [figure.layout[axis].autorange for axis in ("yaxis", "yaxis2")] == ["reversed"] * 2


def test_negative_weights_get_a_scale_around_0():
    panels = {"a": torch.tensor([[0.5, -3.0], [0.0, 1.0]]), "b": torch.tensor([[0.5, 0.0], [0.0, 2.0]])}
    figure: Any = mean_patterns(panels, ["x1", "y1"])
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-3, 3)


@pytest.mark.parametrize(
    "panels", [{}, {"a": torch.zeros(3, 3)}, {"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 2), "b": torch.zeros(3, 3)}]
)
def test_patterns_that_do_not_fit_the_labels_are_refused(panels):
    with pytest.raises(ValueError, match=r"patterns must be \[query_pos key_pos\] = \(2, 2\)"):
        mean_patterns(panels, ["x1", "y1"])


# ---- alignment ----


def test_cosines_stand_beside_distances_with_their_bands():
    cosine = torch.tensor([[0.0, 0.5], [0.8, 1.0]], dtype=torch.float64)
    distance = torch.tensor([[2.0, 4.0], [0.1, 0.3]], dtype=torch.float64)
    nothing = torch.full((2, 2), torch.nan, dtype=torch.float64)
    both = AlignmentOverTraining((0, 100), distance, cosine, nothing, nothing)
    one = AlignmentOverTraining((0, 100), distance[:, :1], cosine[:, :1], nothing[:, :1], nothing[:, :1])
    figure: Any = alignments_over_training({"two seeds": both, "one seed": one})
    left, right = drawn(figure, "two seeds")
    assert left == ([50, 100], pytest.approx([0.25, 0.9]))
    assert right == ([50, 100], pytest.approx([3.0, 0.2]))
    assert [y for _, y in drawn(figure, "one seed")] == [[0.0, 0.8], [2.0, pytest.approx(0.1)]]
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    assert [band.xaxis for band in bands] == ["x", "x2"]  # a single seed has none
    for band, values in zip(bands, (cosine, distance), strict=True):
        first, second = interval(values[0]), interval(values[1])
        assert list(band.x) == [50, 100, 100, 50]
        assert list(band.y) == pytest.approx([first.high, second.high, second.low, first.low])
    lines = [trace for trace in figure.data if trace.name]
    assert [(line.xaxis, line.showlegend) for line in lines] == [("x", True), ("x2", False)] * 2
    assert (figure.layout.xaxis.type, figure.layout.xaxis2.type) == ("log", "log")


# ---- heads ----

CURVE = {"eval_step": [0, 10, 100], "eval_loss": [[4.0, 3.0], [2.0, 2.5], [0.1, 0.2]]}


def test_scores_stand_over_the_loss_of_every_seed():
    scores = {
        "previous_token": torch.tensor([[0.1, 0.3], [0.5, 0.7]], dtype=torch.float64),
        "induction": torch.tensor([[0.0, 0.0], [0.8, 1.0]], dtype=torch.float64),
    }
    figure: Any = heads_during_training(CURVE, HeadsOverTraining((0, 50), scores), "Heads")
    assert drawn(figure, "loss") == [([5, 10, 100], [4.0, 2.0, 0.1]), ([5, 10, 100], [3.0, 2.5, 0.2])]
    assert drawn(figure, "previous token score") == [
        ([5, 50], pytest.approx([0.2, 0.6]))
    ]  # step 0 where the loss has it
    assert drawn(figure, "induction score") == [([5, 50], pytest.approx([0.0, 0.9]))]
    sides = {trace.name: trace.yaxis for trace in figure.data if trace.name}
    assert sides == {"loss": "y", "previous token score": "y2", "induction score": "y2"}
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    for band, values in zip(bands, scores.values(), strict=True):
        first, second = interval(values[0]), interval(values[1])
        assert list(band.x) == [5, 50, 50, 5]
        assert list(band.y) == pytest.approx([first.high, second.high, second.low, first.low])
        assert band.yaxis == "y2"
    assert [trace.showlegend for trace in figure.data if trace.name == "loss"] == [True, False]
    assert figure.layout.xaxis.type == "log"
    assert figure.layout.yaxis2.title.text == "score (95% interval over seeds)"
    assert figure.layout.title.text == "Heads"


def test_one_seed_has_no_band():
    curve = {"eval_step": [1, 10], "eval_loss": [[4.0], [2.0]]}
    formed = HeadsOverTraining((0, 1, 10), {"copying": torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64)})
    figure: Any = heads_during_training(curve, formed)
    assert [trace.name for trace in figure.data] == ["loss", "copying score"]
    assert drawn(figure, "loss") == [([1, 10], [4.0, 2.0])]
    assert drawn(figure, "copying score") == [([0.5, 1, 10], pytest.approx([0.1, 0.2, 0.3]))]
    assert figure.layout.yaxis2.title.text == "score"
