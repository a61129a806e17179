"""Circuits as results: saved and loaded, as text, tables and graphs."""

import dataclasses
import math
from typing import Any

import networkx as nx
import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.circuits import EMBEDDING, Circuit, Edge, Node
from mechicl.statistics import interval, load_result, ratio_interval

FIRST, SECOND, MLP = Node(0, 2), Node(1, 0), Node(1)
NODES = (FIRST, SECOND, MLP)
EDGES = (
    Edge(EMBEDDING, FIRST, "v"),
    Edge(FIRST, SECOND, "q"),
    Edge(FIRST, SECOND, "k"),
    Edge(SECOND, MLP),
    Edge(MLP, None),
)


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
def test_circuits_are_saved_and_loaded(kind, n_prompts, tmp_path):
    made = circuit(*SMALL[kind], n_prompts=n_prompts)
    for loaded in (Circuit.load(made.save(tmp_path / kind)), load_result(tmp_path / kind)):
        assert loaded.is_same_as(made)
        assert loaded.nodes == made.nodes
        assert loaded.edges == made.edges  # tuples of nodes within tuples of edges
        for field in dataclasses.fields(Circuit):
            before, after = getattr(made, field.name), getattr(loaded, field.name)
            if isinstance(before, torch.Tensor):
                assert_close(after, before, rtol=0, atol=0)
            else:
                assert after == before
        assert str(loaded) == str(made)


@pytest.mark.parametrize("kind", list(SMALL))
@pytest.mark.parametrize("n_prompts", [1, 5])
def test_small_circuits_print_and_are_tables_and_graphs(kind, n_prompts):
    nodes, edges = SMALL[kind]
    made = circuit(nodes, edges, n_prompts=n_prompts)
    assert f"{len(edges)} edges; loss" in str(made)
    assert len(made.edge_list().splitlines()) == max(len(edges), 1)
    assert (made.edge_list() == "no edges") == (not edges)
    assert len(made.to_dataframe()) == len(made.effects()) == len(made.minimality()) == len(nodes) + len(edges)
    assert "<table>" in made._repr_html_()
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


def test_effects_that_were_not_measured_are_left_out():
    nan = torch.full((5, 5), torch.nan, dtype=torch.float64)
    made = circuit(node_effects=nan[:3], edge_effects=nan)
    assert made.effects() == made.minimality() == {}
    assert made.to_dataframe()["effect"].isna().all()
    assert list(made.to_dataframe()["part"]) == [*map(str, NODES), *map(str, EDGES)]
    assert "effect" not in made.to_networkx().nodes["head 0.2"]
    assert made.edge_list().splitlines()[0] == "embedding → head 0.2 (v)"


def test_the_edge_list_goes_from_the_embedding_to_the_output_with_effects():
    made = circuit(edges=EDGES[::-1])
    lines = made.edge_list().splitlines()
    assert [line.split("  ")[0] for line in lines] == [str(edge) for edge in EDGES]
    for line, effect in zip(lines, made.edge_effects.flip(0), strict=True):
        assert line.endswith(str(interval(effect)))
    longest = max(len(str(edge)) for edge in EDGES)
    assert all(line[: longest + 2].endswith("  ") and line[longest + 2] != " " for line in lines)  # one column


def test_minimality_is_the_lost_share_of_the_whole_effect():
    made = circuit()
    shares = made.minimality()
    gained = (made.ablated - made.full).mean()
    for part, effect in zip((*NODES, *EDGES), (*made.node_effects, *made.edge_effects), strict=True):
        assert shares[part].mean == pytest.approx((effect.mean() / gained).item())
        assert shares[part] == ratio_interval(effect, made.ablated - made.full)


def test_circuits_are_the_same_where_their_nodes_and_edges_are():
    made = circuit()
    assert made.is_same_as(circuit(NODES[::-1], EDGES[::-1], n_prompts=3, metric="another"))
    assert not made.is_same_as(circuit(NODES, EDGES[1:]))
    assert not made.is_same_as(circuit(NODES[1:], EDGES))
    with_embedding = dataclasses.make_dataclass("Truth", ["nodes", "edges"])([EMBEDDING, *NODES], list(EDGES))
    assert made.is_same_as(with_embedding)


def test_a_circuit_of_all_nodes_has_no_completeness():
    made = circuit(n_nodes=3)
    assert math.isnan(made.completeness().mean)
    assert "(the whole model)" in str(made)


def test_a_printed_circuit_lists_its_strongest_edges_with_their_intervals():
    made = circuit()
    effects = {edge: effect.mean for edge, effect in made.effects().items() if isinstance(edge, Edge)}
    strongest = sorted(effects, key=lambda edge: -effects[edge])
    many = circuit([Node(layer, 0) for layer in range(40)], [Edge(Node(layer, 0), None) for layer in range(40)])
    summary, title, *lines = str(made).splitlines()
    assert summary.startswith("head 0.2, head 1.0, MLP 1; 5 edges; loss ")
    assert title == "change of the metric without each of the 5 strongest of 5 edges:"
    assert [line.split("  ")[0] for line in lines] == list(map(str, strongest))
    assert all(line.endswith(str(made.effects()[edge])) for line, edge in zip(lines, strongest, strict=True))
    assert str(many).startswith("40 nodes; 40 edges; loss ")
    assert "5 strongest of 40 edges" in str(many)
    assert len(str(many).splitlines()) == 7


def test_circuits_that_older_versions_saved_are_loaded(tmp_path):
    """Circuits of the method "scrambled", which cannot be measured any more."""
    made = circuit(method="scrambled")
    loaded = load_result(made.save(tmp_path))
    assert loaded.method == "scrambled"
    assert str(loaded) == str(made)
