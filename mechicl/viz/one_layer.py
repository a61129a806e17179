"""The figures of a one-layer study (von Oswald et al. 2023, Figs. 2, 6, 9 and 10)."""

import math
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from mechicl.analysis.behaviour.shifts import ShiftedLosses
from mechicl.analysis.dynamics.snapshots import AlignmentOverTraining
from mechicl.analysis.one_layer import RollOut
from mechicl.analysis.weights.connectivity import LossPath
from mechicl.analysis.weights.products import WeightProducts
from mechicl.statistics import interval
from mechicl.viz.style import COLORS, add_band, add_line, figure, on_log_axis


def learning_curves(curve: dict[str, Any], seeds: list[int], gd_mse: float) -> go.Figure:
    """Half the held-out mean squared error of each seed over training, and that of tuned gradient descent.

    Args:
        curve: a checkpoint record's curve, with "eval_step" and "eval_loss" `[step][seed]`.
        seeds: names of the lines.
        gd_mse: mean squared error of tuned gradient descent.
    """
    fig = figure("Loss during training", "optimisation step", "half mean squared error", log_x=True)
    fig.update_xaxes(dtick=1)
    losses = torch.tensor(curve["eval_loss"]) / 2
    steps = curve["eval_step"][1:]  # step 0 has no place on a logarithmic axis
    for i, seed in enumerate(seeds):
        add_line(fig, steps, losses[1:, i].tolist(), f"seed {seed}", COLORS["trained"], opacity=0.6)
    _across(fig, steps, gd_mse / 2, "gradient descent, tuned")
    fig.update_yaxes(rangemode="tozero")
    return fig


def alignment_over_training(result: AlignmentOverTraining) -> go.Figure:
    """Sensitivity cosine (left axis), prediction and sensitivity distance (right axis): mean and 95% interval."""
    fig = make_subplots(specs=[[{"secondary_y": True}]])
    fig.update_layout(figure("Alignment with gradient descent during training", "", "").layout)
    steps = on_log_axis(result.steps)
    lines = (
        ("sensitivity cosine", result.sensitivity_cosine, COLORS["trained"], False),
        ("prediction distance", result.prediction_distance, COLORS["interpolated"], True),
        ("sensitivity distance", result.sensitivity_distance, COLORS["other"], True),
    )
    for name, values, color, secondary in lines:
        means = values.mean(-1).tolist()
        intervals = [interval(row) for row in values]
        part = go.Figure()
        add_band(part, steps, [i.low for i in intervals], [i.high for i in intervals], color)
        add_line(part, steps, means, name, color)
        for trace in part.data:
            fig.add_trace(trace, secondary_y=secondary)
    fig.update_xaxes(title_text="optimisation step (the first point is step 0)", type="log")
    fig.update_yaxes(title_text="cosine", range=[-0.2, 1.05], secondary_y=False)
    fig.update_yaxes(title_text="L2 distance", rangemode="tozero", tickmode="auto", showgrid=False, secondary_y=True)
    fig.update_layout(legend={"x": 0.02, "y": 0.5})
    return fig


def weight_products_figure(trained: WeightProducts, construction: WeightProducts, names: list[str]) -> go.Figure:
    """W_KQ and W_PV of a trained layer in the fixed gauge, beside the construction's (Fig. 9).

    Args:
        trained: with the gauge fixed; its first layer and head are shown.
        construction: the same for the construction.
        names: of the stream's dimensions.
    """
    panels = [
        ("W<sub>KQ</sub> / β, trained", trained.W_KQ[0, 0]),
        ("W<sub>KQ</sub>, construction", construction.W_KQ[0, 0]),
        ("β W<sub>PV</sub>, trained", trained.W_PV[0, 0]),
        ("W<sub>PV</sub>, construction", construction.W_PV[0, 0]),
    ]
    fig = make_subplots(rows=1, cols=4, subplot_titles=[title for title, _ in panels], horizontal_spacing=0.06)
    for column, (_, matrix) in enumerate(panels, start=1):
        bound = max(float(panel.abs().max()) for _, panel in panels[(column - 1) // 2 * 2 :][:2])
        fig.add_trace(
            _heatmap(matrix, names, bound, show_scale=column in (2, 4), x=0.478 if column < 4 else 1.0), 1, column
        )
    fig.update_yaxes(autorange="reversed")
    fig.update_yaxes(showticklabels=False, col=2)
    fig.update_yaxes(showticklabels=False, col=3)
    fig.update_yaxes(showticklabels=False, col=4)
    fig.update_xaxes(tickangle=-60)
    fig.update_layout(
        template="plotly_white", height=340, margin={"l": 40, "r": 60, "t": 50, "b": 50},
        font={"family": "system-ui, sans-serif", "size": 11},
    )  # fmt: skip
    fig.update_yaxes(title_text="read from", col=1)
    return fig


def interpolation_paths(rescaled: list[LossPath], raw: list[LossPath]) -> go.Figure:
    """Half the loss along the line from each trained model to the construction, with and without rescaling."""
    fig = figure("From the trained weights to the construction", "α (0: trained, 1: construction)",
                 "half mean squared error")  # fmt: skip
    for paths, name, color in ((raw, "not rescaled", COLORS["other"]), (rescaled, "rescaled", COLORS["trained"])):
        for i, path in enumerate(paths):
            losses = (path.squared_errors.mean(-1) / 2).tolist()
            add_line(fig, path.alphas.tolist(), losses, name, color, showlegend=i == 0, opacity=0.7, legendgroup=name)
    fig.update_yaxes(rangemode="tozero")
    return fig


def shifted_losses(panels: dict[str, ShiftedLosses]) -> go.Figure:
    """Half the loss of gradient descent, the trained models and their interpolations at each scale (Fig. 6)."""
    fig = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels), horizontal_spacing=0.05)
    shown: set[str] = set()
    dashes = {"gradient descent": "solid", "GD++": "dashdot", "trained": "dash", "interpolated": "dot"}
    for column, losses in enumerate(panels.values(), start=1):
        for learner, means in zip(losses.learners, losses.mean() / 2, strict=True):
            kind = next(k for k in dashes if learner.startswith(k))
            part = go.Figure()
            width = {
                "line": {"color": COLORS[kind], "dash": dashes[kind], "width": 4 if kind == "gradient descent" else 2}
            }
            add_line(part, losses.scales.tolist(), means.tolist(), kind, COLORS[kind], showlegend=kind not in shown,
                     legendgroup=kind)  # fmt: skip
            part.data[0].update(width)
            fig.add_trace(part.data[0], 1, column)
            shown.add(kind)
        fig.update_xaxes(title_text=losses.scaled.replace("_", " ") + " α", col=column)
        means = losses.mean()
        finite = means[means.isfinite() & (means > 0)]
        decades = (finite.max() / finite.min()).log10().item() if len(finite) else 0.0
        fig.update_yaxes(dtick=max(1, math.ceil(decades / 8)), col=column)  # no more labels than there is room for
    fig.update_yaxes(type="log", exponentformat="power")
    fig.update_yaxes(title_text="half mean squared error", col=1)
    fig.update_layout(
        template="plotly_white", height=380, margin={"l": 70, "r": 20, "t": 50, "b": 55},
        font={"family": "system-ui, sans-serif", "size": 12}, legend={"orientation": "h", "y": -0.25},
    )  # fmt: skip
    return fig


def roll_outs(results: list[RollOut]) -> go.Figure:
    """Half the loss while one layer is applied again and again, at several dampings (Fig. 10)."""
    titles = [f"damping λ = {r.damping:g}" for r in results]
    fig = make_subplots(rows=1, cols=len(results), subplot_titles=titles, shared_yaxes=True)
    for column, result in enumerate(results, start=1):
        part = go.Figure()
        steps = list(range(len(result.gradient_descent)))
        first = column == 1
        add_line(part, steps, _cut(result.gradient_descent), "gradient descent", COLORS["gradient descent"],
                 showlegend=first, legendgroup="gd")  # fmt: skip
        for kind, losses, dash, color in (
            ("trained layer", result.trained, "dash", COLORS["trained"]),
            ("with its untrained entries", result.whole_layer, "dot", COLORS["other"]),
        ):
            for i in range(losses.shape[1]):
                add_line(part, steps, _cut(losses[:, i]), kind, color, dash=dash, showlegend=first and i == 0,
                         legendgroup=kind, opacity=0.8)  # fmt: skip
        for trace in part.data:
            fig.add_trace(trace, 1, column)
        fig.update_xaxes(title_text="repeats", col=column)
    start = float(results[0].gradient_descent[0]) / 2
    fig.update_yaxes(range=[0, 1.3 * start])
    fig.update_yaxes(title_text="half mean squared error", col=1)
    fig.update_layout(
        template="plotly_white", height=360, margin={"l": 70, "r": 20, "t": 50, "b": 55},
        font={"family": "system-ui, sans-serif", "size": 12}, legend={"orientation": "h", "y": -0.25},
    )  # fmt: skip
    return fig


def _cut(losses: Tensor) -> list[float | None]:
    """Half losses, with what has diverged left out of the line."""
    limit = 10 * float(losses[0])
    return [value / 2 if value == value and value < limit else None for value in losses.tolist()]


def _across(fig: go.Figure, x: list[float], y: float, name: str) -> None:
    add_line(fig, [x[0], x[-1]], [y, y], name, COLORS["gradient descent"], dash="dash")


def _heatmap(matrix: Tensor, names: list[str], bound: float, *, show_scale: bool, x: float) -> go.Heatmap:
    return go.Heatmap(
        z=matrix.tolist(), x=names, y=names, zmin=-bound, zmax=bound, colorscale="RdBu", reversescale=True,
        showscale=show_scale, colorbar={"x": x, "thickness": 8, "len": 0.9, "tickfont": {"size": 9}},
        hovertemplate="from %{y} to %{x}: %{z:.4f}<extra></extra>",
    )  # fmt: skip
