"""Figures of language models: few-shot accuracy, function vectors, and heads without which answers change."""

from collections.abc import Mapping

import plotly.graph_objects as go

from mechicl.analysis.language import FewShotScores, FunctionVector, MatchedAblation
from mechicl.statistics import interval
from mechicl.viz import elements as draw

N_NAMED = 4  # heads of a map that are named, if they are at least APART layers or heads from each other
APART = 3
PERCENT = ".0%"  # of axes of accuracies and probabilities


def in_context_figure(scores: FewShotScores, vector: FunctionVector) -> go.Figure:
    """Draw the accuracy by demonstrations over all tasks, and the effects of all heads with the strongest named."""
    task = vector.task.replace("_", " ")
    values = vector.indirect_effects.mean(-1).T  # layers along the horizontal axis: there are more of them
    bound = float(values.abs().max()) or 1.0
    effects = f"Effect of each head on the answer's probability, {task} (darkest: {100 * bound:.1f} points)"
    names = ["Accuracy by number of demonstrations", effects]
    fig = draw.panels("", names, horizontal_spacing=0.16)
    labels = [f"{label} labels" for label in scores.labels]
    for k, (name, color) in enumerate(zip(labels, draw.colors_for(labels), strict=True)):
        means = [interval(accuracy.flatten().double()).within(0, 1) for accuracy in scores.accuracy[:, k].unbind(1)]
        draw.add_intervals(fig, list(scores.shots), means, name, color, place=draw.panel(0, 2))
    fig.update_xaxes(title_text="demonstrations", tickvals=list(scores.shots), **draw.panel(0, 2))
    fig.update_yaxes(range=[-0.02, 1.02], tickformat=PERCENT, **draw.panel(0, 2))
    look = {"showscale": False, **draw.signed_scale(bound)}
    heads, layers = map(range, values.shape)
    draw.add_heatmap(fig, values, layers, heads, "head %{x}.%{y}: %{z:.2%}", place=draw.panel(1, 2), **look)
    named: list[tuple[int, int]] = []
    for layer, head in vector.heads:
        if len(named) < N_NAMED and all(max(abs(layer - one), abs(head - two)) >= APART for one, two in named):
            named.append((layer, head))
            look = {"ax": 0, "ay": -16, "arrowwidth": 1, "arrowhead": 0, "bgcolor": "rgba(255,255,255,0.8)"}
            fig.add_annotation(x=layer, y=head, text=f"{layer}.{head}", borderpad=0, **look, **draw.panel(1, 2))
    fig.update_xaxes(title_text="layer", showgrid=False, **draw.panel(1, 2))
    fig.update_yaxes(title_text="head", showgrid=False, **draw.panel(1, 2))
    return fig.update_layout(height=330, legend=draw.BELOW)


def few_shot_curves(scores: FewShotScores, task: str | None = None) -> go.Figure:
    """Draw the accuracy of `icl_score` on a task by demonstrations, with 95% intervals, a line per kind of labels."""
    t = 0 if task is None else scores.tasks.index(task)
    curves = {
        f"{label} labels": [interval(accuracy.double()).within(0, 1) for accuracy in scores.accuracy[t, k]]
        for k, label in enumerate(scores.labels)
    }
    title = scores.tasks[t].replace("_", " ")
    fig = draw.interval_lines(title, "demonstrations", "accuracy", list(scores.shots), curves)
    return fig.update_yaxes(range=[-0.02, 1.02], tickformat=PERCENT)


def head_effects(vector: FunctionVector) -> go.Figure:
    """Draw the indirect effect of each head from `function_vectors`, a mean over prompts."""
    values = vector.indirect_effects.mean(-1)
    bound = float(values.abs().max()) or 1.0
    fig = draw.figure("Indirect effect of each head on the probability", "head", "layer")
    heads, layers = range(values.shape[1]), range(values.shape[0])
    look = {"colorbar": {"title": "effect", "tickformat": ".1%"}, **draw.signed_scale(bound)}
    draw.add_heatmap(fig, values, heads, layers, "head %{y}.%{x}: %{z:.2%}", **look)
    return fig


def curves_by_layer(vector: FunctionVector) -> go.Figure:
    """Draw the right answer's probability with the vector of `function_vectors` (or a random one) added to a layer."""
    added = {"function vector": vector.added, "random vector": vector.random_added}
    curves = {name: [interval(values.double()) for values in lines] for name, lines in added.items()}
    title = "Probability of the right answer without demonstrations"
    fig = draw.interval_lines(title, "layer", "probability", list(range(len(vector.added))), curves)
    return fig.update_yaxes(tickformat=PERCENT)


def ablation_bars(ablations: Mapping[str, MatchedAblation]) -> go.Figure:
    """Draw the right answer's probability without some heads (`ablate_matched`, by name), and without random ones."""
    fig = draw.figure("Probability of the right answer", "", "probability")
    fig.update_xaxes(type="category").update_yaxes(tickformat=PERCENT)
    for name in ("intact", "ablated", "matched"):
        label = {"ablated": "without these heads", "matched": "without random heads of the same layers"}.get(name, name)
        samples = [getattr(result, name).double() for result in ablations.values()]
        values = [interval(each.mean(0) if each.ndim > 1 else each).within(0, 1) for each in samples]
        look = {"marker_color": draw.color_of(label), "error_y": draw.error_bars(values)}
        fig.add_bar(x=[*map(draw.literal, ablations)], y=[v.mean for v in values], name=label, **look)
    return fig
