"""An algorithm as a causal model: the variables that each point carries, and how one step changes them.

Points act like a transformer's tokens: in one step every point, of the context or the query, computes its new variables
from its own and from those of the context's points. A variable can be exchanged between two runs after any step, and
the outcome is computed exactly.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.sizes import SizedForFourthPowers
from mechicl.base.arguments import checked
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts

State = dict[str, Float[Tensor, "prompt _ _"]]
"""Each variable's values `[prompt point dim]`. In a whole state the last point is the query."""

INPUTS: tuple[str, ...] = ("x", "transformed x")  # variables that start as the inputs
TARGETS: tuple[str, ...] = ("y", "residual", "target")  # as the targets, 0 for the query's
OF_INPUTS: tuple[str, ...] = ("inverse times x", "previous")  # as zeros of the inputs' size
"""All other variables start as zeros of the targets' size."""


class StepwiseAlgorithm(ABC):
    """An algorithm as a causal model: named variables at each point, and steps that change them.

    A state is a dictionary from variables to values `[prompt point dim]`, float64, in which the last point is the
    query. Subclasses implement `step`; `predict(prompts)` and `trajectory(prompts)` run it as a learner.

    Attributes:
        name: name in tables.
        n_steps: number of steps.
        variables: names of the variables that a point carries, the entries of every state.
        causal: True if a context point reads only itself and the points before it, as in a transformer with causal
            attention. The query, which comes last, reads them all.
    """

    name: str
    n_steps: int
    variables: tuple[str, ...]
    causal: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the arguments of the subclass's own `__init__` and `start`."""
        super().__init_subclass__(**options)
        for name in {"__init__", "start"} & vars(cls).keys():
            setattr(cls, name, checked(undefined=name == "start")(vars(cls)[name]))

    @checked(undefined=True)
    def start(self, prompts: Prompts) -> State:
        """Return the state before the first step, float64: inputs, targets (0 for the query's) and zeros.

        Variables of other sizes than the inputs' or the targets' need an override.
        """
        xs, ys = prompts.xs.double(), prompts.ys.double()
        ys = torch.cat([ys[:, :-1], torch.zeros_like(ys[:, -1:])], dim=1)
        starts = {**dict.fromkeys(INPUTS, xs), **dict.fromkeys(TARGETS, ys), **dict.fromkeys(OF_INPUTS, 0 * xs)}
        return {name: starts.get(name, torch.zeros_like(ys)) for name in self.variables}

    @abstractmethod
    def step(self, k: int, readers: State, context: State, sees: Float[Tensor, "reader point"] | None = None) -> State:
        """Return the readers' variables after step `k`, counted from 0.

        Args:
            k: number of the step.
            readers: state before the step of the points that are updated: any points, of the context or the query.
            context: state before the step of the context's points; without points, readers read nothing and keep the
                values that the step would overwrite.
            sees: 1 where a reader sees a point and 0 elsewhere; by default all see all.
        """

    @checked(undefined=True)
    def read(self, query: State) -> Float[Tensor, "prompt y"]:
        """Return the query's prediction from its state: its variable "prediction", or minus its residual."""
        if not {"prediction", "residual"} & set(query):
            raise ValueError(f"query must contain 'prediction' or 'residual', got the variables {list(query)}")
        return query["prediction"][:, 0] if "prediction" in query else -query["residual"][:, 0]

    @checked(undefined=True)
    def states(self, prompts: SizedForFourthPowers) -> list[State]:
        """Run the algorithm: return `n_steps + 1` states, the one before the first step and those after each."""
        states = [self.start(prompts)]
        for k in range(self.n_steps):
            states.append(self._advance(k, states[-1]))
        return states

    def _advance(self, k: int, state: State) -> State:
        """Return the whole state after step `k`; the query, which is the last reader, sees all points."""
        whole = next(iter(state.values()))
        sees = whole.new_ones(whole.shape[1], whole.shape[1] - 1).tril() if self.causal else None
        return self.step(k, state, context_of(state), sees)

    @checked(undefined=True)
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Return the query's prediction after the last step, in the prompts' dtype."""
        return self.read(query_of(self.states(prompts)[-1])).to(prompts.dtype)

    @checked(undefined=True)
    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Return the prediction of each point, the query included, from the points before it."""
        return torch.stack([self.predict(prompts.prefix(t)) for t in range(prompts.n_context + 1)], dim=1)

    @checked(undefined=True)
    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """Return the predictions after each step (0 to `n_steps`), for every prefix.

        Args:
            with_weights: not available here; points carry residuals or predictions.
        """
        if with_weights:
            raise ValueError(f"{self.name} has no weights: its points carry residuals or predictions")
        prefixes = [
            torch.stack([self.read(query_of(state)) for state in self.states(prompts.prefix(t))])
            for t in range(prompts.n_context + 1)
        ]
        steps = tuple(range(self.n_steps + 1))
        return Trajectory(steps, torch.stack(prefixes, dim=2).to(prompts.dtype), self.name)


def gather(
    scores: Float[Tensor, "prompt reader point"],
    values: Float[Tensor, "prompt point dim"],
    sees: Float[Tensor, "reader point"] | None,
) -> Float[Tensor, "prompt reader dim"]:
    """Return `Σ_i score_ji value_i` over the points i that reader j sees."""
    return (scores if sees is None else scores * sees) @ values


@checked(undefined=True)
def query_of(state: State) -> State:
    """Return the query's part of a stepwise algorithm's state: the values at the last point.

    Args:
        state: the algorithm's variables before or after a step, `[prompt point dim]` by name, the query last;
            `algorithm.states(prompts)` returns one for each step.

    Returns:
        Values `[prompt 1 dim]` by variable. `algorithm.read` turns them into a prediction `[prompt y]`.

    Example:
        >>> algorithm = algorithms.stepwise.ResidualDescent(2, step_size=0.05)
        >>> algorithm.read(query_of(algorithm.states(prompts)[1]))  # predictions after one step
    """
    return {name: value[:, -1:] for name, value in state.items()}


def context_of(state: State) -> State:
    """Return the context's part of a state."""
    return {name: value[:, :-1] for name, value in state.items()}


def joined_states(context: State, query: State) -> State:
    """Return a whole state from the context's part and the query's."""
    return {name: torch.cat([context[name], query[name]], dim=1) for name in context}


def with_numbers(state: State) -> State:
    """Return a state with the variable "number": each point's place in the prompt, from 0."""
    x = state["x"]
    numbers = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[None, :, None]
    return state | {"number": numbers.expand(len(x), -1, 1)}


def count(number: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
