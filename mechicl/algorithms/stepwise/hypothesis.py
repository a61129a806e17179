"""A hypothesis on a model: which algorithm it runs, which layers are which steps, and where variables are."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.base.arguments import check_fields


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """The hypothesis that a model runs an algorithm: after certain layers its tokens carry the algorithm's variables.

    Attributes:
        algorithm: step by step.
        schedule: pairs (number of layers, number of steps), from (0, 0) to all layers and all steps. Layers
            rise, and steps do or stay: a layer that takes no step, several layers for one step (those inside are left
            out), or several steps in a layer. By default one step a layer.
        subspaces: a variable, or several that share a place ("y, prediction"), to the orthonormal columns
            `[d_model dim]` of the residual stream that carry it, where known; `rest` is their complement.
        name: for tables; the algorithm's by default.

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
