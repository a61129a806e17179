"""Figures of training and of fine-tuning: losses, alignment and heads over the steps, changes compared by layer."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from mechicl.analysis.dynamics import AlignmentOverTraining, LearningCoefficient, StrategyTracking, Transitions
from mechicl.analysis.finetuning.context_comparison import FineTuningComparison
from mechicl.base.arguments import checked
from mechicl.statistics import UNBOUNDED, Interval, Result, interval
from mechicl.viz import elements as draw


@checked
def losses_over_training(
    steps: Sequence[int],
    losses: Mapping[str, Sequence[Sequence[float | None]]],
    *,
    references: Mapping[str, float] | None = None,
    transitions: Mapping[str, Transitions] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    half: bool = False,
) -> go.Figure:
    """Draw the mean squared error over training, a line for each seed.

    Args:
        steps: training steps of the evaluations; step 0 is left out on a logarithmic axis.
        losses: mean squared errors `[step][seed]` of each kind of model; the keys are the labels in the legend. A
            checkpoint has them as `record["curve"]["eval_loss"]`, at the steps "eval_step". None, for a loss that is
            not finite, leaves a gap.
        references: mean squared errors of horizontal lines; the keys are their labels.
        transitions: results of `find_transitions`, by the same keys as `losses`: each fall of a loss gets a diamond.
        log_x: logarithmic axis of steps.
        log_y: logarithmic axis of losses.
        half: draw half of every error, as von Oswald et al. 2023 do.
    """
    (factor, unit) = (0.5, "half mean squared error") if half else (1.0, "mean squared error")
    fig = draw.figure("Loss during training", "optimisation step", unit, log_x=log_x, log_y=log_y)
    shown = [i for i, step in enumerate(steps) if step > 0 or not log_x]
    for color, (kind, values) in zip(draw.colors_for(list(losses)), losses.items(), strict=True):
        if len(values) != len(steps):
            raise ValueError(f"losses must have one row per step, got {len(values)} of {kind!r} for {len(steps)} steps")
        n_seeds = sorted({len(row) for row in values})
        if len(n_seeds) > 1:
            raise ValueError(f"losses must have the same number of seeds at every step, got {n_seeds} of {kind!r}")
        for seed in range(max(n_seeds, default=0)):
            drawn = [None if (loss := values[i][seed]) is None else factor * loss for i in shown]
            look = {"opacity": 0.6, "showlegend": seed == 0, "legendgroup": kind}
            draw.add_line(fig, [steps[i] for i in shown], drawn, kind, color, **look)
        if transitions is not None and kind in transitions:
            falls = transitions[kind]
            fig.add_scatter(
                x=falls.steps[falls.fell].tolist(), y=(factor * (falls.plateau + falls.final) / 2)[falls.fell].tolist(),
                mode="markers", name=draw.literal(f"transition, {kind}"), legendgroup=kind,
                marker={"symbol": "diamond", "size": 8, "color": color, "line": {"color": "white", "width": 1}},
            )  # fmt: skip
    for dash, (name, value) in zip(itertools.cycle(draw.DASHES[1:]), (references or {}).items(), strict=False):
        ends = [steps[i] for i in (*shown[:1], *shown[-1:])]
        draw.add_line(fig, ends, [factor * value] * len(ends), name, draw.COLORS["gradient descent"], dash=dash)
    fig.update_xaxes(exponentformat="none", separatethousands=True)
    if not log_y:
        fig.update_yaxes(rangemode="tozero")
    return draw.tick_log_axes(fig)


@checked
def alignments_over_training(trainings: Mapping[str, AlignmentOverTraining]) -> go.Figure:
    """Draw how a model comes to resemble a learner over training: means over seeds with bands of 95% intervals.

    The panels, over training steps (logarithmic axis): the cosine between the sensitivities of the model and the
    learner (derivatives of the prediction with respect to the query's input), the L2 norm of the difference of their
    predictions, and that of their sensitivities. A norm of 0 means equal.

    Args:
        trainings: results of `align_over_training`, a line each; the keys are the labels in the legend.
    """
    names = {"sensitivity_cosine": "cosine of sensitivities", "prediction_distance": "distance of predictions",
             "sensitivity_distance": "distance of sensitivities"}  # fmt: skip
    fig, title = draw.panels("", list(names.values())), {}
    for (name, training), color in zip(trainings.items(), draw.colors_for(list(trainings)), strict=True):
        steps, title = draw.on_log_axis(training.steps), draw.title_of_steps(training.steps)
        for column, measure in enumerate(names):
            means = [interval(seeds, within=UNBOUNDED) for seeds in getattr(training, measure)]
            look = {"legendgroup": name, "showlegend": column == 0 and len(trainings) > 1,
                    "place": draw.panel(column, 3)}  # fmt: skip
            draw.add_intervals(fig, steps, means, name, color, **look)
    fig.update_xaxes(type="log", exponentformat="power").update_xaxes(title=title, col=2)
    fig.update_yaxes(rangemode="tozero").update_yaxes(rangemode="normal", range=[-0.2, 1.05], col=1)
    return draw.tick_log_axes(fig.update_layout(legend=draw.BELOW))


@checked
def learning_coefficients(result: LearningCoefficient) -> go.Figure:
    """Draw the chains at the last step (first part and seed), and the coefficient of each part over training steps.

    Takes the result of `learning_coefficient`; with a single step, its coefficients are dots.
    """
    names = [f"chains at step {result.steps[-1]}, {result.parts[0]}", "coefficient (95% interval)"]
    fig = draw.panels("Local learning coefficient", names)
    left, right = draw.panel(0, 2), draw.panel(1, 2)
    for chain in result.traces[-1, 0, 0].tolist():
        ends = [(i + 1) * result.trace_every for i in range(len(chain))]
        draw.add_line(fig, ends, chain, "chain", draw.COLORS["trained"], opacity=0.5, showlegend=False, place=left)
    fig.add_vline(x=result.burn_in, line={"dash": "dot", "color": "gray"}, **left)
    fig.update_xaxes(title_text="step of the sampler (dotted: first draw)", **left)
    fig.update_yaxes(title_text="nβ (L(w) - L(w*))", **left)
    rows = {part: [result.estimate(step, part) for step in result.steps] for part in result.parts}
    if len(result.steps) == 1:
        dots = draw.interval_dots("", "", list(rows), [means[0] for means in rows.values()]).data[0]
        fig.add_trace(dots.update(showlegend=False), **right)
        return fig.update_yaxes(autorange="reversed", **right)
    for color, (part, means) in zip(draw.colors_for(list(rows)), rows.items(), strict=True):
        look = {"showlegend": len(rows) > 1, "place": right}
        draw.add_intervals(fig, draw.on_log_axis(result.steps), means, part, color, **look)
    fig.update_xaxes(title=draw.title_of_steps(result.steps), type="log", exponentformat="power", **right)
    return draw.tick_log_axes(fig.update_layout(legend=draw.BELOW))


def strategies_over_training(tracking: StrategyTracking) -> go.Figure:
    """Draw the result of `track_strategies`: weights over training, the residual, and the way through predictions.

    Bands are 95% intervals over seeds and prompts. In the second panel a dotted line marks the threshold above which no
    mixture explains the model. The third shows the first two principal components of all predictions, with a line for
    each seed that begins at a circle, and a diamond for each strategy.
    """
    shares = ", ".join(f"{share:.0%}" for share in tracking.explained)
    names = ["weight in the nearest mixture", "residual", f"principal components ({shares})"]
    fig, steps = draw.panels("Strategies during training", names), draw.on_log_axis(tracking.steps)
    left, middle, right = (draw.panel(i, 3) for i in range(3))
    for i, (name, color) in enumerate(zip(tracking.learners, draw.colors_for(tracking.learners), strict=True)):
        draw.add_intervals(fig, steps, tracking.curve(name), name, color, place=left, legendgroup=name)
        x, y = tracking.learner_coordinates[:, i, None].tolist()
        look = {"mode": "markers", "marker": {"symbol": "diamond", "size": 12, "color": color}, "showlegend": False}
        draw.add_line(fig, x, y, name, color, place=right, legendgroup=name, **look)
    blue = draw.COLORS["trained"]
    draw.add_intervals(fig, steps, tracking.curve("residual"), "residual", blue, place=middle, showlegend=False)
    fig.add_hline(y=tracking.threshold, line={"color": "#999999", "width": 1, "dash": "dot"}, **middle)
    for seed, (xs, ys) in enumerate(tracking.coordinates.permute(2, 0, 1).tolist()):
        look = {"mode": "lines+markers", "marker": {"size": [9, *[4] * (len(xs) - 1)], "color": blue}, "opacity": 0.7}
        draw.add_line(fig, xs, ys, "model", blue, place=right, showlegend=seed == 0, legendgroup="model", **look)
    for place in (left, middle):
        fig.update_xaxes(type="log", exponentformat="power", **place)
    fig.update_xaxes(title=draw.title_of_steps(tracking.steps), **left).update_yaxes(rangemode="tozero", **middle)
    return draw.tick_log_axes(fig.update_yaxes(range=[-0.02, 1.02], **left).update_layout(legend=draw.BELOW))


@checked
def training_history(
    curve: Mapping[str, Any],
    traced: Mapping[str, Result],
    *,
    transitions: Transitions | None = None,
    loss: str = "squared error (MSE)",
) -> go.Figure:
    """Draw the loss of a training and any quantities at its snapshots in panels with one common axis of steps.

    The loss has a line for each seed. Quantities are means over seeds with bands of 95% intervals.

    Args:
        curve: a checkpoint's `record["curve"]`, with "eval_step" and "eval_loss" `[step][seed]`; {} for no panel of it.
        traced: results with a field `steps` and quantities `[step seed]`, such as those of `measure_over_training` and
            `score_heads_over_training`; the keys are the titles of their panels.
        transitions: result of `find_transitions`: a dotted line through all panels marks each seed's transition.
        loss: title of the loss' panel.
    """
    names = [*([loss] if curve else []), *traced]
    if not names:
        raise ValueError("there is nothing to draw: give a curve or traced results")
    n_steps, n_rows = (len(curve.get(key, ())) for key in ("eval_step", "eval_loss"))
    if n_steps != n_rows:
        raise ValueError(f"curve must have one row of eval_loss per eval_step, got {n_rows} for {n_steps} steps")
    steps = {name: list(getattr(result, "steps", ())) for name, result in traced.items()}
    fig = draw.panels("", names, columns=1, shared_xaxes=True, vertical_spacing=0.25 / len(names))
    every = sorted({*curve.get("eval_step", ()), *(step for each in steps.values() for step in each)})
    places = dict(zip(every, draw.on_log_axis(every), strict=True))
    samples = {name: result.samples().items() for name, result in traced.items()}
    lines = {name: {key.replace("_", " "): v for key, v in each if v.ndim == 2} for name, each in samples.items()}
    keys = list(dict.fromkeys(key for each in lines.values() for key in each))
    colors = dict(zip(keys, draw.colors_for(keys), strict=True))  # a colour means the same in all panels
    for seed, losses in enumerate(zip(*curve.get("eval_loss", ()), strict=True)):
        look = {"opacity": 0.6, "legendgroup": loss, "showlegend": seed == 0, "place": draw.panel(0, 1)}
        draw.add_line(fig, [places[s] for s in curve["eval_step"]], losses, "each seed", draw.COLORS["trained"], **look)
    for i, name in enumerate(traced, start=bool(curve)):
        look = {"place": draw.panel(i, 1), "legendgroup": name, "showlegend": len(lines[name]) > 1}
        for key, values in lines[name].items():
            x, means = [places[step] for step in steps[name]], [interval(seeds, within=UNBOUNDED) for seeds in values]
            draw.add_intervals(fig, x, means, key, colors[key], **look)
    for step in [] if transitions is None else transitions.steps[transitions.fell].tolist():
        fig.add_vline(x=max(step, min(places.values())), line={"color": "#444444", "width": 1, "dash": "dot"})
    fig.update_xaxes(type="log").update_yaxes(rangemode="tozero")
    draw.tick_log_axes(fig).update_xaxes(title=draw.title_of_steps(every), row=len(names))
    height = 190 * len(names)
    return fig.update_layout(height=height + 110, legend={**draw.BELOW, "y": -60 / height}, margin_b=70)


# ---- fine-tuning compared with demonstrations ----


@checked
def settings_figure(
    scores: Mapping[str, Mapping[str, Interval]],
    title: str = "With demonstrations, and tuned on them",
    *,
    chance: Sequence[float] | None = None,
) -> go.Figure:
    """Draw bars of scores with the given intervals: for each task a group of bars, one per setting.

    Args:
        scores: scores by setting (such as "zero-shot" and "fine-tuned"; the labels in the legend) and then by task (the
            labels along the axis), for example `FineTuningComparison.intervals()["zero_shot_score"]`.
        chance: score of guessing for each task, in their order, drawn as a dotted line across the task's bars.
    """
    if not scores:
        raise ValueError("scores must have at least one setting, got none")
    fig = draw.figure(title, "", "accuracy")
    for color, (name, by_task) in zip(draw.colors_for(list(scores)), scores.items(), strict=True):
        means = [each.mean for each in by_task.values()]
        known = [each if each.n > 1 else replace(each, low=each.mean, high=each.mean) for each in by_task.values()]
        bar = draw.error_bars(known, width=3, color="#333")
        fig.add_bar(x=[*map(draw.literal, by_task)], y=means, name=draw.literal(name), marker_color=color, error_y=bar)
    dotted = {"color": "#444", "width": 1, "dash": "dot"}
    for i, level in enumerate(chance or ()):
        fig.add_shape(type="line", x0=i - 0.45, x1=i + 0.45, y0=level, y1=level, line=dotted, layer="above",
                      name="chance", showlegend=i == 0)  # fmt: skip
    fig.update_layout(barmode="group", bargap=0.25)
    fig.update_yaxes(tickformat=draw.PERCENT)
    return fig.update_xaxes(type="category")  # the lines' numeric ends would make it a linear one


@checked
def update_similarity_figure(comparisons: Mapping[str, FineTuningComparison]) -> go.Figure:
    """Draw how similarly demonstrations and fine-tuning change attention outputs, by layer (SimAOU).

    SimAOU (similarity of attention output updates) is the cosine between the changes that demonstrations and
    fine-tuning make to an attention layer's output at the last token. Bands are 95% intervals over queries. The line
    "random change" is the first comparison's baseline, with a random vector in place of fine-tuning's change.

    Args:
        comparisons: results of `compare_with_finetuning`, a line each; the keys are the labels in the legend.
    """
    title = "What demonstrations and fine-tuning change (SimAOU)"
    return _by_layer(title, comparisons, "update_similarity", {"random change": "random_update_similarity"})


@checked
def map_similarity_figure(comparisons: Mapping[str, FineTuningComparison]) -> go.Figure:
    """Draw how similar attention is with demonstrations and without them, by layer (SimAM).

    SimAM (similarity of attention maps) is the cosine between two vectors of a head's scores (before the softmax) from
    the query's last token to the query's own tokens. The first vector is the original model's, with demonstrations. The
    second is without demonstrations: the original model's (the line "before fine-tuning", of the first comparison) or
    the fine-tuned model's (the other lines). Lines are means over heads with bands of 95% intervals over queries.

    Args:
        comparisons: results of `compare_with_finetuning`, a line each; the keys are the labels in the legend.
    """
    title, control = "Attention to the query's own tokens (SimAM)", {"before fine-tuning": "map_similarity_before"}
    return _by_layer(title, comparisons, "map_similarity_after", control)


@checked
def head_similarity_figure(comparison: FineTuningComparison) -> go.Figure:
    """Draw how similarly demonstrations and fine-tuning change each head's output, as a heatmap of layers and heads.

    A cell is the cosine (mean over queries) between two changes of the head's z at the last token: by demonstrations
    in context, and by fine-tuning on them.

    Args:
        comparison: result of `compare_with_finetuning`.
    """
    means = comparison.head_update_similarity.mean(-1)
    layers, heads = means.shape
    fig = draw.figure("What each head changes, in context and by fine-tuning", "head", "layer")
    draw.add_heatmap(
        fig, means, range(heads), range(layers), "layer %{y}, head %{x}<br>%{z:.4f}", **draw.signed_scale(1),
        texttemplate="%{z:.2f}" if heads <= 24 else None, xgap=1.5, ygap=1.5, colorbar=draw.color_bar("cosine"),
    )  # fmt: skip
    fig.update_layout(width=max(420, 70 * heads + 200), height=max(300, 46 * layers + 130))
    return draw.name_cells(fig)


def _by_layer(
    title: str, comparisons: Mapping[str, FineTuningComparison], measure: str, control: Mapping[str, str]
) -> go.Figure:
    """Draw a measure of each comparison, and a control of the first: means over queries and heads, with intervals."""
    if not comparisons:
        raise ValueError("comparisons must have at least one comparison, got none")
    first = next(iter(comparisons.values()))
    values = {name: getattr(first, each) for name, each in control.items()}
    values |= {name: getattr(comparison, measure) for name, comparison in comparisons.items()}
    lines = {
        name: [interval(v if v.ndim == 1 else v.mean(0), within=UNBOUNDED) for v in layers]
        for name, layers in values.items()
    }
    n_layers = len(next(iter(lines.values())))
    if n_layers > 1:
        fig = draw.interval_lines(title, "layer", "cosine", list(range(n_layers)), lines)
    else:  # points side by side
        fig = draw.figure(title, "the one layer", "cosine")
        for color, (name, intervals) in zip(draw.colors_for(list(lines)), lines.items(), strict=True):
            draw.add_intervals(fig, [name], intervals, name, color, showlegend=False)
        fig.update_xaxes(type="category", range=[-0.5, len(lines) - 0.5])
        fig.update_layout(width=min(1044, 180 + 160 * len(lines)))
    return fig.add_hline(**draw.ZERO)
