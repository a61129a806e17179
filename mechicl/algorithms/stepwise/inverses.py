"""Newton's method step by step, and ridge regression: along a path, by eigendirections, and of collected moments."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mechicl.algorithms.spectra import above_rounding, safe_norm
from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm, count, gather
from mechicl.base.arguments import Count, Natural, NonNegative, Positive
from mechicl.prompts import Prompts


class NewtonSteps(StepwiseAlgorithm):
    """Iterative Newton, in which every point carries its input times the current inverse M_k of S = XᵀX (B = XᵀY).

    The first step writes `m = αSx`; each iteration makes it `2m - M S m`, which reads only the m that other points
    carry: `Σ_i m_i <m_i, x>`. The prediction `x M_k B = Σ_i <m_i, x> y_i` is read

    - "at the end": by the query, in a separate step after the last iteration (Fu et al.'s construction);
    - "anew": in every step after the first, from the context's targets, over the query's previous prediction;
    - "running": as what each iteration adds, from the residuals that the context's points carry:
      `x M_{k+1} B = x M_k B + Σ_i <m_i, x> (y_i - x_i M_k B)`.

    All three predict the same after the last step, and differ in the variables that the query carries. Source: Fu et
    al. 2024, section 3.2 and Theorem 1.

    Args:
        iterations: number k of iterations; the steps are k + 2.
        alpha: α of the first inverse `M_0 = αS`; by default `1 / ‖S Sᵀ‖_F` of each context, times `share`.
        share: factor on that default.
        answer: how the prediction is read, see above.
        causal: True if a context point reads only itself and the points before it.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> torch.allclose(NewtonSteps(5).predict(prompts), algorithms.newton(prompts, 5).query()[0])
        True
    """

    def __init__(
        self,
        iterations: Natural,
        *,
        alpha: Positive | None = None,
        share: Positive = 1.0,
        answer: Literal["at the end", "anew", "running"] = "at the end",
        causal: bool = False,
    ):
        self.iterations, self.alpha, self.share = iterations, alpha, share
        self.answer, self.causal = answer, causal
        self.n_steps = iterations + 2
        self.variables = ("x", "y", "inverse times x", "prediction")
        self.variables += ("residual",) if answer == "running" else ()
        how = {"at the end": "answered at the end", "anew": "read anew", "running": "running prediction"}[answer]
        self.name = f"Newton, {count(iterations, 'iteration')}, {how}"

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Take the first step, an iteration, or the step that reads the prediction."""
        new = dict(readers)
        if k == 0:
            gathered = gather(readers["x"] @ context["x"].mT, context["x"], sees)
            return new | {"inverse times x": readers["inverse times x"] + self._alpha(context["x"], sees) * gathered}
        values = context["residual" if self.answer == "running" else "y"]
        added = gather(readers["x"] @ context["inverse times x"].mT, values, sees)
        if self.answer == "running":
            new["prediction"], new["residual"] = readers["prediction"] + added, readers["residual"] - added
        elif self.answer == "anew" and context["x"].shape[1]:
            new["prediction"] = added
        elif k == self.n_steps - 1:
            new["prediction"] = readers["prediction"] + added
        # the running prediction starts from the first inverse, which stays for one more step
        if k < self.n_steps - 1 and not (self.answer == "running" and k == 1):
            m = context["inverse times x"]
            new["inverse times x"] = 2 * readers["inverse times x"] - gather(readers["x"] @ m.mT, m, sees)
        return new

    def _alpha(self, xs: Tensor, sees: Tensor | None) -> float | Tensor:
        if self.alpha is not None:
            return self.alpha
        seen = xs.new_ones(1, xs.shape[1]) if sees is None else sees
        moments = torch.einsum("ri,pia,pib->prab", seen, xs, xs)
        return self.share / safe_norm((moments @ moments).flatten(2))


class RidgePath(StepwiseAlgorithm):
    """Ridge regression with a new penalty in each step, computed anew from the context: not an iteration.

    The query's previous prediction is overwritten, and the context does not change.

    Args:
        penalties: penalty λ of each step, usually falling; 0 gives the least-squares solution of least norm.
    """

    variables = ("x", "y", "prediction")

    def __init__(self, penalties: Sequence[NonNegative]):
        if not penalties:
            raise ValueError("penalties must be one or more numbers, got none")
        self.penalties, self.n_steps = tuple(map(float, penalties)), len(penalties)
        self.name = f"ridge path, {self.n_steps} penalt{'y' if self.n_steps == 1 else 'ies'}"

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Predict by the step's penalty; all readers read the whole context."""
        if not context["x"].shape[1]:
            return dict(readers)
        return readers | {"prediction": readers["x"] @ _of_context(context, self.penalties[k])}


class RidgeByDirections(StepwiseAlgorithm):
    """Ridge regression by eigendirections of the context's S, the largest first: each step adds one of `x_dim`."""

    variables = ("x", "y", "prediction")

    def __init__(self, x_dim: Count, *, penalty: NonNegative = 0.0):
        self.n_steps, self.penalty = x_dim, float(penalty)
        self.name = f"ridge by {count(x_dim, 'eigendirection')}"

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Add the contribution of direction k to every reader's prediction."""
        if readers["x"].shape[-1] != self.n_steps:
            raise ValueError(f"{self.name}, and these prompts have {readers['x'].shape[-1]} dimensions")
        solution = _of_context(context, self.penalty, direction=-1 - k)
        return readers | {"prediction": readers["prediction"] + readers["x"] @ solution}


class ResidualRidge(StepwiseAlgorithm):
    """Ridge regression in every step on the residuals of the step before, which every point carries.

    `r_j ← r_j - x_j (S + λ)⁻¹ Σ_i x_iᵀ r_i` with `S = Σ_i x_iᵀ x_i` over the points i that j reads. The query, whose
    target counts as 0, carries minus the prediction: after one step that of ridge regression. Source: von Oswald et al.
    2025, section 3, for a layer that does this.

    Args:
        steps: number of steps.
        penalty: λ.
        causal: True if a context point reads only itself and the points before it, as in a recurrent layer.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> expected = algorithms.ridge(prompts, penalty=0.5).query()[0]
        >>> torch.allclose(ResidualRidge(1, penalty=0.5).predict(prompts), expected)
        True
    """

    variables = ("x", "residual")

    def __init__(self, steps: Count, *, penalty: Positive, causal: bool = False):
        self.n_steps, self.penalty, self.causal = steps, penalty, causal
        self.name = f"ridge of residuals, {count(steps, 'step')}"

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Subtract the prediction of ridge regression on the context's residuals from every reader's residual."""
        x, n_readers = context["x"], readers["x"].shape[1]
        seen = x.new_ones(n_readers, x.shape[1]) if sees is None else sees.to(x)
        second = torch.einsum("ri,pia,pib->prab", seen, x, x)
        cross = torch.einsum("ri,pia,piy->pray", seen, x, context["residual"])
        weights = torch.linalg.solve(second + self.penalty * torch.eye(x.shape[-1]).to(x), cross)
        return readers | {"residual": readers["residual"] - (readers["x"][..., None, :] @ weights)[..., 0, :]}


class MomentsThenRidge(StepwiseAlgorithm):
    """Ridge regression in two steps: a sum over the context, then a function of it that reads nothing more.

    The first step adds `S = Σ_i x_iᵀ x_i` and `B = Σ_i x_iᵀ y_i` to every point's variable "moments"; the second
    computes `x (S + λ)⁻¹ B` over the previous prediction (`penalty` λ; 0 for least squares of least norm). A network
    does this if its attention gathers features once, and its MLPs combine them.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> expected = algorithms.ridge(prompts, penalty=0.5).query()[0]
        >>> torch.allclose(MomentsThenRidge(penalty=0.5).predict(prompts), expected)
        True
    """

    n_steps = 2
    variables = ("x", "y", "moments", "prediction")
    name = "ridge of collected moments"

    def __init__(self, *, penalty: NonNegative = 0.0):
        self.penalty = float(penalty)

    def start(self, prompts: Prompts) -> State:
        """Add moments of 0 to inputs, targets and a prediction of 0."""
        n, d, m = prompts.n_context + 1, prompts.x_dim, prompts.y_dim
        state = super().start(prompts)
        return state | {"moments": state["x"].new_zeros(len(prompts), n, d * (d + m))}

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Collect the moments of the points that are seen, or solve for the prediction."""
        if k == 0:
            products = context["x"][..., :, None] * torch.cat([context["x"], context["y"]], dim=-1)[..., None, :]
            products = products.flatten(2)  # [prompt point moment]
            weights = products.new_ones(readers["x"].shape[1], products.shape[1]) if sees is None else sees
            return readers | {"moments": readers["moments"] + weights.to(products) @ products}
        d, m = readers["x"].shape[-1], readers["y"].shape[-1]
        second, cross = readers["moments"].unflatten(-1, (d, d + m)).split([d, m], dim=-1)
        solution = _solve((second + second.mT) / 2, cross, self.penalty)  # [prompt reader x y]
        return readers | {"prediction": (readers["x"][..., None, :] @ solution)[..., 0, :]}


def _of_context(context: State, penalty: float, direction: int | None = None) -> Tensor:
    xs, ys = context["x"], context["y"]
    return _solve(xs.mT @ xs, xs.mT @ ys, penalty, direction)


def _solve(second: Tensor, cross: Tensor, penalty: float, direction: int | None = None) -> Tensor:
    """Return `(S + penalty)⁻¹ B` over the directions that are more than rounding noise, or over one of them alone."""
    eigenvalues, directions = torch.linalg.eigh(second)
    eigenvalues = eigenvalues.clamp(min=0.0)
    present = above_rounding(eigenvalues)
    if direction is not None:
        present &= torch.arange(eigenvalues.shape[-1], device=eigenvalues.device) == eigenvalues.shape[-1] + direction
    inverse = torch.where(present, 1 / (eigenvalues.masked_fill(~present, 1.0) + penalty), 0.0)
    return directions @ (inverse[..., None] * (directions.mT @ cross))
