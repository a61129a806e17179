"""The report on any learner: its behaviour on any task, and its components as far as it can be opened."""

from dataclasses import replace

import plotly.graph_objects as go
import torch

from mechicl import algorithms, viz
from mechicl.analysis import fit_readouts, measure_shifted_losses
from mechicl.learners import AlgorithmLearner, Learner, squared_errors
from mechicl.models import LayeredModel
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.heads import ablate_heads, model_parts, no_model_parts, restore_stream
from mechicl.reports.kind import ALGORITHM, HISTORY, Kind, Part
from mechicl.reports.layers import losses_by_points, match_layers
from mechicl.reports.rows import Row, seeds_and_prompts
from mechicl.reports.verdict import Verdict, capital
from mechicl.statistics import crossed_interval, interval, ratio_interval

N_SHIFTED, N_FITTING, N_PATCHED = 1024, 4096, 64
_SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
_WORDS = {
    "loss": "Squared error of the prediction by the number of context points, relative to the mean square of the "
    "targets: predicting 0 has 1. Bands are 95% intervals over prompts.",
    "shifts": "Squared error on inputs scaled by α, which training may never have shown.",
    "layers": "Squared error of linear readouts after each layer, fitted in closed form on other prompts, relative to "
    "the mean square of the targets. Layer 0 is the stream before the first layer.",
}


def _loss(kind: "Own") -> Measured:
    study, prompts = kind.study, kind.held_out
    learners: dict[str, Learner] = study.with_compared({
        study.name: study.model, "least squares": AlgorithmLearner(algorithms.ols),
        "averaging": AlgorithmLearner(algorithms.averaging),
    })  # fmt: skip
    errors = {name: squared_errors(learner, prompts, at="points") for name, learner in learners.items()}
    drawn = losses_by_points({name: values.T for name, values in errors.items()}, prompts)
    query = {name: values[:, -1] for name, values in errors.items()}
    rows = [
        Row(f"squared error (MSE) of the query, {name}", None, interval(values), "prompts")
        for name, values in query.items()
    ]
    rows += [
        Row(f"squared error over that of {name}", None, ratio_interval(query[study.name], values), "prompts")
        for name, values in query.items()
        if name != study.name
    ]
    if len(study.models) > 1:
        every = torch.stack([squared_errors(model, prompts).mean(1) for model in study.models])
        over = seeds_and_prompts(*every.shape)
        rows.append(Row("squared error (MSE) of the query, all seeds", None, crossed_interval(every), over))
    return rows, [Section("Loss by context length", _WORDS["loss"], drawn)], {}


def _no_shifts(kind: "Own") -> str:
    task = kind.study.task
    if hasattr(task, "input_scale") and callable(getattr(task, "replace", None)):
        return ""
    return f"{type(task).__name__} has no field input_scale to vary"


def _shifts(kind: "Own") -> Measured:
    study = kind.study
    learners = study.with_compared({"trained": study.model, "least squares": AlgorithmLearner(algorithms.ols)})
    shifted = measure_shifted_losses(
        learners, study.task, _SCALES, scaled="input_scale", n_prompts=N_SHIFTED, seed=kind.seed + 1
    )
    drawn = viz.shifted_losses({"inputs scaled": shifted})
    return [], [Section("Losses out of distribution", _WORDS["shifts"], drawn)], {}


def _no_layers(kind: "Own") -> str:
    model = kind.study.model
    if not isinstance(model, LayeredModel):
        return f"{type(model).__name__} only predicts: mechicl.wrap(module, ..., layers=...) opens a torch module"
    return "" if model.cfg.n_layers else "no layers were declared: mechicl.wrap(module, ..., layers=...)"


def _layers(kind: "Own") -> Measured:
    """Match layers with iterations if every point is predicted in one pass; else fit readouts of the query."""
    study, task = kind.study, kind.study.task
    study.model.encode(task.sample(2, seed=kind.seed))  # only prompts show what a wrapped module predicts
    if study.model.cfg.one_pass:
        rows, sections, data = match_layers(study, n_prompts=min(kind.n_prompts, 1024), n_fitting=N_FITTING)
        return [replace(row, published=None, agrees=None, source="") for row in rows], sections, data
    readouts = fit_readouts(study.model, task.sample(N_FITTING, seed=kind.seed + 2))
    square = kind.held_out.query.ys.double().square().mean(-1)
    shares = [ratio_interval(layer[0], square) for layer in readouts.errors(kind.held_out).squared_errors]
    drawn = viz.interval_lines("What each layer contains of the answer", "layer", "MSE / E y²",
                               list(range(len(shares))), {"linear readout": shares}, log_y=True)  # fmt: skip
    rows = [
        Row(f"error of a linear readout after layer {i}, over the mean square", None, share, "prompts")
        for i, share in enumerate(shares)
    ]
    return rows, [Section("What each layer contains", _WORDS["layers"], drawn)], {}


def _no_hook(kind: "Own", name: str, keyword: str) -> str:
    if reason := _no_layers(kind):
        return reason
    if kind.study.task.n_context < 2:
        return "labels are exchanged within a context of two points or more"
    if f"blocks.0.{name}" not in kind.study.model.hook_dict:
        return f"{kind.study.name} has no {name}: mechicl.wrap(module, ..., {keyword}) declares it"
    return ""


def _patching(kind: "Own") -> Measured:
    if not no_model_parts(kind.study):  # a transformer of this package: all its components at once
        return model_parts(kind.study)
    prompts = kind.study.task.sample(N_PATCHED, seed=kind.seed + 3)
    stream, section = restore_stream(kind.study.model, prompts, seed=0)
    return [], [section], {"resid_pre_recovered": stream.recovered().tolist()}


def _heads(kind: "Own") -> Measured:
    if not no_model_parts(kind.study):
        return [], [], {}
    prompts = kind.study.task.sample(N_PATCHED, seed=kind.seed + 4)
    without, sections = ablate_heads(kind.study.model, prompts)
    return [], sections, {"mean_ablation_of_heads": without.effect().mean(-1).tolist()}


class Own(Kind):
    """Losses, nearest algorithms and shifts, and layers, patching and heads as far as the model can be opened."""

    parts = (
        Part("loss", _loss),
        replace(ALGORITHM, missing=lambda kind: kind.question.no_answer),
        Part("shifts", _shifts, _no_shifts),
        Part("layers", _layers, _no_layers),
        Part("patching", _patching, lambda kind: _no_hook(kind, "hook_resid_pre", "layers=...")),
        Part("heads", _heads, lambda kind: _no_hook(kind, "attn.hook_z", "attention={'z': ..., 'n_heads': ...}")),
        HISTORY,
    )
    heading = "Which algorithm does {name} behave like?"
    n_held_out, prompt_seed = 2048, 6_000_003
    no_weights = "No construction is fitted to the weights of this kind of model."

    def verdict(self, comparison: Comparison) -> Verdict:
        """Name the nearest algorithm, or the reason why none can be fitted."""
        why = self.question.no_answer
        if not why:
            return super().verdict(comparison)
        figures = [part for each in comparison.sections for part in each.parts if isinstance(part, go.Figure)]
        return Verdict(
            "Its algorithm cannot be identified",
            {"Why?": f"{capital(why)}. Its losses next to those of other learners are shown below."},
            figures[0] if figures else None,
        )
