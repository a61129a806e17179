"""Recursive least squares and discounted gradient descent step by step."""

from typing import Annotated

import torch
from torch import Tensor

from mechicl.algorithms.gradient_descent import per_step
from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm, count, gather, with_numbers
from mechicl.base.arguments import Count, Positive, between, checked
from mechicl.prompts import Prompts


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

    @checked
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

    @checked(undefined=True)
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

    @checked
    def __init__(self, steps: Count, *, step_size: float, discount: Annotated[float, between(1e-3, 1)] = 1.0):
        self.n_steps, self.discount = steps, discount
        (self.step_size,) = per_step("step_size", step_size, 1)
        self.name = f"discounted gradient descent, {count(steps, 'step')}"

    @checked(undefined=True)
    def start(self, prompts: Prompts) -> State:
        """Add each point's number; the query's is that of the last point before it."""
        state = with_numbers(super().start(prompts))
        return state | {"number": state["number"].clamp(max=max(prompts.n_context - 1, 0))}

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Take a step of descent on every reader's residual."""
        back = readers["number"] - context["number"].mT
        scores = self.step_size * self.discount**back * (readers["x"] @ context["x"].mT)
        return readers | {"residual": readers["residual"] - gather(scores, context["residual"], sees)}
