"""How much worse a learner is than the best known learner of its task, after each number of points."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.references import references
from mechicl.base.arguments import at_least, checked
from mechicl.base.memory import MEMORY
from mechicl.base.progress import progress_bar
from mechicl.learners import (
    Learners,
    TokenLearners,
    bytes_per_prompt,
    named_learners,
    named_token_learners,
    prompt_batches,
    sequence_batches,
    token_losses,
)
from mechicl.learners.learners import predictions_at
from mechicl.prompts import PointsAt, Prompts
from mechicl.statistics import Interval, Result, interval
from mechicl.statistics.results import index_of
from mechicl.tasks import AnyTask
from mechicl.tasks.sampling import TokenDistribution

Loss = Literal["squared error", "log loss", "errors", "nats"]
LEAST_PROBABILITY = 1e-3
"""Lower limit of predicted probabilities of classes in the log loss; the upper limit is 1 minus it."""


@dataclass(frozen=True, eq=False)
class Regret(Result):
    """Losses of a learner and of its task's reference learners on the same prompts, point by point.

    Attributes:
        learner: name of the learner.
        reference: name of the reference that is subtracted.
        loss: the "squared error" (mean over the target's dimensions), the "log loss" (nats), the share of "errors", or
            "nats" per token.
        points: number of points (or tokens) before each prediction.
        losses: losses of each learner by name, `[point prompt]`.
    """

    learner: str
    reference: str
    loss: str
    points: tuple[int, ...]
    losses: dict[str, Float[Tensor, "point prompt"]]

    def regret(self, name: str | None = None) -> Float[Tensor, "point prompt"]:
        """Loss of a learner, by default of `learner`, minus the reference's."""
        name = name or self.learner
        index_of("learner", name, self.losses)
        return self.losses[name] - self.losses[self.reference]

    def curve(self, name: str | None = None, level: float = 0.95) -> list[Interval]:
        """The mean regret after each number of points, with intervals over prompts."""
        return [interval(at_point, level) for at_point in self.regret(name)]

    def mean(self, name: str | None = None, level: float = 0.95) -> Interval:
        """The mean regret over all points, with an interval over prompts."""
        return interval(self.regret(name).mean(0), level)

    def last(self, name: str | None = None, level: float = 0.95) -> Interval:
        """The mean regret after the whole context."""
        return interval(self.regret(name)[-1], level)

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """One row per learner and number of points: the mean loss and the regret with its interval over prompts."""
        rows = []
        for name, losses in self.losses.items():
            for points, loss, regret in zip(self.points, losses, self.curve(name, level), strict=True):
                rows.append({
                    "learner": name, "points": points, "loss": loss.mean().item(),
                    "regret": regret.mean, "low": regret.low, "high": regret.high,
                })  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        last = len(self.points) - 1
        places = sorted({0, last // 4, last // 2, last})
        columns = ["mean", "regret", *(f"after {self.points[place]}" for place in places)]
        lines = [(f"{self.loss}, above {self.reference}", " ".join(f"{column:>18}" for column in columns))]
        for name, losses in self.losses.items():
            curve = self.curve(name)
            numbers = [f"{losses.mean().item():.4f}", str(self.mean(name)), *(str(curve[place]) for place in places)]
            lines.append((name, " ".join(f"{number:>18}" for number in numbers)))
        return lines


@checked
def regret(
    learner: Any,
    task: AnyTask,
    *,
    reference: str | None = None,
    also: Learners | TokenLearners = (),
    with_references: bool = True,
    untrained: Any = None,
    loss: Loss | None = None,
    at: PointsAt = "points",
    n_prompts: Annotated[int, at_least(2)] = 2000,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> Regret:
    """Subtract the loss of the best known learner of a task from a learner's, on the same prompts, after each point.

    Where the reference is exact Bayes (`algorithms.references` puts it first), no learner has a negative regret except
    by chance. The task's other references are measured too: a model whose regret falls below theirs does something
    that they cannot.

    Args:
        learner: any learner; for a task of tokens a network on ids, or anything with `log_probabilities`.
        task: a task of points or of tokens that has reference learners.
        reference: the name of the reference to measure against; by default the first.
        also: further learners to measure.
        with_references: measure the task's other references too; False saves the time of slow ones, such as training a
            network on each context.
        untrained: a network to measure as the control, e.g. `HookedTransformer(model.cfg, seed=1)`.
        loss: for points "squared error" (the default), or where targets are classes, ±1 or one-hot, "log loss" (in
            nats; predictions are read as the mean of the target, so as probabilities, and clipped to 0.001 .. 0.999) or
            "errors" (the share of wrong classes; a tie counts half). For tokens "nats".
        at: the curve over all "points", each predicted from those before it, or the "query" alone.
        n_prompts: number of prompts.

    Example:
        >>> print(regret(load("lsa-1l"), LinearRegression(), at="query", n_prompts=512))
        Regret...
    """
    on_tokens = isinstance(task, TokenDistribution)
    name_learners: Callable[[Any], dict[str, Any]] = named_token_learners if on_tokens else named_learners
    known = references(task)
    reference = reference or next(iter(known))
    index_of("reference", reference, known)
    known = known if with_references else {reference: known[reference]}
    name = str(getattr(learner, "name", None) or "model")
    name = f"{name} (learner)" if name in known else name
    learners = name_learners({name: learner})
    for more in (known, name_learners(also), {} if untrained is None else name_learners({"untrained": untrained})):
        twice = sorted(learners.keys() & more.keys())
        if twice:
            raise ValueError(f"two learners are called {twice[0]!r}: give yours another name in also=")
        learners |= more
    if on_tokens:
        measured, points, batches = _token_batches(task, loss, at, n_prompts, seed, memory)
    else:
        measured, points, batches = _point_batches(learners, task, loss, at, n_prompts, seed, memory)
    parts: dict[str, list[Tensor]] = {name: [] for name in learners}
    runs = [(measure, each) for measure in batches for each in learners]
    for measure, each in progress_bar(runs, unit="run", progress=progress, desc="regret"):
        parts[each].append(measure(each, learners[each]))
    losses = {name_: torch.cat(tensors).T for name_, tensors in parts.items()}
    return Regret(name, reference, measured, points, losses)


Measure = Callable[[str, Any], Float[Tensor, "prompt point"]]


def _token_batches(
    task: TokenDistribution, loss: str | None, at: str, n_prompts: int, seed: int, memory: float
) -> tuple[str, tuple[int, ...], Iterator[Measure]]:
    if loss not in (None, "nats"):
        raise ValueError(f"loss={loss!r} is for prompts of points; tokens are measured in 'nats'")
    sequences = task.sample(n_prompts, seed=seed)
    scored = sequences.predictable[:, 1:].all(0)
    if not scored.any():
        raise ValueError(f"sequences of {task} have no position in common that is predicted: there is no curve")
    places = scored.nonzero().flatten()[-1 if at == "query" else 0 :]

    def measure(part: Any, _: str, learner: Any) -> Tensor:
        return token_losses(learner, part)[:, places]

    batches = sequence_batches(sequences, getattr(task, "d_vocab", 2), memory)
    return "nats", tuple((places + 1).tolist()), (partial(measure, part) for part in batches)


def _point_batches(
    learners: dict[str, Any], task: Any, loss: str | None, at: PointsAt, n_prompts: int, seed: int, memory: float
) -> tuple[str, tuple[int, ...], Iterator[Measure]]:
    measures = {"squared error": _squared_errors, "log loss": _log_losses, "errors": _wrong}
    loss = loss or "squared error"
    index_of("loss", loss, measures)
    prompts = task.sample(n_prompts, seed=seed, dtype=torch.float64)
    if loss != "squared error" and not are_classes(prompts.ys):
        raise ValueError(f"loss={loss!r} is for targets that are ±1 or one-hot; those of {type(task).__name__} are not")

    @torch.no_grad()
    def measure(part: Prompts, name: str, learner: Any) -> Tensor:
        predicted = predictions_at(learner, part, at)
        targets = part.ys[:, -1:] if at == "query" else part.ys
        if predicted.shape != targets.shape:
            raise ValueError(f"{name!r} predicted {tuple(predicted.shape)} for targets {tuple(targets.shape)}")
        return measures[loss](predicted.cpu().double(), targets.cpu())

    # a reference without an estimate of its own is small next to a model
    largest = max(
        learners.values(), key=lambda each: hasattr(each, "bytes_per_prompt") * bytes_per_prompt(each, prompts)
    )
    batches = prompt_batches(largest, prompts, memory)
    points = tuple(range(prompts.n_context + 1))[-1 if at == "query" else 0 :]
    return loss, points, (partial(measure, part) for part in batches)


def are_classes(ys: Float[Tensor, "*any y"]) -> bool:
    """True if targets are classes: all ±1 in one dimension, or one-hot in several."""
    if ys.shape[-1] == 1:
        return bool((ys.abs() == 1).all())
    return bool(((ys == 0) | (ys == 1)).all() and (ys.sum(-1) == 1).all())


def _squared_errors(predicted: Tensor, targets: Tensor) -> Tensor:
    return (predicted - targets).square().mean(-1)


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
