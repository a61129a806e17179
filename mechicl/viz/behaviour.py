"""Pictures of behaviour: the nearest families of algorithms and their filters, regret, losses on shifted prompts."""

import itertools
import math
from collections.abc import Mapping

import plotly.graph_objects as go
import torch

from mechicl.algorithms.spectral_fit import SpectralLearner
from mechicl.analysis.behaviour.families import Identification
from mechicl.analysis.behaviour.losses import Regret, ShiftedLosses
from mechicl.analysis.behaviour.token_identification import TokenIdentification
from mechicl.base.arguments import checked
from mechicl.viz.elements import (
    BELOW,
    COLORS,
    PALETTE,
    add_line,
    color_of,
    figure,
    interval_dots,
    interval_lines,
    panel,
    panels,
    tick_log_axes,
)


def identified_filters(result: Identification, n_families: int = 4) -> go.Figure:
    """The residual of the target along an eigendirection of S, `1 - λ f(λ)`, for the nearest families.

    Learners that are not one function of each eigenvalue are left out; the middle 98% of the positive eigenvalues are
    shaded. The `n_families` nearest are drawn.
    """
    positive = result.eigenvalues[result.eigenvalues > 0].flatten()[:100_000]
    low, high = torch.quantile(positive, torch.tensor([0.01, 0.99]).double()).tolist()
    eigenvalues = torch.logspace(math.log10(low / 2), math.log10(1.3 * high), 400, dtype=torch.float64)
    fig = figure("What the model leaves along each eigendirection", "eigenvalue λ of S", "1 − λ f(λ)", log_x=True)
    fig.add_vrect(x0=low, x1=high, fillcolor="#eef2f6", line_width=0, layer="below")
    spectral = [m for m in result.matches if isinstance(m.learner, SpectralLearner) and m.learner.elementwise]
    strangers = itertools.cycle(reversed(PALETTE))  # members of one family share its colour
    for match, dash in zip(spectral[:n_families], itertools.cycle(("solid", "dash", "dot", "dashdot")), strict=False):
        color = color_of(match.name) or next(strangers)
        assert isinstance(match.learner, SpectralLearner)
        left = 1 - eigenvalues * match.learner.filter(eigenvalues[:, None])[:, 0]
        add_line(fig, eigenvalues.tolist(), left.clamp(-1.5, 1.5).tolist(), match.name, color, dash=dash)
    fig.add_hline(y=0, line={"color": "#999999", "width": 1})
    return tick_log_axes(fig)


def identified_families(result: Identification) -> go.Figure:
    """Distance of each family's nearest member from the model, with 95% intervals, the nearest at the top."""
    names, distances = [m.name for m in result.matches], [result.distance(m) for m in result.matches]
    return interval_dots(
        "Which algorithm is it?", "squared distance / squared predictions", names, distances, log_x=True
    )


@checked
def shifted_losses(by_shift: Mapping[str, ShiftedLosses]) -> go.Figure:
    """Half the loss of learners at each scale, a panel for each shift (von Oswald et al. 2023, Fig. 6).

    Learners whose names start with "gradient descent", "GD++", "trained" or "interpolated" share a colour and an entry
    of the legend.
    """
    dashes = {"gradient descent": "solid", "GD++": "dashdot", "trained": "dash", "interpolated": "dot"}
    fig = panels("", list(by_shift), horizontal_spacing=0.07)
    shown: set[str] = set()
    for i, losses in enumerate(by_shift.values()):
        place = panel(i, len(by_shift))
        for learner, means in zip(losses.learners, losses.mean() / 2, strict=True):
            kind = next((name for name in dashes if learner.startswith(name)), learner)
            add_line(
                fig, losses.scales, means.tolist(), kind, COLORS.get(kind, COLORS["other"]),
                dash=dashes.get(kind, "solid"), width=4 if kind == "gradient descent" else 2, legendgroup=kind,
                showlegend=kind not in shown, place=place,
            )  # fmt: skip
            shown.add(kind)
        fig.update_xaxes(title_text=losses.scaled.replace("_", " ") + " α", **place)
    fig.update_yaxes(type="log", exponentformat="power")
    tick_log_axes(fig)
    fig.update_yaxes(title_text="half mean squared error", col=1)
    fig.update_layout(legend=BELOW)
    return fig


def regret_curves(result: Regret, title: str | None = None) -> go.Figure:
    """Regret of every learner over the number of points before, with 95% intervals; 0 is the reference."""
    names = [result.learner, *(name for name in result.losses if name not in (result.learner, result.reference))]
    fig = interval_lines(
        title or f"Regret against {result.reference}", "points before" if result.loss != "nats" else "tokens before",
        f"{result.loss} above the reference", result.points, {name: result.curve(name) for name in names},
    )  # fmt: skip
    fig.update_traces(line={"color": COLORS["trained"], "width": 3}, selector={"name": result.learner})
    return fig.add_hline(y=0, line={"color": "#999999", "width": 1}).update_layout(legend=BELOW)


def token_divergences(result: TokenIdentification, title: str = "Which learner is it?") -> go.Figure:
    """Divergence of each learner from the network over the number of tokens before, with 95% intervals."""
    curves = {name: result.curve(name) for name in result.divergences}
    fig = interval_lines(title, "tokens before", "KL(network ‖ learner), nats", result.points, curves)
    return fig.update_layout(legend=BELOW)
