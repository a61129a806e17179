"""Counterfactual predictions of an algorithm: with its state changed after some step."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm, context_of, joined_states, query_of
from mechicl.base.arguments import checked

Place = Literal["query", "context"]
"""The points whose state is changed."""


class Runs:
    """Counterfactual runs of an algorithm: its states on some prompts, changed by interventions with states of others.

    Each method returns the query's prediction `[prompt y]`, float64, of a run that continues after an intervention.
    Steps are counted from 0; `range(1, 3)` are the second and the third.

    Args:
        algorithm: the algorithm that runs.
        base: its states on the prompts that are intervened in, from `algorithm.states(prompts)`.
        source: its states on the prompts that states are taken from, prompt by prompt.
    """

    @checked
    def __init__(self, algorithm: StepwiseAlgorithm, base: Sequence[State], source: Sequence[State]):
        self.algorithm, self.base, self.source = algorithm, base, source

    @checked(undefined=True)
    def exchange(
        self, after: int, place: Place, variables: Iterable[str] | None = None, point: int | range | None = None
    ) -> Float[Tensor, "prompt y"]:
        """Replace the state of the query, or of the context, after some steps by the source's.

        Args:
            after: number of steps before the exchange.
            place: "query", or "context" for all its points.
            variables: names of the variables that are replaced; all by default.
            point: index of the only context point that is replaced, or a range of several; by default all points of
                `place`.
        """
        base, source = self._after(after), self._after(after, self.source)
        n_context = next(iter(base.values())).shape[1] - 1
        where = slice(n_context, None) if place == "query" else slice(0, n_context)
        where = slice(point, point + 1) if isinstance(point, int) else where if point is None else list(point)
        state = {name: value.clone() for name, value in base.items()}
        names = list(state if variables is None else variables)
        if unknown := [name for name in names if name not in state or name not in source]:
            raise ValueError(f"variables must be of {list(state)}, got {unknown[0]!r}")
        for name in names:
            state[name][:, where] = source[name][:, where]
        return self._finish(state, after)

    @checked(undefined=True)
    def skip(self, steps: range, place: Place) -> Float[Tensor, "prompt y"]:
        """Undo the changes that some steps made to the "query" or the "context", after the last of them."""
        return self.freeze((steps.start, steps.stop), place)

    @checked(undefined=True)
    def repeat(self, steps: range, place: Place) -> Float[Tensor, "prompt y"]:
        """Let the "query" or "context" take some steps twice, the second time with the other restored to before."""
        before, after = self._after(steps.start), self._after(steps.stop)
        context, query = (after, before) if place == "context" else (before, after)
        again = self._advance(joined_states(context_of(context), query_of(query)), steps)
        context, query = (again, after) if place == "context" else (after, again)
        return self._finish(joined_states(context_of(context), query_of(query)), steps.stop)

    @checked(undefined=True)
    def freeze(self, stops: Sequence[int], place: Place) -> Float[Tensor, "prompt y"]:
        """Keep the "query" or the "context" unchanged from the first stop to the last.

        Args:
            stops: ascending numbers of steps; at each one after the first, the state of `place` at the first is
                restored.
            place: "query" or "context".
        """
        if not stops:
            raise ValueError("stops must be one or more numbers of steps, got none")
        state = self._after(stops[0])
        for start, stop in itertools.pairwise(stops):
            new = self._advance(state, range(start, stop))
            context, query = (new, state) if place == "query" else (state, new)
            state = joined_states(context_of(context), query_of(query))
        return self._finish(state, stops[-1])

    @checked(undefined=True)
    def stop_reading(self, steps: range) -> Float[Tensor, "prompt y"]:
        """Keep the query from reading the context in these steps."""
        query, context = query_of(self._after(steps.start)), context_of(self._after(steps.start))
        no_points = {name: value[:, :0] for name, value in context.items()}
        for k in steps:
            query = self.algorithm.step(k, query, no_points)
        return self._finish(joined_states(context_of(self._after(steps.stop)), query), steps.stop)

    @checked(undefined=True)
    def isolate(self, steps: range) -> Float[Tensor, "prompt y"]:
        """Let each context point read only itself in these steps; the query reads them all."""
        state = self._after(steps.start)
        for k in steps:
            whole = next(iter(state.values()))
            sees = torch.eye(whole.shape[1], whole.shape[1] - 1).to(whole)
            sees[-1] = 1.0
            state = self.algorithm.step(k, state, context_of(state), sees)
        return self._finish(state, steps.stop)

    def _after(self, steps: int, states: Sequence[State] | None = None) -> State:
        states = self.base if states is None else states
        if not 0 <= steps < len(states):
            raise ValueError(f"steps must be 0 to {len(states) - 1}, got {steps}")
        return states[steps]

    def _advance(self, state: State, steps: range) -> State:
        for k in steps:
            state = self.algorithm._advance(k, state)
        return state

    def _finish(self, state: State, after: int) -> Tensor:
        state = self._advance(state, range(after, self.algorithm.n_steps))
        return self.algorithm.read(query_of(state))
