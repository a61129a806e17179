"""Circuits compared with the truth, counted as sets."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.analysis.circuits import EMBEDDING, Edge, Node, compare_circuits
from mechicl.analysis.circuits.circuit_comparison import CircuitComparison, Kind, order_edges

NODES = [Node(layer, head) for layer in range(2) for head in (0, 1, None)]
EDGES = [Edge(EMBEDDING, node, by) for node in NODES if node.head is not None for by in "qkv"]
EDGES += [Edge(Node(0, 1), Node(0)), Edge(Node(0), Node(1, 0), "k"), Edge(EMBEDDING, None), Edge(Node(1), None)]


@dataclass(frozen=True)
class Parts:
    nodes: list[Node]
    edges: list[Edge]


def some(parts):
    return st.lists(st.sampled_from(parts), unique=True)


@settings(max_examples=60, deadline=None)
@given(some([EMBEDDING, *NODES]), some([EMBEDDING, *NODES]), some(EDGES), some(EDGES))
def test_shared_missing_and_false_are_those_of_sets(nodes, true_nodes, edges, true_edges):
    made = compare_circuits(Parts(nodes, edges), Parts(true_nodes, true_edges))
    every: list[tuple[Kind, list, list]] = [("nodes", nodes, true_nodes), ("edges", edges, true_edges)]
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


def test_it_prints_missing_and_false_parts():
    made = compare_circuits(Parts(NODES[:2], EDGES[:3]), Parts(NODES[:3], [EDGES[0], EDGES[-1]]))
    assert str(made) == (
        "2 of 3 nodes found, 0 false; missing: MLP 0\n"
        "1 of 2 edges found, 2 false; missing: MLP 1 → output; "
        "false: embedding → head 0.0 (k), embedding → head 0.0 (v)"
    )
    assert "<td>MLP 0</td>" in made._repr_html_()
    many = compare_circuits(Parts(NODES, []), Parts(NODES, EDGES))
    assert f"and {len(EDGES) - 12} more" in str(many)


def test_it_is_saved_and_loaded(tmp_path):
    made = compare_circuits(Parts(NODES[:2], EDGES[:3]), Parts([], EDGES))
    loaded = CircuitComparison.load(made.save(tmp_path))
    assert (loaded.shared_edges, loaded.missing_edges) == (made.shared_edges, made.missing_edges)
    assert str(loaded) == str(made)


def test_order_is_that_of_computation():
    nodes = (Node(0, 3), Node(0), Node(1, 1), Node(1))
    assert compare_circuits(Parts([Node(1), *nodes[:3]], []), Parts([], [])).false_nodes == nodes
    edges = (
        Edge(EMBEDDING, Node(0, 0), "q"), Edge(EMBEDDING, Node(0, 0), "k"), Edge(EMBEDDING, Node(0, 0), "v"),
        Edge(Node(0, 0), Node(0)), Edge(EMBEDDING, Node(1, 0), "v"), Edge(EMBEDDING, None), Edge(Node(0), None),
    )  # fmt: skip
    assert order_edges(reversed(edges)) == edges
