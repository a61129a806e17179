"""A hypothesis on a model (the algorithm that it runs, in which layers), and the interventions that test it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.base.arguments import check_fields
from mechicl.statistics import storable


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """The hypothesis that a model runs an algorithm: after certain layers its tokens carry the algorithm's variables.

    Attributes:
        algorithm: the algorithm, step by step: an object of `algorithms.stepwise`, such as
            `ResidualDescent(2, step_size=0.05)`.
        schedule: pairs (number of layers, number of steps taken by then), from (0, 0) to all layers and all steps.
            Layers rise, and steps rise or stay: a layer may take no step, or several; or several layers take one step
            together. By default one step a layer.
        subspaces: from a variable, or several that share a place ("y, prediction"), to the orthonormal columns
            `[d_model dim]` of the residual stream that carry it, where known; `rest` is their complement.
        name: name in tables; the algorithm's by default.

    Example:
        >>> Hypothesis(ResidualDescent(2, step_size=0.05), schedule=((0, 0), (2, 1), (4, 2))).n_layers
        4
    """

    algorithm: StepwiseAlgorithm
    schedule: Sequence[tuple[int, int]] = ()
    subspaces: Mapping[str, Float[Tensor, "d_model _"]] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self):
        check_fields(self)
        steps = self.algorithm.n_steps
        schedule = tuple(self.schedule) or tuple((k, k) for k in range(steps + 1))
        object.__setattr__(self, "schedule", schedule)
        object.__setattr__(self, "name", self.name or self.algorithm.name)
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(schedule))
        if schedule[0] != (0, 0) or schedule[-1][1] != steps or not rising:
            raise ValueError(
                f"schedule must go from (0, 0) to (all layers, {steps} steps), layers rising and steps not falling, "
                f"got {schedule}"
            )
        for name, columns in self.subspaces.items():
            if not set(variables_of(name)) <= set(self.algorithm.variables):
                raise ValueError(f"{self.algorithm.name!r} has the variables {self.algorithm.variables}, not {name!r}")
            _check_orthonormal(name, columns)

    @property
    def n_layers(self) -> int:
        """Number of layers that the schedule covers."""
        return self.schedule[-1][0]

    @property
    def between(self) -> tuple[tuple[int, int], ...]:
        """The (layers, steps) between the first and the last, where states can be exchanged."""
        return tuple(self.schedule[1:-1])

    @property
    def segments(self) -> tuple[tuple[range, range], ...]:
        """The layers and the steps between neighbouring entries of the schedule."""
        pairs = itertools.pairwise(self.schedule)
        return tuple((range(a[0], b[0]), range(a[1], b[1])) for a, b in pairs)

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The variables without a subspace, which the rest of the stream carries."""
        named = {variable for name in self.subspaces for variable in variables_of(name)}
        return tuple(variable for variable in self.algorithm.variables if variable not in named)

    @property
    def rest(self) -> Float[Tensor, "d_model dim"] | None:
        """Orthonormal columns of the subspaces' complement; None if it is empty or there are no subspaces."""
        if not self.subspaces:
            return None
        columns = torch.cat([value.double() for value in self.subspaces.values()], dim=1)
        _check_orthonormal("all subspaces together", columns)
        if columns.shape[0] == columns.shape[1]:
            return None
        return torch.linalg.qr(columns, mode="complete").Q[:, columns.shape[1] :]


def variables_of(name: str) -> tuple[str, ...]:
    """Split a subspace's name into its variables: two for "y, prediction"."""
    return tuple(name.split(", "))


def _check_orthonormal(name: str, columns: Tensor) -> None:
    gram = columns.double().T @ columns.double()
    if columns.ndim != 2 or not torch.allclose(gram, torch.eye(len(gram)).to(gram), atol=1e-6):
        raise ValueError(f"the columns [d_model dim] of {name!r} must be orthonormal: torch.linalg.qr(...).Q is")


Key = tuple[Any, ...]
InterchangeKind = Literal["prediction", "exchange", "mixture", "ablation"]
LASTING = ("query stops reading", "context frozen", "context isolated")  # from some layer on


@storable
@dataclass(frozen=True)
class Cell:
    """One intervention, and where it takes place.

    Attributes:
        intervention: its name.
        layer: number of layers before it.
        step: number of steps before it.
        to_layer: number of layers after which it ends; the same as `layer` for an exchange between two layers.
    """

    intervention: str
    layer: int
    step: int
    to_layer: int

    @property
    def kind(self) -> InterchangeKind:
        """ "exchange" of states, "ablation" (steps skipped, repeated or kept from reading), or "mixture".

        A mixture joins inputs or states of two contexts: of half of the points each, or of one point before any layer.
        """
        if self.intervention == "prediction":
            return "prediction"
        if self.intervention == "half exchanged" or (self.intervention == "point exchanged" and self.layer == 0):
            return "mixture"
        return "exchange" if self.intervention.endswith("exchanged") else "ablation"

    def __str__(self) -> str:
        if self.kind == "prediction":
            return self.intervention
        word = "from" if self.intervention in LASTING else "after"
        if self.to_layer > self.layer and word == "after":
            last = self.to_layer - 1
            layers = f"layer {self.layer}" if last == self.layer else f"layers {self.layer}-{last}"
            return f"{self.intervention} {layers}"
        return f"{self.intervention} {word} {self.layer} layer{'' if self.layer == 1 else 's'}"


@dataclass(frozen=True, eq=False)
class Call:
    """A call of one method of `Runs`, or of a model's runs, that makes an intervention."""

    method: str
    arguments: tuple[Any, ...]
    on_point: bool = False  # on the runs whose source is the prompts with one other point

    @property
    def key(self) -> Key:
        """An identifier by which hypotheses share a model's runs."""
        return (self.method, self.on_point, *(id(a) if isinstance(a, Tensor) else a for a in self.arguments))

    def run(self, runs: Sequence[Any]) -> Tensor:
        """Return the prediction `[prompt y]`, given the runs with whole sources and those with one other point."""
        return getattr(runs[self.on_point], self.method)(*self.arguments)


Planned = tuple[Cell, Call, Call]


def plan_interventions(
    hypothesis: Hypothesis, point: int, n_context: int, *, stop_reading: bool, isolate: bool
) -> Iterator[Planned]:
    """Yield all interventions of a hypothesis, each as calls on the algorithm and on the model.

    `stop_reading` and `isolate`: the model can keep the query from reading, and context points from each other.
    """

    def twins(name: str, method: str, places: tuple[int, int, int], of_algorithm: tuple, of_model: tuple) -> Planned:
        alone = name == "point exchanged"
        return Cell(name, *places), Call(method, of_algorithm, alone), Call(method, of_model, alone)

    n_layers, n_steps = hypothesis.schedule[-1]
    one_point, half = ("context", None, point), ("context", None, range(0, n_context, 2))
    yield twins("prediction", "freeze", (0, 0, 0), ((n_steps,), "query"), ((n_layers,), "query"))  # changes nothing
    for layer, step in hypothesis.between:
        places = (layer, step, layer)
        for place in ("query", "context"):
            at_step, at_layer = (step, place), (layer, place)
            yield twins(f"{place} exchanged", "exchange", places, at_step, at_layer)
            for name, basis in hypothesis.subspaces.items():
                variables = variables_of(name)
                yield twins(
                    f"{place}'s {name} exchanged", "exchange", places, (*at_step, variables), (*at_layer, basis)
                )
            if hypothesis.rest is not None:
                unnamed, rest = (*at_step, hypothesis.unnamed), (*at_layer, hypothesis.rest)
                yield twins(f"{place}'s rest exchanged", "exchange", places, unnamed, rest)
        yield twins("point exchanged", "exchange", places, (step, *one_point), (layer, *one_point))
    for layer, step in hypothesis.schedule[:-1]:  # before the first layer, inputs are exchanged
        yield twins("half exchanged", "exchange", (layer, step, layer), (step, *half), (layer, *half))
    yield twins("point exchanged", "exchange", (0, 0, 0), (0, *one_point), (0, *one_point))
    for layers, steps in hypothesis.segments:
        places = (layers.start, steps.start, layers.stop)
        for place in ("query", "context"):
            for name, method in (("skips", "skip"), ("repeats", "repeat")):
                yield twins(f"{place} {name}", method, places, (steps, place), (layers, place))
        if stop_reading:
            yield twins("query does not read", "stop_reading", places, (steps,), (layers,))
    for i, (layer, step) in enumerate(hypothesis.schedule[:-1]):
        places = (layer, step, n_layers)
        at_layers, at_steps = (tuple(column) for column in zip(*hypothesis.schedule[i:], strict=True))
        others = (range(step, n_steps),), (range(layer, n_layers),)
        yield twins("context frozen", "freeze", places, (at_steps, "context"), (at_layers, "context"))
        if stop_reading:
            yield twins("query stops reading", "stop_reading", places, *others)
        if isolate:
            yield twins("context isolated", "isolate", places, *others)


def select_interventions(plan: Sequence[Planned], interventions: Sequence[str] | None) -> list[Planned]:
    """Return the interventions of these names; all by default."""
    known = {cell.intervention for cell, _, _ in plan}
    if interventions is not None and not interventions:
        raise ValueError(f"interventions must be one or more of {sorted(known)}, got none")
    if unknown := set(interventions or ()) - known:
        raise ValueError(f"interventions must be of {sorted(known)}, got {sorted(unknown)}")
    return [each for each in plan if interventions is None or each[0].intervention in interventions]
