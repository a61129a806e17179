"""How good circuits of the best edges are, and how edges rank."""

import plotly.graph_objects as go

from mechicl.analysis.circuits import CircuitCurve, EdgeScores
from mechicl.analysis.circuits.comparison import NodesAndEdges
from mechicl.viz.elements import add_intervals, add_line, color_of, colors_for, figure, tick_log_axes

LEAST = 1e-12  # of the largest score, below which one is drawn as none


def faithfulness_curves(curve: CircuitCurve, title: str | None = None) -> go.Figure:
    """Faithfulness against the share of edges kept, a line for each of the scores, with 95% bands over prompts.

    The legend has the areas: CPR below the curve, CMD between it and 1. Random scores are grey. Shares that differ by
    more than 50 times stand on a logarithmic axis.
    """
    areas = {name: f"{name}: CPR {curve.cpr(name).mean:.3f}, CMD {curve.cmd(name).mean:.3f}" for name in curve.names}
    n_edges = round(curve.counts[-1] / curve.fractions[-1])
    wide = curve.fractions[-1] > 50 * curve.fractions[0]  # too much for one scale
    words = f"Faithfulness of the best of {n_edges:,} edges ({curve.metric}; {curve.method})"
    fig = figure(title or words, "share of the edges kept", "share of the metric kept", log_x=wide)
    add_line(fig, curve.fractions, [1.0] * len(curve.fractions), "the whole model", "#999999", dash="dot", width=1)
    named = [name for name in curve.names if not name.startswith("random")]
    colors = dict(zip(named, colors_for(named), strict=True))
    for name in curve.names:
        color = colors.get(name) or color_of("random") or "#b4b4b4"
        add_intervals(fig, curve.fractions, curve.faithfulness(name), areas[name], color, mode="lines+markers")
    fig.update_layout(legend={"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0}, height=430)
    return tick_log_axes(fig)


def edge_ranking(scores: EdgeScores, truth: NodesAndEdges | None = None, title: str | None = None) -> go.Figure:
    """The absolute scores of all edges, the largest first; beside a truth, its edges have a colour of their own.

    Scores of 0 stand at the bottom. Hovering names the edge.
    """
    sizes = scores.sizes().double()
    order = sizes.argsort(descending=True, stable=True).tolist()
    floor = max(float(sizes.max()), 1e-30) * LEAST if len(order) else 1.0
    words = f"Scores of {len(order):,} edges ({scores.scoring}; {scores.metric}, {scores.method})"
    if truth is not None:
        words += f": AUROC {scores.auroc(truth):.3f}"
    fig = figure(title or words, "rank", "change without the edge", log_x=True, log_y=True)
    true = set(scores.edges if truth is None else truth.edges)
    groups = {"edges": True} if truth is None else {"other edges": False, "true edges": True}
    for color, (name, wanted) in zip(("#999999", "#1f6fb4")[-len(groups) :], groups.items(), strict=True):
        at = [(rank, i) for rank, i in enumerate(order, 1) if (scores.edges[i] in true) == wanted]
        fig.add_trace(
            go.Scatter(
                x=[rank for rank, _ in at], y=[max(float(sizes[i]), floor) for _, i in at], mode="markers", name=name,
                marker={"color": color, "size": 7 if len(order) <= 500 else 4},
                text=[str(scores.edges[i]) for _, i in at], customdata=[float(sizes[i]) for _, i in at],
                hovertemplate="%{text}<br>%{customdata:.3g}<extra></extra>", showlegend=truth is not None,
            )
        )  # fmt: skip
    return tick_log_axes(fig)
