"""Fingerprints: the kinds of learners, of algorithms, of learners on no list, of trained and untrained models."""

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
from mechicl.reports import Comparison, Row, Section
from mechicl.tasks import LinearRegression, Task
from mechicl.viz.elements import add_heatmap, color_bar, figure, name_cells

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
FLOOR = 1e-12  # smaller violations have one colour


@script(
    checkpoints=Option(TRAINED, "trained models; the untrained ones have their shapes"),
    n_prompts=Option(512, "prompts of each fingerprint"),
    seed=Option(0, "seed of the prompts"),
)
def compare(args: Any) -> Comparison:
    """Measure every property of every learner, with all seeds of a model, and its error for scale."""
    options: dict[str, Any] = {"n_prompts": args.n_prompts, "seed": args.seed, "progress": False}
    found: dict[str, list[Fingerprint]] = {}
    for name, (algorithm, settings) in LISTED.items():
        found[name] = [fingerprint(AlgorithmLearner(algorithm, settings), TASK, **options)]
    for name in UNLISTED:
        found[f"{name} (on no list)"] = [fingerprint(unlisted()[name], TASK, **options)]
    errors: dict[str, list[float]] = {}
    for name in args.checkpoints:
        trained = load_checkpoint(name)
        with random_weights():
            untrained = load_checkpoint(name)
        for label, each in ((name, trained), (f"{name}, untrained", untrained)):
            models = [model.to(torch.float64) for model in each.models]
            found[label] = [fingerprint(model, each.task, **options) for model in models]
            errors[label] = [_error(model, each.task, args.n_prompts, args.seed) for model in models]
    rows = [_row(name, prints, errors.get(name, [])) for name, prints in found.items()]
    numbers = {
        name: {"violations": _table(prints), "description": prints[0].description, "error": errors.get(name)}
        for name, prints in found.items()
    }
    sections = [Section("How far does each learner violate each property?", "", [_picture(numbers)])]
    lead = f"{args.n_prompts} prompts for each learner; algorithms on linear regression in 5 dimensions with 20 points."
    return Comparison("What kind of learner is it?", lead, rows, sections, numbers)


def _error(model: Learner, task: Task, n_prompts: int, seed: int) -> float:
    """The model's squared error relative to its squared predictions: how exact can a property be expected to be?"""
    prompts = task.sample(n_prompts, seed=seed, dtype=torch.float64)
    with torch.no_grad():
        predictions = model.predict(prompts).double()
    return ((predictions - prompts.query.ys).square().mean() / predictions.square().mean()).item()


def _table(prints: Sequence[Fingerprint]) -> dict[str, list[float]]:
    """For each property, the relative violation of each seed."""
    return {name: [each.violation(name).mean for each in prints] for name in prints[0].violations}


def _row(name: str, prints: Sequence[Fingerprint], errors: Sequence[float]) -> Row:
    table = _table(prints)
    words = "; ".join(f"{each} {_spread(values)}" for each, values in table.items())
    note = f"own error {_spread(errors)}; " if errors else ""
    return Row(name, None, prints[0].description, "", f"{note}{words}")


def _spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.1e}" if len(values) == 1 or math.isclose(low, high) else f"{low:.1e} to {high:.1e}"


def _picture(numbers: Mapping[str, Any]) -> go.Figure:
    """Violations, on a logarithmic scale: dark where a property holds."""
    properties = list(dict.fromkeys(p for each in numbers.values() for p in each["violations"]))
    names = list(numbers)[::-1]
    values: list[list[float | None]] = []
    for name in names:
        of_seeds = [numbers[name]["violations"].get(p) for p in properties]
        values.append([None if v is None else math.log10(max(sum(v) / len(v), FLOOR)) for v in of_seeds])
    fig = figure("Relative squared violation of each property", "", "")
    add_heatmap(fig, values, properties, names, "%{y}<br>%{x}: 10^%{z:.1f}", colorscale="Viridis",
                zmin=math.log10(FLOOR), zmax=0.0, colorbar=color_bar("log10 of the violation"))  # fmt: skip
    return name_cells(fig).update_layout(height=120 + 24 * len(names))


if __name__ == "__main__":
    compare.run()
