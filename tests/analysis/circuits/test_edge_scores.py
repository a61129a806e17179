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

from mechicl.analysis.circuits import EMBEDDING, Edge, EdgeScores, Node
from mechicl.analysis.circuits.cuts import between_ends
from mechicl.analysis.circuits.scores import read_scores
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.edges import list_edges
from mechicl.models.opening.parts import record_writes
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
    scored = EdgeScores(tuple(edges), torch.tensor(scores)[:, None], "loss", "eap-ig", "zero")
    assert scored.auroc(true) == pytest.approx(expected)
    assert scored.auroc(Truth([], true)) == pytest.approx(expected)
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
    assert between_ends(GRAPH, torch.tensor(kept)).tolist() == expected


def test_scores_are_read_in_any_form():
    values = torch.arange(len(EDGES), dtype=torch.float64)
    by_edge = dict(zip(EDGES, values.tolist(), strict=True))
    shuffled = dict(reversed(by_edge.items()))
    for scores in (by_edge, shuffled, EdgeScores(tuple(EDGES), values[:, None], "loss", "eap-ig", "zero")):
        assert torch.equal(read_scores(scores, EDGES), values)


GOOD: dict[Edge, float] = dict.fromkeys(EDGES, 1.0)
BAD: dict[str, Any] = {
    r"of another model: this one has no edge head 7\.0 → output": {Edge(Node(7, 0), None): 1.0, **GOOD},
    r"miss 1 of the model's \d+ edges, such as embedding → head 0\.0 \(q\)": dict(list(GOOD.items())[1:]),
    r"not finite for 1 edges, such as embedding → head 0\.0 \(q\): nan": {**GOOD, EDGES[0]: float("nan")},
    r"not finite for \d+ edges": dict.fromkeys(EDGES, float("inf")),
}


@pytest.mark.parametrize("message", list(BAD))
def test_scores_of_something_else_are_refused(message):
    with pytest.raises(ValueError, match=message):
        read_scores(BAD[message], EDGES)


def test_a_truth_that_tells_nothing_apart_is_refused():
    scores = EdgeScores(tuple(EDGES), torch.ones(len(EDGES), 1), "loss", "eap-ig", "zero")
    with pytest.raises(ValueError, match=r"nothing to distinguish: 0 true edges and \d+ others"):
        scores.auroc([])
    with pytest.raises(ValueError, match=r"nothing to distinguish: \d+ true edges and 0 others"):
        scores.auroc(EDGES)
    with pytest.raises(ValueError, match=r"1 true edges have no score, such as head 7\.0 → output"):
        scores.auroc([Edge(Node(7, 0), None)])
