"""Which algorithm is it? Families of algorithms fitted to a model's predictions, ranked on held-out prompts."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.baselines import averaging, nearest_neighbours
from mechicl.algorithms.card import ROUNDING, FitProblem, FittedAlgorithm, cards, nearest_learner
from mechicl.algorithms.first_order import fit_polynomial
from mechicl.algorithms.least_squares import bayes, fit_ridge, ols, ridge
from mechicl.algorithms.newton import fit_newton
from mechicl.algorithms.references import references
from mechicl.algorithms.spectral_fit import SpectralProblem
from mechicl.analysis.behaviour.alignment import (
    GRAPH_COPIES,
    cosine_of_sensitivities,
    predictions_and_sensitivities,
)
from mechicl.analysis.behaviour.confidence import family_weights
from mechicl.analysis.behaviour.regrets import are_classes
from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY
from mechicl.base.progress import progress_bar
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, Learner, Learners, named_learners, prompt_batches
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, interval, ratio_interval
from mechicl.tasks import Task
from mechicl.tasks.sampling import TokenDistribution

NONE = "none of these"
LIMIT_PROMPTS = 32_768  # that the best learners on the task are tuned on: rare contexts decide their losses


@dataclass(frozen=True, eq=False)
class FamilyMatch(Result):
    """The member of a family of algorithms that predicts most like the model, on held-out prompts.

    Attributes:
        name: of the family.
        learner: the member; None in a result that was loaded.
        hyperparameters: its fitted hyperparameters.
        n_fitted: how many numbers were fitted.
        squared_distances: of its predictions from the model's, `[prompt]`, averaged over the target's dimensions.
        sensitivity_cosine: cosine of d prediction / d query with the model's, `[prompt]`.
        squared_errors: of its predictions, `[prompt]`.
        n_given: how many numbers are given beside the fitted ones: 1 where the number of steps is.
    """

    name: str
    learner: Learner | None = field(metadata={"stored": False})
    hyperparameters: dict[str, float]
    n_fitted: int
    squared_distances: Float[Tensor, "prompt"]
    sensitivity_cosine: Float[Tensor, "prompt"]
    squared_errors: Float[Tensor, "prompt"]
    n_given: int = 0

    @property
    def family(self) -> str:
        """The name without numbers of steps: "Newton" for "Newton, 3 iterations"."""
        return self.name.split(",")[0]


@dataclass(frozen=True, eq=False)
class Identification(Result):
    """Families ranked by how well their best member predicts what the model predicts.

    Attributes:
        matches: fitted to the model's predictions, the nearest first; of those that predict the same up to rounding,
            the one with the fewest fitted numbers.
        limits: the best learners of their order on the task, fitted to the targets: how far is the model from them?
        squared_predictions: of the model, `[prompt]`.
        squared_errors: of the model, `[prompt]`.
        eigenvalues: of the held-out contexts' S, `[x prompt]`.
        note: what to keep in mind where the families are not made for the task, else empty.
    """

    matches: list[FamilyMatch]
    limits: list[FamilyMatch]
    squared_predictions: Float[Tensor, "prompt"]
    squared_errors: Float[Tensor, "prompt"]
    eigenvalues: Float[Tensor, "x prompt"]
    note: str = ""

    @property
    def best(self) -> FamilyMatch:
        """The nearest family."""
        return self.matches[0]

    @property
    def answer(self) -> FamilyMatch:
        """What it is called: of the likeliest family the likeliest member, which need not be the nearest.

        A family that contains the right one comes nearer, by whatever is left: numbers that are fitted must be worth it
        (see `weights`).
        """
        family = next(name for name in self.weights if name != NONE)
        members = [i for i, match in enumerate(self.matches) if match.family == family]
        return self.matches[max(members, key=lambda i: self._weights[i].item())]

    @property
    def confidence(self) -> float:
        """The probability that the answer's family is the right one.

        About 90% of the answers with 90% are right, on models with known algorithms (`analyses/known_families.py`).
        """
        return self.weights[self.answer.family]

    @property
    def weights(self) -> dict[str, float]:
        """The probability of each family, all numbers of steps together, and of "none of these"; likeliest first.

        By distance, simplicity and over resampled prompts: see `family_weights`.
        """
        totals = {NONE: 1 - self._weights.sum().item()}
        for match, weight in zip(self.matches, self._weights.tolist(), strict=True):
            totals[match.family] = totals.get(match.family, 0.0) + weight
        return dict(sorted(totals.items(), key=lambda pair: -pair[1]))

    @cached_property
    def _weights(self) -> Tensor:
        distances = torch.stack([match.squared_distances for match in self.matches])
        n_numbers = [match.n_fitted + match.n_given for match in self.matches]
        return family_weights(distances, n_numbers, self.squared_predictions.mean().item())

    def distance(self, match: FamilyMatch) -> Interval:
        """Squared distance of predictions over the model's squared predictions: 0 for the same, 1 for predicting 0."""
        return ratio_interval(match.squared_distances, self.squared_predictions)

    def gap(self, match: FamilyMatch) -> Interval:
        """How much farther than the best family, in the same unit, over the same prompts."""
        return ratio_interval(match.squared_distances - self.best.squared_distances, self.squared_predictions)

    def tied(self, match: FamilyMatch) -> bool:
        """Whether these prompts do not tell it from the best family.

        The gap's interval holds 0, and the match is not farther on the typical prompt either (a few prompts on which it
        goes astray widen the former's interval, not the latter's); or the gap is rounding.
        """
        gap, distances, best = self.gap(match), match.squared_distances, self.best.squared_distances
        farther = interval((distances - best) / (distances + best).clamp(min=1e-300))  # each prompt between -1 and 1
        return match is self.best or gap.mean < ROUNDING or (0 in gap and farther.low <= 0)

    def to_dataframe(self) -> pd.DataFrame:
        """One row a family, ranked, then the limits; distances with 95% intervals over prompts.

        `sensitivity_rank` is the place by mean sensitivity cosine, last where predictions have no derivative.
        """
        rows = []
        for kind, matches in (("family", self.matches), ("limit", self.limits)):
            cosines = [match.sensitivity_cosine.mean().nan_to_num(nan=-math.inf).item() for match in matches]
            for rank, match in enumerate(matches, start=1):
                distance = self.distance(match)
                ratio = ratio_interval(match.squared_errors, self.squared_errors)
                cosine = interval(match.sensitivity_cosine)
                rows.append({
                    "kind": kind, "rank": rank, "name": match.name, "fitted": match.n_fitted,
                    "sensitivity_rank": 1 + sum(other > cosines[rank - 1] for other in cosines),
                    "distance": distance.mean, "low": distance.low, "high": distance.high,
                    "tied": kind == "family" and self.tied(match),
                    "sensitivity_cosine": cosine.mean, "cosine_low": cosine.low, "cosine_high": cosine.high,
                    "loss_over_model": ratio.mean, "loss_low": ratio.low, "loss_high": ratio.high,
                    "hyperparameters": ", ".join(f"{k}={v:.4g}" for k, v in match.hyperparameters.items()),
                })  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        def line(*columns: str, note: str = "") -> str:
            return f"{columns[0]:>20} {columns[1]:>24} {columns[2]:>20}  {note}".rstrip()

        lines = [("family", line("distance", "sensitivity cosine", "loss / model", note="fitted"))]
        for title, matches in (("", self.matches), ("the best on the task itself", self.limits)):
            lines += [(title, "")] if title else []
            for match in matches:
                ratio = ratio_interval(match.squared_errors, self.squared_errors)
                settings = ", ".join(f"{k}={v:.4g}" for k, v in list(match.hyperparameters.items())[:4])
                more = ", ..." if len(match.hyperparameters) > 4 else ""
                columns = (str(self.distance(match)), str(interval(match.sensitivity_cosine)), str(ratio))
                lines.append((match.name, line(*columns, note=settings + more)))
        lines.append(("called", f"{self.answer.name} (with a confidence of {self.confidence:.0%})"))
        return [*lines, ("note", self.note)] if self.note else lines


@checked
def identify(
    model: Learner,
    task: Task,
    *,
    also: Learners = (),
    with_references: bool = True,
    with_limits: bool = True,
    steps: int | None = None,
    n_prompts: int = 4096,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> Identification:
    """Which algorithm does a learner run? Fit each family of algorithms to its predictions, and rank them.

    Hyperparameters are fitted to the model's predictions of the query on some prompts; distances, sensitivities and
    losses are measured on others. Families are ranked by the distance of predictions; `sensitivity_rank` in the table
    says where they stand by sensitivities. Families: gradient descent (up to 1024 steps; with a step size each), GD++
    (shared and one set a step, up to 12 steps), preconditioned gradient descent, Newton (up to 15 iterations), ridge,
    least squares, Chebyshev, online gradient descent, averaging, nearest neighbours; gradient descent with momentum,
    preconditioned in several steps with one matrix, and with an intercept (one step with a kernel of 1 and x); and, for
    scale, any polynomial of S with as many terms as steps and any function of S. The task's own reference learners
    (`algorithms.references`) are ranked with them, as far as they are no members of these families: dMMSE of a pool of
    tasks, exact Bayes of Boolean functions. The families are algorithms for linear functions; where the task's targets
    are classes, or a reference loses half as much as any family, the result's `note` says so.

    The nearest family is not always the right one: who contains it is as near. `answer` weighs distance and simplicity,
    with a `confidence` that was calibrated on models with known algorithms.

    The limits are the best learners on the task itself, tuned on 32,768 prompts: first order (a polynomial with as many
    terms as steps, the same for every context), second order (as many Newton iterations, α tuned), and ridge.

    Args:
        model: any learner with predictions that are differentiable with respect to the query.
        task: its prompts; the query stands after all `n_context` points.
        also: learners of your own to rank among the families: a mapping from names, or a sequence of learners with
            names. Each is compared as it is (`AlgorithmLearner` makes one of any function of prompts); of an
            `AlgorithmFamily`, the value that comes nearest is chosen on the prompts to fit on.
        with_references: rank the task's own reference learners too; False spares the time of slow ones, such as
            training a network on each context.
        with_limits: measure the best learners on the task too, which says nothing of which algorithm it is.
        steps: of the learner: by default the model's number of layers, or 8.
        n_prompts: to fit on, and to measure on.
        seed: of the prompts to fit on; the held-out ones have the next.
        memory: bound in bytes on what the model holds at a time.

    Source: von Oswald et al. 2023 and Fu et al. 2024, with every algorithm at once; Golub & Varga 1961 for the limit of
    first-order methods.

    Example:
        >>> result = identify(load("lsa-1l"), LinearRegression(), n_prompts=512)
        >>> result.best.name
        'preconditioned gradient descent, 1 step'
        >>> half = AlgorithmLearner(lambda prompts: prompts.context.ys.mean(1) / 2)
        >>> identify(load("lsa-1l"), LinearRegression(), also={"half the mean": half}, n_prompts=512).best.name
        'preconditioned gradient descent, 1 step'
    """
    if isinstance(task, TokenDistribution):
        raise TypeError(f"{type(task).__name__} is a task of tokens: take analysis.identify_on_tokens")
    known = {name: learner for name, learner in _references(task).items() if not _in_a_family(learner)}
    known = known if with_references else {}
    learners = {**known, **named_learners(also)}
    cfg = getattr(model, "cfg", None)
    steps = int(getattr(cfg, "n_layers", 0) or 8) if steps is None else steps
    if steps < 1 or n_prompts < 2:
        raise ValueError(f"steps must be at least 1 and n_prompts at least 2, got {steps} and {n_prompts}")
    if task.n_context == 0:
        raise ValueError("without a context there is nothing to learn from: n_context must be at least 1")
    fitting, held_out = (task.sample(n_prompts, seed=seed + i, dtype=torch.float64) for i in range(2))
    predict = partial(_predict, memory=memory)
    targets = predict(model, fitting)
    if not targets.isfinite().all():
        raise ValueError(f"{type(model).__name__} does not predict finite numbers on this task")
    predictions, slopes = _predictions_and_slopes(model, held_out, memory)

    def compare(fit: FittedAlgorithm) -> FamilyMatch:
        try:
            predicted, its_slopes = _predictions_and_slopes(fit.learner, held_out, memory)
        except (ValueError, RuntimeError):  # numpy in between, or nothing that gradients flow through
            predicted, its_slopes = predict(fit.learner, held_out), torch.full_like(slopes, math.nan)
        return FamilyMatch(
            fit.name,
            fit.learner,
            fit.hyperparameters,
            fit.n_fitted,
            (predicted - predictions).square().mean(-1),
            cosine_of_sensitivities(its_slopes, slopes),
            (predicted - held_out.query.ys).square().mean(-1),
            fit.n_given,
        )

    problem = FitProblem(fitting, targets[None], steps)
    fits = [card.members for card in cards()]
    fits += [partial(_fit_given, name, learner, predict=predict) for name, learner in learners.items()]
    bar = progress_bar(fits, unit="family", progress=progress, desc="identify")
    matches = [compare(member) for fit in bar for member in fit(problem)]
    limit_matches = []
    if with_limits:
        tuning = task.sample(max(n_prompts, LIMIT_PROMPTS), seed=seed + 2, dtype=torch.float64)
        limit_matches = [compare(fit) for fit in limits(FitProblem(tuning, tuning.query.ys[None], steps))]
    rounding = ROUNDING * predictions.square().mean().item()

    def rank(match: FamilyMatch) -> tuple[float, int]:  # what predicts the same up to rounding: by fitted numbers
        return max(match.squared_distances.nan_to_num(nan=math.inf).mean().item(), rounding), match.n_fitted

    return Identification(
        sorted(matches, key=rank),
        limit_matches,
        note=_note(
            task,
            held_out,
            [m for m in matches if m.name not in learners] + limit_matches,
            [m for m in matches if m.name in known],
        ),
        squared_predictions=predictions.square().mean(-1),
        squared_errors=(predictions - held_out.query.ys).square().mean(-1),
        eigenvalues=SpectralProblem.from_prompts(held_out, predictions).eigenvalues.T,
    )


IN_FAMILIES = tuple(map(inspect.unwrap, (ols, ridge, bayes, averaging, nearest_neighbours)))


def _references(task: Task) -> dict[str, Learner]:
    """The task's reference learners; none where nobody has said any."""
    try:
        return references(task)
    except TypeError:
        return {}


def _in_a_family(learner: Learner) -> bool:
    return isinstance(learner, AlgorithmLearner) and inspect.unwrap(learner.algorithm) in IN_FAMILIES


def _note(task: Task, prompts: Prompts, families: list[FamilyMatch], known: list[FamilyMatch]) -> str:
    """Where the families do not apply: targets that are classes, or a reference that loses half as much as any."""
    kind, ys = type(task).__name__, prompts.ys
    least = min(match.squared_errors.mean().item() for match in families)
    best = min(known, key=lambda match: match.squared_errors.mean().item(), default=None)
    loss = math.inf if best is None else best.squared_errors.mean().item()
    compared = f"the best of them loses {least:.3g}, {best.name} {loss:.3g}" if best is not None else ""
    if are_classes(ys):
        beside = f" ({compared})" if compared else ", and no learner of classes is known for it: give some in also="
        return f"the families are algorithms for linear functions, and the targets of {kind} are classes{beside}"
    if 2 * loss < least - ROUNDING * ys.square().mean().item():
        return f"the families know nothing of {kind} but that it is linear, if it is: {compared}"
    return ""


def limits(problem: FitProblem) -> list[FittedAlgorithm]:
    """The best learners of each order for the problem's targets, the task's own."""
    newton = fit_newton(problem.spectral, [problem.steps])
    words = f"first order, {problem.steps} step{'' if problem.steps == 1 else 's'}"
    first = fit_polynomial(problem.spectral, problem.steps, words)
    return [first, dataclasses.replace(newton, name=f"second order: {newton.name}"), fit_ridge(problem)]


def _fit_given(
    name: str, learner: Learner, problem: FitProblem, *, predict: Callable[[Learner, Prompts], Tensor]
) -> list[FittedAlgorithm]:
    """A learner of the user's, as it is; of an `AlgorithmFamily`, the member nearest to the targets."""
    fit = FittedAlgorithm(name, learner)
    if isinstance(learner, AlgorithmFamily):
        best = nearest_learner(name, learner.members(), problem)
        settings = {learner.hyperparameter: float(learner.values[best])}
        fit = FittedAlgorithm(name, learner.members()[best], settings, 1)
    predicted = predict(fit.learner, problem.prompts)
    if predicted.shape != problem.targets.shape:
        raise ValueError(
            f"{name!r} predicts the shape {tuple(predicted.shape)}, and the model {tuple(problem.targets.shape)}"
        )
    if not predicted.isfinite().all():
        raise ValueError(f"{name!r} predicts numbers that are not finite")
    return [fit]


@torch.no_grad()
def _predict(learner: Learner, prompts: Prompts, memory: float) -> Tensor:
    """Predictions of the query, float64 on the CPU."""
    return torch.cat([learner.predict(part).cpu().double() for part in prompt_batches(learner, prompts, memory)])


def _predictions_and_slopes(learner: Learner, prompts: Prompts, memory: float) -> tuple[Tensor, Tensor]:
    batches = prompt_batches(learner, prompts, memory, copies=GRAPH_COPIES)
    parts = [predictions_and_sensitivities(learner, part) for part in batches]
    predictions, slopes = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    return predictions, slopes
