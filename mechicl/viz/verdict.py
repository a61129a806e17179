"""The figures that reports open with: the nearest algorithms, or scores of heads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import plotly.graph_objects as go

from mechicl.algorithms.card import is_for_scale
from mechicl.analysis.behaviour.families import FamilyMatch, Identification
from mechicl.viz import elements as draw

N_FAMILIES = 6
_FLOOR = 1e-8  # of the axis: below, predictions differ by rounding
GREY = draw.COLORS["other algorithms"]
MARK = {"color": GREY, "dash": "dot", "width": 1.2}
ROW, LABEL = 30, 17  # pixels of a family, and of a label of a line across them


def verdict_figure(
    identified: Identification,
    match: FamilyMatch,
    rivals: Sequence[FamilyMatch] = (),
    *,
    untrained: float | None = None,
    near: float | None = None,
) -> go.Figure:
    """Draw the share of a model's squared predictions that the nearest algorithms leave unexplained.

    `match` is the algorithm that is named, `rivals` those tied with it, `untrained` the least share of an untrained
    network, and `near` the share up to which a model is called alike.
    """
    fig = draw.figure("Left unexplained by the nearest algorithms", "share of the model's squared predictions")
    shown = [each for each in identified.matches if not is_for_scale(each.name)][:N_FAMILIES]
    if match not in shown:
        shown = [match, *shown[: N_FAMILIES - 1]]
    distances = [
        replace(d, mean=max(d.mean, _FLOOR), high=max(d.high, _FLOOR)) for d in map(identified.distance, shown)
    ]
    kinds = ["named" if each is match else "tied with it" if each in rivals else "other algorithms" for each in shown]
    for kind in [kind for kind in ("named", "tied with it", "other algorithms") if kind in kinds]:
        at = [i for i, each in enumerate(kinds) if each == kind]
        fig.add_scatter(
            x=[distances[i].mean for i in at], y=[draw.literal(shown[i].name) for i in at], mode="markers", name=kind,
            error_x=draw.error_bars([distances[i] for i in at], log=True),
            marker={"color": draw.COLORS[kind], "size": 10 if kind == "named" else 8},
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
        )  # fmt: skip
    marks = {"predicting 0": 1.0} | ({} if near is None else {"called alike": near})
    if untrained is not None and untrained < 0.9:
        marks["untrained network"] = untrained
    for i, (name, value) in enumerate(marks.items()):
        fig.add_vline(x=value, line=MARK)
        fig.add_annotation(  # each in its own line under the dots, over the lines of the others
            x=math.log10(value), y=len(shown) - 0.5 + (i + 0.5) * LABEL / ROW, text=name, showarrow=False,
            xanchor="right", yanchor="middle", bgcolor="white", borderpad=0, font={"size": 11, "color": "#5c6068"},
        )  # fmt: skip
    ends = math.log10(max(_FLOOR, min(1e-2, *(d.mean for d in distances))) / 4), math.log10(3.0)
    fig.update_xaxes(**draw.share_axis(*ends))
    bottom = len(shown) - 0.5 + len(marks) * LABEL / ROW
    order = {"categoryorder": "array", "categoryarray": [draw.literal(each.name) for each in shown]}
    fig.update_yaxes(range=[bottom, -0.5], type="category", **order)
    above = 50
    height = max(ROW * len(shown) + LABEL * len(marks), 200)
    legend, margin = {**draw.BELOW, "y": -60 / height}, {"l": 250, "t": above, "b": 95}
    return fig.update_layout(height=above + height + 95, legend=legend, margin=margin)


def score_bars(title: str, unit: str, names: Sequence[str], values: Mapping[str, Sequence[float]]) -> go.Figure:
    """Draw bars side by side for each name: the first kind of values in the model's colour, the second in grey."""
    fig = draw.figure(title, "", unit)
    for (kind, heights), color in zip(values.items(), (draw.COLORS["trained"], GREY), strict=False):
        fig.add_bar(x=[*map(draw.literal, names)], y=list(heights), name=draw.literal(kind), marker_color=color)
    return fig.update_xaxes(type="category").update_yaxes(range=[0, 1]).update_layout(legend=draw.BELOW)
