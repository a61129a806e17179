"""Which algorithm does it behave like? Families of algorithms fitted to a model's predictions."""

import dataclasses
import inspect
import math
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.baselines import averaging, nearest_neighbours
from mechicl.algorithms.card import (
    EACH,
    ROUNDING,
    Algorithm,
    FitProblem,
    FittedAlgorithm,
    cards,
    contains,
    nearest_learner,
)
from mechicl.algorithms.first_order import fit_polynomial
from mechicl.algorithms.least_squares import bayes, fit_ridge, ols, ridge
from mechicl.algorithms.newton import fit_newton
from mechicl.algorithms.references import references
from mechicl.algorithms.spectral_fit import SpectralProblem
from mechicl.analysis.behaviour.alignment import GRAPH_COPIES, cosine_of_sensitivities, predictions_and_sensitivities
from mechicl.analysis.behaviour.families import FamilyMatch, Identification
from mechicl.analysis.behaviour.fingerprints import COMPARED, OF_THE_QUERY, PROPERTIES, Changes, check_answers, measured
from mechicl.analysis.behaviour.losses import are_classes
from mechicl.base.arguments import Count, at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.base.warning import warn
from mechicl.checkpoints.study import takes_study
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, Learner, Learners, prompt_batches
from mechicl.learners.learners import named_learners, query_predictions
from mechicl.prompts import Prompts
from mechicl.tasks import Task

LIMIT_PROMPTS = 32_768  # prompts that the best learners on the task are tuned on: rare contexts decide their losses
MUCH = 0.5  # a family that contains another must come this much nearer
OF_CLASSES = ("plain", "permuted")  # changes that keep inputs and targets of any kind
N_CHANGED, FAR = 256, 0.5  # prompts that are changed; distance from which a family is not compared on them
LEAST_GAIN, FEW = 0.05, 16  # a model that gains less than this over predicting 0, on enough prompts, looks untrained


@takes_study
@checked
def identify(
    model: Learner,
    task: Task,
    *,
    also: Learners = (),
    with_references: bool = True,
    with_limits: bool = True,
    steps: Count | None = None,
    n_prompts: Annotated[int, at_least(2)] = 4096,
    seed: int = 0,
    progress: bool | None = None,
) -> Identification:
    """Rank algorithm families by how well they predict the model's outputs.

    Hyperparameters are fitted to the model's predictions of the query on some prompts; distances, losses and cosines of
    sensitivities are measured on others. With `S = XᵀX` of the context's inputs X, the families are:

    - gradient descent: plain (one step size and up to 1024 steps, or a step size for each step); with momentum; with an
      intercept (one step with a kernel of 1 and x); online; preconditioned (one step, or several with one matrix);
    - GD++ (parameters shared or for each step, up to 12 steps), Newton (up to 15 iterations), Chebyshev;
    - ridge, least squares, averaging, nearest neighbours, and algorithms that forget: normalised LMS, recursive least
      squares, discounted gradient descent;
    - as bounds on how near a family can come, any polynomial of S with as many terms as steps, and any function of S;
    - the task's other reference learners (`algorithms.references`), such as dMMSE of a pool.

    `note` has a caveat where targets are classes, or a reference learner has less than half the loss of every family:
    the families are algorithms for linear functions. A model hardly better than predicting 0 gives a warning: it may
    be untrained, or trained on another task. Source: von Oswald et al. 2023 and Fu et al. 2024; Golub & Varga 1961
    for the limit of first-order methods.

    Args:
        model: anything with `predict(prompts)`; cosines of sensitivities are NaN if predictions have no derivative.
        task: distribution of the prompts; the query follows all `n_context` points.
        also: your learners to rank too, by name or as a sequence with names. Each is compared unchanged
            (`AlgorithmLearner` wraps any function of prompts); an `AlgorithmFamily` by its nearest member on the
            prompts to fit on.
        with_references: rank the task's reference learners too; False saves the time of slow ones.
        with_limits: also fit the best learners on the task itself, to the targets of 32,768 prompts: first order (a
            polynomial of S with as many terms as steps), second order (as many Newton iterations, tuned), ridge.
        steps: number of steps of the families with parameters for each step, and of the limits; by default the model's
            number of layers, or 8 if it has none.
        n_prompts: number of prompts to fit on, and of the held-out prompts to measure on.
        seed: seed of the prompts to fit on; the held-out prompts have `seed + 1`.

    Returns:
        An `Identification`: the nearest member of each family (`matches`, nearest first) and its `distance(match)`. A
        larger family is at least as near (GD++ contains gradient descent), so report `answer`, where families with more
        freedom count less, and which is "none of these" where nothing fits as a copy of itself would; or `verdict`, a
        sentence with the kind of learner and the calibrated `confidence`.

    Example:
        >>> result = identify(load("lsa-1l"), LinearRegression(), n_prompts=512)
        >>> result.best.name
        'preconditioned gradient descent, 1 step'
    """
    if task.n_context == 0:
        raise ValueError("without a context there is nothing to learn from: n_context must be at least 1")
    known = references_of(task) if with_references else {}
    known = {
        name: learner for name, learner in known.items()
        if not (isinstance(learner, AlgorithmLearner) and inspect.unwrap(learner.algorithm) in IN_FAMILIES)
    }  # fmt: skip
    learners = {**known, **named_learners(also)}
    steps = steps or int(getattr(getattr(model, "cfg", None), "n_layers", 0) or 8)
    fitting, held_out = (task.sample(n_prompts, seed=seed + i, dtype=torch.float64) for i in range(2))
    targets = query_predictions(model, fitting)
    if not targets.isfinite().all():
        raise ValueError(f"{type(model).__name__} does not predict finite numbers on this task")
    predictions, slopes = _predictions_and_slopes(model, held_out)
    ys = held_out.query.ys
    squared_errors, zero_errors = (predictions - ys).square().mean(-1), ys.square().mean(-1)

    elsewhere = _Elsewhere(model, held_out, predictions, seed, progress)
    has_layers = hasattr(getattr(model, "cfg", None), "n_layers")

    def compare(fit: FittedAlgorithm, card: Algorithm | None = None) -> FamilyMatch:
        predicted, its_slopes = _predictions_and_slopes(fit.learner, held_out)
        distances, errors = ((predicted - values).square().mean(-1) for values in (predictions, ys))
        cosine = cosine_of_sensitivities(its_slopes, slopes)
        changed = elsewhere.distances(fit, predicted)
        broken = elsewhere.standing(card.holds, "violated") if card else []
        excluded = "its fit is a limit of the family, at the end of a range" if fit.is_limit else ""
        excluded = f"the model violates: {', '.join(broken)}" if broken else excluded
        is_bound = (card is not None and card.for_scale) or (fit.name.endswith(EACH) and not has_layers)
        return FamilyMatch(fit.name, fit.learner, fit.hyperparameters, fit.n_fitted, distances, cosine, errors, changed,
                           fit.n_given, excluded, is_bound)  # fmt: skip

    problem = FitProblem(fitting, targets[None], steps)
    not_fitted = {
        card.name: f"the model keeps: {', '.join(kept)}"
        for card in cards() if (kept := elsewhere.standing(card.violates, "exact"))
    }  # fmt: skip
    fits: list[tuple[Any, Algorithm | None]] = [(card.members, card) for card in cards() if card.name not in not_fitted]
    fits += [(partial(_fit_given, name, learner), None) for name, learner in learners.items()]
    bar = progress_bar(fits, unit="family", progress=progress, desc="identify")
    matches = [compare(member, card) for fit, card in bar for member in fit(problem)]
    matches = [_simplest(match, matches) for match in matches]
    limit_matches = []
    if with_limits:
        tuning = task.sample(max(n_prompts, LIMIT_PROMPTS), seed=seed + 2, dtype=torch.float64)
        limit_matches = [compare(fit) for fit in limits(FitProblem(tuning, tuning.query.ys[None], steps))]
    rounding = ROUNDING * predictions.square().mean().item()

    def rank(match: FamilyMatch) -> tuple[float, int]:  # matches that agree up to rounding: by fitted numbers
        return max(match.squared_distances.nan_to_num(nan=math.inf).mean().item(), rounding), match.n_fitted

    families = [m for m in matches if m.name not in learners] + limit_matches
    notes = [_note(task, held_out, families, [m for m in matches if m.name in known])]
    ratio = (squared_errors.mean() / zero_errors.mean()).item()
    if n_prompts >= FEW and ratio > 1 - LEAST_GAIN:
        notes.append(f"the model's loss on this {type(task).__name__} is {ratio:.3g} times that of predicting 0: "
                     f"it looks untrained, or trained on another task (other inputs, scale or noise)")  # fmt: skip
        warn(notes[-1])
    return Identification(
        sorted(matches, key=rank),
        limit_matches,
        note="; ".join(filter(None, notes)),
        squared_predictions=predictions.square().mean(-1),
        squared_errors=squared_errors,
        eigenvalues=SpectralProblem.from_prompts(held_out, predictions).eigenvalues.T,
        fingerprint=elsewhere.fingerprint,
        changes=elsewhere.losses,
        not_fitted=not_fitted,
    )


def _simplest(match: FamilyMatch, matches: list[FamilyMatch]) -> FamilyMatch:
    """Exclude a member that is not much nearer than one of a family that its family contains."""
    limit = match.changed_distances.mean() / MUCH
    for other in matches:
        if contains(match.name, other.name) and not other.excluded and other.changed_distances.mean() <= limit:
            return dataclasses.replace(match, excluded=f"it is not much nearer than {other.name}, which it contains")
    return match


class _Elsewhere:
    """A model's predictions on changed prompts, which tell families apart that agree on the task's own.

    Attributes:
        fingerprint: properties of the model; None if the context is a single point.
        losses: the changes on which families are compared, with the model's loss relative to predicting 0.
    """

    def __init__(self, model: Learner, prompts: Prompts, predictions: Tensor, seed: int, progress: bool | None):
        self.fingerprint, self._n = None, min(len(prompts), N_CHANGED)
        self._changes, self._predicted = Changes(prompts[:N_CHANGED], seed), {"plain": predictions[: self._n]}
        if prompts.n_context > 1:
            self.fingerprint, predicted = measured(model, self._changes, progress)
            for name in OF_CLASSES if are_classes(prompts.ys) else COMPARED:
                if name not in predicted:
                    predicted[name] = self._changes.predicted(model, name)
                self._predicted[name] = predicted[name]
        else:
            check_answers(model, self._changes.prompts["plain"], self._changes.predicted(model, "plain"))
        losses = {name: self._loss(name) for name in self._predicted}
        self.losses = {name: each for name, each in losses.items() if 1 - each >= (1 - losses["plain"]) / 2}

    def _loss(self, name: str) -> float:
        target = self._changes.target(name)
        return ((self._predicted[name] - target).square().mean() / target.square().mean()).item()

    def distances(self, fit: FittedAlgorithm, predictions: Tensor) -> Float[Tensor, "prompt"]:
        """Return squared distances over the model's squared predictions, averaged over changes; from predictions on the
        task's own prompts, and alone where these are far."""
        rows = [self._distance("plain", predictions[: self._n])]
        if rows[0].mean() < FAR:
            names = [name for name in self.losses if name != "plain"]
            rows += [self._distance(name, self._changes.predicted(fit.learner, name)) for name in names]
        return torch.stack(rows).mean(0)

    def _distance(self, name: str, predictions: Tensor) -> Float[Tensor, "prompt"]:
        mine = self._predicted[name]
        return (predictions - mine).square().mean(-1) / mine.square().mean().clamp(min=1e-300)

    def standing(self, names: tuple[str, ...], how: str) -> list[str]:
        """Return the properties among `names` that the model has exactly, nearly, or violates (`how`).

        Properties are left out that were tested on changed prompts on which the model does not work.
        """
        found = self.fingerprint.standing if self.fingerprint else {}
        works = {*self.losses, *OF_THE_QUERY}
        return [name for name in names if found.get(name) == how and {*PROPERTIES.get(name, ())} <= works]


IN_FAMILIES = tuple(map(inspect.unwrap, (ols, ridge, bayes, averaging, nearest_neighbours)))


def references_of(task: Any) -> dict[str, Any]:
    """The task's reference learners; none if none are registered."""
    try:
        return references(task)
    except TypeError:
        return {}


def _note(task: Task, prompts: Prompts, families: list[FamilyMatch], known: list[FamilyMatch]) -> str:
    """A caveat where the families do not apply: targets are classes, or a reference loses half as much as any."""
    kind, ys = type(task).__name__, prompts.ys
    losses = {match.name: match.squared_errors.mean().item() for match in known}
    best = min(losses, key=losses.__getitem__, default="")
    loss = losses.get(best, math.inf)
    least = min(match.squared_errors.mean().item() for match in families)
    compared = f"the best of them loses {least:.3g}, {best} {loss:.3g}"
    if are_classes(ys):
        hint = compared if best else "no learner of classes is known for it: pass some as also="
        return f"the families are algorithms for linear functions, and the targets of {kind} are classes ({hint})"
    if 2 * loss < least - ROUNDING * ys.square().mean().item():
        return f"the families assume only that {kind} is linear: {compared}"
    return ""


def limits(problem: FitProblem) -> list[FittedAlgorithm]:
    """Fit the best learners of each order to the problem's targets, those of the task."""
    newton = fit_newton(problem.spectral, [problem.steps])
    name = f"first order, {problem.steps} step{'' if problem.steps == 1 else 's'}"
    first = fit_polynomial(problem.spectral, problem.steps, name)
    return [first, dataclasses.replace(newton, name=f"second order: {newton.name}"), fit_ridge(problem)]


def _fit_given(name: str, learner: Learner, problem: FitProblem) -> list[FittedAlgorithm]:
    fit = FittedAlgorithm(name, learner)
    if isinstance(learner, AlgorithmFamily):
        best = nearest_learner(name, learner.members(), problem)
        settings = {learner.hyperparameter: float(learner.values[best])}
        fit = FittedAlgorithm(name, learner.members()[best], settings, 1)
    predicted = query_predictions(fit.learner, problem.prompts, name)
    if not predicted.isfinite().all():
        raise ValueError(f"{name!r} predicts numbers that are not finite")
    return [fit]


def _predictions_and_slopes(learner: Learner, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Predictions of the query and their derivatives, float64 on the CPU; derivatives are NaN if there are none."""
    batches = prompt_batches(learner, prompts, copies=GRAPH_COPIES)
    parts = [predictions_and_sensitivities(learner, part, required=False) for part in batches]
    predictions, slopes = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    return predictions, slopes
