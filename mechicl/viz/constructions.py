"""Pictures of fits: paths between models, filters of spectral learners, distances of algorithm families."""

import math
from collections.abc import Mapping

import plotly.graph_objects as go
import torch

from mechicl.analysis.behaviour.identification import Identification
from mechicl.analysis.behaviour.spectral import SpectralLearner
from mechicl.analysis.weights.connectivity import LossPath
from mechicl.statistics import interval
from mechicl.viz.layers import interval_lines
from mechicl.viz.style import COLORS, add_line, figure


def connectivity_paths(paths: Mapping[str, LossPath], title: str = "Loss along paths between two models") -> go.Figure:
    """Mean squared error along each path, with bands of 95% intervals over prompts, on a logarithmic axis.

    Args:
        paths: by name; they need the same alphas.
        title: of the figure.

    Raises:
        ValueError: no paths, or different alphas.
    """
    alphas = [path.alphas.tolist() for path in paths.values()]
    if not alphas or any(each != alphas[0] for each in alphas):
        raise ValueError(f"needs paths with the same alphas, got {alphas}")
    lines = {name: [interval(errors) for errors in path.squared_errors] for name, path in paths.items()}
    x_title = "α (0: the first model, 1: the second)"
    return interval_lines(title, x_title, "mean squared error", alphas[0], lines, log_y=True)


def identified_filters(result: Identification, n_families: int = 4) -> go.Figure:
    """What is left of the target along an eigendirection of S, `1 - λ f(λ)`, for the nearest families.

    Learners that are not one function of each eigenvalue are left out; shaded is where the middle 98% of the positive
    eigenvalues lie.

    Args:
        result: of `identify`.
        n_families: how many lines, the nearest first.
    """
    positive = result.eigenvalues[result.eigenvalues > 0].flatten()[:100_000]
    low, high = torch.quantile(positive, torch.tensor([0.01, 0.99]).double()).tolist()
    eigenvalues = torch.logspace(math.log10(low / 2), math.log10(1.3 * high), 400, dtype=torch.float64)
    fig = figure("What the model leaves along each eigendirection", "eigenvalue λ of S", "1 − λ f(λ)", log_x=True)
    fig.add_vrect(x0=low, x1=high, fillcolor="#eef2f6", line_width=0, layer="below")
    spectral = [m for m in result.matches if isinstance(m.learner, SpectralLearner) and m.learner.elementwise]
    colors = (COLORS["trained"], COLORS["interpolated"], COLORS["closed form"], COLORS["other"])
    for match, color, dash in zip(spectral[:n_families], colors, ("solid", "dash", "dot", "dashdot"), strict=False):
        assert isinstance(match.learner, SpectralLearner)
        left = 1 - eigenvalues * match.learner.filter(eigenvalues[:, None])[:, 0]
        add_line(fig, eigenvalues.tolist(), left.clamp(-1.5, 1.5).tolist(), match.name, color, dash=dash)
    fig.add_hline(y=0, line={"color": "#999999", "width": 1})
    fig.update_xaxes(exponentformat="power")
    fig.update_layout(legend={"x": 0.98, "xanchor": "right", "y": 0.98})
    return fig


def identified_families(result: Identification) -> go.Figure:
    """Distance of each family's nearest member from the model, with 95% intervals, the nearest at the top."""
    distances = [result.distance(match) for match in result.matches]
    names = [match.name for match in result.matches]
    fig = figure(
        "Which algorithm is it?", "squared distance of predictions / the model's squared predictions", "", log_x=True
    )
    fig.add_trace(
        go.Scatter(
            x=[d.mean for d in distances],
            y=names,
            mode="markers",
            marker={"color": COLORS["trained"], "size": 9},
            error_x={
                "type": "data", "symmetric": False, "array": [d.high - d.mean for d in distances],
                "arrayminus": [min(d.mean - d.low, 0.9 * d.mean) for d in distances], "thickness": 1.3,
            },
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
        )
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", type="category")
    fig.update_layout(height=120 + 26 * len(names), margin={"l": 330})
    return fig
