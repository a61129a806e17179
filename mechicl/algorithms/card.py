"""The card of an algorithm: everything that the library knows about it, in one place.

`match`, `identify`, `test_hypotheses` and the reports read only the cards: how parameters are fitted to a model, which
steps layers are compared with, the step forms, the simpler algorithms that it contains, and its name in a sentence.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, ParamSpec

from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectral_fit import SpectralProblem
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm, count
from mechicl.base.arguments import check_fields, checked
from mechicl.learners import AlgorithmLearner, Learner
from mechicl.learners.learners import query_predictions
from mechicl.prompts import Prompts

ROUNDING = 1e-10  # squared distances, relative to squared predictions: below, two learners predict the same
_Fields = ParamSpec("_Fields")
Freedom = Literal["fixed", "per prefix", "tuned per step"]
"""What the scale of an algorithm's steps adapts to: nothing (one value for all prefixes and steps), each prefix's
second moments, or these with a factor for each step that is tuned on other prompts."""
LINEAR = ("linear in the targets", "linear in the query", "scale of the targets")
"""Properties of learners that predict `x W y`, with any W of the inputs; see `analysis.fingerprint`."""
FILTER = (*LINEAR, "order of the points", "rotation of the inputs", "moments", "function of S")
"""Properties of learners that apply a function to XᵀX."""
KERNEL = ("linear in the targets", "scale of the targets", "order of the points", "rotation of the inputs")
"""Properties of learners that weigh targets by the products or distances of inputs."""
LINE_SEARCH = (
    "order of the points", "rotation of the inputs", "moments", "linear in the query", "scale of the targets",
    "scale of the inputs",
)  # fmt: skip
"""Properties of descent whose step sizes minimise the loss."""
EACH = "parameters for each step"
"""The variant of a family whose members have separate parameters for each step."""
COPYING = "copying, then "
"""The start of the names of hypotheses on prompts whose targets are separate tokens."""


@dataclass(frozen=True, eq=False)
class FittedAlgorithm:
    """A member of an algorithm's family, with the hyperparameters that were fitted to a model's predictions.

    Attributes:
        name: name of the member, such as "Newton, 3 iterations" (from `Algorithm.member`).
        learner: the algorithm with the fitted hyperparameters; `learner.predict(prompts)` is `[prompt y]`.
        hyperparameters: the fitted values by name, for tables.
        n_fitted: how many numbers were fitted, a measure of the family's freedom.
        n_given: 1 if the number of steps is not fitted: it is 1, or the model's number of layers.
        is_limit: True if a value came to the end of its range: the nearest is a limit of the family, not a member.
    """

    name: str
    learner: Learner
    hyperparameters: dict[str, float] = field(default_factory=dict)
    n_fitted: int = 0
    n_given: int = 0
    is_limit: bool = False

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)


@dataclass(frozen=True, eq=False)
class FitProblem:
    """Prompts, and a model's predictions on them that algorithms are fitted to.

    Attributes:
        prompts: the prompts, float64.
        after_steps: the model's predictions of the query after each of its layers; at least those after the last one.
            Or the task's own targets.
        steps: number of layers of the model.
        causal: True if the context's points read only themselves and those before them (for step forms).
    """

    prompts: Prompts
    after_steps: Float[Tensor, "step prompt y"]
    steps: int
    causal: bool = False

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)

    @property
    def targets(self) -> Float[Tensor, "prompt y"]:
        """The predictions after the last step."""
        return self.after_steps[-1]

    @cached_property
    def spectral(self) -> SpectralProblem:
        """The same prompts and targets in the eigenbases of their contexts."""
        return SpectralProblem.from_prompts(self.prompts, self.targets)

    @checked
    def first(self, n_prompts: int) -> "FitProblem":
        """Return the problem on the first `n_prompts` prompts only."""
        few = self.after_steps[:, :n_prompts]
        return dataclasses.replace(self, prompts=self.prompts[:n_prompts], after_steps=few)

    def error(self, predictions: Float[Tensor, "prompt y"]) -> float:
        """Return the mean squared difference of predictions from `targets`, infinite if not finite."""
        return (predictions - self.targets).square().mean().nan_to_num(math.inf, math.inf).item()


@dataclass(frozen=True, eq=False)
class Algorithm:
    """The card of an algorithm: everything that `identify`, `match`, `test_hypotheses` and the reports know about it.

    Attributes:
        name: name of the algorithm and its family, such as "Newton".
        trajectory: function `(prompts, **parameters)` that returns a `Trajectory`; None for a family without one.
        parameters: candidate values of each parameter. The default fit takes the combination nearest to the model.
        fit: function from a `FitProblem` to the family's nearest members, in place of the default fit. With neither
            `fit` nor `parameters`, `identify` does not try the algorithm.
        path: function from prompts to the parameters of `trajectory` with which `match` compares steps with layers; the
            prompts decide scales such as a stable step size. None if there are no steps to compare with.
        freedom: what the scale of the steps of `path` adapts to. Families that are compared should have the same.
        other_paths: `path` with other freedom, such as one fixed step size.
        layer_name: name in tables of layers, if not `name`.
        step_forms: function from a `FitProblem` to the algorithm as causal models (`StepwiseAlgorithm`) with fitted
            values.
        step_kinds: how the report groups step forms: from a label to the start and the end of its members' names. By
            default there is one group, of the names that start with the card's.
        contains: names of families that this one equals for some parameters, at the same number of steps.
        phrase: the member in a sentence, with `{count}` for "one step" or "3 steps"; by default the member's name.
        unit: name of a step, such as "iteration".
        variants: kinds of members apart from the plain one, each with its addition to the phrase.
        holds: properties that every member has by theorem; names are those of `analysis.fingerprint`.
        violates: properties that no member has.
        for_scale: True for a family that only bounds what others can reach and is never the answer.
    """

    name: str
    trajectory: Callable[..., Any] | None = None
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fit: Callable[[FitProblem], Iterable[FittedAlgorithm]] | None = None
    path: Callable[[Prompts], dict[str, Any]] | None = None
    freedom: Freedom = "fixed"
    other_paths: Mapping[Freedom, Callable[[Prompts], dict[str, Any]]] = field(default_factory=dict)
    layer_name: str = ""
    step_forms: Callable[[FitProblem], Iterable[StepwiseAlgorithm]] | None = None
    step_kinds: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    contains: tuple[str, ...] = ()
    phrase: str = ""
    unit: str = "step"
    variants: Mapping[str, str] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    violates: tuple[str, ...] = ()
    for_scale: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def member(self, steps: int | None = None, variant: str = "") -> str:
        """Return the name of a member: "Newton, 3 iterations", or "GD++, 2 steps, parameters for each step".

        Args:
            steps: number of steps; None for an algorithm without steps.
            variant: one of `variants`, added at the end; empty for the plain member.
        """
        parts = [self.name, "" if steps is None else count(steps, self.unit), variant]
        return ", ".join(filter(None, parts))

    @checked
    def members(self, problem: FitProblem) -> list[FittedAlgorithm]:
        """Fit the family to a problem: return its members nearest to `problem.targets`, one for each variant."""
        if self.fit is not None:
            return list(self.fit(problem))
        if not self.parameters or self.trajectory is None:
            return []
        grid = itertools.product(*self.parameters.values())
        combinations = [dict(zip(self.parameters, values, strict=True)) for values in grid]
        learners = [
            AlgorithmLearner(self.trajectory, each | ({"steps": (each["steps"],)} if "steps" in each else {}))
            for each in combinations
        ]
        best = nearest_learner(self.name, learners, problem)
        values = combinations[best]
        settings = {name: float(value) for name, value in values.items()}
        return [FittedAlgorithm(self.member(values.get("steps")), learners[best], settings, len(values))]

    def fitted(self, settings: dict[str, Any], steps: int | None = None) -> FittedAlgorithm:
        """Return the member whose `trajectory` takes these fitted settings; `steps` is for its name."""
        if self.trajectory is None:
            raise ValueError(f"{self.name!r} has no trajectory")
        learner = AlgorithmLearner(self.trajectory, settings)
        return FittedAlgorithm(self.member(steps), learner, settings, n_fitted=len(settings))

    @checked
    def on(self, prompts: Prompts, freedom: Freedom | None = None, **parameters: Any) -> AlgorithmLearner:
        """Return the learner whose `trajectory(prompts)` has the steps that `match` compares with layers.

        Args:
            prompts: prompts that decide scales, such as a stable step size.
            freedom: what the scale of the steps adapts to; by default the card's `freedom`.
            parameters: values that replace those of `path`, for example `steps`.
        """
        if self.path is None or self.trajectory is None:
            raise ValueError(f"{self.name!r} has no path: it has no steps that layers could be compared with")
        paths = {**self.other_paths, self.freedom: self.path}
        path = paths.get(freedom or self.freedom)
        if path is None:
            raise ValueError(f"freedom of {self.name!r} must be one of {', '.join(paths)}; got {freedom!r}")
        return AlgorithmLearner(self.trajectory, {**path(prompts), **parameters})


def nearest_learner(name: str, learners: Sequence[Learner], problem: FitProblem) -> int:
    """Return the index of the learner that predicts nearest to the targets."""
    errors = [problem.error(query_predictions(each, problem.prompts, name)) for each in learners]
    best = min(range(len(errors)), key=errors.__getitem__)
    if not math.isfinite(errors[best]):
        raise ValueError(f"{name!r} predicts no finite numbers for any of its {len(learners)} candidates")
    return best


CARDS: dict[str, Algorithm] = {}
"""All cards, by name."""


@checked
def register(card: Algorithm) -> Algorithm:
    """Let `identify`, `test_hypotheses` and the reports try your own algorithm; return its card unchanged.

    Args:
        card: everything that these analyses need; a `name`, a `trajectory` and `parameters` are enough for `identify`.

    Raises:
        ValueError: another card has this name.
    """
    if CARDS.setdefault(card.name, card) is not card:
        raise ValueError(f"name must be one that no other algorithm has, got {card.name!r}")
    return card


def _registered(make: Callable[_Fields, Algorithm]) -> Callable[_Fields, Algorithm]:
    return lambda *args, **fields: register(make(*args, **fields))


new_card = _registered(Algorithm)
"""Make a card and register it; the library's own cards are made so."""


@checked
def cards() -> list[Algorithm]:
    """Return the card (`Algorithm`) of every algorithm in the library; mere bounds (`for_scale`) come last."""
    return sorted(CARDS.values(), key=lambda card: card.for_scale)


def _parts(name: str) -> tuple[Algorithm, str, str] | None:
    family, *rest = name.split(", ")
    if family not in CARDS:
        return None
    card = CARDS[family]
    counted = bool(rest) and rest[0].rstrip("s").endswith(card.unit)
    return card, rest[0] if counted else "", ", ".join(rest[counted:])


def phrase(name: str) -> str:
    """Return the name of a family's member as it appears in a sentence; other names are returned unchanged.

    Example:
        >>> phrase("Newton, 3 iterations")
        "3 iterations of Newton's method"
    """
    if (parts := _parts(name)) is None:
        return name
    card, steps, variant = parts
    if not card.phrase or ("{count}" in card.phrase and not steps):
        return name
    counted = f"one {card.unit}" if steps == f"1 {card.unit}" else steps
    return card.phrase.format(count=counted) + card.variants.get(variant, "")


def contains(general: str, special: str) -> bool:
    """Return whether one family's member equals the other for some parameters, at the same number of steps."""
    a, b = _parts(general), _parts(special)
    if a is None or b is None or general == special or a[1] != b[1]:
        return False
    (card, _, variant), (other, _, other_variant) = a, b
    if card is other:  # parameters for each step contain the same ones for all
        return variant == EACH and not other_variant
    return other.name in card.contains and other_variant in ("", variant)


def is_for_scale(name: str) -> bool:
    """Return whether a family only bounds what other families can reach, such as "any function of S"."""
    parts = _parts(name)
    return parts is not None and parts[0].for_scale


def step_kind(hypothesis: str) -> str:
    """Return the group of step forms that a hypothesis belongs to, for tables; its own name if no card has one."""
    name = hypothesis.removeprefix(COPYING)
    fitting = [
        (len(start) + len(end), label)
        for card in CARDS.values()
        if card.step_forms is not None
        for label, (start, end) in (card.step_kinds or {card.name: (card.name, "")}).items()
        if name.startswith(start) and name.endswith(end)
    ]
    return max(fitting)[1] if fitting else name
