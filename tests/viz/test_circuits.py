"""Circuits as graphs: layered without overlaps, every node and edge in its place, with the numbers of the circuit."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.analysis import Circuit
from mechicl.analysis.circuits import Edge, EdgeScores, Node, compare_circuits
from mechicl.constructions import induction, weights_circuit
from mechicl.statistics import interval
from mechicl.viz import circuit_graph, plot
from mechicl.viz.layered import LANE, NODE, lay_out
from tests.analysis.circuits.test_curves import made
from tests.viz.traces import lines

N = 4  # prompts
EMBEDDING = Node(-1)
FIRST, SECOND, OTHER, MLP = Node(0, 2), Node(1, 1), Node(1, 3), Node(1)
NODES = (FIRST, SECOND, OTHER, MLP)
EDGES = (
    Edge(EMBEDDING, FIRST, "v"), Edge(EMBEDDING, SECOND, "q"), Edge(FIRST, SECOND, "k"), Edge(FIRST, SECOND, "v"),
    Edge(FIRST, OTHER, "k"), Edge(SECOND, MLP), Edge(MLP, None), Edge(SECOND, None),
)  # fmt: skip


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


def traces(figure: Any, *, edges: bool) -> dict[str, Any]:
    """Return the traces of edges, or those of nodes, by their names."""
    drawn = [trace for trace in figure.data if trace.hovertext]  # the others are entries of the legend
    return {trace.hovertext.split("<br>")[0]: trace for trace in drawn if (trace.mode == "lines") == edges}


def test_edges_join_sender_and_receiver_and_are_wider_the_more_they_matter():
    made = circuit()
    figure: Any = circuit_graph(made)
    lines, nodes = traces(figure, edges=True), traces(figure, edges=False)
    places = {name: (trace.x[0], trace.y[0]) for name, trace in nodes.items()}
    assert {name: y for name, (_, y) in places.items()} == {
        "embedding": 0, "head 0.2": 1, "head 1.1": 2, "head 1.3": 2, "MLP 1": 3, "output": 4,
    }  # fmt: skip
    widths = []
    for edge, effects in zip(EDGES, made.edge_effects, strict=True):
        trace = lines[str(edge)]
        aside = {"q": -1, "k": 0, "v": 1, "": 0}[edge.by]  # queries left, values right
        for end, part in ((0, edge.sender), (-1, edge.receiver or "output")):
            x, y = places[str(part)]
            assert trace.y[end] == pytest.approx(y)
            assert 0 <= aside * (trace.x[end] - x) <= 0.1
            assert bool(aside) == (abs(trace.x[end] - x) > 0.01)
        assert trace.hovertext == f"{edge}<br>without it: {interval(effects)}"
        widths.append(trace.line.width)
    assert widths == sorted(widths, reverse=True)
    assert len({trace.line.color for trace in lines.values()}) == 4  # into q, k, v and the rest
    sizes = [nodes[str(node)].marker.size for node in NODES]
    assert sizes == sorted(sizes)
    assert figure.layout.title.text == "Circuit: loss 1 with the whole model, 1.4 with this, 5 with all edges cut"


def test_lines_and_numbers_do_not_overlap():
    figure: Any = circuit_graph(circuit())
    places = {name: (trace.x[0], trace.y[0]) for name, trace in traces(figure, edges=False).items()}
    for name, line in traces(figure, edges=True).items():
        ends = name.split(" (")[0].split(" → ")
        for x, y in [place for other, place in places.items() if other not in ends]:
            assert not any(abs(a - x) < 0.3 and abs(b - y) < 0.2 for a, b in zip(line.x, line.y, strict=True)), name
    numbers = {text.text: (text.x, text.y) for text in figure.layout.annotations}
    assert list(numbers) == ["+1", "-0.5", "+0.25", "-0.12", "+0.062"]  # 0.03 is less than a twentieth
    for i, (x, y) in enumerate(numbers.values()):
        assert not any(abs(x - a) < 0.1 and abs(y - b) < 0.1 for a, b in list(numbers.values())[:i])


def test_empty_circuits_effects_of_zero_and_unmeasured_effects_are_drawn():
    assert set(traces(circuit_graph(circuit(nodes=(), edges=())), edges=False)) == {"embedding", "output"}
    assert not traces(circuit_graph(circuit(edges=())), edges=True)
    made = circuit()
    silent = replace(made, node_effects=0 * made.node_effects, edge_effects=0 * made.edge_effects)
    assert {trace.line.width for trace in traces(circuit_graph(silent), edges=True).values()} == {1}
    nodes, edges = made.node_effects[:0], made.edge_effects * torch.nan
    figure: Any = circuit_graph(replace(made, nodes=(), node_effects=nodes, edge_effects=edges))
    lines = traces(figure, edges=True)
    assert [trace.hovertext for trace in lines.values()] == list(lines)  # without effects
    assert set(traces(figure, edges=False)) == {"embedding", "output", *map(str, NODES)}
    assert not figure.layout.annotations


def test_a_circuit_read_off_weights_has_lines_of_equal_width():
    truth = weights_circuit(induction(d_vocab=8, n_ctx=14, n_heads=2, induction_head=1, seed=0))
    figure: Any = plot(truth)
    assert set(traces(figure, edges=True)) == set(map(str, truth.edges))
    assert set(traces(figure, edges=False)) == {"embedding", "output", *map(str, truth.nodes)} - {""}
    assert len({trace.line.width for trace in traces(figure, edges=True).values()}) == 1
    assert figure.layout.title.text == "Circuit: 2 heads and MLPs, 7 edges"
    assert "the 3 strongest of 7 edges" in circuit_graph(truth, most=3).layout.title.text  # type: ignore[attr-defined]


def test_a_circuit_is_compared_with_the_truth():
    kept = circuit(NODES[:2], (*EDGES[:3], Edge(EMBEDDING, None)))
    compared = compare_circuits(kept, circuit())
    figure: Any = plot(compared)
    looks = {
        name: (trace.hovertext.split("<br>")[1], trace.line.dash) for name, trace in traces(figure, edges=True).items()
    }
    assert looks == {
        **{str(edge): ("shared", "solid") for edge in EDGES[:3]},
        **{str(edge): ("missing", "dot") for edge in EDGES[3:]},
        "embedding → output": ("false", "solid"),
    }
    nodes = {name: trace.hovertext for name, trace in traces(figure, edges=False).items()}
    assert nodes["head 0.2"].endswith("shared")
    assert nodes["MLP 1"].endswith("missing")
    assert [trace.name for trace in figure.data if trace.showlegend is None] == [
        "3 shared edges", "5 missing edges", "1 false edge",
    ]  # fmt: skip
    assert "2 of 4 nodes found, 0 false" in figure.layout.title.text
    empty = compare_circuits(circuit((), ()), circuit((), ()))
    assert set(traces(plot(empty), edges=False)) == {"embedding", "output"}


def test_curves_are_the_means_with_the_areas_in_the_legend():
    curve = made()
    curve = replace(
        curve, alone=curve.alone | {"random": curve.alone["scores"] * 0 + 1}, n_kept=curve.n_kept | {"random": (0,) * 4}
    )
    figure: Any = plot(curve)
    ((x, y),) = lines(figure, "scores: CPR 0.850, CMD 0.250")
    assert (x, y) == (list(curve.fractions), [0, 0.5, 1.25, 1])
    ((x, y),) = lines(figure, "random: CPR 0.000, CMD 0.900")
    assert y == [0, 0, 0, 0]
    assert figure.layout.title.text == "Faithfulness of the best of 10 edges (loss; zero)"
    assert figure.layout.xaxis.type == "linear"
    small: Any = plot(replace(curve, fractions=(0.001, 0.2, 0.5, 1.0)))
    assert small.layout.xaxis.type == "log"
    colors = [trace.line.color for trace in figure.data if trace.name and trace.name.startswith("random")]
    assert colors == ["#b4b4b4"]


def test_edges_are_ranked_by_size_and_true_ones_have_another_colour():
    values = torch.tensor([0.5, -4.0, 2.0, 0.0, 1.0, 0.25, 0.125, 3.0], dtype=torch.float64)
    scores = EdgeScores(EDGES, values[:, None].repeat(1, 3), "loss", "eap", "zero")
    plain: Any = plot(scores)
    assert list(plain.data[0].x) == list(range(1, 9))
    assert list(plain.data[0].y)[:7] == [4, 3, 2, 1, 0.5, 0.25, 0.125]
    assert 0 < plain.data[0].y[7] < 1e-9  # 0 has no place on the axis
    assert plain.data[0].customdata[7] == 0
    truth = circuit(edges=(EDGES[1], EDGES[4]))
    compared: Any = plot(scores, truth=truth)
    others, true = compared.data
    assert [str(edge) for edge in (EDGES[1], EDGES[4])] == list(true.text)
    assert list(true.x) == [1, 4]
    assert sorted([*others.x, *true.x]) == list(range(1, 9))
    assert compared.layout.title.text.endswith(f"AUROC {scores.auroc(truth):.3f}")
    assert scores.auroc(truth) == pytest.approx(10 / 12)


def crossings(layout, edges):
    """Count pairs of lines between the same rows whose ends are in opposite orders, shared lanes once."""
    links = {link for edge in edges for link in pairwise([(x, int(y)) for x, y in layout.way(edge)])}
    pairs = [(a, b, c, d) for ((a, row), (b, _)), ((c, other), (d, _)) in product(links, links) if row == other]
    return sum((a - c) * (b - d) < -1e-9 for a, b, c, d in pairs) / 2


@st.composite
def graphs(draw):
    rows = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    nodes = [[(r, i) for i in range(n)] for r, n in enumerate(rows)]
    flat = [node for row in nodes for node in row]
    pairs = [(a, b) for a in flat for b in flat if a[0] < b[0]]
    return nodes, draw(st.lists(st.sampled_from(pairs), max_size=25)) if pairs else []


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_nothing_overlaps_and_every_edge_rises_row_by_row(graph):
    rows, edges = graph
    layout = lay_out(rows, edges)
    assert {node: r for r, nodes in enumerate(rows) for node in nodes} == layout.row
    widths: dict[Any, list[tuple[float, float]]] = {}
    item: Any  # a node, or a sender's lane in a row
    for item, x in layout.x.items():
        is_node = item in layout.row
        widths.setdefault(layout.row[item] if is_node else item[1], []).append((x, NODE if is_node else LANE))
    for places in widths.values():
        for (x, width), (next_x, next_width) in pairwise(sorted(places)):
            assert next_x - x >= (width + next_width) / 2 - 1e-9
    for edge in edges:
        way = layout.way(edge)
        assert [y for _, y in way] == list(range(edge[0][0], edge[1][0] + 1))
        assert (way[0][0], way[-1][0]) == (layout.x[edge[0]], layout.x[edge[1]])
    assert max(layout.x.values()) == pytest.approx(-min(layout.x.values()))


def test_edges_that_need_not_cross_do_not_and_those_of_one_sender_share_their_lane():
    ladder = [(("a", i), ("b", (i * 3) % 5)) for i in range(5)]  # a permutation that another order undoes
    layout = lay_out([[("a", i) for i in range(5)], [("b", i) for i in range(5)]], ladder)
    assert crossings(layout, ladder) == 0
    for low, high in ladder:
        assert layout.x[low] == pytest.approx(layout.x[high])
    layout = lay_out([["a"], ["b"], ["c", "d"], ["e"]], [("a", "c"), ("a", "d"), ("a", "e")])
    assert layout.way(("a", "c"))[1] == layout.way(("a", "d"))[1] == layout.way(("a", "e"))[1]
    assert len(layout.x) == 5 + 2  # a lane in each of the two rows that edges pass
