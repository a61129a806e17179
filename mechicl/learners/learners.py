"""Learners of points: the protocols, algorithms as learners, and their predictions and errors.

A learner turns a prompt into a prediction: a trained transformer, ridge regression, five steps of gradient descent, a
transformer whose weights were written by hand. Everything in the package makes learners, compares them or opens one.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.annotations import described
from mechicl.base.arguments import calling, check_fields, checked
from mechicl.base.memory import Budget
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt


@runtime_checkable
class Learner(Protocol):
    """Anything that predicts queries from contexts: models, `AlgorithmLearner`, your classes with `predict`."""

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Return the query's prediction."""
        ...


@runtime_checkable
class PrefixLearner(Learner, Protocol):
    """Interface of a learner that also predicts every point from the points before it."""

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Return the prediction of each point t from the points 0..t-1; the last one is the query's."""
        ...


@runtime_checkable
class IterativeLearner(PrefixLearner, Protocol):
    """Interface of a learner that reaches its prediction in steps: an algorithm's iterations, a network's layers."""

    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> "Trajectory":
        """Return the predictions after each step, for every prefix.

        Args:
            with_weights: also return the weights W of each prediction `x W`, as `weights` `[step prompt point x y]`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Predictions of an iterative learner after some of its steps, for every prefix of the prompts.

    Attributes:
        steps: the step numbers (iterations of an algorithm, layers of a network), or the values of another
            hyperparameter. An algorithm without steps has one, 1.
        predictions: `[step prompt point y]`; point t is predicted from points 0..t-1, and the last point is the query.
        name: the learner's name, for tables and pictures.
        weights: `[step prompt point x y]`, the linear weights W of each prediction `x W`; None if they were not
            requested (`with_weights=True`).
    """

    steps: tuple[float, ...]
    predictions: Float[Tensor, "step prompt point y"]
    name: str = ""
    weights: Float[Tensor, "step prompt point x y"] | None = None

    def __post_init__(self):
        check_fields(self, undefined=True)
        expected = self.predictions.shape
        if len(self.steps) != expected[0]:
            raise ValueError(f"{len(self.steps)} steps for {expected[0]} slices of predictions")
        if self.weights is not None and (*self.weights.shape[:3], self.weights.shape[4]) != expected:
            raise ValueError(
                f"weights [step prompt point x y] of shape {tuple(self.weights.shape)} do not fit predictions "
                f"[step prompt point y] of shape {tuple(expected)}"
            )

    @checked
    def part(self, prompts: slice, points: slice = slice(None)) -> "Trajectory":
        """Return the trajectory of some of the prompts and points; all points by default."""
        weights = None if self.weights is None else self.weights[:, prompts, points]
        return dataclasses.replace(self, predictions=self.predictions[:, prompts, points], weights=weights)

    def query(self) -> Float[Tensor, "step prompt y"]:
        """Return the last point's predictions after each step."""
        return self.predictions[:, :, -1]

    @checked
    def step_errors(self, prompts: Prompts) -> Float[Tensor, "step prompt point"]:
        """Return the squared error of each point after each step, averaged over the target's dimensions.

        Args:
            prompts: the prompts that were predicted; a trajectory with one point is compared with the query's target.
        """
        targets = prompts.ys[:, -1:] if self.predictions.shape[2] == 1 else prompts.ys
        if self.predictions.shape[1:] != targets.shape:
            shape = tuple(self.predictions.shape)
            raise ValueError(f"predictions [step prompt point y] of shape {shape} do not fit {prompts}")
        return (self.predictions - targets.to(self.predictions.device)).square().mean(-1)


@dataclass(frozen=True, eq=False)
class AlgorithmLearner:
    """An algorithm, or any function of prompts, with its hyperparameters as a learner.

    Attributes:
        algorithm: takes prompts and the hyperparameters. It returns predictions, a tensor or numpy array `[prompt y]`
            for the query or `[prompt point y]` for every point; or a `Trajectory`, whose last step is the prediction.
            If it has a parameter `at`, it is called with `at="query"` where only the query's prediction is needed.
        hyperparameters: keyword arguments of every call.

    Example:
        >>> from mechicl import algorithms
        >>> five_steps = AlgorithmLearner(algorithms.gradient_descent, dict(steps=[5], step_size=0.05))
        >>> zero = AlgorithmLearner(lambda prompts: 0 * prompts.query.ys)
    """

    algorithm: Callable[..., Any]
    hyperparameters: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)

    @property
    def name(self) -> str:
        """The algorithm's name and hyperparameters."""
        return call_as_text(self.algorithm, self.hyperparameters)

    @checked(undefined=True)
    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """Return the predictions after all requested steps, for every prefix; one step if the algorithm has none."""
        if with_weights:
            if not self._takes("with_weights"):
                raise ValueError(
                    f"{self.name} gives no weights: it is not linear in the query, or its function has no parameter "
                    f"with_weights"
                )
            return self.algorithm(prompts, **self.hyperparameters, with_weights=True)
        result = self.algorithm(prompts, **self.hyperparameters)
        if isinstance(result, Trajectory):
            return result
        predictions = self._checked(result, prompts)
        if predictions.shape[1] < prompts.n_context + 1:  # the query's alone: every point as the query of its prefix
            before = [self.predict(prompts.prefix(t)) for t in range(prompts.n_context)]
            predictions = torch.stack([*before, predictions[:, -1]], dim=1)
        return Trajectory((1,), predictions[None], self.name)

    @checked(undefined=True)
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Return the query's prediction after the last step."""
        at = {"at": "query"} if self._takes("at") else {}
        result = self.algorithm(prompts, **{**self.hyperparameters, **at})
        if isinstance(result, Trajectory):
            return result.predictions[-1, :, -1]
        return self._checked(result, prompts)[:, -1]

    @checked(undefined=True)
    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Return the prediction of each point t from the points 0..t-1, after the last step."""
        return self.trajectory(prompts).predictions[-1]

    def _takes(self, parameter: str) -> bool:
        parameters = inspect.signature(self.algorithm).parameters.values()
        return any(each.name == parameter or each.kind is each.VAR_KEYWORD for each in parameters)

    def _checked(self, result: Any, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        if isinstance(result, np.ndarray):
            result = torch.from_numpy(result).to(prompts.xs)
        allowed = "[prompt y] or [prompt point y]"
        if not isinstance(result, Tensor):
            raise TypeError(f"{self.name} must return predictions {allowed}, got {type(result).__name__}")
        predictions = result[:, None] if result.ndim == 2 else result
        if predictions.shape not in (prompts.ys.shape, prompts.ys[:, -1:].shape):
            shape = tuple(result.shape)
            raise ValueError(f"{self.name} must return predictions {allowed} for {prompts}, got the shape {shape}")
        return predictions


def call_as_text(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return a call as text, with tensors by their shape and functions by their name: "ridge(penalty=0.1)"."""

    def text(value: Any) -> str:
        if isinstance(value, Tensor) and value.ndim:
            return f"[{' x '.join(map(str, value.shape))}]"
        return getattr(value, "__name__", str(value))

    settings = ", ".join(f"{name}={text(value)}" for name, value in arguments.items())
    return f"{getattr(function, '__name__', 'algorithm')}({settings})"


@dataclass(frozen=True, eq=False)
class AlgorithmFamily:
    """An algorithm at several values of one hyperparameter, as an iterative learner whose steps are these values.

    Use it to compare a model's layers, or its prediction, with all of them at once.

    Attributes:
        algorithm: function of prompts and hyperparameters, as for `AlgorithmLearner`; its last step is used.
        hyperparameter: name of the hyperparameter that varies.
        values: its values, one or more.
        others: the other hyperparameters, the same for all values.

    Example:
        >>> penalties = AlgorithmFamily(algorithms.ridge, "penalty", (0.01, 0.1, 1.0))
    """

    algorithm: Callable[..., Any]
    hyperparameter: str
    values: tuple[float, ...]
    others: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_fields(self)
        if not self.values:
            raise ValueError(f"values of {self.hyperparameter} must be one or more, got none")

    @property
    def name(self) -> str:
        """The algorithm's name and the hyperparameter that varies."""
        return f"{getattr(self.algorithm, '__name__', 'algorithm')} ({self.hyperparameter})"

    def members(self) -> list[AlgorithmLearner]:
        """Return the algorithm at each of the values, as learners."""
        return [AlgorithmLearner(self.algorithm, {**self.others, self.hyperparameter: value}) for value in self.values]

    @checked(undefined=True)
    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """Return the prediction at each value (the axis `step`), for every prefix."""
        trajectories = [member.trajectory(prompts, with_weights=with_weights) for member in self.members()]
        weights = [trajectory.weights[-1] for trajectory in trajectories if trajectory.weights is not None]
        predictions = torch.stack([trajectory.predictions[-1] for trajectory in trajectories])
        name = f"{trajectories[0].name} ({self.hyperparameter})"
        return Trajectory(self.values, predictions, name, torch.stack(weights) if weights else None)

    @checked(undefined=True)
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Return the query's prediction at the last value."""
        return self.predict_prefixes(prompts)[:, -1]

    @checked(undefined=True)
    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Return the prediction of each point t from the points 0..t-1, at the last value."""
        return self.trajectory(prompts).predictions[-1]


Learners = Mapping[str, Any] | Sequence[Any]
"""Learners by name, or named after themselves."""


def by_name(learners: Learners) -> dict[str, Any]:
    """Return learners by name, or else by their `name` or type, numbered where several share one."""
    if isinstance(learners, Mapping):
        return dict(learners)
    names = list(map(name_of, learners))
    numbered = [f"{name} {i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]
    if len({*numbered}) < len(names):
        raise ValueError(f"names of learners must differ, got {names}: give a mapping from names to learners")
    return dict(zip(numbered, learners, strict=True))


def named_learners(learners: Learners) -> dict[str, Any]:
    """Return learners by name as `by_name` does; TypeError for anything else."""
    learners = by_name(learners)
    for name, each in learners.items():
        if not isinstance(each, Learner):
            raise TypeError(
                f"{name!r} ({type(each).__name__}) is not a learner: it has no method predict(prompts). "
                f"AlgorithmLearner makes one of a function, mechicl.wrap of a torch module"
            )
    return learners


def name_of(learner: object) -> str:
    """Return a learner's name, by default that of its class."""
    return str(getattr(learner, "name", None) or type(learner).__name__)


@contextmanager
def calling_learner(learner: object, prompts: Prompts, name: str = "") -> Iterator[None]:
    """A context in which errors name the learner, and the prompts' dtype, which other code may not expect.

    Changed prompts are an error too: others are given the same ones.
    """
    with calling(f"learner {name or name_of(learner)!r}, given prompts of {prompts.dtype},"):
        before = prompts.xs.clone(), prompts.ys.clone()
        yield
        for kept, now in zip(before, (prompts.xs, prompts.ys), strict=True):
            if not torch.allclose(kept, now, rtol=0, atol=0, equal_nan=True):
                raise ValueError("it changes the prompts in place: use copies, such as prompts.ys.clone()")


def trajectory_of(learner: IterativeLearner, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
    """Return a learner's predictions after each step; an error in its code names it."""
    with calling_learner(learner, prompts):
        return learner.trajectory(prompts, with_weights=True) if with_weights else learner.trajectory(prompts)


def predictions_at(
    learner: Learner, prompts: Prompts, at: PointsAt = "query", *, name: str = ""
) -> Float[Tensor, "prompt point y"]:
    """Return a learner's predictions of the "query" alone (one point, by `predict`), or of all "points".

    An error in its code, or anything else than predictions, is an ArgumentError with the learner's `name`.
    """
    if at == "points" and not isinstance(learner, PrefixLearner):
        raise TypeError(
            f"{type(learner).__name__} has no method predict_prefixes(prompts), which predictions of all points need; "
            f"at='query' needs only predict"
        )
    method = "predict" if at == "query" else "predict_prefixes"
    targets = prompts.ys[:, -1] if at == "query" else prompts.ys
    with calling_learner(learner, prompts, name):
        predicted = getattr(learner, method)(prompts)
        if not isinstance(predicted, Tensor) or not predicted.is_floating_point() or predicted.shape != targets.shape:
            raise TypeError(
                f"{method}() must return a tensor of floats {list(targets.shape)}, got {described(predicted)}"
            )
    return predicted[:, None] if at == "query" else predicted


def bytes_per_prompt(learner: object, prompts: Prompts) -> float:
    """Estimate how many bytes a learner's predictions take for each prompt.

    A learner may have a method `bytes_per_prompt(prompts)`; for others the estimate is a few matrices `[x + y, x + y]`
    for every prefix.
    """
    measure: Callable[[Prompts], float] | None = getattr(learner, "bytes_per_prompt", None)
    return measure(prompts) if measure else 64 * (prompts.n_context + 1) * (prompts.x_dim + prompts.y_dim) ** 2


@checked
def prompt_batches(
    learner: Learner, prompts: Prompts, *, copies: float = 1, reserved: float = 0.0
) -> Iterator[Prompts]:
    """Split prompts into batches on which a learner's predictions take at most `settings.memory` bytes.

    Args:
        learner: the learner; its method `bytes_per_prompt(prompts)`, if it has one, replaces a general estimate.
        prompts: prompts to divide.
        copies: factor on the memory of the predictions, for example for gradients.
        reserved: bytes that the caller uses meanwhile.
    """
    yield from prompts.split(Budget(kept=reserved).rows(copies * bytes_per_prompt(learner, prompts), at_most=4096))


@torch.no_grad()
def query_predictions(learner: Learner, prompts: Prompts, name: str = "") -> Float[Tensor, "prompt y"]:
    """Return a learner's predictions of the query, float64 on the CPU; an error in its code has the `name`."""
    parts = prompt_batches(learner, prompts)
    return torch.cat([predictions_at(learner, part, name=name)[:, 0].cpu().double() for part in parts])


@checked
@torch.no_grad()
def squared_errors(learner: Learner, prompts: Prompts, *, at: PointsAt = "query") -> Float[Tensor, "prompt point"]:
    """Return the squared error of a learner's predictions, averaged over the target's dimensions, in float64.

    Args:
        learner: a model, an `AlgorithmLearner` or any other learner.
        prompts: prompts with targets.
        at: "query" for the last point only (a point axis of length 1), "points" for every point from those before it.
    """
    parts = []
    for part in prompt_batches(learner, prompts):
        predicted = predictions_at(learner, part, at)
        targets = part.ys[:, -1:] if at == "query" else part.ys
        parts.append((predicted.to(targets.device).double() - targets.double()).square().mean(-1))
    return torch.cat(parts) if parts else prompts.xs.new_zeros(0, 1, dtype=torch.float64)
