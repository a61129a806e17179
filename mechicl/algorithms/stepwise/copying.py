"""Circuits that copy between points: a target moves to its input, or remembers it for an induction head."""

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm, gather, without_query_target
from mechicl.algorithms.stepwise.descent import Weights
from mechicl.prompts import Prompts


class AfterCopying(StepwiseAlgorithm):
    """An algorithm whose first step moves every target from a token of its own to the token of its input.

    For prompts whose inputs and targets are tokens of their own. Before that step a point's target is at its target
    token ("target"), after it at its input token, and the target's token is read no more.

    Args:
        algorithm: what runs on the points that the copying has put together.

    Source: von Oswald et al. 2023, Proposition 3 and section 4.

    Example:
        >>> AfterCopying(algorithms.stepwise.ResidualDescent(2, step_size=0.05)).n_steps
        3
    """

    def __init__(self, algorithm: StepwiseAlgorithm):
        self.algorithm = algorithm
        self.n_steps, self.causal = algorithm.n_steps + 1, algorithm.causal
        self.variables = (*algorithm.variables, "target")
        self._receivers = [name for name in ("y", "residual") if name in algorithm.variables]  # what starts as a target
        self.name = f"copying, then {algorithm.name}"

    def start(self, prompts: Prompts) -> State:
        """The algorithm's state on prompts without targets, and the targets beside it."""
        state = self.algorithm.start(prompts)
        return state | {name: 0 * state[name] for name in self._receivers} | {"target": without_query_target(prompts)}

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """The copy of each point's own target, or a step of the algorithm."""
        if k == 0:
            return readers | dict.fromkeys(self._receivers, readers["target"])
        inner = self.algorithm.step(k - 1, readers, context, sees)
        return inner | {"target": readers["target"]}

    def read(self, query: State) -> Float[Tensor, "prompt y"]:
        """The algorithm's prediction."""
        return self.algorithm.read(query)


class Induction(StepwiseAlgorithm):
    """Two steps: every target takes up the token before it, its input; then readers match and copy the target.

    For prompts whose inputs and targets are tokens of their own: an induction head and the previous-token head that it
    needs, on continuous tokens. The first step adds a point's input to what its target remembers, "previous"; in the
    second, readers take the targets whose "previous" their own input matches.

    Args:
        weights: from readers' inputs `[prompt reader x]` and what targets remember `[prompt point x]` to weights
            `[prompt reader point]`; by default all on the nearest (`best_match`).
        causal: see `StepwiseAlgorithm`: weights on points that are not seen are left out, not spread over the others.

    Source: Olsson et al. 2022, section "Induction heads", with vectors in place of tokens.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> expected = algorithms.nearest_neighbours(prompts, n_neighbours=1).query()[0]
        >>> torch.allclose(Induction().predict(prompts), expected)
        True
    """

    n_steps = 2
    variables = ("x", "target", "previous", "prediction")

    def __init__(self, weights: Weights | None = None, *, causal: bool = False):
        self.weights, self.causal = weights or best_match, causal
        self.name = "previous token, then induction"

    def start(self, prompts: Prompts) -> State:
        """Inputs and targets; nothing remembered, and a prediction of 0."""
        xs, ys = prompts.xs.double(), without_query_target(prompts)
        return {"x": xs, "target": ys, "previous": torch.zeros_like(xs), "prediction": torch.zeros_like(ys)}

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """What targets remember, or what readers copy."""
        if k == 0:
            return readers | {"previous": readers["previous"] + readers["x"]}
        if not context["x"].shape[1]:
            return dict(readers)
        copied = gather(self.weights(readers["x"], context["previous"]), context["target"], sees)
        return readers | {"prediction": readers["prediction"] + copied}


SHARPEST = 1e12
"""What is beyond it overflows in single precision where inputs are large."""


def best_match(
    readers: Float[Tensor, "prompt reader x"], points: Float[Tensor, "prompt point x"], sharpness: float = 1e6
) -> Float[Tensor, "prompt reader point"]:
    """All weight on the points nearest to the reader, shared by those whose `<x, x_i> - |x_i|² / 2` hardly differ.

    Args:
        readers: `[prompt reader x]`.
        points: `[prompt point x]`.
        sharpness: factor on these scores before a softmax.
    """
    if not 0 <= sharpness <= SHARPEST:
        raise ValueError(f"sharpness must be from 0 to {SHARPEST:g}, got {sharpness:g}")
    if readers.dtype != points.dtype:
        raise TypeError(f"readers are {readers.dtype} and points {points.dtype}: convert the one to the other")
    scores = readers @ points.mT - points.square().sum(-1)[:, None] / 2
    return (sharpness * scores).softmax(-1)
