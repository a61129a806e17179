"""The card of an algorithm: everything that the library knows about it, in one place.

`analysis.match`, `identify`, `test_hypotheses` and the reports read the cards, and nothing else: how its parameters are
fitted to a model's predictions, which of its steps layers are compared with, what it looks like step by step, which
simpler algorithms it contains, and how a sentence calls it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectral_fit import SpectralProblem
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.base.arguments import checked
from mechicl.learners import AlgorithmLearner, Learner
from mechicl.prompts import Prompts

ROUNDING = 1e-10  # squared distances, relative to squared predictions: below, two learners predict the same
EACH = "parameters for each step"
"""The variant of a family whose members have parameters for each step instead of the same for all."""
COPYING = "copying, then "
"""Begins the names of hypotheses on prompts whose targets are tokens of their own."""


@dataclass(frozen=True, eq=False)
class FittedAlgorithm:
    """A member of an algorithm's family, with the hyperparameters that were fitted.

    Attributes:
        name: as `Algorithm.member` makes it.
        learner: predicts with the fitted hyperparameters.
        hyperparameters: the fitted values, for tables.
        n_fitted: how many numbers were fitted.
        n_given: 1 if the number of steps is not fitted: it is 1, or the model's number of layers.
    """

    name: str
    learner: Learner
    hyperparameters: dict[str, float] = field(default_factory=dict)
    n_fitted: int = 0
    n_given: int = 0


@dataclass(frozen=True, eq=False)
class FitProblem:
    """What algorithms are fitted to: prompts, and what a learner predicts for them.

    Attributes:
        prompts: float64.
        after_steps: the learner's predictions of the query after each of its steps; at least the last one, or the
            task's own targets.
        steps: number of steps of the learner, a model's layers.
        causal: whether the context's points read only themselves and those before them (for step forms).
    """

    prompts: Prompts
    after_steps: Float[Tensor, "step prompt y"]
    steps: int
    causal: bool = False

    @property
    def targets(self) -> Float[Tensor, "prompt y"]:
        """The predictions after the last step."""
        return self.after_steps[-1]

    @cached_property
    def spectral(self) -> SpectralProblem:
        """The same prompts and targets in the eigenbases of their contexts."""
        return SpectralProblem.from_prompts(self.prompts, self.targets)

    def error(self, predictions: Float[Tensor, "prompt y"]) -> float:
        """Mean squared distance of predictions from the targets; infinite if they are not finite."""
        return (predictions - self.targets).square().mean().nan_to_num(math.inf, math.inf).item()


@dataclass(frozen=True, eq=False)
class Algorithm:
    """The card of an algorithm.

    Attributes:
        name: of the algorithm and its family, such as "Newton".
        trajectory: `(prompts, **parameters)` to a `Trajectory`; None for a family that is fitted as one filter.
        parameters: the candidates of each parameter, for the default fit; without candidates `fit` finds the values.
        fit: from what is to be predicted to the nearest members of the family. By default the best combination of
            `parameters`; without either the algorithm is not tried by `identify`.
        path: the parameters of `trajectory` for which `match` compares its steps with layers, from prompts that decide
            scales such as a stable step size. None if `match` has no steps to compare with.
        layer_name: in tables of layers, if not `name`.
        step_forms: from what is to be predicted to the algorithm as causal models with the same freedom.
        step_kinds: how the report groups step forms: a label, and how the names of its members begin and end.
        contains: families that this one equals for some parameters, at the same number of steps.
        phrase: in a sentence, with `{count}` for "one step" or "3 steps"; by default a member's name.
        unit: what a step is called.
        variants: kinds of members beside the plain one, and what they add to the phrase.
        for_scale: whether it is only a bound on families and never the answer.
    """

    name: str
    trajectory: Callable[..., Any] | None = None
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fit: Callable[[FitProblem], Iterable[FittedAlgorithm]] | None = None
    path: Callable[[Prompts], dict[str, Any]] | None = None
    layer_name: str = ""
    step_forms: Callable[[FitProblem], Iterable[StepwiseAlgorithm]] | None = None
    step_kinds: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    contains: tuple[str, ...] = ()
    phrase: str = ""
    unit: str = "step"
    variants: Mapping[str, str] = field(default_factory=dict)
    for_scale: bool = False

    def member(self, steps: int | None = None, variant: str = "") -> str:
        """The name of a member: "Newton, 3 iterations", or "GD++, 2 steps, parameters for each step"."""
        parts = [self.name, "" if steps is None else count(steps, self.unit), variant]
        return ", ".join(filter(None, parts))

    def members(self, problem: FitProblem) -> list[FittedAlgorithm]:
        """The members that are nearest to what is to be predicted, one for each variant.

        Raises:
            ValueError: no combination of `parameters` predicts finite numbers.
        """
        if self.fit is not None:
            return list(self.fit(problem))
        if not self.parameters or self.trajectory is None:
            return []
        combinations = [
            dict(zip(self.parameters, values, strict=True)) for values in itertools.product(*self.parameters.values())
        ]
        learners = [
            AlgorithmLearner(self.trajectory, each | ({"steps": (each["steps"],)} if "steps" in each else {}))
            for each in combinations
        ]
        best = nearest_learner(self.name, learners, problem)
        values = combinations[best]
        settings = {name: float(value) for name, value in values.items()}
        return [FittedAlgorithm(self.member(values.get("steps")), learners[best], settings, len(values))]

    def on(self, prompts: Prompts, **parameters: Any) -> AlgorithmLearner:
        """The iterative learner whose steps `match` compares with layers, scaled to these prompts.

        Args:
            prompts: that decide scales, such as the largest stable step size.
            **parameters: in place of those of `path`, for example other `steps`.

        Raises:
            ValueError: an algorithm without `path`.
        """
        if self.path is None or self.trajectory is None:
            raise ValueError(f"{self.name!r} has no path: it has no steps that layers could be compared with")
        return AlgorithmLearner(self.trajectory, {**self.path(prompts), **parameters})


def nearest_learner(name: str, learners: Sequence[Learner], problem: FitProblem) -> int:
    """Index of the learner that predicts nearest to the targets.

    Raises:
        ValueError: none predicts finite numbers.
    """
    with torch.no_grad():
        errors = [problem.error(each.predict(problem.prompts).cpu().double()) for each in learners]
    best = min(range(len(errors)), key=errors.__getitem__)
    if not math.isfinite(errors[best]):
        raise ValueError(f"{name!r} predicts no finite numbers for any of its {len(learners)} candidates")
    return best


CARDS: dict[str, Algorithm] = {}
"""All cards, by name."""


@checked
def register(card: Algorithm) -> Algorithm:
    """Let `identify`, `test_hypotheses` and the reports try an algorithm of your own; returns its card.

    Raises:
        ValueError: another algorithm has the name.
    """
    if CARDS.get(card.name, card) is not card:
        raise ValueError(f"name must be one that no other algorithm has, got {card.name!r}")
    CARDS[card.name] = card
    return card


@checked
def cards() -> list[Algorithm]:
    """The cards of all algorithms, in the order in which they are tried; families for scale come last."""
    return sorted(CARDS.values(), key=lambda card: card.for_scale)


@dataclass(frozen=True)
class _Member:
    card: Algorithm
    steps: str = ""
    variant: str = ""


def _member(name: str) -> _Member | None:
    """The parts of a name that `Algorithm.member` made; None for names without a card."""
    family, *rest = name.split(", ")
    if family not in CARDS:
        return None
    card = CARDS[family]
    counted = bool(rest) and rest[0].rstrip("s").endswith(card.unit)
    return _Member(card, rest[0] if counted else "", ", ".join(rest[counted:]))


def phrase(name: str) -> str:
    """The name of a family's member as it appears in a sentence; other names are returned unchanged.

    Example:
        >>> phrase("Newton, 3 iterations")
        "3 iterations of Newton's method"
    """
    member = _member(name)
    if member is None or not member.card.phrase or ("{count}" in member.card.phrase and not member.steps):
        return name
    counted = f"one {member.card.unit}" if member.steps == f"1 {member.card.unit}" else member.steps
    return member.card.phrase.format(count=counted) + member.card.variants.get(member.variant, "")


def contains(general: str, special: str) -> bool:
    """Whether one family's member equals the other for some parameters, at the same number of steps."""
    a, b = _member(general), _member(special)
    if a is None or b is None or general == special or a.steps != b.steps:
        return False
    if a.card is b.card:  # parameters for each step contain the same ones for all
        return a.variant == EACH and not b.variant
    return b.card.name in a.card.contains and (not b.variant or a.variant == b.variant)


def is_for_scale(name: str) -> bool:
    """Whether a family only bounds what other families can reach, such as "any function of S"."""
    member = _member(name)
    return member is not None and member.card.for_scale


def step_kind(hypothesis: str) -> str:
    """The group of step forms that a hypothesis belongs to, for tables; its own name if no card has one."""
    name = hypothesis.removeprefix(COPYING)
    fitting = [
        (len(start) + len(end), label)
        for card in CARDS.values()
        for label, (start, end) in card.step_kinds.items()
        if name.startswith(start) and name.endswith(end)
    ]
    return max(fitting)[1] if fitting else name


def count(number: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
