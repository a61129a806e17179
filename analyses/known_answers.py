"""Tests of "which algorithm" on models whose algorithm is known: the right hypothesis, the others, and none at all."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.script import Option, script
from mechicl.algorithms.card import step_kind
from mechicl.algorithms.stepwise import AfterCopying, Hypothesis, ResidualDescent, StepwiseAlgorithm, query_of
from mechicl.analysis import fit_readouts, interchange, match, sample_sources, test_hypotheses
from mechicl.analysis.causes import HypothesisTest, Interchange
from mechicl.analysis.layers import Lens, probe
from mechicl.checkpoints import load_checkpoint
from mechicl.constructions import known_models
from mechicl.constructions.known import KnownModel
from mechicl.learners import Trajectory
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.tasks import Task
from mechicl.viz.elements import figure

SAME, ALIKE = 0.999, 0.5
"""R² of hypotheses that say the same of a model, and bar for others."""
MATRIX, FITTED, LAYERS = "Its own hypothesis and the others", "Fitted hypotheses", "What layers hold"
SEEDS = "A second seed of the same model"
APART, N_WEAKEST = 0.01, 10
"""An intervention separates hypotheses whose R² differ by more; number of pairs in the table of power."""
NOISE = 1e-4
"""Of the noisy models' weights, relative to the size of each matrix."""
Part = tuple[list[Row], list[go.Figure]]


@dataclass(frozen=True)
class Pair:
    """A hypothesis on a known model."""

    model: str  # its name
    hypothesis: str  # whose it is
    weakest: float  # R² of its weakest counterfactual
    where: str  # which one that is
    effects: float  # of the interventions, what it explains
    prediction: float  # R² without intervention
    reason: str = ""  # why it comes so near that it is above the bar, if it does
    power: float = 0.0  # share of the interventions that set it apart from the model's own hypothesis


@script(
    n_prompts=Option(64, "prompts to measure counterfactuals on"),
    n_fitting=1024,
    checkpoints=Option(("lsa-5l", "gpt2-4l"), "trained models whose shapes and shuffled weights are controls too"),
    seeds_of=Option(("lsa-1l", "lsa-2l-looped", "gpt2-8l"), "trained models whose seeds are compared with each other"),
    every=Option(5, "which of the known models' shapes are controls: the first, and so on"),
    seed=Option(0, "seed of prompts and disguises"),
)
def compare(args: Any) -> Comparison:
    """All parts, one after the other."""
    known = known_models()
    rows, sections = [], []
    for name, measure in ((MATRIX, _matrix), (FITTED, _fitted), (SEEDS, _seeds), (LAYERS, _layers)):
        more, pictures = measure(args, known)
        rows += [replace(row, section=name) for row in more]
        sections.append(Section(name, "", pictures))
    lead = (
        f"{len(known)} models with known algorithms (`constructions.known_models()`), {args.n_prompts} prompts for "
        f"counterfactuals, {args.n_fitting:,} to fit readouts on. R² of a hypothesis is that of its weakest "
        f"counterfactual."
    )
    return Comparison("Known answers", lead, rows, sections)


# ---- every hypothesis on every model ----


def _matrix(args: Any, known: Sequence[KnownModel]) -> Part:
    rows, pairs, owns = [], [], {}
    for label, models, bar in (
        ("plain", known, SAME),
        ("hidden", known_models(hidden=True, seed=args.seed), SAME),
        ("noisy", known_models(hidden=True, noise=NOISE, seed=args.seed), 0.99),
    ):
        owns[label] = [_own(each, args) for each in models]
        least = min(owns[label], key=lambda pair: pair.weakest)
        held = f"{sum(pair.weakest >= bar for pair in owns[label])} of {len(owns[label])}"
        rows.append(Row(f"least R² of a model's own hypothesis, {label}", None, least.weakest, "", least.model))
        rows.append(Row(f"own hypothesis at least {bar:g}, {label}", None, held))
    for model, own in zip(known, owns["plain"], strict=True):
        others = _others(model, known, args)
        pairs += [own, *others]
        above = [pair for pair in others if pair.weakest > ALIKE]
        nearest = max(others, key=lambda pair: pair.weakest)
        note = "; ".join(f"{pair.hypothesis} {pair.weakest:.2f}: {pair.reason}" for pair in above)
        words = f"own {own.weakest:.4f}, nearest other {nearest.weakest:.2f}"
        rows.append(Row(model.name, None, words, "", note or f"{nearest.hypothesis}: {nearest.where}"))
    others = [pair for pair in pairs if pair.model != pair.hypothesis]
    above = [pair for pair in others if pair.weakest > ALIKE]
    words = f"{len(others) - len(above)} of {len(others)}"
    rows.insert(0, Row("others' hypotheses with R² at most 0.5", None, words))
    rows.insert(1, Row("others above 0.5 without a reason", None, str(sum(not pair.reason for pair in above))))
    different = [pair for pair in others if pair.weakest < SAME]  # the rest are the same steps with the same numbers
    power = torch.tensor([pair.power for pair in different])
    rows += [
        Row("pairs of a model and another algorithm", None, str(len(different))),
        Row("share of interventions that separate a pair, median", None, power.median().item()),
        Row("pairs that half of the interventions or more separate", None, str(int((power >= 0.5).sum()))),
    ]
    for pair in sorted(different, key=lambda pair: pair.power)[:N_WEAKEST]:
        words = f"{pair.power:.3f} of the interventions"
        rows.append(Row(f"{pair.model}; {pair.hypothesis}", None, words, "", f"weakest R² {pair.weakest:.3f}"))
    return rows, [_picture(known, pairs), _power_picture(known, pairs)]


def _own(known: KnownModel, args: Any) -> Pair:
    prompts = known.task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    sources = sample_sources(known.task, prompts, seed=args.seed + 1)
    test = interchange(known.model, known.hypothesis, prompts, sources, progress=False)
    return _pair(known.name, known.name, test)


def _pair(model: str, hypothesis: str, test: Any) -> Pair:
    weakest, where = max(test.score.mean, -99.0), str(test.cells[test.weakest])
    separated = [r2.mean < 1 - APART for r2 in test.r2]  # the own hypothesis has an R² of 1
    power = sum(separated) / len(separated)
    return Pair(model, hypothesis, weakest, where, test.effects.mean, max(test.r2[0].mean, -99.0), power=power)


def _others(known: KnownModel, everyone: Sequence[KnownModel], args: Any) -> list[Pair]:
    """The other models' algorithms on this one, each with the layers given to its steps that fit best."""
    adapted = {other.name: _for_prompts_of(other.hypothesis.algorithm, known.hypothesis.algorithm)
               for other in everyone if other is not known}  # fmt: skip
    kept = {name: each for name, each in adapted.items() if each is not None and _runs(each, known.task)}
    result = test_hypotheses(
        known.model, known.task, kept, n_prompts=args.n_prompts, seed=args.seed, with_likeness=False, progress=False
    )
    pairs = []
    for test in result.tests:
        pair = _pair(known.name, test.hypothesis, test)
        if pair.weakest > ALIKE:
            pair = replace(pair, reason=_reason(pair, known.hypothesis, kept[test.hypothesis]))
        pairs.append(pair)
    return pairs


def _for_prompts_of(algorithm: StepwiseAlgorithm, own: StepwiseAlgorithm) -> StepwiseAlgorithm | None:
    """Return the algorithm with targets as separate tokens, or not, as in the other one."""
    inner = algorithm.algorithm if isinstance(algorithm, AfterCopying) else algorithm
    if isinstance(own, AfterCopying):
        return AfterCopying(inner) if "previous" not in inner.variables else None
    if "previous" in own.variables:  # induction reads targets at separate tokens
        return algorithm if isinstance(algorithm, AfterCopying) else AfterCopying(inner)
    return inner if "previous" not in inner.variables else None


def _runs(algorithm: StepwiseAlgorithm, task: Task) -> bool:
    """Whether it predicts finite numbers on this task: not with more points than it has steps for, and so on."""
    try:
        states = algorithm.states(task.sample(64, seed=9, dtype=torch.float64))
    except (ValueError, IndexError, RuntimeError):
        return False
    return all(bool(value.isfinite().all()) for state in states for value in state.values())


def _reason(pair: Pair, own: Hypothesis, other: StepwiseAlgorithm) -> str:
    """Return the reason why another hypothesis explains a model too; empty if none is known."""
    if pair.weakest >= SAME:
        return "the same steps with the same numbers"
    if len(own.between) == 0:
        return f"one layer has nothing between its ends, and predictions agree to R² {pair.prediction:.3f}"
    if pair.prediction >= 0.9 and other.n_steps != own.algorithm.n_steps:
        return f"steps of one are several of the other's: predictions agree to R² {pair.prediction:.4f}"
    return f"predictions agree to R² {pair.prediction:.4f}" if pair.prediction >= 0.9 else ""


def _picture(known: Sequence[KnownModel], pairs: Sequence[Pair]) -> go.Figure:
    values = {(pair.model, pair.hypothesis): max(pair.weakest, -1.0) for pair in pairs}
    return _grid(known, values, "R² of the weakest counterfactual (below -1 shown as -1)", -1)


def _power_picture(known: Sequence[KnownModel], pairs: Sequence[Pair]) -> go.Figure:
    values = {(pair.model, pair.hypothesis): pair.power for pair in pairs}
    return _grid(known, values, "Power: share of the interventions that separate model and hypothesis", 0)


def _grid(known: Sequence[KnownModel], values: Mapping[tuple[str, str], float], title: str, least: int) -> go.Figure:
    names = [each.name for each in known]
    shown = [[values.get((model, hypothesis)) for hypothesis in names] for model in names]
    fig = figure(title, "hypothesis", "model")
    fig.add_trace(go.Heatmap(z=shown, x=names, y=names, zmin=least, zmax=1, colorscale="RdBu"))
    fig.update_yaxes(autorange="reversed", type="category")
    fig.update_xaxes(type="category")
    fig.update_layout(height=900, margin={"l": 330, "b": 330})
    return fig


# ---- hypotheses fitted to models, and to models without an algorithm ----


def _fitted(args: Any, known: Sequence[KnownModel]) -> Part:
    rows, tests = [], {}
    for kind, models in _kinds(args).items():
        best = []
        for name, (model, task) in models.items():
            result = _tested(model, task, args)
            if result is None:
                rows.append(Row(f"{kind}: {name}", None, "predicts no finite numbers that differ"))
                continue
            if kind == "known":
                tests[name] = result
            weakest, strongest = max(result.tests, key=lambda test: test.score.mean), result.best
            best.append((weakest.score.mean, strongest.effects.mean))
            note = f"effects explained {strongest.effects.mean:.3f} by {strongest.hypothesis}"
            words = f"{max(weakest.score.mean, -99):.3f} ({weakest.hypothesis})"
            rows.append(Row(f"{kind}: {name}", None, words, "", note))
        if kind != "known" and best:
            rows.append(Row(f"largest R² of any fitted hypothesis, {kind}", None, max(pair[0] for pair in best)))
            rows.append(Row(f"most effects explained, {kind}", None, max(pair[1] for pair in best)))
    return [*_false_positives(args, tests), *rows], []


def _false_positives(args: Any, tests: Mapping[str, HypothesisTest]) -> list[Row]:
    """Count the supported hypotheses of hidden models by whether they take the model's steps."""
    rows, found, wrong, passed, n_wrong = [], 0, 0, 0, 0
    for each in known_models(hidden=True, seed=args.seed):
        result = tests[each.name]
        pairs = zip(result.tests, result.schedules, strict=True)
        right = {test.hypothesis for test, schedule in pairs if _is_right(each, test, schedule)}
        supported, apart = [test.hypothesis for test in result.supported], result.set_apart
        others = [name for name in supported if name not in right]
        found += bool(right & set(supported))
        wrong, n_wrong = wrong + bool(others), n_wrong + len(others)
        passed += len(set(apart) - right)
        words = f"{len(supported) - len(others)} with its steps, {len(others)} others"
        notes = [f"other: {name}" for name in others] + [
            f"set apart: {name}, by: {cell}" for name, cell in apart.items()
        ]
        rows.append(Row(f"supported: {each.name}", None, words, "", "; ".join(notes)))
    n = len(rows)
    return [
        Row("hidden models whose steps are supported", None, f"{found} of {n}"),
        Row("hidden models on which other steps are supported", None, f"{wrong} of {n}", "", f"{n_wrong} hypotheses"),
        Row("other steps with every R² at least 0.9 that an intervention sets apart", None, str(passed)),
        *rows,
    ]


def _is_right(known: KnownModel, test: Interchange, schedule: Sequence[tuple[int, int]]) -> bool:
    """Whether a fitted hypothesis takes a model's steps: the same kind and number, or the same outcomes throughout."""
    own = known.hypothesis.algorithm
    alike = step_kind(test.hypothesis) == step_kind(own.name) and schedule[-1][1] == own.n_steps
    return alike or test.score.mean >= SAME


# ---- how near two seeds of a model are to each other ----


def _seeds(args: Any, known: Sequence[KnownModel]) -> Part:
    """Measure R² between two seeds of a model, under the interventions of one hypothesis: a reason for the bar."""
    rows = []
    for name in args.seeds_of:
        checkpoint = load_checkpoint(name)
        prompts = checkpoint.task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
        sources = sample_sources(checkpoint.task, prompts, seed=args.seed + 1)
        models = [model.double() for model in checkpoint.models]
        steps = ResidualDescent(models[0].cfg.n_layers, step_size=0.01)  # only its schedule, a step a layer, matters
        tests = [interchange(model, Hypothesis(steps), prompts, sources, progress=False) for model in models]
        pairs = [(a, b) for i, a in enumerate(tests) for b in tests[:i]]
        between = [
            replace(a, expected=b.predictions, expected_base=b.base, hypothesis="another seed") for a, b in pairs
        ]
        weakest = torch.tensor([pair.score.mean for pair in between], dtype=torch.float64)
        medians = [torch.tensor([r2.mean for r2 in pair.r2]).median() for pair in between]
        least = min(between, key=lambda pair: pair.score.mean)
        note = f"{least.cells[least.weakest]}; largest {weakest.max():.3f}; prediction {least.r2[0].mean:.4f}"
        over = f"{len(pairs)} pairs, median"
        rows.append(Row(f"weakest R² of two seeds of {name}", None, weakest.median().item(), over, note))
        rows.append(Row(f"median R² of two seeds of {name}", None, torch.stack(medians).median().item(), over))
    return rows, []


def _tested(model: HookedTransformer, task: Task, args: Any) -> Any:
    options = {"n_prompts": args.n_prompts, "seed": args.seed, "with_likeness": False, "progress": False}
    with suppress(ValueError, RuntimeError):
        return test_hypotheses(model, task, **options)


def _kinds(args: Any) -> dict[str, dict[str, tuple[Any, Task]]]:
    """Hidden known models; the same networks with new initial weights; and with their weights in another order."""
    known = {each.name: (each.model, each.task) for each in known_models(hidden=True, seed=args.seed)}
    models = dict(list(known.items())[:: args.every])
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        models[name] = (checkpoint.models[0], checkpoint.task)
    return {
        "known": known,
        "untrained": {name: (untrained(model, args.seed), task) for name, (model, task) in models.items()},
        "shuffled": {name: (shuffled(model, args.seed), task) for name, (model, task) in models.items()},
    }


def untrained(model: HookedTransformer, seed: int) -> HookedTransformer:
    """A network of the same shape before any training."""
    initial = getattr(model, "initial_weights", None)
    return HookedTransformer(model.cfg, seed=1000 + seed, initial_weights=initial).double().eval()


@torch.no_grad()
def shuffled(model: HookedTransformer, seed: int) -> HookedTransformer:
    """The network with the entries of each weight matrix in another order."""
    generator, twin = torch.Generator().manual_seed(seed), untrained(model, 0)

    def mixed(weight: Tensor) -> Tensor:
        order = torch.randn(weight.numel(), dtype=torch.float64, generator=generator).argsort()
        return weight.flatten()[order].reshape(weight.shape)

    twin.load_state_dict(
        {name: (mixed(each) if each.ndim >= 2 else each).double() for name, each in model.state_dict().items()}
    )
    return twin


# ---- what layers hold ----


def _layers(args: Any, known: Sequence[KnownModel]) -> Part:
    rows, matched, read = [], [], []
    for each in known_models(hidden=True, seed=args.seed):
        steps = _matched_steps(each, args)
        if steps is not None:
            matched.append(steps)
            right = f"{sum(steps['right'])} of {len(steps['right'])}"
            rows.append(Row(f"layers matched with their iteration, {each.name}", None, right))
        read.append(_read_variables(each, args))
    right = [flag for each in matched for flag in each["right"]]
    rows.insert(0, Row("layers matched with their iteration, all models", None, f"{sum(right)} of {len(right)}"))
    planted = [value for each in read for value in each["planted"].values()]
    rows += [Row("least R² of a readout of what a layer holds", None, min(planted)),
             Row("readouts of what a layer holds with R² at least 0.99", None,
                 f"{sum(value >= 0.99 for value in planted)} of {len(planted)}")]  # fmt: skip
    for name, words in {
        "absent": "what the layer does not hold yet", "control": "targets of other prompts",
        "untrained": "the same in an untrained network",
    }.items():  # fmt: skip
        values = [value for each in read for value in each[name].values()]
        median = sorted(values)[len(values) // 2] if values else float("nan")
        rows.append(Row(f"largest R² of a readout of {words}", None, max(values), "", f"median {median:.3f}"))
    for name, (least, largest, absent, control) in _probed(args).items():
        words = f"{least:.3f} to {largest:.3f}; of what is not there up to {absent:.3f}; control task {control:.3f}"
        rows.append(Row(f"R² of probes of the input before, by target, {name}", None, words))
    return rows, []


def _probed(args: Any) -> dict[str, tuple[float, float, float, float]]:
    """Probes of the model of induction at targets' tokens: of the input before, and of the one before that.

    Returns:
        By network: the least and largest R² of the input before after the first layer; the largest of what targets
        do not hold (the earlier input in any layer, and any input ahead of the first); the largest of the control task.
    """
    known = next(each for each in known_models(hidden=True, seed=args.seed) if "induction" in each.name)
    fitting, held_out = _two_draws(known, args)
    measured = {}
    for name, model in (("known", known.model), ("untrained", untrained(known.model, args.seed))):
        quantities = {"input before": partial(_input_before, 1), "the one before it": partial(_input_before, 2)}
        result = probe(model, quantities, fitting, held_out, progress=False)
        explained, control = result.explained(), result.control()
        before = explained[0, :, 1::2]  # at the targets' tokens
        absent = max(before[0].max().item(), explained[1, :, 1::2].nan_to_num(0.0).max().item())
        measured[name] = (before[1].min().item(), before[1].max().item(), absent, control.nan_to_num(0.0).max().item())
    return measured


def _two_draws(known: KnownModel, args: Any) -> list[Prompts]:
    """Prompts to fit on, and half as many to measure on."""
    sizes = enumerate((args.n_fitting, args.n_fitting // 2))
    return [known.task.sample(n, seed=args.seed + 20 + i, dtype=torch.float64) for i, n in sizes]


def _input_before(back: int, prompts: Prompts) -> Float[Tensor, "prompt point x"]:
    """The last input of those seen, or an earlier one; 0 where there is none."""
    return torch.cat([torch.zeros_like(prompts.xs[:, :back]), prompts.xs[:, :-back]], dim=1)


def _matched_steps(known: KnownModel, args: Any) -> dict[str, Any] | None:
    """Which iteration `match` finds for each layer after which the schedule has a prediction to match."""
    prompts = known.task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    algorithm = _trajectory(known.hypothesis.algorithm, prompts)
    moving = [k for k, weights in enumerate(algorithm.weights) if weights.square().mean() > 1e-20]  # type: ignore[arg-type]
    steps = algorithm.predictions
    changing = [k for k in moving if k == 0 or not torch.allclose(steps[k], steps[k - 1])]
    if len(changing) < 2:
        return None
    result = match(Lens(known.model), algorithm, prompts, similarity="weights")
    expected = {layer: step for layer, step in known.hypothesis.schedule if step in changing}
    by_layer = {best.row: best.column for best in result.best()}
    layers = [layer for layer in expected if layer in by_layer]
    chosen = [by_layer[layer] for layer in layers]
    right = [bool(step == expected[layer]) for layer, step in zip(layers, chosen, strict=True)]
    return {"layers": layers, "expected": [expected[layer] for layer in layers], "matched": chosen, "right": right}


def _trajectory(algorithm: StepwiseAlgorithm, prompts: Prompts) -> Trajectory:
    """Return the query's state after each step, and its gradient with respect to the query's input."""
    xs = prompts.xs.clone().requires_grad_()
    predictions = _carried(algorithm, Prompts(xs, prompts.ys))
    slopes = [torch.autograd.grad(each.sum() + 0 * xs.sum(), xs, retain_graph=True)[0][:, -1] for each in predictions]
    weights = torch.stack(slopes)[:, :, None, :, None]
    return Trajectory(tuple(range(len(predictions))), predictions.detach()[:, :, None], algorithm.name, weights)


def _read_variables(known: KnownModel, args: Any) -> dict[str, dict[str, float]]:
    """R² of readouts, on other prompts, of the running prediction after each step at each layer.

    "planted": at the layer that the schedule gives the step; "absent": at layers before, where the prediction is still
    0 for the algorithm (the step has no part in the stream yet); "control": planted, with the targets of other prompts;
    "untrained": planted, in a network with new weights.
    """
    fitting, held_out = _two_draws(known, args)
    told = [_carried(known.hypothesis.algorithm, each) for each in (fitting, held_out)]
    sizes = told[0].square().mean((1, 2))
    without = untrained(known.model, args.seed)
    parts: dict[str, dict[str, float]] = {name: {} for name in ("planted", "absent", "control", "untrained")}
    empty = [layer for layer, step in known.hypothesis.schedule if sizes[step] < 1e-20 and layer > 0]
    for layer, step in known.hypothesis.schedule:
        if sizes[step] < 1e-20:
            continue
        targets, place = [each[step] for each in told], f"layer {layer}, step {step}"
        explained = _explained(known.model, (fitting, held_out), targets)
        parts["planted"][place] = explained[layer]
        permuted = [each.roll(1, 0) for each in targets]
        parts["control"][place] = _explained(known.model, (fitting, held_out), permuted)[layer]
        with suppress(ValueError):  # its predictions explode
            parts["untrained"][place] = _explained(without, (fitting, held_out), targets)[layer]
        parts["absent"] |= {f"layer {each}, step {step}": explained[each] for each in empty if each < layer}
    return parts


def _carried(algorithm: StepwiseAlgorithm, prompts: Prompts) -> Float[Tensor, "step prompt y"]:
    return torch.stack([algorithm.read(query_of(state)) for state in algorithm.states(prompts)])


def _explained(
    model: HookedTransformer, prompts: tuple[Prompts, Prompts], targets: Sequence[Tensor]
) -> Mapping[int, float]:
    """By layer, the R² of a readout of these targets at the query on other prompts."""
    fitting, held_out = (
        Prompts(each.xs, torch.cat([each.ys[:, :-1], target[:, None]], dim=1))
        for each, target in zip(prompts, targets, strict=True)
    )
    readouts = fit_readouts(model, fitting, progress=False)
    errors = readouts.trajectory(held_out).query() - held_out.query.ys
    centred = held_out.query.ys - held_out.query.ys.mean(0)
    return {layer: 1 - (error.square().sum() / centred.square().sum()).item() for layer, error in enumerate(errors)}


if __name__ == "__main__":
    compare.run()
