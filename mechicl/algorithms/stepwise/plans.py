"""Which interventions a hypothesis speaks of, each with its twin on the model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from mechicl.algorithms.stepwise.hypothesis import Hypothesis, variables_of
from mechicl.statistics import storable

Key = tuple[Any, ...]
Kind = Literal["prediction", "exchange", "ablation"]


@storable
@dataclass(frozen=True)
class Cell:
    """One intervention, and where: after so many layers and steps, or from so many on, up to so many.

    Attributes:
        intervention: its name.
        layer: number of layers before it.
        step: number of steps before it.
        to_layer: number of layers after it; the same as `layer` for what happens between two layers.
    """

    intervention: str
    layer: int
    step: int
    to_layer: int

    @property
    def kind(self) -> Kind:
        """Whether states are exchanged, or steps left out, repeated or kept from reading."""
        if self.intervention == "prediction":
            return "prediction"
        return "exchange" if self.intervention.endswith("exchanged") else "ablation"

    def __str__(self) -> str:
        if self.kind == "prediction":
            return self.intervention
        word = "from" if self.intervention in ("query stops reading", "context frozen", "context isolated") else "after"
        if self.to_layer > self.layer and word == "after":
            layers = (
                f"layer {self.layer}" if self.to_layer == self.layer + 1 else f"layers {self.layer}-{self.to_layer - 1}"
            )
            return f"{self.intervention} {layers}"
        return f"{self.intervention} {word} {self.layer} layer{'' if self.layer == 1 else 's'}"


@dataclass(frozen=True, eq=False)
class Ask:
    """One intervention to be made: the method of `Runs`, or of a model's runs, and what it is called with."""

    method: str
    arguments: tuple[Any, ...]
    on_point: bool = False  # on the runs whose source is the prompts with one other point

    @property
    def key(self) -> Key:
        """What tells it from others, so that hypotheses share a model's runs."""
        return (self.method, self.on_point, *(id(a) if isinstance(a, Tensor) else a for a in self.arguments))

    def answer(self, runs: Sequence[Any]) -> Tensor:
        """The prediction `[prompt y]`, from the runs with whole sources and those with one other point."""
        return getattr(runs[self.on_point], self.method)(*self.arguments)


Planned = tuple[Cell, Ask, Ask]


def plan_interventions(hypothesis: Hypothesis, point: int, *, hears: bool, isolates: bool) -> Iterator[Planned]:
    """All interventions that a hypothesis speaks of, each on the algorithm and on the model."""

    def twins(name: str, method: str, places: tuple[int, int, int], of_algorithm: tuple, of_model: tuple) -> Planned:
        alone = name == "point exchanged"
        return Cell(name, *places), Ask(method, of_algorithm, alone), Ask(method, of_model, alone)

    n_layers, n_steps = hypothesis.schedule[-1]
    yield twins("prediction", "freeze", (0, 0, 0), ((n_steps,), "query"), ((n_layers,), "query"))  # nothing is left
    for layer, step in hypothesis.between:
        places = (layer, step, layer)
        for place in ("query", "context"):
            at_step, at_layer = (step, place), (layer, place)
            yield twins(f"{place} exchanged", "exchange", places, at_step, at_layer)
            for name, basis in hypothesis.subspaces.items():
                told, asked = (*at_step, variables_of(name)), (*at_layer, basis)
                yield twins(f"{place}'s {name} exchanged", "exchange", places, told, asked)
            if hypothesis.rest is not None:
                told, asked = (*at_step, ()), (*at_layer, hypothesis.rest)
                yield twins(f"{place}'s rest exchanged", "exchange", places, told, asked)
        told, asked = (step, "context", None, point), (layer, "context", None, point)
        yield twins("point exchanged", "exchange", places, told, asked)
    for layers, steps in hypothesis.segments:
        places = (layers.start, steps.start, layers.stop)
        for place in ("query", "context"):
            for name, method in (("skips", "skip"), ("repeats", "repeat")):
                yield twins(f"{place} {name}", method, places, (steps, place), (layers, place))
        if hears:
            yield twins("query does not read", "stop_reading", places, (steps,), (layers,))
    for i, (layer, step) in enumerate(hypothesis.schedule[:-1]):
        places = (layer, step, n_layers)
        at_layers, at_steps = (tuple(column) for column in zip(*hypothesis.schedule[i:], strict=True))
        rest = (range(step, n_steps),), (range(layer, n_layers),)
        yield twins("context frozen", "freeze", places, (at_steps, "context"), (at_layers, "context"))
        if hears:
            yield twins("query stops reading", "stop_reading", places, *rest)
        if isolates:
            yield twins("context isolated", "isolate", places, *rest)


def select_interventions(plan: Sequence[Planned], interventions: Sequence[str] | None) -> list[Planned]:
    """Those of these names; all by default."""
    known = {cell.intervention for cell, _, _ in plan}
    unknown = set(interventions or ()) - known
    if unknown:
        raise ValueError(f"{sorted(unknown)} are not among what this hypothesis can be asked: {sorted(known)}")
    return [each for each in plan if interventions is None or each[0].intervention in interventions]
