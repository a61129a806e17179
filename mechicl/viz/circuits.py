"""Circuits as graphs: heads and MLPs in layers, edges by what the metric loses without them."""

from collections.abc import Mapping
from math import sqrt

import plotly.graph_objects as go

from mechicl.analysis import Circuit, Edge, Node
from mechicl.learners import Interval, interval
from mechicl.viz.style import COLORS, figure

WAYS = {"q": "#e07b00", "k": "#1f6fb4", "v": "#2a9d4a", "": "#666666"}
"""Colours of the edges into a head's query, key and value, and into MLPs and the output."""
_WORDS = {"q": "into a query", "k": "into a key", "v": "into a value", "": "into an MLP or the output"}


LABELLED = 16  # edges beyond which there is no room for numbers


def circuit_graph(circuit: Circuit, title: str | None = None, *, most: int = 60) -> go.Figure:
    """A circuit from the embedding (bottom) to the output (top), one row a layer.

    Lines are edges: coloured by what they go into, and the wider, the more the metric changes without them. Discs are
    heads, squares MLPs, their area the change without them. Numbers are means over prompts; hovering shows intervals.
    Where edges were not looked for, nodes stand alone. Of very many edges only the `most` strongest are drawn.
    """
    places = _places(circuit)
    faithful = f"faithfulness {circuit.faithfulness()}, completeness {circuit.completeness()}"
    fig = figure(title or f"Circuit for {circuit.metric}: {faithful}", "", "")
    measured = zip(circuit.edges, map(interval, circuit.edge_effects), strict=True)
    drawn = sorted(measured, key=lambda pair: abs(pair[1].mean), reverse=True)[:most]
    strongest = abs(drawn[0][1].mean) or 1.0 if drawn else 1.0
    if len(drawn) < len(circuit.edges):
        fig.update_layout(title_text=f"{fig.layout.title.text}<br>the {most} strongest of {len(circuit.edges)} edges")  # type: ignore[attr-defined]
    shown: set[str] = set()
    siblings: dict[tuple[Node, Node | None], int] = {}
    for edge, effect in reversed(drawn):  # the strongest on top
        pair = (edge.sender, edge.receiver)
        siblings[pair] = bend = siblings.get(pair, -1) + 1
        _draw_edge(fig, edge, effect, places, strongest, bend, edge.by not in shown, len(drawn) <= LABELLED)
        shown.add(edge.by)
    _draw_nodes(fig, circuit, places)
    rows = sorted({y for _, y in places.values()})
    ends = {rows[0]: "", rows[-1]: ""}
    fig.update_yaxes(tickvals=rows, ticktext=[ends.get(y, _layer_name(y)) for y in rows], showgrid=True, zeroline=False)
    fig.update_xaxes(visible=False, range=[-1.25, 1.25])
    fig.update_layout(height=max(320, 110 * len(rows) + 120), legend={"orientation": "h", "y": -0.08})
    return fig


def _places(circuit: Circuit) -> dict[Node | None, tuple[float, float]]:
    """Where each node stands; the output is None. A layer's MLP stands half a row above its heads."""
    rows: dict[float, list[Node]] = {}
    for node in circuit.nodes:
        rows.setdefault(1 + node.layer + (0.5 if node.head is None else 0.0), []).append(node)
    places: dict[Node | None, tuple[float, float]] = {Node(-1): (0.0, 0.0)}
    for y, nodes in rows.items():
        for i, node in enumerate(nodes):
            shift = 0.22 * (-1) ** int(y)  # so that a column of single heads does not hide the edges that pass it
            places[node] = ((2 * (i + 1) / (len(nodes) + 1) - 1) * 1.1 + (shift if len(nodes) == 1 else 0), y)
    top = max((y for _, y in places.values()), default=0.0)
    places[None] = (0.0, float(int(top)) + 1.0)
    return places


def _layer_name(y: float) -> str:
    return f"layer {int(y) - 1}{' MLP' if y % 1 else ''}"


def _draw_edge(
    fig: go.Figure,
    edge: Edge,
    effect: Interval,
    places: Mapping[Node | None, tuple[float, float]],
    strongest: float,
    bend: int,
    in_legend: bool,
    labelled: bool,
) -> None:
    (x0, y0), (x1, y1) = places[edge.sender], places[edge.receiver]
    side = (0, 1, -1)[bend % 3] * 0.16  # parallel edges bow apart
    if y1 - y0 > 1 and abs(x1 - x0) < 0.4:
        side += 0.45 if x0 <= 0 else -0.45  # and long ones pass beside what lies between
    steps = [i / 20 for i in range(21)]
    xs = [x0 + (x1 - x0) * t + 4 * side * t * (1 - t) for t in steps]
    ys = [y0 + (y1 - y0) * t for t in steps]
    words = f"{edge}<br>without it: {effect}"
    fig.add_trace(
        go.Scatter(
            x=xs,
            y=ys,
            mode="lines",
            line={"color": WAYS[edge.by], "width": 1 + 6 * sqrt(abs(effect.mean) / strongest), "shape": "spline"},
            opacity=0.3 + 0.5 * sqrt(abs(effect.mean) / strongest),
            name=_WORDS[edge.by],
            legendgroup=edge.by,
            showlegend=in_legend,
            hovertext=words,
            hoverinfo="text",
        )
    )
    if labelled:
        fig.add_annotation(
            x=xs[12], y=ys[12], text=f"{effect.mean:+.2g}", showarrow=False, font={"size": 11, "color": WAYS[edge.by]},
            bgcolor="rgba(255,255,255,0.8)",
        )  # fmt: skip


def _draw_nodes(fig: go.Figure, circuit: Circuit, places: Mapping[Node | None, tuple[float, float]]) -> None:
    effects = {node: interval(of) for node, of in zip(circuit.nodes, circuit.node_effects, strict=True)}
    strongest = max((abs(effect.mean) for effect in effects.values()), default=0.0) or 1.0
    ends: dict[Node | None, str] = {Node(-1): "embedding", None: "output"}
    for node, (x, y) in places.items():
        effect = effects.get(node) if node is not None else None
        size = 58.0 if effect is None else 34 + 24 * sqrt(abs(effect.mean) / strongest)
        name = ends.get(node) or (f"{node.layer}.{node.head}" if node and node.head is not None else "MLP")
        fig.add_trace(
            go.Scatter(
                x=[x],
                y=[y],
                mode="markers+text",
                marker={
                    "size": size,
                    "color": "#f0f0f0" if effect is None else "#dbe9f6",
                    "symbol": "square" if effect is None or (node and node.head is None) else "circle",
                    "line": {"color": COLORS["gradient descent"], "width": 1.2},
                    "opacity": 1,
                },
                text=[name if effect is not None else ""],
                hovertext=f"{node or 'output'}" + ("" if effect is None else f"<br>without it: {effect}"),
                hoverinfo="text",
                showlegend=False,
            )
        )
        if effect is None:
            fig.add_annotation(x=x, y=y, text=name, showarrow=False, font={"size": 11}, bgcolor="#f0f0f0")
