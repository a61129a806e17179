"""Circuits as graphs, alone or compared with the truth; their faithfulness by size, and the ranks of edges."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite, sqrt
from typing import Any

import plotly.graph_objects as go

from mechicl.analysis import Circuit
from mechicl.analysis.circuits import EMBEDDING, Edge, EdgeScores, Node
from mechicl.analysis.circuits.circuit import CircuitComparison, NodesAndEdges, order_edges
from mechicl.analysis.circuits.curves import CircuitCurve
from mechicl.base.arguments import checked
from mechicl.base.precision import nan_last
from mechicl.statistics import Interval
from mechicl.statistics.results import largest
from mechicl.viz import elements as draw
from mechicl.viz.layered import Layout, lay_out

WAYS = {"q": "#e07b00", "k": "#8e3b8e", "v": "#2a9d4a", "": "#666666"}
"""Colours of the edges into a head's query, key and value, and into MLPs and the output."""
RECEIVERS = {"q": "into a query", "k": "into a key", "v": "into a value", "": "into an MLP or the output"}
_COLORS = {"shared": "#777777", "missing": "#1f6fb4", "false": "#d1495b"}
"""Colours of true positives, false negatives and false positives of a circuit compared with the truth."""
OUTLINE = draw.COLORS["gradient descent"]
SIDES = {"q": -1, "k": 0, "v": 1, "": 0}  # offsets of edges from the middle of a lane and of a head
EDGES_APART = 14, 0.1  # distance between such edges, in pixels and at most in nodes
LABELLED = 16  # edges beyond which numbers would overlap
ON_LINE = (0.6, 0.45, 0.3, 0.65, 0.5, 0.4, 0.35, 0.25, 0.75, 0.2, 0.8)  # places of a number on its line, best first
UNMEASURED = 0.3  # the strength of lines without a measured effect
WORTH = 0.05  # share of the strongest edge's effect below which an edge has no number
MOST_EDGES = 300  # edges that are drawn
MANY_EDGES = 80  # edges beyond which lines are thin and light
POINTS = 12  # of a line from row to row
LEAST_WIDTH = 3.6  # of the figure, in nodes
MANY_WIDE = 12  # nodes side by side beyond which they are smaller
PIXELS = 900  # approximate width of a figure
LEAST_DRAWN = 1e-12  # of the largest score, below which one is drawn as 0
_Point = tuple[float, float]


@checked
def circuit_graph(circuit: Circuit | NodesAndEdges, *, most: int = MOST_EDGES) -> go.Figure:
    """Draw a circuit from the embedding (bottom) to the output (top), a row for each layer that it uses.

    Lines are edges, coloured by what they enter (query, key, value, MLP or output); a line is wider the more the metric
    changes when the edge is cut. Discs are heads and squares MLPs, larger the more the metric changes without them. In
    circuits of up to 16 edges, numbers are the change of the metric, a mean over prompts (edges below a twentieth of
    the strongest have none); hovering shows 95% intervals. A circuit read off weights has lines of equal width.

    Args:
        circuit: result of `find_circuit`, `measure_circuit` or `weights_circuit`.
        most: largest number of edges to draw; of a larger circuit, the strongest are drawn.
    """
    nodes, edges = set(circuit.nodes) - {EMBEDDING}, order_edges(circuit.edges)
    effects = circuit.effects() if isinstance(circuit, Circuit) else {}
    if isinstance(circuit, Circuit):
        whole, alone, cut = (values.mean().item() for values in (circuit.full, circuit.edges_alone, circuit.ablated))
        losses = f"{whole:.3g} with the whole model, {alone:.3g} with this, {cut:.3g} with all edges cut"
        summary = f"{circuit.metric} {losses}"
    else:
        summary = f"{len(nodes)} heads and MLPs, {len(edges)} edges"
    order, tie = largest([_size(effects.get(edge)) for edge in edges], most)
    drawn = [edges[i] for i in order]
    fewer = f"<br>the {most} strongest of {len(edges)} edges{tie and f' ({tie})'}" if len(edges) > most else ""
    fig = draw.figure(draw.Markup(f"{draw.literal(f'Circuit: {summary}')}{fewer}"))
    layout = lay_out_circuit(list(nodes), drawn)
    for by in [by for by in WAYS if any(edge.by == by for edge in drawn)]:
        _add_to_legend(fig, RECEIVERS[by], color=WAYS[by])
    strongest = max((_size(effects.get(edge)) for edge in drawn), default=0.0)
    widest, faintest = (6, 0.4) if len(drawn) <= LABELLED else (4, 0.4) if len(drawn) <= MANY_EDGES else (2.5, 0.25)
    lines = {edge: edge_line(layout, edge) for edge in drawn}
    for edge, line in reversed(lines.items()):  # the strongest on top
        share = UNMEASURED if edge not in effects else sqrt(_size(effects[edge]) / strongest) if strongest else 0.0
        hover = f"{edge}<br>without it: {effects[edge]}" if edge in effects else str(edge)
        _draw_line(fig, line, hover, faintest + 0.45 * share, color=WAYS[edge.by], width=1 + widest * share)
    biggest = max((_size(effects.get(node)) for node in nodes), default=0.0)
    for node in layout.row:
        effect = effects.get(node) if isinstance(node, Node) else None
        size = 34 + 24 * sqrt(_size(effect) / biggest) if biggest else 34.0
        _draw_node(fig, node, layout, size, "" if effect is None else f"<br>without it: {effect}")
    if len(drawn) <= LABELLED:
        strong = [edge for edge in drawn if edge in effects and _size(effects[edge]) >= WORTH * strongest > 0]
        _write_numbers(fig, {edge: effects[edge] for edge in strong}, lines, layout)
    return _frame(fig, layout, n_lines=1 + bool(fewer))


def circuit_differences(comparison: CircuitComparison) -> go.Figure:
    """Draw the result of `compare_circuits`: shared (grey), missing (blue, dotted) and false (red) nodes and edges."""
    nodes = {node: kind for kind in _COLORS for node in getattr(comparison, f"{kind}_nodes")}
    edges = {edge: kind for kind in _COLORS for edge in getattr(comparison, f"{kind}_edges")}
    layout = lay_out_circuit(list(nodes), list(edges))
    fig = draw.figure(draw.Markup("<br>".join(map(draw.literal, comparison.counts()))))
    looks = {kind: {"color": color, "dash": "dot" if kind == "missing" else "solid"} for kind, color in _COLORS.items()}
    for kind, look in looks.items():
        n = list(edges.values()).count(kind)
        _add_to_legend(fig, f"{n} {kind} edge{'s' * (n != 1)}", **look)
    for edge, kind in edges.items():
        opacity, width = (0.5, 1.5) if kind == "shared" else (0.9, 3)
        _draw_line(fig, edge_line(layout, edge), f"{edge}<br>{kind}", opacity, **looks[kind], width=width)
    for node in layout.row:
        kind = nodes.get(node, "shared") if isinstance(node, Node) else "shared"
        _draw_node(fig, node, layout, 40.0, f"<br>{kind}", outline=OUTLINE if kind == "shared" else _COLORS[kind])
    return _frame(fig, layout, n_lines=2)


def faithfulness_curves(curve: CircuitCurve) -> go.Figure:
    """Draw the faithfulness of a `circuit_curve` against the share of edges kept, with 95% bands over prompts.

    The legend has the areas: CPR below the curve, CMD between it and 1. Random scores are grey. The axis is logarithmic
    if shares span more than a factor of 50.
    """
    n_edges = round(curve.counts[-1] / curve.fractions[-1])
    summary = f"Faithfulness of the best of {n_edges:,} edges ({curve.metric}; {curve.method})"
    wide = curve.fractions[-1] > 50 * curve.fractions[0]  # too much for one scale
    fig = draw.figure(summary, "share of the edges kept", "share of the metric kept", log_x=wide)
    draw.add_line(fig, curve.fractions, [1.0] * len(curve.fractions), "the whole model", "#999999", dash="dot", width=1)
    named = [name for name in curve.names if not name.startswith("random")]
    colors = dict(zip(named, draw.colors_for(named), strict=True))
    for name in curve.names:
        areas = f"{name}: CPR {curve.cpr(name).mean:.3f}, CMD {curve.cmd(name).mean:.3f}"
        color = colors.get(name, draw.COLORS["random"])
        draw.add_intervals(fig, curve.fractions, curve.faithfulness(name), areas, color, mode="lines+markers")
    return draw.tick_log_axes(fig.update_layout(legend={**draw.BELOW, "y": -0.22}, height=430))


def edge_ranking(scores: EdgeScores, truth: NodesAndEdges | None = None) -> go.Figure:
    """Draw the absolute scores of all edges (`score_edges`), the largest first; edges of a `truth` have another colour.

    Scores of 0 are at the bottom. Hovering names the edge.
    """
    sizes = scores.sizes().double()
    order = nan_last(sizes).argsort(descending=True, stable=True).tolist()
    lowest = max(float(sizes.max()), 1e-30) * LEAST_DRAWN if len(order) else 1.0
    summary = f"Scores of {len(order):,} edges ({scores.scoring}; {scores.metric}, {scores.method})"
    if truth is not None:
        summary += f": AUROC {scores.auroc(truth):.3f}"
    fig = draw.figure(summary, "rank", "change without the edge", log_x=True, log_y=True)
    true = set(scores.edges if truth is None else truth.edges)
    groups = {"edges": True} if truth is None else {"other edges": False, "true edges": True}
    for color, (name, wanted) in zip(("#999999", "#1f6fb4")[-len(groups) :], groups.items(), strict=True):
        at = [(rank, i) for rank, i in enumerate(order, 1) if (scores.edges[i] in true) == wanted]
        fig.add_scatter(
            x=[rank for rank, _ in at], y=[max(float(sizes[i]), lowest) for _, i in at], mode="markers", name=name,
            marker={"color": color, "size": 7 if len(order) <= 500 else 4},
            text=[str(scores.edges[i]) for _, i in at], customdata=[float(sizes[i]) for _, i in at],
            hovertemplate="%{text}<br>%{customdata:.3g}<extra></extra>", showlegend=truth is not None,
        )  # fmt: skip
    return draw.tick_log_axes(fig)


def lay_out_circuit(nodes: Sequence[Node], edges: Sequence[Edge]) -> Layout:
    """Place the embedding, the nodes, and the output (None); a layer's MLP is in a row above its heads."""
    inner = {*nodes, *(edge.sender for edge in edges), *(edge.receiver for edge in edges if edge.receiver)}
    rows: dict[tuple[int, bool], list[Node | None]] = {}
    for node in sorted(inner - {EMBEDDING}, key=lambda node: (node.layer, node.head is None, node.head or 0)):
        rows.setdefault((node.layer, node.head is None), []).append(node)
    return lay_out([[EMBEDDING], *rows.values(), [None]], [(edge.sender, edge.receiver) for edge in edges])


def edge_line(layout: Layout, edge: Edge) -> list[_Point]:
    """Return a smooth curve through an edge's places; edges into queries, keys and values are side by side."""
    way = layout.way((edge.sender, edge.receiver))
    aside = SIDES[edge.by] * min(EDGES_APART[0] * _width(layout) / PIXELS, EDGES_APART[1])
    xs, ys = [x + aside for x, _ in way], [y for _, y in way]
    rises = [x1 - x0 for x0, x1 in pairwise(xs)]  # rows are 1 apart
    # vertical at both ends and where it turns, and never beyond a place that it passes: slopes are harmonic means
    slopes = [0.0, *(2 * a * b / (a + b) if a * b > 0 else 0.0 for a, b in pairwise(rises)), 0.0]
    line: list[_Point] = [(xs[0], ys[0])]
    for i, rise in enumerate(rises):
        for t in (step / POINTS for step in range(1, POINTS + 1)):
            bent = (slopes[i] * (1 - t) - slopes[i + 1] * t) * t * (1 - t)
            line.append((xs[i] + rise * t * t * (3 - 2 * t) + bent, ys[i] + t))
    return line


def _size(effect: Interval | None) -> float:
    return abs(effect.mean) if effect is not None and isfinite(effect.mean) else 0.0


def _add_to_legend(fig: go.Figure, name: str, **look: Any) -> None:
    """Add an entry whose line is visible however thin the lines of the figure are."""
    fig.add_scatter(x=[None], y=[None], mode="lines", line={"width": 4, **look}, name=name, hoverinfo="skip")


def _draw_line(fig: go.Figure, line: Sequence[_Point], hover: str, opacity: float, **look: Any) -> None:
    fig.add_scatter(
        x=[x for x, _ in line], y=[y for _, y in line], mode="lines", line=look, opacity=opacity, showlegend=False,
        hovertext=hover, hoverinfo="text",
    )  # fmt: skip


def _draw_node(fig: go.Figure, node: Any, layout: Layout, size: float, hover: str, outline: str = OUTLINE) -> None:
    is_end = node in (EMBEDDING, None)
    size = 16.0 if is_end else size * min(1.0, MANY_WIDE / _width(layout))  # smaller if there are many side by side
    marker = {
        "size": size, "color": "#f0f0f0" if is_end else "#dbe9f6", "opacity": 1,
        "symbol": "square" if is_end or node.head is None else "circle",
        "line": {"color": outline, "width": 1.2 if outline == OUTLINE else 3},
    }  # fmt: skip
    fig.add_scatter(
        x=[layout.x[node]], y=[layout.row[node]], mode="markers+text", marker=marker, showlegend=False,
        text=[str(node or "output") if is_end else "MLP" if node.head is None else f"{node.layer}.{node.head}"],
        textposition="top center" if node is None else "bottom center" if is_end else "middle center",
        textfont={"size": 13 if is_end or size > 30 else 11 if size > 20 else 9},
        hovertext=f"{node or 'output'}{'' if is_end else hover}", hoverinfo="text",
    )  # fmt: skip


def _write_numbers(
    fig: go.Figure, numbered: Mapping[Edge, Interval], lines: Mapping[Edge, Sequence[_Point]], layout: Layout
) -> None:
    """Write each number on its line, away from nodes and other numbers."""
    wide, high = _width(layout) / PIXELS, 1 / _row_height(layout)  # a pixel
    nodes = [((layout.x[node], row), 24 if node in (EMBEDDING, None) else 40) for node, row in layout.row.items()]
    numbers: list[_Point] = []
    for edge, effect in numbered.items():
        free = [lines[edge][round(share * (len(lines[edge]) - 1))] for share in ON_LINE]
        hidden = [
            sum(abs(x - a) < 50 * wide and abs(y - b) < extent * high for (a, b), extent in nodes)
            + sum(abs(x - a) < 42 * wide and abs(y - b) < 17 * high for a, b in numbers)
            for x, y in free
        ]
        x, y = free[hidden.index(min(hidden))]
        numbers.append((x, y))
        fig.add_annotation(
            x=x, y=y, text=f"{effect.mean:+.2g}", showarrow=False, font={"size": 11, "color": WAYS[edge.by]},
            bgcolor="rgba(255,255,255,0.8)",
        )  # fmt: skip


def _width(layout: Layout) -> float:
    places = layout.x.values()
    return max(max(places) - min(places) + 1.5, LEAST_WIDTH)


def _row_height(layout: Layout) -> float:
    n_rows = max(layout.row.values())
    return 125 if n_rows < 5 else 100 if n_rows < 9 else 78


def _frame(fig: go.Figure, layout: Layout, n_lines: int) -> go.Figure:
    """Add names of layers, space for the title's lines, and a legend below."""
    names = dict.fromkeys(layout.row.values(), "")
    for node, row in layout.row.items():
        if isinstance(node, Node) and node != EMBEDDING:
            names[row] = f"layer {node.layer}{' MLP' if node.head is None else ''}"
    last, half = max(names), _width(layout) / 2
    fig.update_yaxes(tickvals=list(names), ticktext=list(names.values()), showgrid=True, zeroline=False,
                     range=[-0.45, last + 0.45])  # fmt: skip
    fig.update_xaxes(visible=False, range=[-half, half])
    height = _row_height(layout) * (last + 0.9) + 130
    legend = {**draw.BELOW, "y": -20 / height, "traceorder": "normal"}
    least = {"least": 640}  # pixels that its labels need
    return fig.update_layout(height=height, legend=legend, margin_t=40 + 20 * n_lines, meta=least)
