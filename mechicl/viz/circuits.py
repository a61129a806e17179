"""Circuits as graphs: heads and MLPs in layers, edges by what the metric loses without them."""

from collections.abc import Mapping, Sequence
from math import sqrt

import plotly.graph_objects as go

from mechicl.analysis import Circuit
from mechicl.analysis.circuits import Edge, Node
from mechicl.statistics import Interval, interval
from mechicl.viz.elements import COLORS, figure

WAYS = {"q": "#e07b00", "k": "#1f6fb4", "v": "#2a9d4a", "": "#666666"}
"""Colours of the edges into a head's query, key and value, and into MLPs and the output."""
_WORDS = {"q": "into a query", "k": "into a key", "v": "into a value", "": "into an MLP or the output"}
LABELLED = 16  # edges beyond which there is no room for numbers
WORTH = 0.05  # of the strongest edge's effect, below which an edge has no number
BOWS = (0.0, 0.16, -0.16, 0.32, -0.32, 0.5, -0.5, 0.7, -0.7, 0.95, -0.95)  # by how much an edge bends to a side
WIDTH = 1.25  # half of the picture's
Place = tuple[float, float]


def circuit_graph(circuit: Circuit, title: str | None = None, *, most: int = 60) -> go.Figure:
    """A circuit from the embedding (bottom) to the output (top), one row a layer.

    Lines are edges: coloured by what they go into, and the wider, the more the metric changes without them. Discs are
    heads, squares MLPs, their area the change without them. Numbers are means over prompts, left out for edges that
    matter less than a twentieth of the strongest; hovering shows all of them with intervals. Where edges were not
    looked for, nodes stand alone. Of very many edges only the `most` strongest are drawn.
    """
    places = _places(circuit)
    whole, alone, none = (values.mean().item() for values in (circuit.full, circuit.edges_alone, circuit.ablated))
    words = f"{circuit.metric} {whole:.3g} with the whole model, {alone:.3g} with this, {none:.3g} with neither"
    fig = figure(title or f"Circuit: {words}", "", "")
    measured = zip(circuit.edges, map(interval, circuit.edge_effects), strict=True)
    drawn = sorted(measured, key=lambda pair: abs(pair[1].mean), reverse=True)[:most]
    strongest = abs(drawn[0][1].mean) or 1.0 if drawn else 1.0
    if len(drawn) < len(circuit.edges):
        fig.update_layout(title_text=f"{fig.layout.title.text}<br>the {most} strongest of {len(circuit.edges)} edges")  # type: ignore[attr-defined]
    shown: set[str] = set()
    lines: dict[Edge, list[Place]] = {}
    for edge, effect in reversed(drawn):  # the strongest on top
        lines[edge] = _line(edge, places, [line for other, line in lines.items() if _ends(other) == _ends(edge)])
        _draw_edge(fig, edge, effect, lines[edge], strongest, edge.by not in shown)
        shown.add(edge.by)
    _draw_nodes(fig, circuit, places)
    numbered = [pair for pair in drawn if abs(pair[1].mean) >= WORTH * strongest] if len(drawn) <= LABELLED else []
    _write_numbers(fig, numbered, lines, places)
    rows = sorted({y for _, y in places.values()})
    ends = {rows[0]: "", rows[-1]: ""}
    fig.update_yaxes(tickvals=rows, ticktext=[ends.get(y, _layer_name(y)) for y in rows], showgrid=True, zeroline=False,
                     range=[rows[0] - 0.4, rows[-1] + 0.4])  # fmt: skip
    fig.update_xaxes(visible=False, range=[-WIDTH, WIDTH])
    below = 20 / (height := max(320, 110 * len(rows) + 120))
    legend = {"orientation": "h", "y": -below, "yanchor": "top", "x": 0, "traceorder": "normal"}
    fig.update_layout(height=height, legend=legend, margin_t=60 + 20 * (len(drawn) < len(circuit.edges)))
    return fig


def _places(circuit: Circuit) -> dict[Node | None, Place]:
    """Where each node stands; the output is None. A layer's MLP stands half a row above its heads."""
    rows: dict[float, list[Node]] = {}
    for node in circuit.nodes:
        rows.setdefault(1 + node.layer + (0.5 if node.head is None else 0.0), []).append(node)
    places: dict[Node | None, Place] = {Node(-1): (0.0, 0.0)}
    for y, nodes in rows.items():
        for i, node in enumerate(nodes):
            shift = 0.22 * (-1) ** int(y)  # so that a column of single heads does not hide the edges that pass it
            places[node] = ((2 * (i + 0.5) / len(nodes) - 1) * 1.1 + (shift if len(nodes) == 1 else 0), y)
    top = max((y for _, y in places.values()), default=0.0)
    places[None] = (0.0, float(int(top)) + 1.0)
    return places


def _layer_name(y: float) -> str:
    return f"layer {int(y) - 1}{' MLP' if y % 1 else ''}"


def _ends(edge: Edge) -> tuple[Node, Node | None]:
    return edge.sender, edge.receiver


def _line(edge: Edge, places: Mapping[Node | None, Place], siblings: Sequence[Sequence[Place]]) -> list[Place]:
    """A curve that passes beside nodes and siblings, as straight as there is one."""
    (x0, y0), (x1, y1) = places[edge.sender], places[edge.receiver]
    others = [place for node, place in places.items() if node not in _ends(edge)]
    candidates: list[tuple[float, float, list[Place]]] = []
    for bow in BOWS:
        line = [(x0 + (x1 - x0) * t + 4 * bow * t * (1 - t), y0 + (y1 - y0) * t) for t in (i / 20 for i in range(21))]
        hidden = sum(_near(place, other, 0.13, 0.32) for place in line for other in others)
        outside = sum(abs(x) > WIDTH for x, _ in line)
        shared = sum(_near(line[10], other[10], 0.1, 0.1) for other in siblings)
        candidates.append((hidden + outside + 10 * shared, abs(bow) - 0.01 * bow * (x1 >= 0), line))
    return min(candidates, key=lambda candidate: candidate[:2])[2]


def _near(a: Place, b: Place, x: float, y: float) -> bool:
    return abs(a[0] - b[0]) < x and abs(a[1] - b[1]) < y


def _draw_edge(
    fig: go.Figure, edge: Edge, effect: Interval, line: Sequence[Place], strongest: float, in_legend: bool
) -> None:
    share = sqrt(abs(effect.mean) / strongest)
    fig.add_trace(
        go.Scatter(
            x=[x for x, _ in line],
            y=[y for _, y in line],
            mode="lines",
            line={"color": WAYS[edge.by], "width": 1 + 6 * share, "shape": "spline"},
            opacity=0.3 + 0.5 * share,
            name=_WORDS[edge.by],
            legendgroup=edge.by,
            showlegend=in_legend,
            hovertext=f"{edge}<br>without it: {effect}",
            hoverinfo="text",
        )
    )


def _write_numbers(
    fig: go.Figure,
    numbered: Sequence[tuple[Edge, Interval]],
    lines: Mapping[Edge, Sequence[Place]],
    places: Mapping[Node | None, Place],
) -> None:
    """Each on its line, where no node and no other number is."""
    occupied = list(places.values())
    for edge, effect in numbered:
        free = [lines[edge][i] for i in (12, 10, 8, 14, 6, 15, 5, 16)]
        x, y = next((at for at in free if not any(_near(at, other, 0.14, 0.25) for other in occupied)), free[0])
        occupied.append((x, y))
        fig.add_annotation(
            x=x, y=y, text=f"{effect.mean:+.2g}", showarrow=False, font={"size": 11, "color": WAYS[edge.by]},
            bgcolor="rgba(255,255,255,0.8)",
        )  # fmt: skip


def _draw_nodes(fig: go.Figure, circuit: Circuit, places: Mapping[Node | None, Place]) -> None:
    effects = {node: interval(effect) for node, effect in zip(circuit.nodes, circuit.node_effects, strict=True)}
    strongest = max((abs(effect.mean) for effect in effects.values()), default=0.0) or 1.0
    ends: dict[Node | None, str] = {Node(-1): "embedding", None: "output"}
    for node, (x, y) in places.items():
        effect = effects.get(node) if node is not None else None
        size = 70.0 if effect is None else 34 + 24 * sqrt(abs(effect.mean) / strongest)
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
                text=[name],
                textfont={"size": 11 if effect is None else 13},
                hovertext=f"{node or 'output'}" + ("" if effect is None else f"<br>without it: {effect}"),
                hoverinfo="text",
                showlegend=False,
            )
        )
