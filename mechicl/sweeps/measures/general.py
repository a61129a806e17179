"""Measures of any model (losses, regret, alignment, nearest algorithm, fall of the loss) and of Markov chains."""

import copy
import math
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor

from mechicl.algorithms import references
from mechicl.analysis.behaviour import align, identify, regret
from mechicl.analysis.dynamics import find_transitions
from mechicl.analysis.weights import one_step_optimum
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import token_log_probabilities
from mechicl.learners.token_learners import as_token_learner
from mechicl.tasks import FixedTasks, LinearRegression, MarkovChains, TokenDistribution

HELD_OUT = 1_000_003
"""Seed of the held-out prompts."""
ColumnValues = dict[str, float]
T = TypeVar("T")


def one_model(checkpoint: Checkpoint) -> Any:
    """A copy of the single model of a checkpoint, which a measure may change."""
    if len(checkpoint.models) != 1:
        raise ValueError(f"a measure takes a checkpoint with one model; {checkpoint.name} has {len(checkpoint.models)}")
    return copy.deepcopy(checkpoint.models[0])


def task_of(checkpoint: Checkpoint, kind: type[T], measure: str) -> T:
    """The checkpoint's task, which must be of the kind that a measure is for."""
    task = checkpoint.task
    if not isinstance(task, kind):
        raise ValueError(f"{measure} is for models of {kind.__name__}; this one was trained on {type(task).__name__}")
    return task


def mean_regret(checkpoint: Checkpoint, *, n_prompts: int = 4000) -> ColumnValues:
    """Measure the held-out loss minus that of the task's best known learner, on the same prompts: `analysis.regret`.

    Returns `regret`, `held_out_loss` and `best_known_loss`: squared errors as trained, or nats per token.
    """
    model, task = one_model(checkpoint), checkpoint.task
    at = "points" if isinstance(task, TokenDistribution) or model.cfg.one_pass else "query"
    best = next(iter(references(task)))  # the others may be slow
    result = regret(model, task, references=best, at=at, n_prompts=n_prompts, seed=HELD_OUT, progress=False)
    return {
        "regret": result.mean().mean,
        "held_out_loss": result.losses[result.learner].mean().item(),
        "best_known_loss": result.losses[result.reference].mean().item(),
    }


def alignment(checkpoint: Checkpoint, *, learner: str | None = None, n_prompts: int = 2000) -> ColumnValues:
    """Measure the agreement of the model with a reference learner of its task: `analysis.align`, means over prompts.

    Returns `prediction_distance`, `sensitivity_cosine` (where defined) and `sensitivity_distance`. `learner` names one
    of `algorithms.references(task)`, by default the best known: `functools.partial(alignment, learner="ridge")`.
    """
    known = references(checkpoint.task)
    name = learner or next(iter(known))
    if name not in known:
        raise KeyError(f"{type(checkpoint.task).__name__} has no reference learner {name!r}; it has {list(known)}")
    prompts = checkpoint.task.sample(n_prompts, seed=HELD_OUT)
    aligned = align(one_model(checkpoint), known[name], prompts)
    return {quantity: values.nanmean().item() for quantity, values in aligned.samples().items()}


def identified(checkpoint: Checkpoint, *, n_prompts: int = 2048) -> ColumnValues:
    """Measure the distance of each family of algorithms from the model's predictions: `analysis.identify`.

    Returns `relative_distance: FAMILY`, the root of the mean squared distance over that of the model's predictions, for
    each family, and `confidence` in the answer.
    """
    options: dict[str, Any] = {"n_prompts": n_prompts, "with_limits": False, "progress": False}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of models that are hardly trained
        result = identify(one_model(checkpoint), checkpoint.task, **options)
    scale = result.squared_predictions.mean().clamp(min=1e-300)
    distances: ColumnValues = {}
    for match in result.matches:  # the nearest member of a family first
        name = f"relative_distance: {match.family}"
        distances.setdefault(name, (match.squared_distances.mean() / scale).sqrt().item())
    return {**distances, "confidence": result.confidence}


def transition(checkpoint: Checkpoint, *, plateau: float | None = None) -> ColumnValues:
    """Find the step at which the held-out loss falls from its `plateau` (default: the first loss): `find_transitions`.

    Returns `transition_step` and its `transition_width` (from a tenth to nine tenths of the fall), NaN if there is
    none; `fell`, 1 or 0; and the `final_loss`.
    """
    one_model(checkpoint)
    curve = checkpoint.record.get("curve", {})
    if not curve.get("eval_loss"):
        raise CheckpointError(f"{checkpoint.name}: its record has no curve of held-out losses")
    losses = torch.tensor(curve["eval_loss"], dtype=torch.float64)
    falls = find_transitions(list(curve["eval_step"]), losses, plateau=plateau)
    return {
        "transition_step": falls.steps[0].item(),
        "transition_width": (falls.end - falls.start)[0].item(),
        "fell": float(falls.fell[0]),
        "final_loss": falls.final[0].item(),
    }


def fitting(checkpoint: Checkpoint) -> ColumnValues:
    """Measure how much later a model of fixed tasks has a low loss on new tasks than on its own (grokking).

    A loss is low if it is below the middle between predicting 0 and the best step of gradient descent, on new tasks of
    linear regression. Source: von Oswald et al. 2023, Fig. 15.

    Returns:
        `fit_step` and `new_step`, the first steps at which the loss is low on the training tasks and on new ones (NaN
        if it never is), and `delay`, the second over the first; `rise`, the largest factor by which the loss on new
        tasks rose above its least value before, and `fall`, the factor by which it fell after that; `steady_rise` and
        `steady_fall`, the same of running medians of five recorded losses, without spikes; `fit_change`, the training
        loss at the latter's peak over the one at the least value before, below 1 if the model memorises meanwhile;
        `least_new_loss`; `fit_loss` and `new_loss` at the end; `step_loss`, that of the best step, and `nothing_loss`,
        of predicting 0.
    """
    one_model(checkpoint)
    task, curve = task_of(checkpoint, FixedTasks, "fitting"), checkpoint.record.get("curve", {})
    if not isinstance(task.task, LinearRegression):
        raise ValueError(f"fitting is for fixed tasks of LinearRegression, not of {type(task.task).__name__}")
    steps = sorted(set(curve.get("step", ())) & set(curve.get("eval_step", ())))
    if not steps:
        raise CheckpointError(f"{checkpoint.name}: its record has no curves of training and held-out losses")
    fit, new = (
        torch.tensor([curve[losses][curve[at].index(step)][0] for step in steps], dtype=torch.float64)
        for at, losses in (("step", "loss"), ("eval_step", "eval_loss"))
    )
    best = one_step_optimum(task.task).mse
    nothing = task.task.sample(100_000, seed=0).query.ys.square().mean().item()

    def first_low(losses: Tensor) -> float:
        low = (losses <= (nothing + best) / 2).nonzero().flatten()
        return float(steps[int(low[0])]) if len(low) else math.nan

    smooth_fit, smooth_new = (losses.unfold(0, min(5, len(steps)), 1).median(-1).values for losses in (fit, new))
    (rise, fall, _, _), (steady_rise, steady_fall, least, peak) = map(_rise_and_fall, (new, smooth_new))
    return {
        "fit_step": first_low(fit),
        "new_step": first_low(new),
        "delay": first_low(new) / first_low(fit),
        "rise": rise,
        "fall": fall,
        "steady_rise": steady_rise,
        "steady_fall": steady_fall,
        "fit_change": (smooth_fit[peak] / smooth_fit[least]).item(),
        "fit_loss": fit[-1].item(),
        "new_loss": new[-1].item(),
        "least_new_loss": new.min().item(),
        "step_loss": best,
        "nothing_loss": nothing,
    }


def _rise_and_fall(losses: Tensor) -> tuple[float, float, int, int]:
    """Largest factor above the least loss before, the factor of the fall after it, and the places of both losses."""
    above_least = losses / losses.cummin(0).values
    peak = int(above_least.argmax())
    least = int(losses[: peak + 1].argmin())
    return above_least[peak].item(), (losses[peak] / losses[peak:].min()).item(), least, peak


def markov_phases(checkpoint: Checkpoint, *, n_prompts: int = 500) -> ColumnValues:
    """Find when a model of Markov chains counts tokens, and when pairs of tokens: divergences at its snapshots.

    At each snapshot the Kullback-Leibler divergence is measured from each simple learner to the model: "uniform" (all
    tokens alike), "unigram" (counts of tokens) and "bigram" (counts of the tokens that followed the present one), mean
    over positions, in nats. The model is in the phase of the nearest learner. Source: Edelman et al. 2024, section 3.

    Returns `unigram_from` and `bigram_from`, the first snapshots' steps in each phase (NaN for never);
    `unigram_snapshots`, the number of snapshots in that phase; `least_to_unigram`, the smallest divergence from the
    unigram learner, and `apart`, the bigram learner's from it; `final_to_unigram`, `final_to_bigram`; and `order`: 1 if
    the unigram phase comes before the bigram one, 0 if only the latter comes, NaN if there is no bigram phase.
    """
    task = task_of(checkpoint, MarkovChains, "markov_phases")
    if checkpoint.snapshots is None:
        raise CheckpointError(f"{checkpoint.name} was saved without snapshots: set n_snapshots in its training")
    sequences = task.sample(n_prompts, seed=HELD_OUT)
    counted = sequences.predictable[:, 1:]
    known = {name: references(task)[name] for name in ("uniform", "unigram", "bigram")}
    logs = {name: token_log_probabilities(learner, sequences) for name, learner in known.items()}

    def divergence(model_logs: Tensor, name: str) -> float:
        each = (logs[name].exp() * (logs[name] - model_logs)).sum(-1)
        return each[counted].mean().item()

    steps = checkpoint.snapshots.steps
    divergences = []
    for index in range(len(steps)):
        (model,) = checkpoint.models_at(index)
        model_logs = token_log_probabilities(as_token_learner(model, checkpoint.name), sequences)
        divergences.append({name: divergence(model_logs, name) for name in known})
    return _phases(steps, divergences) | {"apart": divergence(logs["unigram"], "bigram")}


def _phases(steps: tuple[int, ...], divergences: list[dict[str, float]]) -> ColumnValues:
    nearest = [min(each, key=each.__getitem__) for each in divergences]
    first = {name: next((float(s) for s, n in zip(steps, nearest, strict=True) if n == name), math.nan)
             for name in ("unigram", "bigram")}  # fmt: skip
    order = math.nan if math.isnan(first["bigram"]) else float(first["unigram"] < first["bigram"])
    return {
        "unigram_from": first["unigram"],
        "bigram_from": first["bigram"],
        "unigram_snapshots": float(nearest.count("unigram")),
        "least_to_unigram": min(each["unigram"] for each in divergences),
        "final_to_unigram": divergences[-1]["unigram"],
        "final_to_bigram": divergences[-1]["bigram"],
        "order": order,
    }
