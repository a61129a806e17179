"""Circuits as results, compared as sets, and their edges by scores."""

import math
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from mechicl.analysis.circuits import EMBEDDING, Circuit, Edge, EdgeScores, Node, compare_circuits
from mechicl.analysis.circuits.circuit import PartKind, order_edges
from mechicl.analysis.circuits.search import between_ends
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.parts import record_writes
from mechicl.models.opening.sites import list_edges
from mechicl.statistics import interval, load_result
from tests.analysis.interventions.oracles import inputs, model_of

FIRST, SECOND, MLP = Node(0, 2), Node(1, 0), Node(1)
NODES = (FIRST, SECOND, MLP)
EDGES = (
    Edge(EMBEDDING, FIRST, "v"), Edge(FIRST, SECOND, "q"), Edge(FIRST, SECOND, "k"), Edge(SECOND, MLP),
    Edge(MLP, None),
)  # fmt: skip


def circuit(nodes: Any = NODES, edges: Any = EDGES, n_prompts: int = 5, **changes: Any) -> Circuit:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, n_prompts, generator=generator, dtype=torch.float64)

    full = drawn()
    fields = {
        "nodes": tuple(nodes), "edges": tuple(edges), "metric": "loss", "method": "mean", "full": full,
        "ablated": full + 2 + drawn(), "alone": full + drawn(), "without": full + 1, "edges_alone": full + drawn(),
        "node_effects": drawn(len(nodes)), "edge_effects": drawn(len(edges)), "n_nodes": 6,
    }  # fmt: skip
    return Circuit(**(fields | changes))


SMALL: dict[str, tuple[tuple, tuple]] = {
    "nothing": ((), ()),
    "nodes alone": (NODES, ()),
    "the embedding read out": ((), (Edge(EMBEDDING, None),)),
    "a circuit": (NODES, EDGES),
}


@pytest.mark.parametrize("kind", list(SMALL))
@pytest.mark.parametrize("n_prompts", [1, 5])
def test_circuits_are_files_text_tables_and_graphs(kind, n_prompts, tmp_path):
    nodes, edges = SMALL[kind]
    made = circuit(nodes, edges, n_prompts=n_prompts, method="scrambled")  # a method of older versions
    loaded = load_result(made.save(tmp_path / kind))
    assert (loaded.nodes, loaded.edges, str(loaded)) == (made.nodes, made.edges, str(made))
    assert f"{len(edges)} edges; loss" in str(made)
    assert len(made.edge_list().splitlines()) == max(len(edges), 1)
    assert len(made.to_dataframe()) == len(made.effects()) == len(made.minimality()) == len(nodes) + len(edges)
    graph = made.to_networkx()
    assert set(graph.nodes) == {"embedding", "output", *map(str, nodes)}
    assert graph.number_of_edges() == len(edges)


def test_the_graph_has_the_parts_and_effects_of_the_circuit():
    made = circuit()
    graph = made.to_networkx()
    assert graph.graph == {"metric": "loss", "method": "mean"}
    assert graph.nodes["head 0.2"].items() >= {"kind": "head", "layer": 0, "head": 2}.items()
    assert graph.nodes["MLP 1"]["kind"] == "MLP"
    assert graph.nodes["output"]["layer"] == 2
    assert nx.is_directed_acyclic_graph(graph)
    assert nx.has_path(graph, "embedding", "output")
    for part, effect in zip((*NODES, *EDGES), (*made.node_effects, *made.edge_effects), strict=True):
        if isinstance(part, Node):
            attributes = graph.nodes[str(part)]
        else:
            attributes = graph.edges[str(part.sender), str(part.receiver or "output"), part.by]
            assert attributes["by"] == part.by
        mean = interval(effect)
        assert [attributes[name] for name in ("effect", "low", "high")] == [mean.mean, mean.low, mean.high]
    assert "head 0.2" in "".join(nx.generate_graphml(graph))  # a format without None


# ---- comparisons ----
KNOWN = [Node(layer, head) for layer in range(2) for head in (0, 1, None)]
LINKS = [Edge(EMBEDDING, node, by) for node in KNOWN if node.head is not None for by in "qkv"]
LINKS += [Edge(Node(0, 1), Node(0)), Edge(Node(0), Node(1, 0), "k"), Edge(EMBEDDING, None), Edge(Node(1), None)]


@dataclass(frozen=True)
class Parts:
    nodes: list[Node]
    edges: list[Edge]


def some(parts):
    return st.lists(st.sampled_from(parts), unique=True)


@settings(max_examples=60, deadline=None)
@given(some([EMBEDDING, *KNOWN]), some([EMBEDDING, *KNOWN]), some(LINKS), some(LINKS))
def test_shared_missing_and_false_are_those_of_sets(nodes, true_nodes, edges, true_edges):
    made = compare_circuits(Parts(nodes, edges), Parts(true_nodes, true_edges))
    every: list[tuple[PartKind, list, list]] = [("nodes", nodes, true_nodes), ("edges", edges, true_edges)]
    for kind, circuit, truth in every:
        ours, theirs = set(circuit) - {EMBEDDING}, set(truth) - {EMBEDDING}
        assert set(getattr(made, f"shared_{kind}")) == ours & theirs
        assert set(getattr(made, f"missing_{kind}")) == theirs - ours
        assert set(getattr(made, f"false_{kind}")) == ours - theirs
        for share, whole in ((made.precision(kind), ours), (made.recall(kind), theirs)):
            assert math.isnan(share) if not whole else share == pytest.approx(len(ours & theirs) / len(whole))
    assert made.is_exact == (
        set(nodes) - {EMBEDDING} == set(true_nodes) - {EMBEDDING} and set(edges) == set(true_edges)
    )
    table = made.to_dataframe()
    assert len(table) == len((set(nodes) | set(true_nodes)) - {EMBEDDING}) + len(set(edges) | set(true_edges))
    assert (table["standing"] == "shared").sum() == len(made.shared_nodes) + len(made.shared_edges)
    assert (table["kind"] == "node").sum() == len({*nodes, *true_nodes} - {EMBEDDING})


def test_it_prints_missing_and_false_parts():
    made = compare_circuits(Parts(KNOWN[:2], LINKS[:3]), Parts(KNOWN[:3], [LINKS[0], LINKS[-1]]))
    assert str(made).splitlines()[0] == "2 of 3 nodes found, 0 false; missing: MLP 0"
    assert str(made).endswith("MLP 1 → output; false: embedding → head 0.0 (k), embedding → head 0.0 (v)")


def test_order_is_that_of_computation():
    nodes = (Node(0, 3), Node(0), Node(1, 1), Node(1))
    assert compare_circuits(Parts([Node(1), *nodes[:3]], []), Parts([], [])).false_nodes == nodes
    edges = (
        Edge(EMBEDDING, Node(0, 0), "q"), Edge(EMBEDDING, Node(0, 0), "k"), Edge(EMBEDDING, Node(0, 0), "v"),
        Edge(Node(0, 0), Node(0)), Edge(EMBEDDING, Node(1, 0), "v"), Edge(EMBEDDING, None), Edge(Node(0), None),
    )  # fmt: skip
    assert order_edges(reversed(edges)) == edges


# ---- scores of edges ----
MODEL = model_of("gpt")
TOKENS = ModelAdapter(MODEL).encode(inputs(MODEL, 0))
GRAPH = EdgeGraph(ModelAdapter(MODEL), TOKENS, record_writes(ModelAdapter(MODEL), TOKENS))
ALL_EDGES = list_edges(MODEL)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(2, 30))
def test_auroc_is_that_of_scikit_learn_with_ties_at_half_weight(data, n):
    scores = data.draw(st.lists(st.sampled_from([0.0, -1.0, 1.0, 0.5, 2.0, 1e-9]), min_size=n, max_size=n))
    truth = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    assume(any(truth) and not all(truth))
    edges = ALL_EDGES[:n]
    true = [edge for edge, is_true in zip(edges, truth, strict=True) if is_true]
    expected = roc_auc_score(truth, np.abs(scores))
    scored = EdgeScores(tuple(edges), torch.tensor(scores)[:, None], "loss", "eap-ig", "zero")
    assert scored.auroc(true) == pytest.approx(expected)
    assert scored.auroc(Parts([], true)) == pytest.approx(expected)
    per_prompt = torch.tensor(scores, dtype=torch.float64)[:, None] + torch.tensor([[-0.25, 0.25]])
    scored = EdgeScores(tuple(edges), per_prompt, "loss", "eap", "zero")
    assert scored.auroc(true) == pytest.approx(expected)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.booleans(), min_size=len(ALL_EDGES), max_size=len(ALL_EDGES)))
def test_kept_edges_are_on_a_path_from_the_embedding_to_the_output(kept):
    graph = nx.MultiDiGraph()
    graph.add_nodes_from([EMBEDDING, "output"])
    for edge, keep in zip(ALL_EDGES, kept, strict=True):
        if keep:
            graph.add_edge(edge.sender, edge.receiver or "output", edge=edge)
    after, before = nx.descendants(graph, EMBEDDING) | {EMBEDDING}, nx.ancestors(graph, "output") | {"output"}
    expected = [keep and edge.sender in after and (edge.receiver or "output") in before
                for edge, keep in zip(ALL_EDGES, kept, strict=True)]  # fmt: skip
    assert between_ends(GRAPH, torch.tensor(kept)).tolist() == expected
