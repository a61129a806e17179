"""`plot`: the figure of any result, by its class."""

from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go

from mechicl.analysis.behaviour.families import Identification
from mechicl.analysis.behaviour.fingerprints import Fingerprint
from mechicl.analysis.behaviour.losses import Regret, ShiftedLosses
from mechicl.analysis.behaviour.matching import Match
from mechicl.analysis.behaviour.table_fingerprints import TableFingerprint
from mechicl.analysis.behaviour.token_identification import TokenIdentification
from mechicl.analysis.causes import HypothesisTest, Interchange, SubspaceSearch
from mechicl.analysis.circuits import Circuit, EdgeScores
from mechicl.analysis.circuits.circuit import CircuitComparison
from mechicl.analysis.circuits.curves import CircuitCurve
from mechicl.analysis.dynamics.langevin import LearningCoefficient
from mechicl.analysis.dynamics.strategies import StrategyTracking
from mechicl.analysis.dynamics.training import AlignmentOverTraining, HeadsOverTraining
from mechicl.analysis.finetuning.context_comparison import FineTuningComparison
from mechicl.analysis.heads.scores import HeadScores
from mechicl.analysis.interventions import InterventionSweep
from mechicl.analysis.language import FewShotScores, FunctionVector, MatchedAblation
from mechicl.analysis.layers.logits import LogitAttribution
from mechicl.analysis.layers.probes import ProbeResult
from mechicl.analysis.weights.paths import LossPath, ModeConnectivity
from mechicl.base.arguments import checked
from mechicl.constructions.supports import WeightsCircuit
from mechicl.statistics import Result, interval
from mechicl.viz import behaviour, causes, circuits, interventions, training, weights
from mechicl.viz import elements as draw

COLUMNS = 3  # panels in a row
HEIGHT = 330  # of a row of panels


@checked
def plot(result: Any, /, *, title: str | None = None, **options: Any) -> go.Figure:
    """Draw the result of any analysis.

    Some kinds of results have a special figure, such as `patching_grid` for what `patch` returns. For others every
    quantity is drawn as its mean with a 95% interval over samples (prompts or seeds).

    Args:
        result: the object that an analysis returned.
        title: title of the figure; by default it describes the result.
        options: options of the function that draws this kind of result: those of `patching_grid` for an
            `InterventionSweep`, `most` for a circuit, `truth` for scores of edges.

    Example:
        >>> plot(align(model, AlgorithmLearner(algorithms.ols), prompts))
        >>> plot(score_heads(model, prompts=prompts), title="Heads of gpt2-8l")
    """
    draw_result = next((FIGURES[kind] for kind in type(result).__mro__ if kind in FIGURES), None)
    if draw_result is None:
        kinds = ", ".join(sorted(kind.__name__ for kind in FIGURES if kind is not Result))
        raise TypeError(
            f"plot() draws {kinds}, and every other Result of mechicl.analysis; got {type(result).__name__}: pass the "
            f"object that an analysis returned"
        )
    fig = draw_result(result, **options)
    return fig if title is None else fig.update_layout(title_text=draw.literal(title))


def _quantities(result: Result) -> go.Figure:
    """Draw every quantity with 95% intervals over its samples: the figure of results without a special one.

    No leading axis: a point; one (layers, ...): a line; more: a heatmap of the last two, averaged over the rest.
    """
    others = {name: values for name, values in result.samples().items() if values.ndim > 1}
    points = {name.replace("_", " "): mean for name, mean in result.intervals().items() if name not in others}
    if not points and not others:
        raise TypeError(f"result must have samples to draw, got a {type(result).__name__} without any")
    names = [*(["means with 95% intervals"] if points else []), *(name.replace("_", " ") for name in others)]
    columns = min(COLUMNS, len(names))
    rows, color = -(-len(names) // columns), draw.COLORS["trained"]
    fig = draw.panels(type(result).__name__, names, columns=columns, vertical_spacing=0.3 / rows)
    bar = {"thickness": 14, "lenmode": "pixels", "len": HEIGHT - 80, "y": 1, "yanchor": "top"}
    fig.update_layout(height=HEIGHT * rows + 60, coloraxis={"colorscale": "Viridis", "colorbar": bar})
    if points:
        dots = draw.interval_dots("", "", list(points), list(points.values())).data[0]
        fig.add_trace(dots.update(showlegend=False), **draw.panel(0, columns))
        fig.update_yaxes(automargin=True, autorange="reversed", **draw.panel(0, columns))
    for i, (name, values) in enumerate(others.items(), start=bool(points)):
        place, axes = draw.panel(i, columns), result.axis_names()[name][-2:]
        ticks = [result.axis_values(axis, n) for axis, n in zip(axes, values.shape[-1 - len(axes) : -1], strict=True)]
        if values.ndim == 2:
            means = [result._interval(name, entry) for entry in values]  # as it prints them
            look = {"showlegend": False, "mode": "lines+markers", "place": place}
            draw.add_intervals(fig, ticks[0], means, name, color, **look)
        else:
            means = values.double().mean(-1)
            means = means.flatten(0, -3).mean(0) if means.ndim > 2 else means
            hover = f"{axes[0]} %{{y}}, {axes[1]} %{{x}}: %{{z:.4g}}"
            draw.add_heatmap(fig, means, ticks[1], ticks[0], hover, place=place, coloraxis="coloraxis")
            fig.update_yaxes(title_text=axes[0], dtick=_every_integer(ticks[0]), **place)
        fig.update_xaxes(title_text=axes[-1], dtick=_every_integer(ticks[-1]), **place)
    return fig


def _contributions(result: LogitAttribution, n: int = 20) -> go.Figure:
    """Draw the largest contributions to a logit with their intervals over prompts, and the logit itself."""
    means = dict(zip(result.components, map(interval, result.contributions), strict=True))
    shown = {name: means[name] for name in result.strongest(n)} | {"logit": interval(result.logits)}
    return draw.interval_dots("Contributions to the logit", "logit", list(shown), list(shown.values()))


def _every_integer(ticks: Any) -> int | None:
    """Return the distance of an axis' ticks: 1 for few integers, None for plotly's choice."""
    return 1 if all(isinstance(tick, int) for tick in ticks) and len(ticks) <= draw.WHOLE else None


FIGURES: Mapping[type, Callable[..., go.Figure]] = {
    Result: _quantities,
    Circuit: circuits.circuit_graph,
    CircuitComparison: circuits.circuit_differences,
    WeightsCircuit: circuits.circuit_graph,
    CircuitCurve: circuits.faithfulness_curves,
    EdgeScores: circuits.edge_ranking,
    HeadScores: interventions.head_table,
    InterventionSweep: interventions.patching_grid,
    HypothesisTest: causes.hypotheses_ranked,
    Interchange: causes.interchange_heatmap,
    SubspaceSearch: causes.subspace_curves,
    Fingerprint: behaviour.fingerprint_figure,
    TableFingerprint: behaviour.table_fingerprint_figure,
    Identification: behaviour.identified_families,
    Match: behaviour.match_heatmap,
    ProbeResult: behaviour.probe_heatmap,
    Regret: behaviour.regret_curves,
    ShiftedLosses: lambda result: behaviour.shifted_losses({"": result}),
    TokenIdentification: behaviour.token_divergences,
    AlignmentOverTraining: lambda result: training.alignments_over_training({"": result}),
    HeadsOverTraining: lambda result: training.training_history({}, {"highest score of a head": result}),
    LearningCoefficient: training.learning_coefficients,
    StrategyTracking: training.strategies_over_training,
    FewShotScores: interventions.few_shot_curves,
    FunctionVector: interventions.head_effects,
    LogitAttribution: _contributions,
    MatchedAblation: lambda result: interventions.ablation_bars({"": result}),
    FineTuningComparison: lambda result: training.update_similarity_figure({"change": result}),
    LossPath: lambda result: weights.connectivity_paths({result.kind: result}),
    ModeConnectivity: lambda result: weights.connectivity_paths(result.paths),
}
"""The function that draws each kind of result; functions of several results by name get this one."""
