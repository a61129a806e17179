"""Fingerprints of algorithms, of learners on no list, and of trained and untrained models: what kind is each?"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from analyses.support.script import Option, script
from analyses.support.unlisted import unlisted
from mechicl import algorithms
from mechicl.analysis import fingerprint
from mechicl.analysis.behaviour.fingerprints import Fingerprint
from mechicl.checkpoints import load_checkpoint, random_weights
from mechicl.learners import AlgorithmLearner, Learner
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import Interval, median_interval
from mechicl.tasks import LinearRegression
from mechicl.viz.elements import Markup, add_heatmap, color_bar, figure, name_cells
from mechicl.viz.page import table

TASK = LinearRegression(x_dim=5, n_context=20, inputs="gaussian", noise_std=0.3)
LISTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "least squares": (algorithms.ols, {}),
    "ridge": (algorithms.ridge, {"penalty": 1.0}),
    "gradient descent, 5 steps": (algorithms.gradient_descent, {"steps": 5, "step_size": 0.01}),
    "online gradient descent": (algorithms.online_gradient_descent, {"step_size": 0.05}),
    "lasso": (algorithms.lasso, {"penalty": 0.1}),
    "Huber regression": (algorithms.huber, {"threshold": 0.3}),
    "kernel ridge": (algorithms.kernel_ridge, {"bandwidth": 2.0, "penalty": 0.3}),
    "nearest neighbours, 3": (algorithms.nearest_neighbours, {"n_neighbours": 3}),
}
UNLISTED = ("0.7 times least squares", "Adam, 20 steps", "Tukey's biweight", "Gaussian smoother")
TRAINED = ("lsa-1l", "lsa-2l-looped", "gpt2-8l", "softmax-4l", "delta-1l", "mesa-1l", "mamba2-4l", "lstm-4l")
GROUPS = ("algorithms on the list", "learners on no list", "trained models", "untrained models")
COLORS = [[0.0, "#08306b"], [5 / 6, "#c6dbef"], [5 / 6, "#fdd0a2"], [1.0, "#d94801"]]
"""From blue (holds) to orange (violated) at 1% of the squared predictions; violations from 1e-12 to 1 differ."""


@script(
    checkpoints=Option(TRAINED, "trained models; the untrained ones have their shapes"),
    n_prompts=Option(256, "prompts of each fingerprint"),
    seed=Option(0, "seed of the prompts"),
)
def compare(args: Any) -> Comparison:
    """Measure every property of every learner, with up to three seeds of a model, with two numbers for scale."""
    options: dict[str, Any] = {"n_prompts": args.n_prompts, "seed": args.seed, "progress": False}
    learners = {name: AlgorithmLearner(*each) for name, each in LISTED.items()}
    found: dict[str, dict[str, list[Fingerprint]]] = {
        GROUPS[0]: {name: [fingerprint(learner, TASK, **options)] for name, learner in learners.items()},
        GROUPS[1]: {name: [fingerprint(unlisted()[name], TASK, **options)] for name in UNLISTED},
        GROUPS[2]: {},
        GROUPS[3]: {},
    }
    scales: dict[str, dict[str, list[float]]] = {}
    for name in args.checkpoints:
        trained = load_checkpoint(name)
        with random_weights():
            untrained = load_checkpoint(name)
        for group, label, each in ((GROUPS[2], name, trained), (GROUPS[3], f"{name}, untrained", untrained)):
            models = [model.to(torch.float64) for model in each.models[:3]]
            found[group][label] = [fingerprint(model, each.task, **options) for model in models]
            if label == name:
                scales[name] = _scales(models, each.task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64))
    every = {name: prints for group in found.values() for name, prints in group.items()}
    rows = [row for name, prints in every.items() for row in _rows(name, prints, scales.get(name, {}))]
    descriptions = {name: prints[0].description for name, prints in every.items()}
    sections = [
        Section("Violated properties", "", [_picture(found)]),
        Section("In words", "", table(("learner", "kind"), list(descriptions.items()))),
    ]
    lead = (
        "Squared differences between predictions that are equal if a property holds, relative to squared predictions "
        "(1% is 0.01). For models, medians and the range of up to three seeds. "
        f"{args.n_prompts} prompts for each learner; algorithms learn linear regression in 5 dimensions from 20 points."
    )
    return Comparison("What kind of learner is it?", lead, rows, sections, {"descriptions": descriptions})


def _scales(models: Sequence[Learner], prompts: Prompts) -> dict[str, list[float]]:
    """How exact a property can be expected to be: a model's squared error, and the squared difference of two seeds."""
    with torch.no_grad():
        predictions = [model.predict(prompts).double() for model in models]
    size = torch.stack(predictions).square().mean()
    pairs = itertools.combinations(predictions, 2)
    return {
        "own error": [((each - prompts.query.ys).square().mean() / size).item() for each in predictions],
        "difference from another seed": [((a - b).square().mean() / size).item() for a, b in pairs],
    }


def _rows(name: str, prints: Sequence[Fingerprint], scales: Mapping[str, list[float]]) -> list[Row]:
    """The violation of each property, and a model's scales."""
    table = {each: [one.violation(each) for one in prints] for each in prints[0].violations}
    rows = [Row(f"{name}: {each}", None, values[0], "prompts") for each, values in table.items()]
    if len(prints) > 1:
        rows = [Row(f"{name}: {each}", None, _over_seeds([value.mean for value in values]), "seeds")
                for each, values in table.items()]  # fmt: skip
    return rows + [Row(f"{name}: {each}", None, _over_seeds(values), "seeds") for each, values in scales.items()]


def _over_seeds(values: Sequence[float]) -> Interval | float:
    return median_interval(torch.tensor(values, dtype=torch.float64)) if len(values) > 1 else values[0]


def _picture(found: Mapping[str, Mapping[str, Sequence[Fingerprint]]]) -> go.Figure:
    """Violations on a logarithmic scale, a row for each learner below the name of its group."""
    properties = list(
        dict.fromkeys(p for group in found.values() for prints in group.values() for p in prints[0].violations)
    )
    names: list[str] = []
    values: list[list[float | None]] = []
    for group, learners in found.items():
        names.append(Markup(f"<b>{group}</b>"))
        values.append([None] * len(properties))
        for name, prints in learners.items():
            names.append(name.removesuffix(", untrained") + (" " if name.endswith("untrained") else ""))
            means = [_mean(prints, each) for each in properties]
            values.append([None if mean is None else math.log10(max(mean, 1e-12)) for mean in means])
    fig = figure("Blue: holds, up to 1%", "", "")
    ticks = {"tickvals": [-12, -6, -2, 0], "ticktext": ["1e-12", "1e-6", "1%", "1"], "tickangle": 0}
    bar = color_bar("", orientation="h", y=1.0, yanchor="bottom", x=0.5, len=1.0, **ticks)
    add_heatmap(fig, values, properties, names, "%{y}<br>%{x}: 10^%{z:.1f}", colorscale=COLORS, zmin=-12, zmax=0,
                xgap=1, ygap=1, colorbar=bar)  # fmt: skip
    name_cells(fig, automargin=True, tickfont_size=11)
    fig.update_xaxes(tickangle=-90, dtick=1).update_yaxes(autorange="reversed")
    return fig.update_layout(height=220 + 19 * len(names), margin_t=110)


def _mean(prints: Sequence[Fingerprint], name: str) -> float | None:
    values = [each.violation(name).mean for each in prints if name in each.violations]
    return sum(values) / len(values) if values else None


if __name__ == "__main__":
    compare.run()
