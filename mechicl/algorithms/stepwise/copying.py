"""Circuits that copy between points: a target moves to its input, or remembers it for an induction head."""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise.base import TARGETS, State, StepwiseAlgorithm, gather
from mechicl.algorithms.stepwise.descent import Weighing
from mechicl.base.arguments import between, checked
from mechicl.prompts import Prompts


class AfterCopying(StepwiseAlgorithm):
    """An algorithm whose first step moves every target from its own token to the token of its input.

    Use it for models whose prompts have separate tokens for inputs and targets. Before that step a point's target is at
    its target token (the variable "target"), after it at its input token, and the target's token is not read any more.
    Source: von Oswald et al. 2023, Proposition 3 and section 4.

    Args:
        algorithm: algorithm that runs on the points after the copying.

    Example:
        >>> AfterCopying(algorithms.stepwise.ResidualDescent(2, step_size=0.05)).n_steps
        3
    """

    def __init__(self, algorithm: StepwiseAlgorithm):
        self.algorithm = algorithm
        self.n_steps, self.causal = algorithm.n_steps + 1, algorithm.causal
        self.variables = (*algorithm.variables, "target")
        self._receivers = [name for name in TARGETS if name in algorithm.variables]
        self.name = f"copying, then {algorithm.name}"

    def start(self, prompts: Prompts) -> State:
        """Return the algorithm's state on prompts without targets, and the targets as a separate variable."""
        state = self.algorithm.start(prompts)
        receivers = {name: torch.zeros_like(state[name]) for name in self._receivers}
        return super().start(prompts) | state | receivers

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Copy each point's target, or take a step of the algorithm."""
        if k == 0:
            return readers | dict.fromkeys(self._receivers, readers["target"])
        return self.algorithm.step(k - 1, readers, context, sees) | {"target": readers["target"]}

    def read(self, query: State) -> Float[Tensor, "prompt y"]:
        """Return the algorithm's prediction."""
        return self.algorithm.read(query)


class Induction(StepwiseAlgorithm):
    """An induction head on points: every target stores the input before it, then readers match it and copy the target.

    Use it for models whose prompts have separate tokens for inputs and targets. The first step is a previous-token
    head: it adds a point's input to its variable "previous". In the second, readers take the targets whose "previous"
    matches their own input. Source: Olsson et al. 2022, section "Induction heads", with vectors in place of tokens.

    Args:
        weights: function of the readers' inputs `[prompt reader x]` and the points' "previous" `[prompt point x]` that
            returns weights `[prompt reader point]`; by default all weight is on the nearest point.
        causal: True if a context point reads only itself and the points before it: weights of other points are dropped.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> expected = algorithms.nearest_neighbours(prompts, n_neighbours=1).query()[0]
        >>> torch.allclose(Induction().predict(prompts), expected)
        True
    """

    n_steps = 2
    variables = ("x", "target", "previous", "prediction")
    name = "previous token, then induction"

    def __init__(self, weights: Weighing | None = None, *, causal: bool = False):
        self.weights, self.causal = weights or best_match, causal

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Store each point's input, or copy the matching targets."""
        if k == 0:
            return readers | {"previous": readers["previous"] + readers["x"]}
        if not context["x"].shape[1]:
            return dict(readers)
        copied = gather(self.weights(readers["x"], context["previous"]), context["target"], sees)
        return readers | {"prediction": readers["prediction"] + copied}


@checked(undefined=True)
def best_match(
    readers: Float[Tensor, "prompt reader x"],
    points: Float[Tensor, "prompt point x"],
    sharpness: Annotated[float, between(0, 1e12)] = 1e6,
) -> Float[Tensor, "prompt reader point"]:
    """Put all weight on the points nearest to the reader, shared where `<x, x_i> - |x_i|² / 2` hardly differ."""
    if readers.dtype != points.dtype:
        raise TypeError(f"readers are {readers.dtype} and points {points.dtype}: convert the one to the other")
    scores = readers @ points.mT - points.square().sum(-1)[:, None] / 2
    return (sharpness * scores).softmax(-1)
