"""What happens during training: losses with their transitions, sensitivities to tokens, patterns before and after."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots
from torch import Tensor

from mechicl.analysis.dynamics import AlignmentOverTraining, HeadsOverTraining, Transitions
from mechicl.statistics import interval
from mechicl.viz.style import COLORS, add_band, add_line, figure, on_log_axis


def losses_over_training(
    steps: Sequence[int],
    losses: Mapping[str, Sequence[Sequence[float]]],
    *,
    references: Mapping[str, float] | None = None,
    found: Mapping[str, Transitions] | None = None,
    title: str = "Loss during training",
    log_x: bool = False,
    log_y: bool = False,
) -> go.Figure:
    """Half the mean squared error of every seed of some kinds of models, with a tick where each one falls.

    Args:
        steps: of the evaluations; step 0 is left out on a logarithmic axis.
        losses: by kind, mean squared errors `[step][seed]`.
        references: by name, mean squared errors to draw across.
        found: by kind, the transitions to mark.
        title: of the figure.
        log_x: logarithmic steps.
        log_y: logarithmic losses.

    Raises:
        ValueError: losses of another length than the steps.
    """
    fig = figure(title, "optimisation step", "half mean squared error", log_x=log_x, log_y=log_y)
    shown = [i for i, step in enumerate(steps) if step > 0 or not log_x]
    colors = (COLORS["trained"], COLORS["interpolated"], COLORS["closed form"], COLORS["other"])
    for (kind, values), color in zip(losses.items(), itertools.cycle(colors), strict=False):
        if len(values) != len(steps):
            raise ValueError(f"{kind} has {len(values)} evaluations for {len(steps)} steps")
        for seed in range(len(values[0])):
            add_line(fig, [steps[i] for i in shown], [values[i][seed] / 2 for i in shown], kind, color,
                     opacity=0.6, showlegend=seed == 0, legendgroup=kind)  # fmt: skip
        if found is not None and kind in found:
            fallen = found[kind].steps[found[kind].fell].tolist()
            halfway = ((found[kind].plateau + found[kind].final) / 4)[found[kind].fell].tolist()
            fig.add_trace(
                go.Scatter(
                    x=fallen, y=halfway, mode="markers", name=f"transition, {kind}", legendgroup=kind,
                    marker={"symbol": "diamond", "size": 8, "color": color, "line": {"color": "white", "width": 1}},
                )
            )  # fmt: skip
    dashes = itertools.cycle(("dash", "dot", "dashdot"))
    for (name, value), dash in zip((references or {}).items(), dashes, strict=False):
        ends = [steps[shown[0]], steps[-1]]
        add_line(fig, ends, [value / 2] * 2, name, COLORS["gradient descent"], dash=dash)
    if not log_y:
        fig.update_yaxes(rangemode="tozero")
    return fig


def sensitivity_over_training(
    steps: Sequence[int],
    norms: Mapping[str, Sequence[float]],
    eval_steps: Sequence[int],
    losses: Sequence[float],
    *,
    gd_mse: float,
    title: str = "What the first layer depends on during training",
) -> go.Figure:
    """Norms of derivatives at the snapshots of one seed (above) over its loss (below).

    Args:
        steps: of the snapshots; step 0 stands at half of the next.
        norms: by name, a norm a snapshot.
        eval_steps: of the evaluations.
        losses: the seed's mean squared errors.
        gd_mse: of tuned gradient descent.
        title: of the figure.
    """
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.6, 0.4])
    colors = (COLORS["trained"], COLORS["interpolated"], COLORS["other"])
    at = on_log_axis(steps)
    for (name, values), color in zip(norms.items(), itertools.cycle(colors), strict=False):
        line = go.Scatter(x=at, y=list(values), name=name, mode="lines+markers", line={"color": color})
        fig.add_trace(line, 1, 1)
    later = [(step, value / 2) for step, value in zip(eval_steps, losses, strict=True) if step > 0]
    loss = go.Scatter(x=[step for step, _ in later], y=[value for _, value in later], name="loss", mode="lines",
                      line={"color": COLORS["gradient descent"]})  # fmt: skip
    fig.add_trace(loss, 2, 1)
    fig.add_hline(y=gd_mse / 2, row=2, col=1, line={"color": "#888888", "dash": "dash", "width": 1},  # type: ignore[arg-type]
                  annotation_text="one step of gradient descent", annotation_position="bottom left")  # fmt: skip
    fig.update_layout(figure(title, "", "").layout)
    fig.update_layout(height=520)
    fig.update_yaxes(title_text="norm of the derivative", rangemode="tozero", row=1)
    fig.update_yaxes(title_text="half mean squared error", rangemode="tozero", row=2)
    fig.update_xaxes(title_text="", row=1)
    fig.update_xaxes(type="log", dtick=1)
    fig.update_xaxes(title_text="optimisation step", row=2)
    return fig


def mean_patterns(panels: Mapping[str, Float[Tensor, "query_pos key_pos"]], labels: Sequence[str]) -> go.Figure:
    """Attention patterns side by side, in one scale.

    Args:
        panels: by title.
        labels: of the positions.

    Raises:
        ValueError: a pattern that does not fit the labels, or none.
    """
    if not panels or any(tuple(p.shape) != (len(labels), len(labels)) for p in panels.values()):
        shapes = [tuple(p.shape) for p in panels.values()]
        raise ValueError(f"patterns must be [query_pos key_pos] = {(len(labels), len(labels))}, got {shapes}")
    bound = max(float(pattern.abs().max()) for pattern in panels.values())
    signed = any(float(pattern.min()) < 0 for pattern in panels.values())
    fig = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels), horizontal_spacing=0.08)
    for column, pattern in enumerate(panels.values(), start=1):
        heat = go.Heatmap(
            z=pattern.tolist(), x=list(labels), y=list(labels), coloraxis="coloraxis",
            hovertemplate="%{y} attends to %{x}: %{z:.3f}<extra></extra>",
        )  # fmt: skip
        fig.add_trace(heat, 1, column)
    fig.update_xaxes(tickangle=-90, tickfont={"size": 9}, title_text="attends to")
    fig.update_yaxes(autorange="reversed", tickfont={"size": 9})
    fig.update_layout(
        template="plotly_white", height=480, font={"family": "system-ui, sans-serif", "size": 12},
        margin={"l": 60, "r": 20, "t": 50, "b": 70},
        coloraxis={"colorscale": "RdBu_r" if signed else "Blues", "cmin": -bound if signed else 0, "cmax": bound},
    )  # fmt: skip
    return fig


def alignments_over_training(found: Mapping[str, AlignmentOverTraining]) -> go.Figure:
    """Cosine of sensitivities (left) and distance of predictions (right) of several trainings, with 95% bands.

    Args:
        found: by name, up to six; step 0 stands at half of the first snapshot after it.
    """
    fig = make_subplots(rows=1, cols=2, subplot_titles=["cosine of sensitivities", "distance of predictions"])
    for (name, result), color in zip(found.items(), COLORS.values(), strict=False):
        steps = on_log_axis(result.steps)
        for column, values in enumerate((result.sensitivity_cosine, result.prediction_distance), start=1):
            part = go.Figure()
            intervals = [interval(row) for row in values]
            if values.shape[1] > 1:
                add_band(part, steps, [i.low for i in intervals], [i.high for i in intervals], color)
            means = values.mean(-1).tolist()
            add_line(part, steps, means, name, color, legendgroup=name, showlegend=column == 1)
            for trace in part.data:
                fig.add_trace(trace, 1, column)
    fig.update_xaxes(type="log", title_text="optimisation step (the first point is step 0)", exponentformat="power")
    fig.update_yaxes(range=[-0.2, 1.05], col=1)
    fig.update_yaxes(rangemode="tozero", col=2)
    fig.update_layout(
        template="plotly_white", height=400, font={"family": "system-ui, sans-serif", "size": 12},
        margin={"l": 60, "r": 20, "t": 40, "b": 55}, legend={"orientation": "h", "y": -0.2},
    )  # fmt: skip
    return fig


def heads_during_training(
    curve: Mapping[str, Any], formed: HeadsOverTraining, title: str = "When heads form"
) -> go.Figure:
    """The loss of each seed (left axis) and the highest score of any head at the snapshots (right axis).

    Scores are means over seeds with 95% intervals, where there are several. Step 0 stands at half of the next step at
    which anything is known.

    Args:
        curve: a checkpoint record's curve, with "eval_step" and "eval_loss" `[step][seed]`.
        formed: of the same checkpoint.
        title: of the figure.
    """
    fig = make_subplots(specs=[[{"secondary_y": True}]])
    fig.update_layout(figure(title, "", "").layout)
    every = sorted({*curve["eval_step"], *formed.steps})
    places = dict(zip(every, on_log_axis(every), strict=True))
    steps = [places[step] for step in curve["eval_step"]]
    losses = list(zip(*curve["eval_loss"], strict=True))
    for seed, values in enumerate(losses):
        part = go.Figure()
        add_line(part, steps, values, "loss", COLORS["gradient descent"], opacity=0.5, legendgroup="loss",
                 showlegend=seed == 0)  # fmt: skip
        fig.add_traces(part.data, secondary_ys=[False])
    colors = itertools.cycle((COLORS["interpolated"], COLORS["trained"], COLORS["closed form"], COLORS["other"]))
    at = [places[step] for step in formed.steps]
    several = False
    for (name, values), color in zip(formed.scores.items(), colors, strict=False):
        intervals, part = [interval(row) for row in values], go.Figure()
        if several := values.shape[1] > 1:
            add_band(part, at, [i.low for i in intervals], [i.high for i in intervals], color)
        add_line(part, at, [i.mean for i in intervals], f"{name.replace('_', ' ')} score", color)
        fig.add_traces(part.data, secondary_ys=[True] * len(part.data))
    fig.update_xaxes(
        title_text="optimisation step (the first point is step 0)", type="log", dtick=1, exponentformat="none",
        separatethousands=True, ticks="outside", ticklen=8, tickcolor="rgba(0,0,0,0)",  # room for the axes' zeros
    )  # fmt: skip
    fig.update_yaxes(title_text="loss (nats)", rangemode="tozero", secondary_y=False)
    score = "score (95% interval over seeds)" if several else "score"
    fig.update_yaxes(title_text=score, range=[0, 1], showgrid=False, tickmode="auto", secondary_y=True)
    fig.update_layout(legend={"x": 0.02, "y": 0.5})
    return fig
