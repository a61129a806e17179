"""Curves of circuits and ranks of edges: what is drawn is what was measured."""

import dataclasses
from typing import Any

import pytest
import torch

from mechicl.analysis.circuits import EdgeScores
from mechicl.viz import edge_ranking, faithfulness_curves
from tests.analysis.circuits.test_curves import made
from tests.viz.test_circuits import EDGES, circuit
from tests.viz.traces import lines


def test_curves_are_the_means_with_the_areas_in_the_legend():
    curve = made()
    curve = dataclasses.replace(
        curve, alone=curve.alone | {"random": curve.alone["scores"] * 0 + 1}, n_kept=curve.n_kept | {"random": (0,) * 4}
    )
    figure: Any = faithfulness_curves(curve)
    ((x, y),) = lines(figure, "scores: CPR 0.850, CMD 0.250")
    assert (x, y) == (list(curve.fractions), [0, 0.5, 1.25, 1])
    ((x, y),) = lines(figure, "random: CPR 0.000, CMD 0.900")
    assert y == [0, 0, 0, 0]
    assert figure.layout.title.text == "Faithfulness of the best of 10 edges (loss; zero)"
    assert figure.layout.xaxis.type == "linear"
    small: Any = faithfulness_curves(dataclasses.replace(curve, fractions=(0.001, 0.2, 0.5, 1.0)))
    assert small.layout.xaxis.type == "log"
    colors = [trace.line.color for trace in figure.data if trace.name and trace.name.startswith("random")]
    assert colors == ["#b4b4b4"]


def test_edges_rank_by_size_and_true_ones_stand_out():
    values = torch.tensor([0.5, -4.0, 2.0, 0.0, 1.0, 0.25, 0.125, 3.0], dtype=torch.float64)
    scores = EdgeScores(EDGES, values[:, None].repeat(1, 3), "loss", "eap", "zero")
    plain: Any = edge_ranking(scores)
    assert list(plain.data[0].x) == list(range(1, 9))
    assert list(plain.data[0].y)[:7] == [4, 3, 2, 1, 0.5, 0.25, 0.125]
    assert 0 < plain.data[0].y[7] < 1e-9  # none has no place on the axis
    assert plain.data[0].customdata[7] == 0
    truth = circuit(edges=(EDGES[1], EDGES[4]))
    beside: Any = edge_ranking(scores, truth)
    others, true = beside.data
    assert [str(edge) for edge in (EDGES[1], EDGES[4])] == list(true.text)
    assert list(true.x) == [1, 4]
    assert sorted([*others.x, *true.x]) == list(range(1, 9))
    assert beside.layout.title.text.endswith(f"AUROC {scores.auroc(truth):.3f}")
    assert scores.auroc(truth) == pytest.approx(10 / 12)
