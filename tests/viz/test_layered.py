"""Layered graphs: nodes and lanes side by side, in an order with few crossings, near to their neighbours."""

from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.viz.layered import LANE, NODE, lay_out


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


def test_edges_that_need_not_cross_do_not():
    ladder = [(("a", i), ("b", (i * 3) % 5)) for i in range(5)]  # a permutation that another order undoes
    layout = lay_out([[("a", i) for i in range(5)], [("b", i) for i in range(5)]], ladder)
    assert crossings(layout, ladder) == 0
    for low, high in ladder:
        assert layout.x[low] == pytest.approx(layout.x[high])


def test_edges_of_one_sender_share_their_lane():
    edges = [("a", "c"), ("a", "d"), ("a", "e")]
    layout = lay_out([["a"], ["b"], ["c", "d"], ["e"]], edges)
    assert layout.way(("a", "c"))[1] == layout.way(("a", "d"))[1] == layout.way(("a", "e"))[1]
    assert len(layout.x) == 5 + 2  # a lane in each of the two rows that edges pass
