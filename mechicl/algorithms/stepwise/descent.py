"""Gradient descent step by step, in the two ways in which points can carry it, and its relatives that read in order."""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.gradient_descent import per_step
from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm, count, gather, with_numbers
from mechicl.base.arguments import Count, NonNegative, Positive, between
from mechicl.prompts import Prompts


class ResidualDescent(StepwiseAlgorithm):
    """Gradient descent in which every point carries its residual at the current weights; also GD++ and momentum.

    `r_j ← r_j - a Σ_i r_i x_jᵀ A x_i` and, for GD++, `x_j ← x_j - γ Σ_i x_i <x_i, x_j>`: the context is refined step by
    step, and the query, whose target counts as 0, carries minus the running prediction. With momentum, points carry a
    velocity too: `v_j ← β v_j + a Σ_i r_i <x_i, x_j>`, `r_j ← r_j - v_j`. Source: von Oswald et al. 2023, Proposition 1
    and A.10; Nertinger 2025, Theorem 1, for a preconditioner (`a = 1/n`).

    Args:
        steps: number of steps.
        step_size: a, the factor on the summed gradient, one for all steps or one a step.
        gamma: γ of GD++, acting on the summed S = XᵀX, one for all steps or one a step; 0 for plain gradient descent.
        momentum: β; 0 for none.
        preconditioner: A `[x x]`, one for all steps or one a step; the identity by default.
        clip: bound on the absolute value of every variable after each step, as in models whose residual stream is
            clipped.
        causal: True if a context point reads only itself and the points before it.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> expected = algorithms.gradient_descent(prompts, 3, step_size=0.05).query()[0]
        >>> torch.allclose(ResidualDescent(3, step_size=0.05).predict(prompts), expected)
        True
    """

    def __init__(
        self,
        steps: Count,
        *,
        step_size: float | Sequence[float],
        gamma: float | Sequence[float] = 0.0,
        momentum: float = 0.0,
        preconditioner: Float[Tensor, "x x"] | Sequence[Float[Tensor, "x x"]] | None = None,
        clip: Positive | None = None,
        causal: bool = False,
    ):
        self.n_steps, self.causal, self.clip = steps, causal, clip
        self.step_sizes, self.gammas = per_step("step_size", step_size, steps), per_step("gamma", gamma, steps)
        (self.momentum,) = per_step("momentum", momentum, 1)
        matrices = [preconditioner] * steps if isinstance(preconditioner, Tensor) else preconditioner
        self.matrices = None if matrices is None else [matrix.double() for matrix in matrices]
        if self.matrices is not None and len(self.matrices) != steps:
            raise ValueError(f"preconditioner has {len(self.matrices)} entries for {steps} steps")
        self.variables = ("x", "residual", "velocity") if self.momentum else ("x", "residual")
        kind = "GD++" if any(self.gammas) else "gradient descent"
        kind = "preconditioned " + kind if self.matrices else kind
        kind += f" with momentum {momentum:.3g}" if self.momentum else ""
        self.name = f"{kind}, {count(steps, 'step')}, residuals in the context"

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Take a step of descent on every reader's residual."""
        x = readers["x"]
        scores = (x if self.matrices is None else x @ self.matrices[k].to(x)) @ context["x"].mT
        moved = self.step_sizes[k] * gather(scores, context["residual"], sees)
        new = dict(readers)
        if self.momentum:
            moved = new["velocity"] = self.momentum * readers["velocity"] + moved
        new["residual"] = readers["residual"] - moved
        if self.gammas[k]:
            new["x"] = x - self.gammas[k] * gather(x @ context["x"].mT, context["x"], sees)
        return new if self.clip is None else {n: value.clamp(-self.clip, self.clip) for n, value in new.items()}


class QueryDescent(StepwiseAlgorithm):
    """Gradient descent by the query alone, from a context that never changes.

    `p ← p + a Σ_i y_i <x_i, z>`, `z ← z - a Σ_i x_i <x_i, z>` from `z = x`: the same predictions p after every step as
    `ResidualDescent` without γ, but nothing in the context changes, so that it needs no exchange between context
    points. With a step size for each step it is any polynomial with real roots.

    Args:
        steps: number of steps.
        step_size: a, the factor on the summed gradient, one for all steps or one a step.
    """

    variables = ("x", "y", "transformed x", "prediction")

    def __init__(self, steps: Count, *, step_size: float | Sequence[float]):
        self.n_steps = steps
        self.step_sizes = per_step("step_size", step_size, steps)
        self.name = f"gradient descent, {count(steps, 'step')}, by the query alone"

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Change every reader's prediction and transformed input."""
        scores = self.step_sizes[k] * readers["transformed x"] @ context["x"].mT
        return readers | {
            "prediction": readers["prediction"] + gather(scores, context["y"], sees),
            "transformed x": readers["transformed x"] - gather(scores, context["x"], sees),
        }


class OnlineDescent(StepwiseAlgorithm):
    """Passes of gradient descent over the context, one of its points a step, in the order of the prompt.

    A step takes `a_k r_k <x_k, x_j>` from every point's residual; the query carries minus the running prediction. The
    variable "turn" is the residual of the point that is next, and 0 at all others; an additional first step marks the
    first point. Source: Fu et al. 2024, section 3.2.

    Args:
        n_context: number of context points; the steps are one more. On shorter prompts the last steps do nothing.
        step_size: a, the same for all points; by default `1 / |x_k|²`, with which each point is fitted exactly.
        offset: ε of normalised least mean squares, whose step size is `a / (ε + |x_k|²)`; None for a itself.
        passes: number of passes, each on the residuals that the one before left.
        causal: True if a context point reads only itself and the points before it. Passes are then not epochs, since a
            point's residual is that of the weights after this point: so do stacked recurrent layers.
    """

    variables = ("x", "residual", "turn", "number")

    def __init__(
        self, n_context: Count, *, step_size: float | None = None, offset: NonNegative | None = None, passes: Count = 1,
        causal: bool = False,
    ):  # fmt: skip
        self.n_context, self.n_steps, self.causal = n_context, passes * (n_context + 1), causal
        self.step_size, self.offset = (1.0, 0.0) if step_size is None else (step_size, offset)
        kind = "online gradient descent" if offset is None else "normalised LMS"
        self.name = f"{kind}, {count(n_context, 'point')}{f', {passes} passes' if passes > 1 else ''}"

    def start(self, prompts: Prompts) -> State:
        """Add each point's number to inputs and targets."""
        if prompts.n_context > self.n_context:
            raise ValueError(f"{self.name}, and these prompts have {prompts.n_context}")
        return with_numbers(super().start(prompts))

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Descend on the marked point, and mark the next one."""
        residual, k = readers["residual"], k % (self.n_context + 1)
        if k:
            x, turn, rate = context["x"], context["turn"], self.step_size
            if self.offset is not None:
                size = self.offset + x.square().sum(-1, keepdim=True)
                rate = self.step_size / size.masked_fill(size == 0, torch.inf)
            residual = residual - gather(readers["x"] @ x.mT, rate * turn, sees)
        # the query, whose number is the last step's, is never read
        marked = readers["number"] == k
        return readers | {"residual": residual, "turn": torch.where(marked, residual, 0.0)}


Weighing = Callable[[Tensor, Tensor], Tensor]
"""From readers' inputs `[prompt reader x]` and the context's `[prompt point x]` to weights `[prompt reader point]`."""


class KernelReading(StepwiseAlgorithm):
    """Steps in which every point subtracts a weighted sum of the context's residuals from its own.

    `r_j ← r_j - a Σ_i w(x_j, x_i) r_i`: with one step and weights that sum to 1 it is kernel smoothing, or the nearest
    neighbour's target; with a kernel as weights, gradient descent on a function of that kernel.

    Args:
        weights: function w of the readers' inputs `[prompt reader x]` and the context's `[prompt point x]` that returns
            weights `[prompt reader point]`.
        steps: number of steps.
        step_size: a, the factor on the sum.
        name: name in tables; by default the function's name and the number of steps.
        normalized: divide the weights of the points that a reader sees by their sum, as a softmax does.
    """

    variables = ("x", "residual")

    def __init__(
        self, weights: Weighing, steps: Count = 1, *, step_size: float = 1.0, name: str = "", normalized: bool = False
    ):
        (self.step_size,), self.normalized = per_step("step_size", step_size, 1), normalized
        self.weights, self.n_steps = weights, steps
        self.name = name or f"{getattr(weights, '__name__', 'kernel')}, {count(steps, 'step')}"

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Subtract the weighted sum from every reader's residual."""
        if not context["x"].shape[1]:
            return dict(readers)
        weights = self.weights(readers["x"], context["x"])
        if self.normalized:
            weights = weights if sees is None else weights * sees
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        moved = gather(weights, context["residual"], sees)
        return readers | {"residual": readers["residual"] - self.step_size * moved}


def nearest(
    readers: Float[Tensor, "prompt reader x"], points: Float[Tensor, "prompt point x"]
) -> Float[Tensor, "prompt reader point"]:
    """Put all weight on the nearest point, the first one of equally near points."""
    closest = torch.cdist(readers.double(), points.double()).argmin(-1)
    return torch.nn.functional.one_hot(closest, points.shape[1]).to(points)


class RecursiveSteps(StepwiseAlgorithm):
    """Recursive least squares with forgetting, one context point a step, in the order of the prompt.

    Every point carries its residual `r = y - x W` and its input times the inverse moments, `m = x P`, with `P = I /
    penalty` at first. Step k reads point k: `r ← r - <m, x_k> r_k / (γ + <m_k, x_k>)`, and `m ← (m - <m, x_k> m_k / (γ
    + <m_k, x_k>)) / γ`. The query carries minus the running prediction. Source: Plackett 1950; Haykin 2002, chapter 9.

    Args:
        n_context: number of context points, the number of steps. On shorter prompts the last steps do nothing.
        penalty: start of the inverse, `P = I / penalty`.
        discount: γ; 1 forgets nothing.
        causal: True if a context point reads only itself and the points before it.

    Example:
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> expected = algorithms.recursive_least_squares(prompts, penalty=0.5, discount=0.9).query()[0]
        >>> torch.allclose(RecursiveSteps(10, penalty=0.5, discount=0.9).predict(prompts), expected)
        True
    """

    variables = ("x", "residual", "inverse times x", "number")

    def __init__(
        self,
        n_context: Count,
        *,
        penalty: Positive,
        discount: Annotated[float, between(1e-3, 1)] = 1.0,
        causal: bool = False,
    ):
        self.n_steps, self.penalty, self.discount, self.causal = n_context, penalty, discount, causal
        self.name = f"recursive least squares, {count(n_context, 'point')}"

    def start(self, prompts: Prompts) -> State:
        """Add each point's number, and its input times the first inverse."""
        if prompts.n_context > self.n_steps:
            raise ValueError(f"{self.name}, and these prompts have {prompts.n_context}")
        state = super().start(prompts)
        return with_numbers(state) | {"inverse times x": state["x"] / self.penalty}

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Correct every reader's residual and inverse by point k."""
        m, x = context["inverse times x"], context["x"]
        read = (context["number"] == k).to(x)  # [prompt point 1]: 1 at point k
        share = read / (self.discount + (m * x).sum(-1, keepdim=True))
        scores = readers["inverse times x"] @ x.mT
        seen = gather(torch.ones_like(scores), read, sees)  # 1 for readers that see it
        corrected = readers["inverse times x"] - gather(scores, share * m, sees)
        return readers | {
            "residual": readers["residual"] - gather(scores, share * context["residual"], sees),
            "inverse times x": corrected / self.discount**seen,
        }


class DiscountedDescent(StepwiseAlgorithm):
    """Gradient descent on residuals in which a reader weighs a point that lies k points back by `γ^k`.

    `r_j ← r_j - a Σ_i γ^(j-i) r_i <x_j, x_i>` over the points i up to j, as in linear attention with a decayed state.
    The query reads the state after the last point, so it has that point's j. With one step the predictions are those
    of `algorithms.discounted_gradient_descent`. Context points read only themselves and those before.

    Args:
        steps: number of steps.
        step_size: a, the factor on the summed gradient.
        discount: γ; 1 forgets nothing.
    """

    variables = ("x", "residual", "number")
    causal = True

    def __init__(self, steps: Count, *, step_size: float, discount: Annotated[float, between(1e-3, 1)] = 1.0):
        self.n_steps, self.discount = steps, discount
        (self.step_size,) = per_step("step_size", step_size, 1)
        self.name = f"discounted gradient descent, {count(steps, 'step')}"

    def start(self, prompts: Prompts) -> State:
        """Add each point's number; the query's is that of the last point before it."""
        state = with_numbers(super().start(prompts))
        return state | {"number": state["number"].clamp(max=max(prompts.n_context - 1, 0))}

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Take a step of descent on every reader's residual."""
        back = readers["number"] - context["number"].mT
        scores = self.step_size * self.discount**back * (readers["x"] @ context["x"].mT)
        return readers | {"residual": readers["residual"] - gather(scores, context["residual"], sees)}
