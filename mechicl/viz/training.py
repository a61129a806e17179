"""Figures of training: losses with their transitions, alignment, heads."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mechicl.analysis.dynamics import AlignmentOverTraining, HeadsOverTraining, Transitions
from mechicl.base.arguments import checked
from mechicl.statistics import interval
from mechicl.viz.elements import (
    BELOW,
    COLORS,
    FIRST_STEP,
    add_intervals,
    add_line,
    colors_for,
    figure,
    on_log_axis,
    panel,
    panels,
    tick_log_axes,
)


@checked
def losses_over_training(
    steps: Sequence[int],
    losses: Mapping[str, Sequence[Sequence[float]]],
    *,
    references: Mapping[str, float] | None = None,
    transitions: Mapping[str, Transitions] | None = None,
    title: str = "Loss during training",
    log_x: bool = False,
    log_y: bool = False,
) -> go.Figure:
    """Half the mean squared error of every seed of some kinds of models, with a mark at each transition.

    Args:
        steps: of the evaluations; step 0 is left out on a logarithmic axis.
        losses: by kind, mean squared errors `[step][seed]`.
        references: by name, mean squared errors of horizontal lines.
        transitions: by kind, the transitions to mark.
        title: of the figure.
        log_x: logarithmic steps.
        log_y: logarithmic losses.

    Raises:
        ValueError: losses of another length than the steps.
    """
    fig = figure(title, "optimisation step", "half mean squared error", log_x=log_x, log_y=log_y)
    shown = [i for i, step in enumerate(steps) if step > 0 or not log_x]
    for color, (kind, values) in zip(colors_for(list(losses)), losses.items(), strict=True):
        if len(values) != len(steps):
            raise ValueError(f"{kind} has {len(values)} evaluations for {len(steps)} steps")
        for seed in range(len(values[0])):
            add_line(fig, [steps[i] for i in shown], [values[i][seed] / 2 for i in shown], kind, color,
                     opacity=0.6, showlegend=seed == 0, legendgroup=kind)  # fmt: skip
        if transitions is not None and kind in transitions:
            falls = transitions[kind]
            halfway = ((falls.plateau + falls.final) / 4)[falls.fell].tolist()
            fig.add_trace(
                go.Scatter(
                    x=falls.steps[falls.fell].tolist(), y=halfway, mode="markers", name=f"transition, {kind}",
                    legendgroup=kind,
                    marker={"symbol": "diamond", "size": 8, "color": color, "line": {"color": "white", "width": 1}},
                )
            )  # fmt: skip
    dashes = itertools.cycle(("dash", "dot", "dashdot"))
    for (name, value), dash in zip((references or {}).items(), dashes, strict=False):
        ends = [steps[shown[0]], steps[-1]]
        add_line(fig, ends, [value / 2] * 2, name, COLORS["gradient descent"], dash=dash)
    fig.update_xaxes(exponentformat="none", separatethousands=True)
    if not log_y:
        fig.update_yaxes(rangemode="tozero")
    return tick_log_axes(fig)


@checked
def alignments_over_training(trainings: Mapping[str, AlignmentOverTraining]) -> go.Figure:
    """Alignment with a learner during trainings: means over seeds with 95% intervals, a panel for each measure."""
    names = {"sensitivity_cosine": "cosine of sensitivities", "prediction_distance": "distance of predictions",
             "sensitivity_distance": "distance of sensitivities"}  # fmt: skip
    fig = panels("", list(names.values()))
    for (name, training), color in zip(trainings.items(), colors_for(list(trainings)), strict=True):
        for column, measure in enumerate(names):
            intervals = [interval(seeds) for seeds in getattr(training, measure)]
            add_intervals(fig, on_log_axis(training.steps), intervals, name, color, legendgroup=name,
                          showlegend=column == 0, place=panel(column, 3))  # fmt: skip
    fig.update_xaxes(type="log", title={"text": FIRST_STEP, "font": {"size": 11}}, exponentformat="power")
    fig.update_yaxes(range=[-0.2, 1.05], col=1)
    for column in (2, 3):
        fig.update_yaxes(rangemode="tozero", col=column)
    fig.update_layout(legend=BELOW)
    return tick_log_axes(fig)


@checked
def heads_during_training(
    curve: Mapping[str, Any], scores: HeadsOverTraining, title: str = "When heads form"
) -> go.Figure:
    """The loss of each seed (left axis) and the highest score of any head at the snapshots (right axis).

    Scores are means over seeds with 95% intervals, if there are several seeds.

    Args:
        curve: a checkpoint record's curve, with "eval_step" and "eval_loss" `[step][seed]`; {} draws no losses.
        scores: of the same checkpoint.
        title: of the figure.
    """
    fig = make_subplots(specs=[[{"secondary_y": True}]])
    fig.update_layout(figure(title).layout)
    every = sorted({*curve.get("eval_step", ()), *scores.steps})
    places = dict(zip(every, on_log_axis(every), strict=True))
    for seed, losses in enumerate(zip(*curve.get("eval_loss", ()), strict=True)):
        add_line(fig, [places[step] for step in curve["eval_step"]], losses, "loss", COLORS["gradient descent"],
                 opacity=0.5, legendgroup="loss", showlegend=seed == 0, place={"secondary_y": False})  # fmt: skip
    colors = itertools.cycle((COLORS["GD++"], COLORS["Newton"], COLORS["Chebyshev"], COLORS["fine-tuned"]))
    several = False
    for (name, values), color in zip(scores.scores.items(), colors, strict=False):
        several = values.shape[1] > 1
        add_intervals(fig, [places[step] for step in scores.steps], [interval(seeds) for seeds in values],
                      f"{name.replace('_', ' ')} score", color, place={"secondary_y": True})  # fmt: skip
    fig.update_xaxes(
        title_text=FIRST_STEP, type="log", dtick=1, exponentformat="none", separatethousands=True,
        ticks="outside", ticklen=8, tickcolor="rgba(0,0,0,0)",  # room for the axes' zeros
    )  # fmt: skip
    fig.update_yaxes(title_text="loss (nats)", rangemode="tozero", secondary_y=False)
    score = "score (95% interval over seeds)" if several else "score"
    fig.update_yaxes(title_text=score, range=[0, 1], showgrid=False, tickmode="auto", secondary_y=True)
    fig.update_layout(legend=BELOW)
    return fig
