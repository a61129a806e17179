"""`plot`: the figure of any result, by its class."""

from functools import singledispatch
from typing import Any

import plotly.graph_objects as go

from mechicl.analysis.behaviour.families import Identification
from mechicl.analysis.behaviour.losses import Regret, ShiftedLosses
from mechicl.analysis.behaviour.matching import Match
from mechicl.analysis.behaviour.token_identification import TokenIdentification
from mechicl.analysis.causes.hypotheses import HypothesisTest
from mechicl.analysis.causes.interchange import Interchange
from mechicl.analysis.causes.subspaces import SubspaceSearch
from mechicl.analysis.circuits import Circuit, CircuitComparison, CircuitCurve, EdgeScores
from mechicl.analysis.dynamics.training import AlignmentOverTraining, HeadsOverTraining
from mechicl.analysis.finetuning.context_comparison import FineTuningComparison
from mechicl.analysis.heads.scores import HeadScores
from mechicl.analysis.interventions import InterventionSweep
from mechicl.analysis.layers.probes import ProbeResult
from mechicl.analysis.weights.kernels import KernelView
from mechicl.analysis.weights.paths import LossPath, ModeConnectivity
from mechicl.base.arguments import checked
from mechicl.constructions.supports import WeightsCircuit
from mechicl.statistics import Result, interval
from mechicl.viz.behaviour import identified_families, regret_curves, shifted_losses, token_divergences
from mechicl.viz.causes import hypotheses_ranked, interchange_heatmap, subspace_curves
from mechicl.viz.circuits import circuit_differences, circuit_graph, edge_ranking, faithfulness_curves
from mechicl.viz.elements import COLORS, WHOLE, add_heatmap, add_intervals, interval_dots, panel, panels
from mechicl.viz.finetuning import update_similarity_figure
from mechicl.viz.heads import head_table
from mechicl.viz.interventions import patching_grid
from mechicl.viz.layers import match_heatmap, probe_heatmap
from mechicl.viz.training import alignments_over_training, heads_during_training
from mechicl.viz.weights import connectivity_paths, kernel_heatmaps

COLUMNS = 3  # panels in a row
HEIGHT = 330  # of a row of panels


@checked
@singledispatch
def plot(result: Any, **options: Any) -> go.Figure:
    """Draw a result: the figure of its kind, or its quantities with their intervals.

    Args:
        result: of any analysis.
        options: of the function that draws this kind: those of `patching_grid` for an `InterventionSweep`, and so on.

    Raises:
        TypeError: an object of another kind; the message lists those that have a figure.

    Example:
        >>> plot(align(model, AlgorithmLearner(algorithms.ols), prompts))
        >>> plot(score_heads(model, prompts=prompts), title="Heads of gpt2-8l")
    """
    kinds = ", ".join(sorted(kind.__name__ for kind in plot.registry if kind not in (object, Result)))
    raise TypeError(
        f"plot() draws {kinds}, and every other Result of mechicl.analysis; got {type(result).__name__}: pass the "
        f"object that an analysis returned"
    )


# One line per kind of result. Functions of several results by name get this one.
plot.register(Circuit, circuit_graph)
plot.register(CircuitComparison, circuit_differences)
plot.register(WeightsCircuit, circuit_graph)
plot.register(CircuitCurve, faithfulness_curves)
plot.register(EdgeScores, edge_ranking)
plot.register(HeadScores, head_table)
plot.register(HypothesisTest, hypotheses_ranked)
plot.register(Identification, identified_families)
plot.register(Interchange, interchange_heatmap)
plot.register(Match, match_heatmap)
plot.register(ProbeResult, probe_heatmap)
plot.register(Regret, regret_curves)
plot.register(SubspaceSearch, subspace_curves)
plot.register(InterventionSweep, patching_grid)
plot.register(TokenIdentification, token_divergences)
plot.register(AlignmentOverTraining, lambda result: alignments_over_training({"": result}))
plot.register(FineTuningComparison, lambda result, **options: update_similarity_figure({"change": result}, **options))
plot.register(KernelView, lambda result, **options: kernel_heatmaps({"kernel": result}, **options))
plot.register(LossPath, lambda result, **options: connectivity_paths({result.kind: result}, **options))
plot.register(ModeConnectivity, lambda result, **options: connectivity_paths(result.paths, **options))
plot.register(
    HeadsOverTraining, lambda result, curve=None, **options: heads_during_training(curve or {}, result, **options)
)
plot.register(ShiftedLosses, lambda result: shifted_losses({"": result}))


@plot.register
def _quantities(result: Result, title: str | None = None) -> go.Figure:
    """Every quantity with 95% intervals over its samples: the figure of results without a special one.

    Quantities without leading axes are points in one panel. One with a leading axis (layers, steps, ...) is a line over
    it, and one with more is a heatmap of the last two, averaged over those before.
    """
    others = {name: values for name, values in result.samples().items() if values.ndim > 1}
    points = {name: mean for name, mean in result.intervals().items() if name not in others}
    if not points and not others:
        raise TypeError(f"{type(result).__name__} holds no samples that could be drawn")
    names = [*(["means with 95% intervals"] if points else []), *(name.replace("_", " ") for name in others)]
    columns = min(COLUMNS, len(names))
    rows, color = -(-len(names) // columns), COLORS["trained"]
    fig = panels(title or type(result).__name__, names, columns=columns, vertical_spacing=0.3 / rows)
    bar = {"thickness": 14, "lenmode": "pixels", "len": HEIGHT - 80, "y": 1, "yanchor": "top"}
    fig.update_layout(height=HEIGHT * rows + 60, coloraxis={"colorscale": "Viridis", "colorbar": bar})
    if points:
        dots = interval_dots("", "", [name.replace("_", " ") for name in points], list(points.values())).data[0]
        fig.add_trace(dots.update(showlegend=False), **panel(0, columns))
        fig.update_yaxes(automargin=True, autorange="reversed", **panel(0, columns))
    for i, (name, values) in enumerate(others.items(), start=bool(points)):
        place, axes = panel(i, columns), result.axis_names()[name][-2:]
        ticks = [result.axis_values(axis, n) for axis, n in zip(axes, values.shape[-1 - len(axes) : -1], strict=True)]
        if values.ndim == 2:
            intervals = [interval(entry) for entry in values]
            add_intervals(fig, ticks[0], intervals, name, color, place=place, showlegend=False, mode="lines+markers")
        else:
            means = values.double().mean(-1)
            means = means.flatten(0, -3).mean(0) if means.ndim > 2 else means
            hover = f"{axes[0]} %{{y}}, {axes[1]} %{{x}}: %{{z:.4g}}"
            add_heatmap(fig, means, ticks[1], ticks[0], hover, place=place, coloraxis="coloraxis")
            fig.update_yaxes(title_text=axes[0], dtick=_every_integer(ticks[0]), **place)
        fig.update_xaxes(title_text=axes[-1], dtick=_every_integer(ticks[-1]), **place)
    return fig


def _every_integer(ticks: Any) -> int | None:
    """The distance of an axis' ticks: 1 for few integers, None for plotly's choice."""
    return 1 if all(isinstance(tick, int) for tick in ticks) and len(ticks) <= WHOLE else None
