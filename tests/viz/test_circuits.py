"""Circuits as graphs: every node and edge in its place, with the numbers of the circuit."""

import dataclasses
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser

from mechicl.analysis import Circuit, Edge, Node, find_circuit, next_token_loss
from mechicl.constructions import induction
from mechicl.statistics import interval
from mechicl.tasks import RepeatedTokens
from mechicl.viz import circuit_graph
from mechicl.viz.page import page, plot, section

N = 4  # prompts
EMBEDDING = Node(-1)
FIRST, SECOND, OTHER, MLP = Node(0, 2), Node(1, 1), Node(1, 3), Node(1)
NODES = (FIRST, SECOND, OTHER, MLP)
EDGES = (
    Edge(EMBEDDING, FIRST, "v"),
    Edge(EMBEDDING, SECOND, "q"),
    Edge(FIRST, SECOND, "k"),
    Edge(FIRST, SECOND, "v"),
    Edge(FIRST, OTHER, "k"),
    Edge(SECOND, MLP),
    Edge(MLP, None),
    Edge(SECOND, None),
)


def circuit(nodes: tuple[Node, ...] = NODES, edges: tuple[Edge, ...] = EDGES) -> Circuit:
    """The k-th edge's effect is 2^-k, of either sign; the k-th node's k + 1."""
    full, ablated = torch.ones(N).double(), torch.full((N,), 5.0).double()
    noise = 0.01 * torch.randn(max(len(edges), len(nodes), 1), N, generator=torch.Generator().manual_seed(0)).double()
    noise -= noise.mean(1, keepdim=True)
    of_edges = torch.tensor([(-1) ** k * 2.0**-k for k in range(len(edges))]).double()[:, None] + noise[: len(edges)]
    of_nodes = torch.arange(1.0, len(nodes) + 1).double()[:, None] + noise[: len(nodes)]
    return Circuit(
        nodes, edges, "loss", "mean", full, ablated, full + 0.1, ablated - 0.2, full + 0.4, of_nodes, of_edges, 10
    )


def lines(figure: Any) -> dict[str, Any]:
    """The traces of edges, by their names."""
    return {trace.hovertext.split("<br>")[0]: trace for trace in figure.data if trace.mode == "lines"}


def nodes(figure: Any) -> dict[str, Any]:
    """The traces of nodes, by their names."""
    return {trace.hovertext.split("<br>")[0]: trace for trace in figure.data if trace.mode != "lines"}


def test_layers_rise_from_the_embedding_to_the_output():
    figure: Any = circuit_graph(circuit())
    found = nodes(figure)
    assert {name: trace.y[0] for name, trace in found.items()} == {
        "embedding": 0, "head 0.2": 1, "head 1.1": 2, "head 1.3": 2, "MLP 1": 2.5, "output": 3,
    }  # fmt: skip
    assert {name: trace.text[0] for name, trace in found.items()} == {
        "embedding": "embedding", "head 0.2": "0.2", "head 1.1": "1.1", "head 1.3": "1.3", "MLP 1": "MLP",
        "output": "output",
    }  # fmt: skip
    assert found["head 1.1"].x[0] < found["head 1.3"].x[0]
    assert found["MLP 1"].marker.symbol == "square"
    assert found["head 1.1"].marker.symbol == "circle"
    assert dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True)) == {
        0: "", 1: "layer 0", 2: "layer 1", 2.5: "layer 1 MLP", 3: "",
    }  # fmt: skip


def test_edges_go_from_who_writes_to_who_reads_as_wide_as_they_matter():
    made = circuit()
    figure: Any = circuit_graph(made)
    found, places = lines(figure), {name: (trace.x[0], trace.y[0]) for name, trace in nodes(figure).items()}
    assert set(found) == set(map(str, EDGES))
    widths = []
    for edge, effects in zip(EDGES, made.edge_effects, strict=True):
        trace = found[str(edge)]
        receiver = "output" if edge.receiver is None else str(edge.receiver)
        assert (trace.x[0], trace.y[0]) == pytest.approx(places[str(edge.sender)])
        assert (trace.x[-1], trace.y[-1]) == pytest.approx(places[receiver])
        assert trace.hovertext == f"{edge}<br>without it: {interval(effects)}"
        widths.append(trace.line.width)
    assert widths == sorted(widths, reverse=True)
    by = {name: found[name].line.color for name in map(str, EDGES)}
    assert len(set(by.values())) == 4  # q, k, v and the rest
    assert by["head 0.2 → head 1.1 (k)"] == by["head 0.2 → head 1.3 (k)"] != by["head 0.2 → head 1.1 (v)"]
    assert sorted(trace.name for trace in found.values() if trace.showlegend) == [
        "into a key", "into a query", "into a value", "into an MLP or the output",
    ]  # fmt: skip


def test_lines_pass_beside_nodes_and_each_other():
    figure: Any = circuit_graph(circuit())
    places = {name: (trace.x[0], trace.y[0]) for name, trace in nodes(figure).items()}
    for name, line in lines(figure).items():
        ends = name.split(" (")[0].split(" → ")
        for x, y in [place for other, place in places.items() if other not in ends]:
            assert not any(abs(a - x) < 0.1 and abs(b - y) < 0.25 for a, b in zip(line.x, line.y, strict=True)), name
    key, value = (lines(figure)[f"head 0.2 → head 1.1 ({by})"] for by in "kv")
    assert abs(key.x[10] - value.x[10]) > 0.1


def test_numbers_are_written_where_they_matter_and_apart():
    figure: Any = circuit_graph(circuit())
    written = {text.text: (text.x, text.y) for text in figure.layout.annotations}
    assert list(written) == ["+1", "-0.5", "+0.25", "-0.12", "+0.062"]  # 0.03 is less than a twentieth
    places = list(written.values())
    for i, (x, y) in enumerate(places):
        assert not any(abs(x - a) < 0.1 and abs(y - b) < 0.2 for a, b in places[:i])


def test_the_size_of_a_node_is_its_effect_and_the_title_says_how_good_the_circuit_is():
    made = circuit()
    figure: Any = circuit_graph(made)
    sizes = [nodes(figure)[str(node)].marker.size for node in NODES]
    assert sizes == sorted(sizes)
    assert nodes(figure)["MLP 1"].hovertext == f"MLP 1<br>without it: {interval(made.node_effects[3])}"
    assert made.faithfulness().mean == pytest.approx(0.9)
    assert figure.layout.title.text == ("Circuit: loss 1 with the whole model, 1.4 with this, 5 with neither")
    assert circuit_graph(made, "Mine").layout.title.text == "Mine"  # pyright: ignore[reportAttributeAccessIssue]


def test_without_edges_nodes_stand_alone():
    figure: Any = circuit_graph(circuit(edges=()))
    assert not lines(figure)
    assert len(nodes(figure)) == 6
    assert not figure.layout.annotations


def test_an_empty_circuit_is_the_embedding_and_the_output():
    figure: Any = circuit_graph(circuit(nodes=(), edges=()))
    assert set(nodes(figure)) == {"embedding", "output"}
    straight: Any = circuit_graph(circuit(nodes=(), edges=(Edge(EMBEDDING, None),)))
    assert set(lines(straight)) == {"embedding → output"}


def test_of_many_edges_the_strongest_are_drawn():
    many = tuple(Node(layer, head) for layer in range(4) for head in range(8))
    edges = tuple(Edge(a, b, by) for a in many for b in many if a.layer < b.layer for by in "qkv")[:100]
    figure: Any = circuit_graph(circuit(many, edges), most=20)
    assert len(lines(figure)) == 20
    assert set(lines(figure)) == set(map(str, edges[:20]))
    assert "the 20 strongest of 100 edges" in figure.layout.title.text
    assert not figure.layout.annotations  # no room
    assert len(nodes(figure)) == 34
    assert all(-1.25 <= trace.x[0] <= 1.25 for trace in nodes(figure).values())
    assert "strongest" not in str(circuit_graph(circuit(), most=8).layout)


def test_effects_of_zero_are_drawn():
    made = circuit()
    silent = dataclasses.replace(made, node_effects=0 * made.node_effects, edge_effects=0 * made.edge_effects)
    assert {trace.line.width for trace in lines(circuit_graph(silent)).values()} == {1}


def test_the_circuit_of_a_construction_is_drawn_in_a_browser(browser: Browser, tmp_path):
    model = induction(d_vocab=8, n_ctx=14, n_heads=2, induction_head=1, seed=0)
    sequences = RepeatedTokens(d_vocab=8, n_ctx=14, min_period=4, max_period=7).sample(16, seed=0)
    found = find_circuit(model, sequences.read, {"loss": next_token_loss(sequences.targets())}, at="positions")
    figure: Any = circuit_graph(found)
    assert {"head 0.0", "head 1.1"} <= set(nodes(figure))
    assert set(lines(figure)) == set(map(str, found.edges))
    (tmp_path / "page.html").write_text(page("Circuit", "", [section("The circuit", "", plot(figure))]))
    tab = browser.new_page()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto((tmp_path / "page.html").as_uri())
    tab.wait_for_selector(".js-plotly-plot .main-svg")
    texts = tab.locator(".js-plotly-plot text").all_text_contents()
    assert {"embedding", "output", "0.0", "1.1", "layer 0", "layer 1"} <= {text.strip() for text in texts}
    tab.close()
    assert errors == []
