"""Figures of language models: few-shot accuracy, function vectors, and heads without which answers change."""

from collections.abc import Mapping

import plotly.graph_objects as go

from mechicl.analysis.language import FewShotScores, FunctionVector, MatchedAblation
from mechicl.statistics import interval
from mechicl.viz import elements as draw


def few_shot_curves(scores: FewShotScores, task: str | None = None) -> go.Figure:
    """Draw the accuracy of `icl_score` on a task by demonstrations, with 95% intervals, a line per kind of labels."""
    t = 0 if task is None else scores.tasks.index(task)
    curves = {
        f"{label} labels": [interval(accuracy.double()).within(0, 1) for accuracy in scores.accuracy[t, k]]
        for k, label in enumerate(scores.labels)
    }
    title = scores.tasks[t].replace("_", " ")
    fig = draw.interval_lines(title, "demonstrations", "accuracy", list(scores.shots), curves)
    return fig.update_yaxes(range=[-0.02, 1.02])


def head_effects(vector: FunctionVector) -> go.Figure:
    """Draw the indirect effect of each head from `function_vectors`, a mean over prompts."""
    values = vector.indirect_effects.mean(-1)
    bound = float(values.abs().max()) or 1.0
    fig = draw.figure("Indirect effect of each head on the probability", "head", "layer")
    heads, layers = range(values.shape[1]), range(values.shape[0])
    look = {"colorbar": {"title": "effect"}, **draw.signed_scale(bound)}
    draw.add_heatmap(fig, values, heads, layers, "head %{y}.%{x}: %{z:.4f}", **look)
    return fig


def curves_by_layer(vector: FunctionVector) -> go.Figure:
    """Draw the right answer's probability with the vector of `function_vectors` (or a random one) added to a layer."""
    added = {"function vector": vector.added, "random vector": vector.random_added}
    curves = {name: [interval(values.double()) for values in lines] for name, lines in added.items()}
    title = "Probability of the right answer without demonstrations"
    return draw.interval_lines(title, "layer", "probability", list(range(len(vector.added))), curves)


def ablation_bars(ablations: Mapping[str, MatchedAblation]) -> go.Figure:
    """Draw the right answer's probability without some heads (`ablate_matched`, by name), and without random ones."""
    fig = draw.figure("Probability of the right answer", "", "probability")
    fig.update_xaxes(type="category")
    for name in ("intact", "ablated", "matched"):
        label = {"ablated": "without these heads", "matched": "without random heads of the same layers"}.get(name, name)
        samples = [getattr(result, name).double() for result in ablations.values()]
        values = [interval(each.mean(0) if each.ndim > 1 else each).within(0, 1) for each in samples]
        fig.add_bar(
            x=[*map(draw.literal, ablations)], y=[v.mean for v in values], name=label, error_y=draw.error_bars(values)
        )
    return fig
