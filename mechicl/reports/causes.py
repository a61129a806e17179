"""Does a model run an algorithm? Rows and pictures of hypotheses that are tested by interventions."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from mechicl import viz
from mechicl.algorithms.card import COPYING, count, step_kind
from mechicl.analysis import test_hypotheses
from mechicl.analysis.causes import HypothesisTest, Interchange
from mechicl.analysis.causes.interchange import InterchangeKind
from mechicl.checkpoints import Checkpoint, untrained
from mechicl.checkpoints.study import Models
from mechicl.models import Model
from mechicl.reports.comparison import Measured
from mechicl.reports.rows import Row, over_models
from mechicl.statistics import Interval
from mechicl.tasks import Task
from mechicl.viz.page import Section

FLOWS = ("query exchanged", "context exchanged", "query stops reading", "context frozen", "context isolated")
LAYERWISE = ("query does not read", "query skips", "context skips")
KEPT = ("hypothesis", "effects", "low", "high", "exchanges", "ablations", "prediction", "weakest_r2", "weakest",
        "steps_after_layers")  # fmt: skip
LEAST_R2 = -100.0  # R² that are lower are reported as this
MOVED = "moved by: "
EXPLAINED = "effects explained: "
WEAKEST = "R² of the best hypothesis's weakest counterfactual"
STAND = "supported hypotheses (every counterfactual's R² at least 0.9)"
N_REPORT, PROMPT_SEED = 256, 5_000_003  # of a report
QUICK = 5  # layers up to which a report tests hypotheses unasked
N_CONTROL = 256  # prompts for untrained models
SOME = ("query exchanged", "context exchanged", "point exchanged", "context skips", "query does not read",
        "context frozen")  # fmt: skip
CAUSES_TITLE = "Does it run the algorithm?"


def causal_part(checkpoint: Models, task: Task, *, n_prompts: int, seed: int, control: bool = True) -> Measured:
    """Test hypotheses on each model by interventions: rows by family, pictures of the first model, numbers.

    The models read prompts of points. `control` also tests an untrained model and one whose weights are shuffled.
    """
    tests = [test_hypotheses(m, task, n_prompts=n_prompts, seed=seed) for m in checkpoint.models]
    families: dict[str, list[Interchange]] = {}
    for test in tests:
        best = {step_kind(each.hypothesis): each for each in reversed(test.tests)}
        for family, each in best.items():
            families.setdefault(family, []).append(each)
    rows = []
    for family in sorted(families, key=lambda family: -sum(each.effects.mean for each in families[family])):
        each = families[family]
        name = each[0].hypothesis.removeprefix(COPYING)
        everyone = checkpoint if len(each) == len(checkpoint.models) else None
        note = "" if name == family else name
        explained = over_models(EXPLAINED + family, [one.effects for one in each], everyone, note=note)
        rows.append(replace(explained, share=True))
    standing = f"{sum(bool(test.supported) for test in tests)} of {len(tests)} seeds have one"
    named = dict.fromkeys(test.hypothesis for each in tests for test in each.supported)
    rows.append(Row(STAND, None, standing, "", "; ".join(named)))
    weak = "; ".join(dict.fromkeys(str(test.best.cells[test.best.weakest]) for test in tests))
    rows.append(over_models(WEAKEST, [_capped(test.best.score) for test in tests], checkpoint, note=weak))
    kinds: tuple[InterchangeKind, ...] = ("exchange", "ablation")
    for kind in kinds:
        explained = [test.best.explained([kind]) for test in tests]
        row = over_models(f"effects of {kind}s explained by the best", explained, checkpoint)
        rows.append(replace(row, share=True))
    for name in (*FLOWS, *LAYERWISE):
        moved = [_moved(test, name) for test in tests]
        rows += [
            over_models(f"{MOVED}{name} {_where(name, layer)}", [each[layer] for each in moved], checkpoint)
            for layer in moved[0]
        ]
    data: dict[str, Any] = {"n_prompts": n_prompts, "seed": seed, "tests": [_numbers(test) for test in tests]}
    if control:
        without, more = _controls(checkpoint, task, seed)
        rows, data = [*rows, *without], {**data, **more}
    return [replace(row, section=CAUSES_TITLE) for row in rows], _sections(tests[0], n_prompts), data


def causes(kind: Any) -> Measured:
    """Test the opened model of a report, with controls."""
    rows, sections, data = causal_part(kind.study.opened(), kind.study.task, n_prompts=N_REPORT, seed=PROMPT_SEED)
    return [row for row in rows if not row.quantity.startswith(MOVED)], sections, {"causes": data}


def no_causes(kind: Any) -> str:
    """Return the reason why there is nothing to exchange; empty if there is."""
    if kind.study.model.cfg.n_layers < 2:
        return "states are exchanged between layers, and the model has one"
    return "" if kind.study.task.n_context else "there is no context to exchange"


def slow_causes(kind: Any) -> str:
    """Return the reason why interventions are made only on request; empty if they are quick."""
    n_layers = kind.study.model.cfg.n_layers
    return f"it takes minutes for {n_layers} layers: --sections causes measures it" if n_layers > QUICK else ""


def interventions_as_text(rows: Sequence[Row]) -> str:
    """Summarise the rows of `causal_part` in sentences; empty without such rows."""
    tested = [row for row in rows if row.quantity.startswith(EXPLAINED)]
    if not tested:
        return ""
    standing, weakest = (next(row for row in rows if row.quantity == name) for name in (STAND, WEAKEST))
    names = [row.note or row.quantity.removeprefix(EXPLAINED) for row in tested]
    if standing.note:
        verdict = f"No intervention contradicts {' or '.join(standing.note.split('; '))}."
    else:
        verdict = (
            f"No candidate algorithm predicts the outcome of every intervention; the best fails at "
            f"'{weakest.note}' (R² {weakest.measured})."
        )
    shares = f"{names[0]} explains {tested[0]} of their effects"
    if tested[1:]:
        shares += f", and the next candidate, {names[1]}, {tested[1]}"
    return f"Interventions were made in the model and in the algorithms: {shares}. {verdict}"


def facts_on_interventions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the share of the interventions' effects that the best candidate explains; empty without such rows."""
    best = next((row for row in rows if row.quantity.startswith(EXPLAINED)), None)
    name = "" if best is None else best.note or best.quantity.removeprefix(EXPLAINED)
    return [] if best is None else [(str(best), f"of the effects of interventions inside it are as in {name}")]


def _capped(score: Interval) -> Interval:
    return replace(score, **{end: max(getattr(score, end), LEAST_R2) for end in ("mean", "low", "high")})


def _moved(test: HypothesisTest, intervention: str) -> dict[int, Interval]:
    moved = zip(test.best.cells, test.best.moved, strict=True)
    return {cell.layer: value for cell, value in moved if cell.intervention == intervention}


def _where(name: str, layer: int) -> str:
    if name in LAYERWISE:
        return f"in layer {layer}" if "read" in name else f"layer {layer}"
    return f"after {count(layer, 'layer')}" if "exchanged" in name else f"from {count(layer, 'layer')} on"


def _controls(checkpoint: Models, task: Task, seed: int) -> tuple[list[Row], dict[str, Any]]:
    """The most that any fitted hypothesis explains of models without an algorithm."""
    model = checkpoint.models[0]
    control = untrained(Checkpoint("control", [model])).models[0]
    models = {"untrained": control, "weights shuffled": shuffle_weights(model, seed)}
    rows, data = [], {}
    for name, model in models.items():
        try:
            test = test_hypotheses(model, task, n_prompts=N_CONTROL, seed=seed)
        except ValueError as error:  # the model diverges
            rows.append(Row(f"{name}: effects explained by the best", None, "cannot be measured", "", str(error)[:160]))
            continue
        rows.append(Row(f"{name}: effects explained by the best", None, test.best.effects, "prompts",
                        f"{test.best.hypothesis}; weakest R² {max(test.best.score.mean, -99):.2g}",
                        share=True))  # fmt: skip
        most = max(each.score.mean for each in test.tests)
        rows.append(Row(f"{name}: largest R² of a hypothesis's weakest counterfactual", None, most))
        data[name] = _numbers(test)
    return rows, data


@torch.no_grad()
def shuffle_weights(model: Model, seed: int) -> Model:
    """Copy a model with the entries of each of its weights in random order."""
    model, generator = deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=generator)].view_as(weight))
    return model


def _numbers(test: HypothesisTest) -> dict[str, Any]:
    table = test.to_dataframe()[list(KEPT)]
    numbers = table.select_dtypes("number").columns
    table[numbers] = table[numbers].clip(lower=-1e6).map(lambda value: float(f"{value:.4g}"))
    return {"likeness": test.likeness, "hypotheses": table.to_dict("records")}


def _sections(test: HypothesisTest, n_prompts: int) -> list[Section]:
    words = (
        f"Interventions on {n_prompts} prompts, made in the model and in each algorithm. By its predictions alone, the "
        f"nearest algorithm is {test.likeness.rpartition(' (distance')[0]}."
    )
    shown = [name for name in SOME if any(cell.intervention == name for cell in test.best.cells)]
    layers = range(1, max(cell.to_layer for cell in test.best.cells))
    moved: Mapping[str, dict[int, Interval]] = {name: _moved(test, name) for name in FLOWS}
    lines = {name: [values[layer] for layer in layers] for name, values in moved.items() if values}
    flows = viz.interval_lines("What moves the prediction", "layers before the intervention",
                               "part of the distance of both ends", layers, lines)  # fmt: skip
    return [
        Section(CAUSES_TITLE, words, viz.plot(test, title="What hypotheses explain of the effects of interventions")),
        Section("The causal model with the measured strength of its arrows", "Each arrow is cut alone.",
                viz.causal_graph(test.best)),
        Section("The best hypothesis, by intervention and layer", "", viz.plot(test.best)),
        Section("Model and hypothesis after interventions", "", viz.counterfactual_scatter(test.best, shown)),
        Section("Which layers matter", "Effects on the model alone, whatever the hypothesis.", flows),
    ]  # fmt: skip
