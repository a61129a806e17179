"""Edges by their scores: ranks by scikit-learn, paths by networkx."""

from dataclasses import dataclass

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
def test_kept_edges_are_on_a_path_from_the_embedding_to_the_output(kept):
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
