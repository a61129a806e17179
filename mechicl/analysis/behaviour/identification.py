"""Which algorithm is it? Families of algorithms fitted to a model's predictions, ranked on held-out prompts."""

import math
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechicl import algorithms
from mechicl.analysis.behaviour.algorithm_families import SAME, Candidate, families, limits
from mechicl.analysis.behaviour.alignment import cosine_of_sensitivities, predictions_and_sensitivities
from mechicl.analysis.behaviour.spectral import SpectralProblem
from mechicl.learners import AlgorithmLearner, Learner
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, interval, ratio_interval
from mechicl.tasks import LinearRegression

LIMIT_PROMPTS = 32_768  # that the best learners on the task are tuned on: rare contexts decide their losses
BATCH = 1024  # prompts through the model at a time


@dataclass(frozen=True, eq=False)
class FamilyMatch:
    """The member of a family of algorithms that predicts most like the model, on held-out prompts.

    Attributes:
        name: of the family.
        learner: the member.
        hyperparameters: its fitted hyperparameters.
        n_fitted: how many numbers were fitted.
        squared_distances: of its predictions from the model's, `[prompt]`, averaged over the target's dimensions.
        sensitivity_cosine: cosine of d prediction / d query with the model's, `[prompt]`.
        squared_errors: of its predictions, `[prompt]`.
    """

    name: str
    learner: Learner
    hyperparameters: dict[str, float]
    n_fitted: int
    squared_distances: Float[Tensor, "prompt"]
    sensitivity_cosine: Float[Tensor, "prompt"]
    squared_errors: Float[Tensor, "prompt"]


@dataclass(frozen=True, eq=False)
class Identification:
    """Families ranked by how well their best member predicts what the model predicts.

    Attributes:
        matches: fitted to the model's predictions, the nearest first; of those that predict the same up to rounding,
            the one with the fewest fitted numbers.
        limits: the best learners of their order on the task, fitted to the targets: how far is the model from them?
        squared_predictions: of the model, `[prompt]`.
        squared_errors: of the model, `[prompt]`.
        eigenvalues: of the held-out contexts' S, `[prompt x]`.
    """

    matches: list[FamilyMatch]
    limits: list[FamilyMatch]
    squared_predictions: Float[Tensor, "prompt"]
    squared_errors: Float[Tensor, "prompt"]
    eigenvalues: Float[Tensor, "prompt x"]

    @property
    def best(self) -> FamilyMatch:
        """The nearest family."""
        return self.matches[0]

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
        gap, own, best = self.gap(match), match.squared_distances, self.best.squared_distances
        farther = interval((own - best) / (own + best).clamp(min=1e-300))  # each prompt between -1 and 1
        return match is self.best or gap.mean < SAME or (0 in gap and farther.low <= 0)

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

    def __str__(self) -> str:
        width = max(len(match.name) for match in (*self.matches, *self.limits))
        lines = [f"{'family':{width}} {'distance':>20} {'sensitivity cosine':>24} {'loss / model':>20}  fitted"]
        for title, matches in (("", self.matches), ("the best on the task itself", self.limits)):
            lines += [title] if title else []
            for match in matches:
                ratio = ratio_interval(match.squared_errors, self.squared_errors)
                settings = ", ".join(f"{k}={v:.4g}" for k, v in list(match.hyperparameters.items())[:4])
                more = ", ..." if len(match.hyperparameters) > 4 else ""
                columns = (str(self.distance(match)), str(interval(match.sensitivity_cosine)), str(ratio))
                lines.append(
                    f"{match.name:{width}} {columns[0]:>20} {columns[1]:>24} {columns[2]:>20}  {settings}{more}"
                )
        return "\n".join(line.rstrip() for line in lines)


def identify(
    model: Learner,
    task: LinearRegression,
    *,
    steps: int | None = None,
    n_prompts: int = 4096,
    seed: int = 0,
    progress: bool = True,
) -> Identification:
    """Which algorithm does a learner run? Fit each family of algorithms to its predictions, and rank them.

    Hyperparameters are fitted to the model's predictions of the query on some prompts; distances, sensitivities and
    losses are measured on others. Families are ranked by the distance of predictions; `sensitivity_rank` in the table
    says where they stand by sensitivities. Families: gradient descent (up to 1024 steps; with a step size each), GD++
    (shared and one set a step, up to 12 steps), preconditioned gradient descent, Newton (up to 15 iterations), ridge,
    least squares, Chebyshev, online gradient descent, averaging, nearest neighbours; and, for scale, any polynomial of
    S with as many terms as steps and any function of S. The limits are the best learners on the task itself, tuned on
    32,768 prompts: first order (a polynomial with as many terms as steps, the same for every context), second order
    (as many Newton iterations, α tuned), and ridge.

    Args:
        model: any learner with predictions that are differentiable with respect to the query.
        task: its prompts; the query stands after all `n_context` points.
        steps: of the learner: by default the model's number of layers, or 8.
        n_prompts: to fit on, and to measure on.
        seed: of the prompts to fit on; the held-out ones have the next.
        progress: show a progress bar.

    Raises:
        ValueError: steps < 1, fewer than 2 prompts, a task without context, or a learner that is not differentiable in
            the query or does not predict finite numbers.

    Source: the comparison of von Oswald et al. 2023 and Fu et al. 2024 with every algorithm at once; Golub & Varga
    1961 for the limit of first-order methods.

    Example:
        >>> result = identify(load("lsa-1l"), LinearRegression(), progress=False)
        >>> result.best.name
        'preconditioned gradient descent, 1 step'
    """
    cfg = getattr(model, "cfg", None)
    steps = int(getattr(cfg, "n_layers", 8)) if steps is None else steps
    if steps < 1 or n_prompts < 2:
        raise ValueError(f"steps must be at least 1 and n_prompts at least 2, got {steps} and {n_prompts}")
    if task.n_context == 0:
        raise ValueError("without a context there is nothing to learn from: n_context must be at least 1")
    fitting, held_out = (task.sample(n_prompts, seed=seed + i, dtype=torch.float64) for i in range(2))
    with torch.no_grad():
        targets = torch.cat([model.predict(part).cpu().double() for part in fitting.split(BATCH)])
    if not targets.isfinite().all():
        raise ValueError(f"{type(model).__name__} does not predict finite numbers on this task")
    own = _with_slopes(model, held_out)
    problem = SpectralProblem.of(fitting, targets)
    total = 14 if steps > 1 else 10
    nearest = families(problem, fitting, steps, task)
    candidates = list(tqdm(nearest, desc="families", total=total, disable=not progress, leave=False))
    matches = [_compared(candidate, own, held_out) for candidate in candidates]
    many = task.sample(max(n_prompts, LIMIT_PROMPTS), seed=seed + 2, dtype=torch.float64)
    on_the_task = SpectralProblem.of(many, many.query.ys)
    best_on_task = [_compared(candidate, own, held_out) for candidate in limits(on_the_task, steps, task)]
    same = SAME * own[0].square().mean().item()

    def order(match: FamilyMatch) -> tuple[float, int]:
        return max(match.squared_distances.nan_to_num(nan=math.inf).mean().item(), same), match.n_fitted

    matches.sort(key=order)
    return Identification(
        matches,
        best_on_task,
        squared_predictions=own[0].square().mean(-1),
        squared_errors=(own[0] - held_out.query.ys).square().mean(-1),
        eigenvalues=SpectralProblem.of(held_out, own[0]).eigenvalues,
    )


def _compared(candidate: Candidate, own: tuple[Tensor, Tensor], prompts: Prompts) -> FamilyMatch:
    found, slopes = _with_slopes(candidate.learner, prompts)
    return FamilyMatch(
        candidate.name,
        candidate.learner,
        candidate.hyperparameters,
        candidate.n_fitted,
        (found - own[0]).square().mean(-1),
        cosine_of_sensitivities(slopes, own[1]),
        (found - prompts.query.ys).square().mean(-1),
    )


def _with_slopes(learner: Learner, prompts: Prompts) -> tuple[Tensor, Tensor]:
    if isinstance(learner, AlgorithmLearner) and learner.algorithm is algorithms.nearest_neighbours:
        found = learner.predict(prompts)  # constant wherever it has a derivative
        return found, found.new_full((*found.shape, prompts.x_dim), torch.nan)
    parts = [predictions_and_sensitivities(learner, part) for part in prompts.split(BATCH)]
    predictions, slopes = zip(*parts, strict=True)
    return torch.cat(predictions).cpu(), torch.cat(slopes).cpu()
