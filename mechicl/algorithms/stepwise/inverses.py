"""Newton's method step by step, and ridge regression: along a path, by eigendirections, and of collected moments."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from mechicl.algorithms.spectra import above_rounding
from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm, gather, in_words, without_query_target
from mechicl.base.checks import check_positive, check_whole
from mechicl.prompts import Prompts

Answers = Literal["at the end", "anew", "running"]


class NewtonSteps(StepwiseAlgorithm):
    """Iterative Newton, in which every point carries its input times the current inverse.

    The first step writes `m = αSx`; each iteration makes it `2m - M S m`, which reads only what other points carry:
    `Σ_i m_i <m_i, x>`. The prediction `x M_k B = Σ_i <m_i, x> y_i` is read

    - "at the end": by the query, in a step of its own after the last iteration (Fu et al.'s construction);
    - "anew": in every step after the first, from the context's targets; what the query held before is overwritten;
    - "running": what each iteration adds, from the residuals that the context's points carry:
      `x M_{k+1} B = x M_k B + Σ_i <m_i, x> (y_i - x_i M_k B)`.

    All three predict the same after the last step, and differ in what the query needs to carry.

    Args:
        iterations: k; the steps are k + 2.
        alpha: α; by default `1 / ‖S Sᵀ‖_F` of each context, times `share`.
        share: factor on that default.
        answer: see above.
        causal: see `StepwiseAlgorithm`.

    Source: Fu et al. 2024, section 3.2 and Theorem 1.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> torch.allclose(NewtonSteps(5).predict(prompts), algorithms.newton(prompts, 5).query()[0])
        True
    """

    def __init__(
        self,
        iterations: int,
        *,
        alpha: float | None = None,
        share: float = 1.0,
        answer: Answers = "at the end",
        causal: bool = False,
    ):
        check_whole(0, iterations=iterations)
        check_positive(share=share, **({} if alpha is None else {"alpha": alpha}))
        if answer not in get_args(Answers):
            raise ValueError(f"answer must be one of {get_args(Answers)}, got {answer!r}")
        self.iterations, self.alpha, self.share = iterations, alpha, share
        self.answer, self.causal = answer, causal
        self.n_steps = iterations + 2
        self.variables = ("x", "y", "inverse times x", "prediction")
        self.variables += ("residual",) if answer == "running" else ()
        how = {"at the end": "answered at the end", "anew": "read anew", "running": "running prediction"}[answer]
        self.name = f"Newton, {in_words(iterations, 'iteration')}, {how}"

    def start(self, prompts: Prompts) -> State:
        """Inputs and targets; nothing yet of the inverse."""
        xs, ys = prompts.xs.double(), without_query_target(prompts)
        state = {"x": xs, "y": ys, "inverse times x": torch.zeros_like(xs), "prediction": torch.zeros_like(ys)}
        return state | ({"residual": ys} if self.answer == "running" else {})

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """The first step, an iteration, or the answer."""
        new = dict(readers)
        if k == 0:
            gathered = gather(readers["x"] @ context["x"].mT, context["x"], sees)
            return new | {"inverse times x": readers["inverse times x"] + self._alpha(context["x"], sees) * gathered}
        if self.answer == "running":
            added = self._answer(readers, context, "residual", sees)
            new["prediction"], new["residual"] = readers["prediction"] + added, readers["residual"] - added
        elif self.answer == "anew" and context["x"].shape[1]:
            new["prediction"] = self._answer(readers, context, "y", sees)
        elif k == self.n_steps - 1:
            new["prediction"] = readers["prediction"] + self._answer(readers, context, "y", sees)
        # the running prediction starts from the first inverse, which stays for one more step
        if k < self.n_steps - 1 and not (self.answer == "running" and k == 1):
            m = context["inverse times x"]
            new["inverse times x"] = 2 * readers["inverse times x"] - gather(readers["x"] @ m.mT, m, sees)
        return new

    def _answer(self, readers: State, context: State, values: str, sees: Tensor | None) -> Tensor:
        return gather(readers["x"] @ context["inverse times x"].mT, context[values], sees)

    def _alpha(self, xs: Tensor, sees: Tensor | None) -> float | Tensor:
        """α, or that of the points that each reader sees."""
        if self.alpha is not None:
            return self.alpha
        seen = xs.new_ones(1, xs.shape[1]) if sees is None else sees
        moments = torch.einsum("ri,pia,pib->prab", seen, xs, xs)
        return self.share / (moments @ moments).flatten(2).norm(dim=2).clamp(min=1e-300)[..., None]


class RidgePath(StepwiseAlgorithm):
    """Ridge regression with a smaller penalty in each step, read anew from the context: no iteration at all.

    The query's previous prediction is overwritten, and the context does not change.

    Args:
        penalties: λ, one a step; 0 gives the least-squares solution of least norm.
        causal: see `StepwiseAlgorithm`; it makes no difference to the query.
    """

    variables = ("x", "y", "prediction")

    def __init__(self, penalties: Sequence[float], *, causal: bool = False):
        self.penalties, self.causal = tuple(map(float, penalties)), causal
        _check_penalties(self.penalties)
        self.n_steps = len(self.penalties)
        self.name = f"ridge path, {self.n_steps} penalt{'y' if self.n_steps == 1 else 'ies'}"

    def start(self, prompts: Prompts) -> State:
        """Inputs, targets, and a prediction of 0."""
        ys = without_query_target(prompts)
        return {"x": prompts.xs.double(), "y": ys, "prediction": torch.zeros_like(ys)}

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """The prediction at the step's penalty, by all readers from the whole context."""
        if not context["x"].shape[1]:
            return dict(readers)
        solution = _solve(context["x"].mT @ context["x"], context["x"].mT @ context["y"], self.penalties[k])
        return readers | {"prediction": readers["x"] @ solution}


class RidgeByDirections(StepwiseAlgorithm):
    """Ridge regression by eigendirections of the context's S, the largest first: each step adds one to the prediction.

    Args:
        x_dim: number of directions, the number of steps.
        penalty: λ.
        causal: see `StepwiseAlgorithm`; it makes no difference to the query.
    """

    variables = ("x", "y", "prediction")
    start = RidgePath.start

    def __init__(self, x_dim: int, *, penalty: float = 0.0, causal: bool = False):
        check_whole(1, x_dim=x_dim)
        _check_penalties([penalty], "penalty")
        self.n_steps, self.penalty, self.causal = x_dim, float(penalty), causal
        self.name = f"ridge by {in_words(x_dim, 'eigendirection')}"

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Add the contribution of direction k to every reader's prediction."""
        if readers["x"].shape[-1] != self.n_steps:
            raise ValueError(f"{self.name}, and these prompts have {readers['x'].shape[-1]} dimensions")
        second, cross = context["x"].mT @ context["x"], context["x"].mT @ context["y"]
        solution = _solve(second, cross, self.penalty, direction=-1 - k)
        return readers | {"prediction": readers["prediction"] + readers["x"] @ solution}


class MomentsThenRidge(StepwiseAlgorithm):
    """Ridge regression in two steps: a sum over the context, and a function of it that reads nothing more.

    The first step adds `S = Σ_i x_iᵀ x_i` and `B = Σ_i x_iᵀ y_i` to what every point has collected, "moments"; the
    second makes `x (S + λ)⁻¹ B` of them, over whatever the prediction was before. A network does this if its attention
    gathers features once, and its MLPs combine them.

    Args:
        penalty: λ; 0 gives the least-squares solution of least norm.
        causal: see `StepwiseAlgorithm`; it makes no difference to the query.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> expected = algorithms.ridge(prompts, penalty=0.5).query()[0]
        >>> torch.allclose(MomentsThenRidge(penalty=0.5).predict(prompts), expected)
        True
    """

    n_steps = 2
    variables = ("x", "y", "moments", "prediction")

    def __init__(self, *, penalty: float = 0.0, causal: bool = False):
        _check_penalties([penalty], "penalty")
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
        d, m = readers["x"].shape[-1], readers["y"].shape[-1]
        second, cross = readers["moments"].unflatten(-1, (d, d + m)).split([d, m], dim=-1)
        solution = _solve((second + second.mT) / 2, cross, self.penalty)  # [prompt reader x y]
        return readers | {"prediction": (readers["x"][..., None, :] @ solution)[..., 0, :]}


def _solve(second: Tensor, cross: Tensor, penalty: float, direction: int | None = None) -> Tensor:
    """`(S + penalty)⁻¹ B` over the directions that are more than rounding noise, or over one of them alone."""
    eigenvalues, directions = torch.linalg.eigh(second)
    eigenvalues = eigenvalues.clamp(min=0.0)
    present = above_rounding(eigenvalues)
    if direction is not None:
        present &= torch.arange(eigenvalues.shape[-1], device=eigenvalues.device) == eigenvalues.shape[-1] + direction
    inverse = torch.where(present, 1 / (eigenvalues.masked_fill(~present, 1.0) + penalty), 0.0)
    return directions @ (inverse[..., None] * (directions.mT @ cross))


def _check_penalties(penalties: Sequence[float], name: str = "penalties") -> None:
    if not penalties or any(not 0 <= penalty < math.inf for penalty in penalties):
        raise ValueError(f"{name} must be finite and at least 0, got {penalties!r}")
