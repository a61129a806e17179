"""Losses next to those of the best known learner, or on shifted prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.algorithms.references import references as task_references
from mechicl.base.arguments import at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.checkpoints.study import takes_study
from mechicl.learners import Learner, Learners, prompt_batches, squared_errors, token_losses
from mechicl.learners.learners import bytes_per_prompt, named_learners, predictions_at
from mechicl.learners.token_learners import named_token_learners, sequence_batches
from mechicl.prompts import Prompts, TokenSequences
from mechicl.prompts.prompts import PointsAt
from mechicl.statistics import UNBOUNDED, Interval, Result, interval, ratio_interval
from mechicl.statistics.results import index_of
from mechicl.tasks import AnyTask, LinearRegression
from mechicl.tasks.sampling import TokenDistribution

Loss = Literal["squared error", "log loss", "errors", "nats"]
LEAST_PROBABILITY = 1e-3
"""Lower limit of predicted probabilities of classes in the log loss; the upper limit is 1 minus it."""


@dataclass(frozen=True, eq=False)
class Regret(Result):
    """Losses of a learner and of its task's reference learners on the same prompts, point by point; see `regret`.

    Attributes:
        learner: name of the learner that was measured; `reference` is that of the reference that is subtracted.
        loss: the "squared error" (mean over the target's dimensions), the "log loss" (nats), the share of "errors", or
            "nats" per token.
        points: number of points (or tokens) before each prediction.
        losses: loss of each learner by name, `[point prompt]`.
    """

    learner: str
    reference: str
    loss: str
    points: tuple[int, ...]
    losses: dict[str, Float[Tensor, "point prompt"]]

    @property
    def _limits(self) -> tuple[float, float]:
        return (-1.0, 1.0) if self.loss == "errors" else UNBOUNDED

    @checked
    def regret(self, name: str | None = None) -> Float[Tensor, "point prompt"]:
        """Return a learner's loss (a key of `losses`; by default the measured learner's) minus the reference's."""
        name = name or self.learner
        index_of("learner", name, self.losses)
        return self.losses[name] - self.losses[self.reference]

    @checked
    def curve(self, name: str | None = None, level: float = 0.95) -> list[Interval]:
        """Return the mean regret after each number of `points`, with intervals over prompts; `name` as for `regret`."""
        return [interval(at_point, level, within=self._limits) for at_point in self.regret(name)]

    @checked
    def mean(self, name: str | None = None, level: float = 0.95) -> Interval:
        """Return the mean regret over all points, with an interval over prompts; `name` as for `regret`."""
        return interval(self.regret(name).mean(0), level, within=self._limits)

    @checked
    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Return one row per learner and number of points: mean loss, and the regret with its interval over prompts."""
        rows = []
        for name, losses in self.losses.items():
            for points, loss, regret in zip(self.points, losses, self.curve(name, level), strict=True):
                row = {"learner": name, "points": points, "loss": loss.mean().item()}
                rows.append(row | regret.columns("regret"))
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        last = len(self.points) - 1
        places = sorted({0, last // 4, last // 2, last})
        columns = ["mean loss", "mean regret", *(f"regret after {self.points[place]}" for place in places)]
        lines = [(f"{self.loss}; regret over {self.reference}", " ".join(f"{column:>18}" for column in columns))]
        for name, losses in self.losses.items():
            curve = self.curve(name)
            numbers = [f"{losses.mean().item():.4f}", str(self.mean(name)), *(str(curve[place]) for place in places)]
            lines.append((name, " ".join(f"{number:>18}" for number in numbers)))
        return lines


@takes_study
@checked
def regret(
    learner: Any,
    task: AnyTask,
    *,
    references: str | Sequence[str] | None = None,
    also: Learners = (),
    loss: Loss | None = None,
    at: PointsAt = "points",
    n_prompts: Annotated[int, at_least(2)] = 2000,
    seed: int = 0,
    progress: bool | None = None,
) -> Regret:
    """Measure a learner's excess loss over the best known learner of a task, on the same prompts, by number of points.

    If that reference is exact Bayes, the regret is at least 0 up to sampling error. A model with less regret than the
    task's other references does something that they cannot.

    Args:
        learner: a model, an `AlgorithmLearner`, or anything else with `predict(prompts)`; for a task of tokens a model
            on token ids, or anything with `log_probabilities(sequences)`.
        task: a task of points or of tokens that has reference learners: see `algorithms.references(task)`.
        references: names of the task's references to measure, by default all; the loss of the first is subtracted.
            The first by default is the best known, but for `GaussianClusters` see `algorithms.references`. Some, such
            as training a network on each context, are slow.
        also: more learners to measure: a mapping from names, or a sequence of learners with names. As a control, for
            example `{"untrained": HookedTransformer(model.cfg, seed=1)}`.
        loss: loss of a prediction. For points "squared error" (the default), or where targets are classes, ±1 or
            one-hot, "log loss" (in nats; predictions are read as the mean of the target, so as probabilities, and
            clipped to 0.001 .. 0.999) or "errors" (the share of wrong classes; a tie counts half). For tokens "nats",
            minus the log-probability of the next token.
        at: "points" for the loss at every point, predicted from those before it; "query" for the last point only.
        n_prompts: number of prompts to draw from the task, with `seed`.

    Returns:
        A `Regret`: `regret(name)` `[point prompt]` is a learner's loss minus the reference's (of the learner itself by
        default), `curve(name)` its mean at each point and `mean(name)` over all points.

    Example:
        >>> print(regret(load("lsa-1l"), LinearRegression(), at="query", n_prompts=512))
        Regret...
    """
    on_tokens = isinstance(task, TokenDistribution)
    named: Callable[[Any], dict[str, Any]] = named_token_learners if on_tokens else named_learners
    known = task_references(task)
    wanted = (references,) if isinstance(references, str) else tuple(references or known)
    for each in wanted:
        index_of("references", each, known)
    known = {each: known[each] for each in wanted}
    name = str(getattr(learner, "name", None) or "model")
    name = f"{name} (learner)" if name in known else name
    learners = named({name: learner})
    for more in (known, named(also)):
        twice = sorted(learners.keys() & more.keys())
        if twice:
            raise ValueError(f"two learners are called {twice[0]!r}: give yours another name in also=")
        learners |= more
    measured, points, batches, measure = (_on_tokens if on_tokens else _on_points)(
        learners, task, loss, at, n_prompts, seed
    )
    parts: dict[str, list[Tensor]] = {name: [] for name in learners}
    with progress_bar(total=len(batches) * len(learners), unit="run", progress=progress, desc="regret") as bar:
        for part in batches:
            for each in learners:
                parts[each].append(measure(part, each))
                bar.update(1)
    losses = {name_: torch.cat(tensors).T for name_, tensors in parts.items()}
    return Regret(name, wanted[0], measured, points, losses)


_Measurement = tuple[str, tuple[int, ...], list[Any], Callable[[Any, str], Float[Tensor, "prompt point"]]]


def _on_tokens(
    learners: dict[str, Any], task: Any, loss: str | None, at: PointsAt, n_prompts: int, seed: int
) -> _Measurement:
    """Loss, points, batches, and the function that measures a learner on a batch."""
    if loss not in (None, "nats"):
        raise ValueError(f"loss={loss!r} is for prompts of points; tokens are measured in 'nats'")
    sequences = task.sample(n_prompts, seed=seed)
    places = scored_places(sequences, task)[-1 if at == "query" else 0 :]
    batches = list(sequence_batches(sequences, getattr(task, "d_vocab", 2)))
    return (
        "nats",
        tuple((places + 1).tolist()),
        batches,
        lambda part, name: token_losses(learners[name], part)[:, places],
    )


def scored_places(sequences: TokenSequences, task: Any) -> Int[Tensor, "point"]:
    """Return the positions read at which all sequences have a token to predict; a ValueError if there is none."""
    places = sequences.predictable[:, 1:].all(0).nonzero().flatten()
    if not len(places):
        raise ValueError(f"sequences of {task} have no position in common that is predicted")
    return places


def _on_points(
    learners: dict[str, Any], task: Any, loss: str | None, at: PointsAt, n_prompts: int, seed: int
) -> _Measurement:
    """Loss, points, batches, and the function that measures a learner on a batch."""
    measures = {"squared error": lambda a, b: (a - b).square().mean(-1), "log loss": _log_losses, "errors": _wrong}
    loss = loss or "squared error"
    index_of("loss", loss, measures)
    prompts = task.sample(n_prompts, seed=seed, dtype=torch.float64)
    if loss != "squared error" and not are_classes(prompts.ys):
        raise ValueError(f"loss={loss!r} is for targets that are ±1 or one-hot; those of {type(task).__name__} are not")

    @torch.no_grad()
    def measure(part: Prompts, name: str) -> Tensor:
        predicted = predictions_at(learners[name], part, at, name=name)
        targets = part.ys[:, -1:] if at == "query" else part.ys
        return measures[loss](predicted.cpu().double(), targets.cpu())

    # a reference without its own estimate is small next to a model
    largest = max(learners.values(), key=lambda one: hasattr(one, "bytes_per_prompt") * bytes_per_prompt(one, prompts))
    points = tuple(range(prompts.n_context + 1))[-1 if at == "query" else 0 :]
    return loss, points, list(prompt_batches(largest, prompts)), measure


def are_classes(ys: Float[Tensor, "*any y"]) -> bool:
    """True if targets are classes: all ±1 in one dimension, or one-hot in several."""
    if ys.shape[-1] == 1:
        return bool((ys.abs() == 1).all())
    return bool(((ys == 0) | (ys == 1)).all() and (ys.sum(-1) == 1).all())


def _log_losses(predicted: Tensor, targets: Tensor) -> Tensor:
    if targets.shape[-1] == 1:
        chance = (1 + predicted * targets)[..., 0] / 2
        return -chance.clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY).log()
    chances = predicted.clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return -((chances * targets).sum(-1) / chances.sum(-1)).log()


def _wrong(predicted: Tensor, targets: Tensor) -> Tensor:
    if targets.shape[-1] == 1:
        return (1 - predicted.sign() * targets)[..., 0] / 2
    best = (predicted == predicted.amax(-1, keepdim=True)).double()
    return 1 - (best * targets).sum(-1) / best.sum(-1)


Scaled = Literal["input_scale", "weight_scale"]
FOREIGN_INPUTS = ("gaussian", "exponential", "laplace")
"""The three input distributions of von Oswald et al. 2023, A.2; each prompt draws one of them."""


@dataclass(frozen=True, eq=False)
class ShiftedLosses(Result):
    """Squared errors of learners at several scales of the inputs or the weights; see `measure_shifted_losses`."""

    learners: tuple[str, ...]
    scaled: str
    scales: tuple[float, ...]
    squared_errors: Float[Tensor, "learner scale prompt"]

    def mean(self) -> Float[Tensor, "learner scale"]:
        """Return the mean squared error over prompts."""
        return self.squared_errors.mean(-1)

    def ratio(self, learner: str, reference: str) -> list[Interval]:
        """Return one learner's mean loss over another's at each scale, with 95% intervals over the paired prompts."""
        errors, others = (
            self.squared_errors[index_of("learner", name, self.learners)] for name in (learner, reference)
        )
        return [ratio_interval(*pair) for pair in zip(errors, others, strict=True)]


@checked
def measure_shifted_losses(
    learners: Mapping[str, Learner],
    task: LinearRegression,
    scales: Sequence[float] = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),
    *,
    scaled: Scaled = "input_scale",
    n_prompts: int = 10_000,
    seed: int = 0,
    progress: bool | None = None,
) -> ShiftedLosses:
    """Measure how learners' losses change when the task's inputs or weights are larger or smaller than in training.

    For other input distributions than in training, pass `task.replace(inputs=("gaussian", "exponential", "laplace"))`.
    Source: von Oswald et al. 2023, A.2 and Fig. 6.

    Args:
        learners: learners by name: models, or anything else with `predict(prompts)`.
        task: the task to scale; scale 1 is the task itself.
        scales: factors on the task's own scale.
        scaled: the field of the task that is multiplied: "input_scale" (all x) or "weight_scale" (the true weights).
        seed: seed of the prompts; every scale uses the same random numbers.

    Returns:
        A `ShiftedLosses`: `squared_errors` `[learner scale prompt]` of the query, averaged over the target's
        dimensions, their `mean()`, and the `ratio(learner, reference)` of means at each scale.

    Example:
        >>> step = AlgorithmLearner(algorithms.gradient_descent, dict(steps=1, step_size=0.6))
        >>> learners = {"trained": load("lsa-1l"), "step": step}
        >>> measure_shifted_losses(learners, LinearRegression(), n_prompts=512).ratio("trained", "step")
    """
    if not learners or not scales:
        raise ValueError("measure_shifted_losses() needs at least one learner and one scale")
    errors = []
    for scale in progress_bar(scales, unit="scale", progress=progress, desc="shifts"):
        prompts = task.replace(**{scaled: getattr(task, scaled) * scale}).sample(n_prompts, seed=seed)
        errors.append(torch.stack([squared_errors(each, prompts)[:, 0] for each in learners.values()]))
    return ShiftedLosses(tuple(learners), scaled, tuple(map(float, scales)), torch.stack(errors, dim=1))
