"""Ridge regression without iterations: the query collects the context's moments, then solves on its own."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import above_rounding
from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm
from mechicl.algorithms.stepwise.descent import without_query_target
from mechicl.prompts import Prompts


class MomentsThenRidge(StepwiseAlgorithm):
    """Ridge regression in two steps: a sum over the context, and a function of it that reads nothing more.

    The first step adds `S = Σ_i x_iᵀ x_i` and `B = Σ_i x_iᵀ y_i` to what every point has collected, "moments"; the
    second makes `x (S + λ)⁻¹ B` of them, over whatever the prediction was before. It is what a network does whose
    attention gathers features once, and whose MLPs combine them.

    Args:
        penalty: λ; 0 gives the least-squares solution of least norm.
        causal: see `StepwiseAlgorithm`; it makes no difference to the query.

    Raises:
        ValueError: a penalty that is negative or not finite.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> expected = algorithms.ridge(prompts, penalty=0.5).query()[0]
        >>> torch.allclose(MomentsThenRidge(penalty=0.5).predict(prompts), expected)
        True
    """

    n_steps = 2
    variables = ("x", "y", "moments", "prediction")

    def __init__(self, *, penalty: float = 0.0, causal: bool = False):
        if not 0 <= penalty < math.inf:
            raise ValueError(f"penalty must be a finite number >= 0, got {penalty!r}")
        self.penalty, self.causal = float(penalty), causal
        self.name = "ridge of collected moments"

    def start(self, prompts: Prompts) -> State:
        """Inputs, targets, no moments, and a prediction of 0."""
        xs, ys = prompts.xs.double(), without_query_target(prompts)
        moments = xs.new_zeros(*xs.shape[:2], xs.shape[2] * (xs.shape[2] + ys.shape[2]))
        return {"x": xs, "y": ys, "moments": moments, "prediction": torch.zeros_like(ys)}

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """The moments of the points that are seen, or the solution."""
        if k == 0:
            products = context["x"][..., :, None] * torch.cat([context["x"], context["y"]], dim=-1)[..., None, :]
            products = products.flatten(2)  # [prompt point moment]
            weights = products.new_ones(readers["x"].shape[1], products.shape[1]) if sees is None else sees
            return readers | {"moments": readers["moments"] + weights.to(products) @ products}
        xs = readers["x"]
        d, m = xs.shape[-1], readers["y"].shape[-1]
        spread, cross = readers["moments"].unflatten(-1, (d, d + m)).split([d, m], dim=-1)
        eigenvalues, directions = torch.linalg.eigh((spread + spread.mT) / 2)
        eigenvalues = eigenvalues.clamp(min=0.0)
        present = above_rounding(eigenvalues)
        inverse = torch.where(present, 1 / (eigenvalues.masked_fill(~present, 1.0) + self.penalty), 0.0)
        solution = directions @ (inverse[..., None] * (directions.mT @ cross))  # [prompt reader x y]
        return readers | {"prediction": (xs[..., None, :] @ solution)[..., 0, :]}

    def read(self, query: State) -> Float[Tensor, "prompt y"]:
        """The prediction, 0 before there is one."""
        return query["prediction"][:, 0]
