"""Learners, and the results that comparing them gives.

A learner turns a prompt into a prediction: a trained transformer, ridge regression, five steps of gradient
descent, a transformer whose weights were written by hand. Everything in the package makes learners, compares them
or opens one.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.special import stdtrit
from torch import Tensor

from mechicl.prompts import Prompts


@runtime_checkable
class Learner(Protocol):
    """Anything that predicts a prompt's target from its context and query."""

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction."""
        ...

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """The prediction of each point t from the points before it."""
        ...


@runtime_checkable
class IterativeLearner(Learner, Protocol):
    """A learner whose prediction is reached in steps: an algorithm's iterations, a network's layers."""

    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> "Trajectory":
        """The predictions after each step, for every prefix; on request with the weights that they come from."""
        ...


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Predictions of an iterative learner after some of its steps, for every prefix of the prompts.

    Attributes:
        steps: the step numbers (iterations of an algorithm, layers of a network), or the values of another
            hyperparameter.
        predictions: `[step prompt point y]`; point t is predicted from the points before it.
        name: of the learner, for tables and pictures.
        weights: `[step prompt point x y]`, the linear model of the query that each prefix has led to, if it was asked
            for (see `analysis.induced_weights`).

    Raises:
        ValueError: another number of steps than of slices, or weights of other prompts than the predictions.
    """

    steps: tuple[float, ...]
    predictions: Float[Tensor, "step prompt point y"]
    name: str = ""
    weights: Float[Tensor, "step prompt point x y"] | None = None

    def __post_init__(self):
        if len(self.steps) != self.predictions.shape[0]:
            raise ValueError(f"{len(self.steps)} steps for {self.predictions.shape[0]} slices of predictions")
        expected = self.predictions.shape
        if self.weights is not None and (*self.weights.shape[:3], self.weights.shape[4]) != expected:
            raise ValueError(
                f"weights [step prompt point x y] of shape {tuple(self.weights.shape)} do not belong to "
                f"predictions [step prompt point y] of shape {tuple(expected)}"
            )

    def part(self, prompts: slice, points: slice = slice(None)) -> "Trajectory":
        """The trajectory of some of the prompts and points."""
        weights = None if self.weights is None else self.weights[:, prompts, points]
        return dataclasses.replace(self, predictions=self.predictions[:, prompts, points], weights=weights)

    def query(self) -> Float[Tensor, "step prompt y"]:
        """The query's predictions."""
        return self.predictions[:, :, -1]

    def squared_errors(self, prompts: Prompts) -> Float[Tensor, "step prompt point"]:
        """Squared error of each prediction, summed over the target's dimensions.

        A trajectory of the query alone (one point) is compared with the query's target.

        Raises:
            ValueError: the predictions are not of these prompts (another number of prompts, points or targets).
        """
        targets = prompts.ys[:, -1:] if self.predictions.shape[2] == 1 else prompts.ys
        if self.predictions.shape[1:] != targets.shape:
            raise ValueError(
                f"predictions [step prompt point y] of shape {tuple(self.predictions.shape)} are not of {prompts}"
            )
        return (self.predictions - targets).square().sum(-1)


Algorithm = Callable[..., Trajectory]


@dataclass(frozen=True, eq=False)
class AlgorithmLearner:
    """An algorithm with its hyperparameters, as a learner: its last requested step is its prediction.

    Attributes:
        algorithm: takes prompts and the hyperparameters, and returns a `Trajectory`; where only the query's
            prediction is wanted, it is also given `points="query"`.
        hyperparameters: keyword arguments of every call.

    Example:
        >>> from mechicl import algorithms
        >>> five_steps = AlgorithmLearner(algorithms.gradient_descent, dict(steps=[5], step_size=0.05))
    """

    algorithm: Algorithm
    hyperparameters: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The algorithm's name and hyperparameters."""
        settings = ", ".join(f"{k}={v}" for k, v in self.hyperparameters.items())
        return f"{getattr(self.algorithm, '__name__', 'algorithm')}({settings})"

    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """All requested steps, all prefixes.

        Raises:
            ValueError: weights are asked of an algorithm that has none, being no linear function of the query.
        """
        if not with_weights:
            return self.algorithm(prompts, **self.hyperparameters)
        if "with_weights" not in inspect.signature(self.algorithm).parameters:
            raise ValueError(f"{self.name} has no weights: it is not linear in the query")
        return self.algorithm(prompts, **self.hyperparameters, with_weights=True)

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction after the last step."""
        return self.algorithm(prompts, **{**self.hyperparameters, "points": "query"}).predictions[-1, :, -1]

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Every point's prediction after the last step."""
        return self.trajectory(prompts).predictions[-1]


@dataclass(frozen=True, eq=False)
class AlgorithmFamily:
    """An algorithm at several values of one hyperparameter, as an iterative learner whose steps are these values.

    Attributes:
        algorithm: as for `AlgorithmLearner`.
        hyperparameter: the name of the one that varies.
        values: its values.
        others: the other hyperparameters.

    Raises:
        ValueError: no values.

    Example:
        >>> penalties = AlgorithmFamily(algorithms.ridge, "penalty", (0.01, 0.1, 1.0))
    """

    algorithm: Algorithm
    hyperparameter: str
    values: tuple[float, ...]
    others: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not self.values:
            raise ValueError(f"a family needs at least one value of {self.hyperparameter}")

    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """The last step at each value, all prefixes; errors as for `AlgorithmLearner.trajectory`."""
        found = [
            AlgorithmLearner(self.algorithm, {**self.others, self.hyperparameter: value}).trajectory(
                prompts, with_weights=with_weights
            )
            for value in self.values
        ]
        weights = [of.weights[-1] for of in found if of.weights is not None]
        predictions = torch.stack([of.predictions[-1] for of in found])
        name = f"{found[0].name} ({self.hyperparameter})"
        return Trajectory(self.values, predictions, name, torch.stack(weights) if weights else None)

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction at the last value."""
        return self.predict_prefixes(prompts)[:, -1]

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Every point's prediction at the last value."""
        return self.trajectory(prompts).predictions[-1]


@torch.no_grad()
def squared_errors(
    learner: Learner, prompts: Prompts, *, points: Literal["all", "query"] = "query", batch_size: int = 4096
) -> Float[Tensor, "prompt point"]:
    """Squared error of a learner's predictions, averaged over the target's dimensions, float64 on the prompts' device.

    Args:
        learner: any learner, on any device.
        prompts: what to predict.
        points: the "query" alone (one point), or "all" points, each from those before it.
        batch_size: prompts in memory at a time.

    Raises:
        ValueError: the learner returned predictions of another shape than the targets.
    """
    parts = []
    for part in prompts.split(batch_size):
        predicted = learner.predict(part)[:, None] if points == "query" else learner.predict_prefixes(part)
        targets = part.ys[:, -1:] if points == "query" else part.ys
        if predicted.shape != targets.shape:
            raise ValueError(f"{type(learner).__name__} predicted {tuple(predicted.shape)} for {tuple(targets.shape)}")
        parts.append((predicted.to(targets.device).double() - targets.double()).square().mean(-1))
    return torch.cat(parts) if parts else prompts.xs.new_zeros(0, 1, dtype=torch.float64)


@dataclass(frozen=True)
class Interval:
    """A mean with a confidence interval.

    Attributes:
        mean: sample mean.
        low: lower end.
        high: upper end.
        n: number of independent samples (prompts or seeds).
        level: confidence level, 0.95 by default.
    """

    mean: float
    low: float
    high: float
    n: int
    level: float = 0.95

    def __str__(self) -> str:
        digits = 4 if not self.half_width or not math.isfinite(self.half_width) else 2 - _magnitude(self.half_width)
        if digits > 12:  # differences at the level of rounding
            return f"{self.mean:.3g} ± {self.half_width:.2g}"
        digits = max(digits, 0)
        return f"{self.mean:.{digits}f} ± {self.half_width:.{digits}f}"

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def _magnitude(value: float) -> int:
    return math.floor(math.log10(abs(value))) + 1


def interval(samples: Tensor, level: float = 0.95) -> Interval:
    """Mean of independent samples and its confidence interval from Student's t distribution.

    With one sample, or none, the interval is not defined and its ends are NaN. Samples that are not finite give a
    mean and ends that are not either: nothing is left out silently.

    Args:
        samples: any shape; every entry counts as one independent sample.
        level: confidence level, strictly between 0 and 1.

    Raises:
        ValueError: level out of range.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be strictly between 0 and 1, got {level}")
    values = samples.detach().cpu().double().flatten()
    n = values.numel()
    mean = values.mean().item() if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n, level)
    half = student_t_quantile(0.5 + level / 2, n - 1) * (values.std() / math.sqrt(n)).item()
    return Interval(mean, mean - half, mean + half, n, level)


def ratio_interval(
    numerator: Float[Tensor, "sample"], denominator: Float[Tensor, "sample"], level: float = 0.95
) -> Interval:
    """Ratio of two means over the same samples, with an interval from the paired samples (delta method).

    Raises:
        ValueError: different numbers of samples, or level out of range.
    """
    if numerator.shape != denominator.shape:
        raise ValueError(f"paired samples needed, got {tuple(numerator.shape)} and {tuple(denominator.shape)}")
    a, b = numerator.detach().cpu().double(), denominator.detach().cpu().double()
    ratio = a.mean() / b.mean()
    # the ratio of means has the standard error of the mean of (a - r b) / mean(b)
    return interval(ratio + (a - ratio * b) / b.mean(), level)


def student_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Quantile of Student's t distribution."""
    return float(stdtrit(degrees_of_freedom, probability))


class Samples:
    """What result objects share: means, intervals and tables of their per-prompt or per-seed tensors.

    A subclass is a frozen dataclass; each of its tensor fields has samples on the last axis (prompts or seeds),
    and any leading axes (layers, scales, ...) index separate quantities.
    """

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each tensor field."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value

    def intervals(self, level: float = 0.95) -> dict[str, Interval]:
        """Mean and confidence interval of each field over its samples.

        Leading axes are averaged first: the entries of one sample are not independent, so they do not count as more
        samples. For the interval of one entry take e.g. `interval(result.field[0])`.
        """
        return {name: interval(_sample_means(value), level) for name, value in self.tensors()}

    def to_dataframe(self) -> pd.DataFrame:
        """One row a sample, one column a field; a field with leading axes has a column an entry, `name[0,1]`.

        Raises:
            ValueError: the fields differ in their number of samples.
        """
        columns = {}
        for name, value in self.tensors():
            entries = torch.atleast_1d(value.detach().cpu())
            if entries.dtype == torch.bfloat16:  # numpy has no such type
                entries = entries.float()
            for place in np.ndindex(*entries.shape[:-1]):
                label = f"{name}[{','.join(map(str, place))}]" if place else name
                columns[label] = entries[place].numpy()
        return pd.DataFrame(columns)


def _sample_means(value: Tensor) -> Tensor:
    value = value.detach().cpu().double()
    while value.ndim > 1:
        value = value.mean(0)
    return value
