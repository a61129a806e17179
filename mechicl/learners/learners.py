"""Learners, and the results that comparing them gives.

A learner turns a prompt into a prediction: a trained transformer, ridge regression, five steps of gradient
descent, a transformer whose weights were written by hand. Everything in the package makes learners, compares them
or opens one.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY, Budget
from mechicl.prompts import PointsAt, Prompts


@runtime_checkable
class Learner(Protocol):
    """Anything that predicts a prompt's target from its context and query."""

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction."""
        ...


@runtime_checkable
class PrefixLearner(Learner, Protocol):
    """A learner that predicts every point from the points before it, too."""

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """The prediction of each point t from the points before it."""
        ...


@runtime_checkable
class IterativeLearner(PrefixLearner, Protocol):
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
            for (see `analysis.behaviour.induced_weights`).

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

    def step_errors(self, prompts: Prompts) -> Float[Tensor, "step prompt point"]:
        """Squared error after each step, averaged over the target's dimensions.

        A trajectory of the query alone (one point) is compared with the query's target.

        Raises:
            ValueError: the predictions are not of these prompts (another number of prompts, points or targets).
        """
        targets = prompts.ys[:, -1:] if self.predictions.shape[2] == 1 else prompts.ys
        if self.predictions.shape[1:] != targets.shape:
            raise ValueError(
                f"predictions [step prompt point y] of shape {tuple(self.predictions.shape)} are not of {prompts}"
            )
        return (self.predictions - targets.to(self.predictions.device)).square().mean(-1)


@dataclass(frozen=True, eq=False)
class AlgorithmLearner:
    """An algorithm, or any function of prompts, with its hyperparameters as a learner.

    Attributes:
        algorithm: takes prompts and the hyperparameters. It returns predictions, a tensor or numpy array `[prompt y]`
            for the query or `[prompt point y]` for every point; or a `Trajectory`, whose last step is the prediction.
            If it has a parameter `at`, it is given `at="query"` where only the query's prediction is wanted.
        hyperparameters: keyword arguments of every call.

    Raises:
        TypeError: when called, the algorithm returned something else.
        ValueError: when called, predictions of another shape.

    Example:
        >>> from mechicl import algorithms
        >>> five_steps = AlgorithmLearner(algorithms.gradient_descent, dict(steps=[5], step_size=0.05))
        >>> zero = AlgorithmLearner(lambda prompts: 0 * prompts.query.ys)
    """

    algorithm: Callable[..., Any]
    hyperparameters: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The algorithm's name and hyperparameters."""
        settings = ", ".join(f"{k}={_in_words(v)}" for k, v in self.hyperparameters.items())
        return f"{getattr(self.algorithm, '__name__', 'algorithm')}({settings})"

    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """All requested steps, all prefixes.

        Raises:
            ValueError: weights are asked of an algorithm that has none, being no linear function of the query.
        """
        if with_weights:
            if not self._takes("with_weights"):
                raise ValueError(f"{self.name} has no weights: it is not linear in the query")
            return self.algorithm(prompts, **self.hyperparameters, with_weights=True)
        result = self.algorithm(prompts, **self.hyperparameters)
        if isinstance(result, Trajectory):
            return result
        predictions = self._checked(result, prompts)
        if predictions.shape[1] < prompts.n_context + 1:  # the query's alone: every point as the query of its prefix
            before = [self.predict(prompts.prefix(t)) for t in range(prompts.n_context)]
            predictions = torch.stack([*before, predictions[:, -1]], dim=1)
        return Trajectory((1,), predictions[None], self.name)

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction after the last step."""
        at = {"at": "query"} if self._takes("at") else {}
        result = self.algorithm(prompts, **{**self.hyperparameters, **at})
        if isinstance(result, Trajectory):
            return result.predictions[-1, :, -1]
        return self._checked(result, prompts)[:, -1]

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Every point's prediction after the last step."""
        return self.trajectory(prompts).predictions[-1]

    def _takes(self, parameter: str) -> bool:
        parameters = inspect.signature(self.algorithm).parameters.values()
        return any(each.name == parameter or each.kind is each.VAR_KEYWORD for each in parameters)

    def _checked(self, result: Any, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Predictions that the algorithm returned as they are, of every point or of the query alone."""
        if isinstance(result, np.ndarray):
            result = torch.from_numpy(result).to(prompts.xs)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"{self.name} returned {type(result).__name__}, not predictions [prompt y] or [prompt point y] (a "
                f"tensor or numpy array), nor a Trajectory"
            )
        predictions = result[:, None] if result.ndim == 2 else result
        if predictions.shape not in (prompts.ys.shape, prompts.ys[:, -1:].shape):
            raise ValueError(
                f"{self.name} returned the shape {tuple(result.shape)} for {prompts}: predictions are [prompt y] or "
                f"[prompt point y]"
            )
        return predictions


def _in_words(value: Any) -> str:
    """A hyperparameter in a name: tensors by their shape, functions by their name."""
    if isinstance(value, Tensor) and value.ndim:
        return f"[{' x '.join(map(str, value.shape))}]"
    return getattr(value, "__name__", str(value))


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

    algorithm: Callable[..., Any]
    hyperparameter: str
    values: tuple[float, ...]
    others: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not self.values:
            raise ValueError(f"a family needs at least one value of {self.hyperparameter}")

    @property
    def name(self) -> str:
        """The algorithm's name and the hyperparameter that varies."""
        return f"{getattr(self.algorithm, '__name__', 'algorithm')} ({self.hyperparameter})"

    def members(self) -> list[AlgorithmLearner]:
        """The algorithm at each of the values."""
        return [AlgorithmLearner(self.algorithm, {**self.others, self.hyperparameter: value}) for value in self.values]

    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """The last step at each value, all prefixes; errors as for `AlgorithmLearner.trajectory`."""
        trajectories = [member.trajectory(prompts, with_weights=with_weights) for member in self.members()]
        weights = [trajectory.weights[-1] for trajectory in trajectories if trajectory.weights is not None]
        predictions = torch.stack([trajectory.predictions[-1] for trajectory in trajectories])
        name = f"{trajectories[0].name} ({self.hyperparameter})"
        return Trajectory(self.values, predictions, name, torch.stack(weights) if weights else None)

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction at the last value."""
        return self.predict_prefixes(prompts)[:, -1]

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Every point's prediction at the last value."""
        return self.trajectory(prompts).predictions[-1]


Learners = Mapping[str, Any] | Sequence[Any]
"""Learners by name, or named after themselves."""


@checked
def named_learners(learners: Learners) -> dict[str, Any]:
    """Learners by name: as they are given, or else their `name` or type, numbered where several would have the same.

    Raises:
        TypeError: something without `predict`.

    Example:
        >>> list(named_learners([AlgorithmFamily(algorithms.ridge, "penalty", (0.1, 1.0))]))
        ['ridge (penalty)']
    """
    if not isinstance(learners, Mapping):
        names = [str(getattr(each, "name", None) or type(each).__name__) for each in learners]
        numbered = [f"{name} {i + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)]
        learners = dict(zip(numbered, learners, strict=True))
    for name, each in learners.items():
        if not isinstance(each, Learner):
            raise TypeError(
                f"{name!r} ({type(each).__name__}) is no learner: it has no method "
                f"predict(prompts). AlgorithmLearner makes one of a function, mechicl.wrap of a torch module"
            )
    return dict(learners)


def predictions_at(learner: Learner, prompts: Prompts, at: PointsAt) -> Float[Tensor, "prompt point y"]:
    """A learner's predictions of the "query" alone (one point), which only needs `predict`, or of all "points".

    Raises:
        TypeError: all points, and a learner without `predict_prefixes`.
    """
    if at == "query":
        return learner.predict(prompts)[:, None]
    if not isinstance(learner, PrefixLearner):
        raise TypeError(
            f"{type(learner).__name__} has no method predict_prefixes(prompts), which predictions of all points need; "
            f"of the query (at='query') predict is enough"
        )
    return learner.predict_prefixes(prompts)


@checked
def bytes_per_prompt(learner: object, prompts: Prompts) -> float:
    """About how many bytes a learner's predictions take for each prompt.

    A learner with a method `bytes_per_prompt(prompts)` says it itself; any other is taken to hold a few matrices
    `[x + y, x + y]` for every prefix.
    """
    measure: Callable[[Prompts], float] | None = getattr(learner, "bytes_per_prompt", None)
    return measure(prompts) if measure else 64 * (prompts.n_context + 1) * (prompts.x_dim + prompts.y_dim) ** 2


@checked
def prompt_batches(
    learner: Learner, prompts: Prompts, memory: float = MEMORY, *, copies: float = 1, held: float = 0.0
) -> Iterator[Prompts]:
    """Prompts in parts on which a learner's predictions take at most `memory` bytes.

    Args:
        learner: see `bytes_per_prompt`.
        prompts: to be split.
        memory: bound in bytes.
        copies: how many times as much the caller holds, say for gradients.
        held: bytes that the caller keeps all the while.

    Raises:
        ValueError: not enough memory for one prompt.
    """
    yield from prompts.split(Budget(memory, held).rows(copies * bytes_per_prompt(learner, prompts), at_most=4096))


@checked
@torch.no_grad()
def squared_errors(
    learner: Learner, prompts: Prompts, *, at: PointsAt = "query", memory: float = MEMORY
) -> Float[Tensor, "prompt point"]:
    """Squared error of a learner's predictions, averaged over the target's dimensions, float64 on the prompts' device.

    Args:
        learner: any learner, on any device.
        prompts: what to predict.
        at: the "query" alone (one point), or all "points", each from those before it.
        memory: bound in bytes on what is held at a time.

    Raises:
        TypeError: all points, and a learner without `predict_prefixes`.
        ValueError: the learner returned predictions of another shape than the targets.
    """
    parts = []
    for part in prompt_batches(learner, prompts, memory):
        predicted = predictions_at(learner, part, at)
        targets = part.ys[:, -1:] if at == "query" else part.ys
        if predicted.shape != targets.shape:
            raise ValueError(f"{type(learner).__name__} predicted {tuple(predicted.shape)} for {tuple(targets.shape)}")
        parts.append((predicted.to(targets.device).double() - targets.double()).square().mean(-1))
    return torch.cat(parts) if parts else prompts.xs.new_zeros(0, 1, dtype=torch.float64)
