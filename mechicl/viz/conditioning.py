"""Pictures of what GD++ does to eigenvalues: its map, condition numbers against γ, their distribution over prompts."""

import math
from collections.abc import Mapping

import plotly.graph_objects as go
import torch

from mechicl.analysis.weights.conditioning import Conditioning, EigenvalueRange, transformed_eigenvalues
from mechicl.viz.elements import COLORS, add_band, add_line, colors_for, figure, panel, panels

QUANTILES = 400  # that a distribution is drawn from


def eigenvalue_map(
    ranges: Mapping[str, EigenvalueRange],
    gammas: Mapping[str, float],
    title: str = "Eigenvalues after one transformation of GD++",
) -> go.Figure:
    """`λ (1 - γλ)²` against λ for several γ: solid where a task's eigenvalues lie, dotted past the root 1/γ.

    Args:
        ranges: of the eigenvalues, by name of the task.
        gammas: a positive γ for each of these names.
        title: of the figure.

    Raises:
        ValueError: no ranges, other names in `gammas`, or a γ that is not positive and finite.

    Source: von Oswald et al. 2023, Fig. 13, left.
    """
    _require_same_names(ranges, gammas, "gammas")
    fig = figure(title, "eigenvalue λ of S", "λ (1 − γλ)²")
    for color, (name, span) in zip(colors_for(list(ranges)), ranges.items(), strict=True):
        gamma = gammas[name]
        for low, high, dash in ((span.smallest, span.largest, "solid"), (span.largest, 4 / (3 * gamma), "dot")):
            if low >= high:  # eigenvalues up to where the map is as high as at its local maximum
                continue
            x = torch.linspace(low, high, 200, dtype=torch.float64)
            label = f"{name}, γ = {gamma:.3g}"
            y = transformed_eigenvalues(x, gamma)
            add_line(fig, x.tolist(), y.tolist(), label, color, dash=dash, showlegend=dash == "solid",
                     legendgroup=name)  # fmt: skip
    end = 1.05 * max(4 / (3 * gamma) for gamma in gammas.values())
    add_line(fig, [0, end], [0, end], "unchanged", "#999999", dash="dash")
    top = max(transformed_eigenvalues(torch.tensor(r.largest), gammas[n]).item() for n, r in ranges.items())
    fig.update_yaxes(range=[0, 1.1 * max(top, *(4 / (27 * gamma) for gamma in gammas.values()))])
    fig.update_xaxes(range=[0, end])
    return fig


def condition_numbers(
    results: Mapping[str, Conditioning],
    observed: Mapping[str, float],
    title: str = "Condition numbers after one transformation of GD++",
) -> go.Figure:
    """Condition numbers against γ: of the whole range of eigenvalues (top), and of each prompt by itself.

    Above, a star is the range's condition number without transformation, a diamond the γ with the least; lines end at
    1/λ_max, where the range comes to contain the map's root. Below, lines are medians over prompts, bands their middle
    half. Dotted are the observed γ.

    Args:
        results: by name of the task; their `gammas` are the points of the lines, ascending.
        observed: γ of trained models, for each of these names.
        title: of the figure.

    Raises:
        ValueError: no results, other names in `observed`, or an observed γ that is not positive and finite.

    Source: von Oswald et al. 2023, Fig. 13, centre.
    """
    _require_same_names(results, observed, "observed")
    names = ("smallest and largest eigenvalue of all tasks", "each task by itself: median and middle half")
    fig = panels(title, names, columns=1, shared_xaxes=True, vertical_spacing=0.09)
    above, below = panel(0, 1), panel(1, 1)
    for color, (name, result) in zip(colors_for(list(results)), results.items(), strict=True):
        span, x = result.extremes, list(result.gammas)
        whole = [value if math.isfinite(value) else None for value in span.condition_numbers(x).tolist()]
        low, middle, high = result.quantiles([0.25, 0.5, 0.75]).tolist()
        add_line(fig, x, whole, name, color, legendgroup=name, place=above)
        for symbol, gamma, words in (("star", 0.0, "no transformation"), ("diamond", span.heuristic_gamma, "least")):
            point = go.Scatter(
                x=[gamma], y=span.condition_numbers([gamma]).tolist(), mode="markers", name=f"{name}: {words}",
                marker={"color": color, "size": 10, "symbol": symbol}, showlegend=False, legendgroup=name,
            )  # fmt: skip
            fig.add_trace(point, **above)
        add_band(fig, x, low, high, color, below)
        add_line(fig, x, middle, name, color, showlegend=False, legendgroup=name, place=below)
        for place in (above, below):
            fig.add_vline(x=observed[name], line={"color": color, "dash": "dot", "width": 1.5}, **place)
    fig.update_layout(height=680)
    fig.update_xaxes(title_text="γ", row=2)
    for row, decades in enumerate(_decades_shown(results), start=1):
        fig.update_yaxes(title_text="condition number", type="log", exponentformat="power", row=row,
                         dtick=max(1, math.ceil(decades / 6)))  # fmt: skip
    return fig


def condition_number_distribution(
    result: Conditioning, title: str = "Condition numbers of single tasks, by γ"
) -> go.Figure:
    """A violin over prompts for S itself and one for each γ, on a logarithmic axis, with the quartiles as a box.

    The outermost eighth of a percent of the prompts at either end is left out.

    Args:
        result: with the γ to show.
        title: of the figure.

    Raises:
        ValueError: a condition number that is not positive and finite.

    Source: von Oswald et al. 2023, Fig. 13, right.
    """
    if not all(bool((values > 0).all() & values.isfinite().all()) for values in (result.before, result.after)):
        raise ValueError("the result's condition numbers, before or after, must be positive and finite to be shown")
    fig = figure(title, "γ", "condition number")
    probabilities = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
    labelled = [("before", result.before), *zip((f"{g:g}" for g in result.gammas), result.after, strict=True)]
    decades = 1
    for label, values in labelled:
        logs = values.cpu().log10().quantile(probabilities)
        decades = max(decades, math.ceil(logs.max().item()))
        color = COLORS["gradient descent"] if label == "before" else COLORS["GD++"]
        fig.add_trace(
            go.Violin(
                x=[label] * QUANTILES, y=logs.tolist(), name=label, line={"color": color, "width": 1.3}, points=False,
                scalemode="width", width=0.85, spanmode="hard", box={"visible": True, "width": 0.25}, hoverinfo="skip",
                showlegend=False,
            )
        )  # fmt: skip
    ticks = list(range(0, decades + 1, max(1, math.ceil(decades / 8))))
    fig.update_yaxes(tickvals=ticks, ticktext=[f"10<sup>{k}</sup>" for k in ticks])
    fig.update_xaxes(type="category")
    fig.update_layout(height=420)
    return fig


def _decades_shown(results: Mapping[str, Conditioning]) -> tuple[float, float]:
    """Decades up to the largest condition number before: of a range, and of the prompts' medians."""
    of_ranges = max(result.extremes.largest / result.extremes.smallest for result in results.values())
    return math.log10(of_ranges), math.log10(max(result.before.median().item() for result in results.values()))


def _require_same_names(results: Mapping[str, object], gammas: Mapping[str, float], name: str) -> None:
    if not results or set(results) != set(gammas):
        raise ValueError(f"{name} needs one γ for each of one or more names, {list(results)}, got {list(gammas)}")
    if not all(0 < gamma < math.inf for gamma in gammas.values()):
        raise ValueError(f"{name}: observed γ must be positive and finite, got {dict(gammas)}")
