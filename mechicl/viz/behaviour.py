"""Figures of behaviour and layers: nearest algorithms, regret, shifted prompts, layers matched with steps, probes."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import plotly.graph_objects as go
import torch

from mechicl.algorithms.card import contains, is_for_scale
from mechicl.algorithms.spectral_fit import SpectralLearner
from mechicl.analysis.behaviour.families import NONE, FamilyMatch, Identification
from mechicl.analysis.behaviour.fingerprints import NEARLY, Fingerprint, Violations
from mechicl.analysis.behaviour.growth import Growth
from mechicl.analysis.behaviour.losses import Regret, ShiftedLosses
from mechicl.analysis.behaviour.matching import Match
from mechicl.analysis.behaviour.table_fingerprints import TableFingerprint
from mechicl.analysis.behaviour.token_identification import TokenIdentification
from mechicl.analysis.layers.probes import ProbeResult
from mechicl.base.arguments import checked
from mechicl.statistics import UNBOUNDED, Interval, interval
from mechicl.viz import elements as draw


def identified_filters(result: Identification) -> go.Figure:
    """Draw the residual along an eigendirection of S, `1 - λ f(λ)`, for the four nearest families of `identify`.

    Only families that are a function of each eigenvalue; the middle 98% of the eigenvalues are shaded.
    """
    positive = result.eigenvalues[result.eigenvalues > 0].flatten()[:100_000]
    low, high = torch.quantile(positive, torch.tensor([0.01, 0.99]).double()).tolist()
    eigenvalues = torch.logspace(math.log10(low / 2), math.log10(1.3 * high), 400, dtype=torch.float64)
    title = "What the model leaves along each eigendirection"
    fig = draw.figure(title, "eigenvalue λ of S", "1 − λ f(λ)", log_x=True)
    fig.add_vrect(x0=low, x1=high, fillcolor="#eef2f6", line_width=0, layer="below")
    spectral = [(m.name, m.learner) for m in result.matches if isinstance(m.learner, SpectralLearner)]
    nearest = [(name, learner) for name, learner in spectral if learner.elementwise][:4]
    others = itertools.cycle(reversed(draw.PALETTE))  # members of one family share its colour
    for (name, learner), dash in zip(nearest, itertools.cycle(draw.DASHES), strict=False):
        residual = (1 - eigenvalues * learner.filter(eigenvalues[:, None])[:, 0]).clamp(-1.5, 1.5)
        color = draw.color_of(name) or next(others)
        draw.add_line(fig, eigenvalues.tolist(), residual.tolist(), name, color, dash=dash)
    return draw.tick_log_axes(fig.add_hline(**draw.ZERO))


def _above_floor(distance: Interval) -> Interval:
    return replace(distance, mean=max(distance.mean, _FLOOR), high=max(distance.high, _FLOOR))


def identified_families(result: Identification) -> go.Figure:
    """Draw the distance of each family of `identify` from the model, with 95% intervals, the nearest at the top.

    Distances below 1e-8, which is rounding, are drawn there: 0 has no place on a logarithmic axis.
    """
    names, distances = [m.name for m in result.matches], [_above_floor(result.distance(m)) for m in result.matches]
    x_title = "unexplained share of squared predictions"
    fig = draw.interval_dots("Which algorithm is it?", x_title, names, distances, log_x=True)
    positive = [each.mean for each in distances if each.mean > 0]
    if not positive:
        return fig
    low, high = min(positive) / 2, 1.5 * max(1.0, *(each.high for each in distances))
    return fig.update_xaxes(draw.share_axis(math.log10(low), math.log10(high)), tickmode="array")


def fingerprint_figure(result: Fingerprint) -> go.Figure:
    """Draw how far a learner violates each property (left, on a logarithmic axis), and its measured filter (right).

    The shaded part has violations of at most 1%; those below 1e-16 are drawn there. Without a filter, the right panel
    has the influence of each point of the context by its age.
    """
    measured = result.eigenvalues.numel() > 0
    fig = _violations(result, "Measured filter λ f(λ)" if measured else "Influence of a point by its age")
    place = draw.panel(1, 2)
    if measured:
        look = {"size": 4, "color": draw.PALETTE[0], "opacity": 0.35}
        fig.add_scatter(
            x=result.eigenvalues.flatten().tolist(), y=result.responses.flatten().tolist(), mode="markers",
            marker=look, showlegend=False, hovertemplate="λ %{x:.3g}: %{y:.3f}<extra></extra>", **place,
        )  # fmt: skip
        at, means = result.filter()
        draw.add_intervals(fig, at, means, "mean", draw.PALETTE[1], showlegend=False, place=place)
        fig.update_xaxes(type="log", title_text="eigenvalue λ of XᵀX", **place)
    else:
        ages = list(range(len(result.influence), 0, -1))
        means = [interval(row, within=UNBOUNDED) for row in result.influence]
        draw.add_intervals(fig, ages, means, "influence", draw.PALETTE[0], showlegend=False, place=place)
        fig.update_xaxes(title_text="points ago", **place)
    return draw.tick_log_axes(fig)


def table_fingerprint_figure(result: TableFingerprint) -> go.Figure:
    """Draw how far a learner of tables violates each property (left), and the influence of labels by distance (right).

    The shaded part has violations of at most 1%; those below 1e-16 are drawn there.
    """
    fig = _violations(result, "Influence of a row's label")
    place, quarters = draw.panel(1, 2), range(len(result.influence))
    means = [interval(row, within=UNBOUNDED) for row in result.influence]
    draw.add_intervals(fig, list(quarters), means, "influence", draw.PALETTE[0], showlegend=False, place=place)
    ticks = {"tickvals": [0, quarters[-1]], "ticktext": ["nearest", "farthest"], "range": [-0.4, len(quarters) - 0.6]}
    fig.update_xaxes(title_text="quarter of rows by distance", **ticks, **place)
    fig.update_yaxes(exponentformat="power", **place)
    return draw.tick_log_axes(fig)


def _violations(result: Violations, right: str) -> go.Figure:
    """Draw violations in the first of two panels."""
    fig = draw.panels("What kind of learner is it?", ["Violations of properties", right], horizontal_spacing=0.1)
    place, names = draw.panel(0, 2), list(result.violations)
    intervals = [result.violation(name) for name in names]
    shown = [max(each.mean, 1e-16) for each in intervals]
    colors = [draw.PALETTE[0] if value <= NEARLY else draw.PALETTE[1] for value in shown]
    fig.add_scatter(
        x=shown, y=names, mode="markers", marker={"size": 11, "color": colors}, showlegend=False,
        customdata=[str(each) for each in intervals], hovertemplate="%{y}: %{customdata}<extra></extra>", **place,
    )  # fmt: skip
    fig.add_vrect(x0=1e-17, x1=NEARLY, fillcolor="#eef2f6", line_width=0, layer="below", **place)
    fig.update_xaxes(type="log", title_text="squared difference / squared prediction", **place)
    return fig.update_yaxes(automargin=True, autorange="reversed", **place)


@checked
def shifted_losses(by_shift: Mapping[str, ShiftedLosses], *, half: bool = False) -> go.Figure:
    """Draw the losses of learners on prompts with scaled inputs or weights (von Oswald et al. 2023, Fig. 6).

    Lines are the mean squared error (logarithmic axis) over the scale α, one per learner. Learners whose names
    start with "gradient descent", "GD++", "trained" or "interpolated" share a colour and an entry of the legend.

    Args:
        by_shift: results of `measure_shifted_losses`, one panel each; the keys are the panels' titles.
        half: draw half of every error, as the paper does.
    """
    dashes = {"gradient descent": "solid", "GD++": "dashdot", "trained": "dash", "interpolated": "dot"}
    fig = draw.panels("", list(by_shift), horizontal_spacing=0.07)
    shown: set[str] = set()
    for i, losses in enumerate(by_shift.values()):
        place = draw.panel(i, len(by_shift))
        for learner, means in zip(losses.learners, losses.mean() / (2 if half else 1), strict=True):
            kind = next((name for name in dashes if learner.startswith(name)), learner)
            draw.add_line(
                fig, losses.scales, means.tolist(), kind, draw.COLORS.get(kind, draw.COLORS["other"]),
                dash=dashes.get(kind, "solid"), width=4 if kind == "gradient descent" else 2, legendgroup=kind,
                showlegend=kind not in shown, place=place,
            )  # fmt: skip
            shown.add(kind)
        fig.update_xaxes(title_text=losses.scaled.replace("_", " ") + " α", **place)
    fig.update_yaxes(type="log", exponentformat="power")
    draw.tick_log_axes(fig).update_yaxes(title_text="half " * half + "mean squared error", col=1)
    return fig.update_layout(legend=draw.BELOW)


def regret_curves(result: Regret) -> go.Figure:
    """Draw each learner's `regret` by the number of points before, with 95% intervals; 0 is the reference."""
    names = [result.learner, *(name for name in result.losses if name not in (result.learner, result.reference))]
    fig = draw.interval_lines(
        f"Regret against {result.reference}", "points before" if result.loss != "nats" else "tokens before",
        f"{result.loss} above the reference", result.points, {name: result.curve(name) for name in names},
    )  # fmt: skip
    fig.update_traces(line={"color": draw.COLORS["trained"], "width": 3}, selector={"name": result.learner})
    return fig.add_hline(**draw.ZERO).update_layout(legend=draw.BELOW)


def token_divergences(result: TokenIdentification) -> go.Figure:
    """Draw each learner's divergence (`identify_on_tokens`) by the number of tokens before, with 95% intervals."""
    curves = {name: result.curve(name) for name in result.divergences}
    y_title = "KL(network ‖ learner), nats"
    fig = draw.interval_lines("Which learner is it?", "tokens before", y_title, result.points, curves)
    return fig.update_layout(legend=draw.BELOW)


# ---- layers as steps of an algorithm ----


def match_heatmap(match: Match) -> go.Figure:
    """Draw the similarities of `match` for all pairs of steps, each row's best outlined (Fu et al. 2024, Fig. 2)."""
    x, y = [str(row) for row in match.rows], [str(column) for column in match.columns]
    compared = "errors" if match.similarity == "errors" else "induced weights"
    steps = match.column_name if match.column_name == "layer" else f"steps of {match.column_name}"
    fig = draw.figure(f"Similarity of {compared}", match.row_name, steps)
    hover = f"{match.row_name} %{{x}}<br>{match.column_name} %{{y}}<br>cosine %{{z:.3f}}"
    means = match.mean().cpu().T
    lowest = -1 if means.min() < 0 else 0  # one scale for all families of a page
    draw.add_heatmap(
        fig, means, x, y, hover, colorscale="Viridis", zmin=lowest, zmax=1, colorbar=draw.color_bar("cosine")
    )
    outline = {"symbol": "square-open", "size": 13, "color": "white", "line": {"width": 2.5}}
    best = [y[column] for column in match.best_columns()]
    fig.add_scatter(x=x, y=best, mode="markers", marker=outline, name="best match", hoverinfo="skip")
    return draw.name_cells(fig).update_layout(height=max(380, 17 * len(y) + 130), showlegend=False)


def match_curve(matches: Mapping[str, Match], growths: Mapping[str, Growth] | None = None) -> go.Figure:
    """Draw the best-matching step of each layer with its interval, on a logarithmic axis, and curves fitted to it.

    Args:
        matches: results of `match`, at least one; the keys, names of algorithms, are the labels in the legend.
        growths: fits by the same keys; the better of the two curves (linear, exponential) is drawn.
    """
    row_name = next(iter(matches.values())).row_name
    fig = draw.figure("Best-matching steps", row_name, "best-matching steps", log_y=True)
    shifts = [0.12 * (i - (len(matches) - 1) / 2) for i in range(len(matches))]  # equal steps are side by side
    for color, shift, (name, match) in zip(draw.colors_for(list(matches)), shifts, matches.items(), strict=True):
        best = [b for b in match.best() if b.column >= 1]
        for at_edge, symbol in ((False, "circle"), (True, "circle-open")):
            points = [b for b in best if b.at_edge == at_edge]
            if not points:
                continue
            suffix = ", at the edge of the steps that were tried" if at_edge else ""
            hover = f"{match.row_name} %{{customdata}}: %{{y:g}} steps of {draw.literal(name)}{suffix}<extra></extra>"
            only = len(points) == len(best)
            errors = {  # None: no caps in the circle
                "type": "data", "symmetric": False, "thickness": 1.2, "width": 3,
                "array": [max(b.high - b.column, 0) if b.high > b.low else None for b in points],
                "arrayminus": [min(max(b.column - b.low, 0), b.column - 0.5) if b.high > b.low else None
                               for b in points],
            }  # fmt: skip
            fig.add_scatter(
                x=[b.row + shift for b in points], y=[b.column for b in points], error_y=errors,
                name=draw.literal(f"{name}{suffix}" if only else name), legendgroup=name,
                showlegend=only or not at_edge, mode="markers",
                marker={"color": color, "size": 9, "symbol": symbol, "line": {"width": 1.5, "color": color}},
                customdata=[b.row for b in points], hovertemplate=hover,
            )  # fmt: skip
        growth = (growths or {}).get(name)
        if growth is not None:
            exponential = growth.exponential_aic < growth.linear_aic
            curve, kind = (growth.exponential_fit, "exponential") if exponential else (growth.linear_fit, "linear")
            draw.add_line(fig, growth.rows, curve, f"{name}: {kind} fit", color, dash="dot", legendgroup=name)
    return draw.tick_log_axes(fig.update_xaxes(dtick=1))


def probe_heatmap(result: ProbeResult, quantity: str | None = None) -> go.Figure:
    """Draw the selectivity (R² minus the control's) of the probes of `probe` for a quantity, by layer and position."""
    quantity = quantity or result.quantities[0]
    if quantity not in result.quantities:
        raise ValueError(f"quantity must be one of {list(result.quantities)}, got {quantity!r}")
    index = result.quantities.index(quantity)
    explained, control = result.explained()[index], result.control()[index]
    fig = draw.figure(f"Probes for {quantity}", "token", "layer")
    hover = "%{x}, layer %{y}<br>R² %{customdata[0]:.3f}<br>control %{customdata[1]:.3f}"
    draw.add_heatmap(
        fig, explained - control, result.positions, range(len(explained)), hover, zmin=0, zmax=1, colorscale="Viridis",
        customdata=torch.stack([explained, control], -1).tolist(), colorbar=draw.color_bar("R² − control"),
    )  # fmt: skip
    fig.update_xaxes(type="category", showgrid=False)
    return fig.update_yaxes(dtick=1, showgrid=False)


N_FAMILIES = 6
_FLOOR = 1e-8  # of the axis: below, predictions differ by rounding
GREY = draw.COLORS["other algorithms"]
MORE = "contains it as a special case"
MARK = {"color": GREY, "dash": "dot", "width": 1.2}
ROW, LABEL = 30, 17  # pixels of a family, and of a label of a line across them


def verdict_figure(
    identified: Identification,
    match: FamilyMatch,
    rivals: Sequence[FamilyMatch] = (),
    *,
    untrained: float | None = None,
    near: float | None = None,
    zero: str = "predicting 0",
) -> go.Figure:
    """Draw the share of a model's squared predictions that the nearest algorithms leave unexplained.

    `match` is the algorithm that is named, or the nearest if none is, `rivals` those tied with it, `untrained` the
    least share of an untrained network, `near` the share up to which a model is called alike, and `zero` the learner
    with a share of 1.
    """
    fig = draw.figure("Left unexplained by the nearest algorithms", "share of the model's squared predictions")
    shown = [each for each in identified.matches if not is_for_scale(each.name)][:N_FAMILIES]
    if match not in shown:
        shown = [match, *shown[: N_FAMILIES - 1]]
    distances = [_above_floor(identified.distance(each)) for each in shown]
    first = "nearest" if identified.answer.name == NONE else "named"

    def kind_of(each: FamilyMatch) -> str:
        if each is match:
            return first
        return "tied with it" if each in rivals else MORE if contains(each.name, match.name) else "other algorithms"

    kinds = [*map(kind_of, shown)]
    for kind in [kind for kind in (first, "tied with it", MORE, "other algorithms") if kind in kinds]:
        at = [i for i, each in enumerate(kinds) if each == kind]
        fig.add_scatter(
            x=[distances[i].mean for i in at], y=[draw.literal(shown[i].name) for i in at], mode="markers", name=kind,
            error_x=draw.error_bars([distances[i] for i in at], log=True),
            marker={"color": draw.COLORS[kind], "size": 10 if kind == first else 8},
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
        )  # fmt: skip
    marks = {zero: 1.0} | ({} if near is None else {f"called alike up to {near:.0%}": near})
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
    legend, margin = {**draw.BELOW, "y": -72 / height}, {"l": 250, "t": above, "b": 105}
    return fig.update_layout(height=above + height + 105, legend=legend, margin=margin)


def score_bars(title: str, unit: str, names: Sequence[str], values: Mapping[str, Sequence[float]]) -> go.Figure:
    """Draw bars side by side for each name: the first kind of values in the model's colour, the second in grey."""
    fig = draw.figure(title, "", unit)
    for (kind, heights), color in zip(values.items(), (draw.PALETTE[4], GREY), strict=False):
        fig.add_bar(x=[*map(draw.literal, names)], y=list(heights), name=draw.literal(kind), marker_color=color)
    fig.update_xaxes(type="category").update_yaxes(range=[0, 1], tickformat=draw.PERCENT)
    return fig.update_layout(legend=draw.BELOW)
