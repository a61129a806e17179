"""Edges by their scores: ranks as scikit-learn has them, paths as networkx has them, and scores that are refused."""

from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from mechicl.analysis.circuits import EMBEDDING, Edge, EdgeScores, Node, auroc
from mechicl.analysis.circuits.graph import EdgeGraph
from mechicl.analysis.circuits.parts import record_writes
from mechicl.analysis.circuits.ranking import keep_paths, rank_edges, read_scores
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edges import list_edges
from tests.analysis.interventions.oracles import inputs, model_of

MODEL = model_of("gpt")
TOKENS = ModelAdapter(MODEL).encode(inputs(MODEL, 0))
GRAPH = EdgeGraph(ModelAdapter(MODEL), TOKENS, record_writes(ModelAdapter(MODEL), TOKENS))
EDGES = list_edges(MODEL)


@dataclass(frozen=True)
class Truth:
    nodes: list[Node]
    edges: list[Edge]


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(2, 30))
def test_auroc_is_that_of_scikit_learn_with_ties_at_half_weight(data, n):
    scores = data.draw(st.lists(st.sampled_from([0.0, -1.0, 1.0, 0.5, 2.0, 1e-9]), min_size=n, max_size=n))
    truth = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    assume(any(truth) and not all(truth))
    edges = EDGES[:n]
    true = [edge for edge, is_true in zip(edges, truth, strict=True) if is_true]
    expected = roc_auc_score(truth, np.abs(scores))
    by_edge = dict(zip(edges, scores, strict=True))
    assert auroc(by_edge, true) == pytest.approx(expected)
    assert auroc(torch.tensor(scores), Truth([], true), edges) == pytest.approx(expected)
    per_prompt = torch.tensor(scores, dtype=torch.float64)[:, None] + torch.tensor([[-0.25, 0.25]])
    scored = EdgeScores(tuple(edges), per_prompt, "loss", "eap", "zero")
    assert scored.auroc(true) == pytest.approx(expected)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.booleans(), min_size=len(EDGES), max_size=len(EDGES)))
def test_what_is_kept_lies_on_a_path_from_the_embedding_to_the_output(kept):
    graph = nx.MultiDiGraph()
    graph.add_nodes_from([EMBEDDING, "output"])
    for edge, keep in zip(EDGES, kept, strict=True):
        if keep:
            graph.add_edge(edge.sender, edge.receiver or "output", edge=edge)
    after, before = nx.descendants(graph, EMBEDDING) | {EMBEDDING}, nx.ancestors(graph, "output") | {"output"}
    expected = [keep and edge.sender in after and (edge.receiver or "output") in before
                for edge, keep in zip(EDGES, kept, strict=True)]  # fmt: skip
    assert keep_paths(GRAPH, torch.tensor(kept)).tolist() == expected


def test_order_is_by_size_or_towards_what_cutting_everything_does():
    scores = torch.tensor([0.5, -2.0, 1.0, 0.5])
    assert rank_edges(scores) == [1, 2, 0, 3]  # ties as they come
    assert rank_edges(scores, absolute=False) == [2, 0, 3, 1]
    assert rank_edges(scores, absolute=False, towards=-3.0) == [1, 0, 3, 2]


def test_scores_are_read_in_any_form():
    values = torch.arange(len(EDGES), dtype=torch.float64)
    by_edge = dict(zip(EDGES, values.tolist(), strict=True))
    shuffled = dict(reversed(by_edge.items()))
    for scores in (values, by_edge, shuffled, EdgeScores(tuple(EDGES), values[:, None], "loss", "eap", "zero")):
        assert torch.equal(read_scores(scores, EDGES), values)


GOOD: dict[Edge, float] = dict.fromkeys(EDGES, 1.0)
BAD: dict[str, Any] = {
    r"must be \[\d+\], one for each of the model's edges: got \(3,\)": torch.ones(3),
    r"of another model: this one has no edge head 7\.0 → output": {Edge(Node(7, 0), None): 1.0, **GOOD},
    r"miss 1 of the model's \d+ edges, such as embedding → head 0\.0 \(q\)": dict(list(GOOD.items())[1:]),
    r"not finite for 1 edges, such as embedding → head 0\.0 \(q\): nan": {**GOOD, EDGES[0]: float("nan")},
    r"not finite for \d+ edges": torch.full((len(EDGES),), torch.inf),
}


@pytest.mark.parametrize("message", list(BAD))
def test_scores_of_something_else_are_refused(message):
    with pytest.raises(ValueError, match=message):
        read_scores(BAD[message], EDGES)


def test_a_truth_that_tells_nothing_apart_is_refused():
    with pytest.raises(ValueError, match=r"nothing to tell apart: 0 true edges and \d+ others"):
        auroc(GOOD, [])
    with pytest.raises(ValueError, match=r"nothing to tell apart: \d+ true edges and 0 others"):
        auroc(GOOD, EDGES)
    with pytest.raises(ValueError, match=r"1 true edges have no score, such as head 7\.0 → output"):
        auroc(GOOD, [Edge(Node(7, 0), None)])
    with pytest.raises(ValueError, match="need edges="):
        auroc(torch.ones(len(EDGES)), EDGES[:2])
