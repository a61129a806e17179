"""An algorithm as a causal model: what each point carries, and how one step changes it by reading the context.

A transformer's token carries what it has been given, and a layer changes it by what it reads from other tokens. So do
points here: each carries named variables, and in one step every point, of the context or the query, makes its new
variables from its own and from those that the context's points carry. State goes in, state comes out, so that a
variable can be exchanged between two runs after any step, and what would have happened is computed exactly.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts

State = dict[str, Float[Tensor, "prompt _ _"]]
"""What points carry: variable to `[prompt point dim]`. In a whole state the last point is the query."""


class StepwiseAlgorithm(ABC):
    """An algorithm whose steps take a state to the next one.

    Attributes:
        name: for tables.
        n_steps: how many steps there are.
        variables: what a point carries, in words; every state has just these entries.
        causal: whether a point of the context reads only itself and the points before it, as in a transformer with
            causal keys. The query, which comes last, reads them all.
    """

    name: str
    n_steps: int
    variables: tuple[str, ...]
    causal: bool = False

    @abstractmethod
    def start(self, prompts: Prompts) -> State:
        """What points carry before the first step, float64; the query's target is not read."""

    @abstractmethod
    def step(self, k: int, readers: State, context: State, sees: Float[Tensor, "reader point"] | None = None) -> State:
        """What points carry after step `k` (counted from 0).

        Args:
            k: which step.
            readers: any points before the step.
            context: the context's points before the step; none at all, where readers are to read nothing. What a
                step would have overwritten by what it reads then stays.
            sees: 1 where a reader sees a point and 0 elsewhere; by default all see all.
        """

    def read(self, query: State) -> Float[Tensor, "prompt y"]:
        """The prediction that the query, a state of one point, carries: its own variable, or minus the residual."""
        return query["prediction"][:, 0] if "prediction" in query else -query["residual"][:, 0]

    def states(self, prompts: Prompts) -> list[State]:
        """The states before the first step and after each."""
        states = [self.start(prompts)]
        for k in range(self.n_steps):
            states.append(self.advance(k, states[-1]))
        return states

    def advance(self, k: int, state: State) -> State:
        """A whole state after step `k`: all points read what the context carried before it."""
        return self.step(k, state, context_of(state), self.sight(state))

    def sight(self, state: State) -> Tensor | None:
        """Which points see which, where not all see all: points `[reader point]`, the query's row last."""
        if not self.causal:
            return None
        n_points = next(iter(state.values())).shape[1]
        return next(iter(state.values())).new_ones(n_points, n_points - 1).tril()

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction after the last step, in the prompts' dtype."""
        return self.read(query_of(self.states(prompts)[-1])).to(prompts.dtype)

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """The prediction of each point from those before it, which are a context of their own."""
        return torch.stack([self.predict(prompts.prefix(t)) for t in range(prompts.n_context + 1)], dim=1)

    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """The predictions that the query carries after each step, for every prefix."""
        if with_weights:
            raise ValueError(f"{self.name} step by step has no weights: they are those of its points")
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
    """`Σ_i score_ji value_i` over the points i that reader j sees."""
    return (scores if sees is None else scores * sees) @ values


@checked(undefined=True)
def query_of(state: State) -> State:
    """What the query carries: one point. After steps that diverge it is NaN or infinite, as the state is."""
    return {name: value[:, -1:] for name, value in state.items()}


def context_of(state: State) -> State:
    """What the context's points carry."""
    return {name: value[:, :-1] for name, value in state.items()}


def joined(context: State, query: State) -> State:
    """A whole state from that of the context and that of the query."""
    return {name: torch.cat([context[name], query[name]], dim=1) for name in context}


def empty(context: State) -> State:
    """A context without points, for readers that read nothing."""
    return {name: value[:, :0] for name, value in context.items()}


def without_query_target(prompts: Prompts) -> Float[Tensor, "prompt point y"]:
    """Targets in float64, 0 for the query's."""
    ys = prompts.ys.double()
    return torch.cat([ys[:, :-1], torch.zeros_like(ys[:, -1:])], dim=1)


def in_words(number: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
