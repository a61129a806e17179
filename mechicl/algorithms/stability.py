"""Warnings where the parameters of an iteration make it diverge on the prompts that it is meant for."""

from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.base.warning import warn

TOLERANCE = 1e-6  # what counts as growth: rounding, and eigenvalues perturbed by it, stay below


class ConditioningWarning(UserWarning):
    """A result has lost most of its digits to the condition of what it is computed from."""


class DivergenceWarning(UserWarning):
    """The parameters of an iteration make it diverge on most of the prompts that it runs on."""


def residuals_grow(
    eigenvalues: Float[Tensor, "*context x"], filters: Float[Tensor, "*context x"]
) -> Bool[Tensor, "*context"]:
    """Whether the residual `|1 - λ f(λ)|` of some eigendirection of S is larger than the 1 it starts from.

    For k steps of gradient descent it is `|1 - aλ|^k`, which exceeds 1 if and only if a is not between 0 and 2/λ_max.
    The residual of GD++ is the product of `|1 - a_i λ_i|` with `λ_{i+1} = λ_i (1 - γ_i λ_i)²`. If no a_i and no γ_i
    leaves that same range, no λ_i exceeds the first λ_max and the residual does not grow; outside the range it may or
    may not (a γ that shrinks S allows a larger a), so that what decides is the residual itself.

    Args:
        eigenvalues: λ of each context's S.
        filters: f(λ) of an algorithm that predicts `x U f(λ) Uᵀ B`; where it has overflowed, its residual has grown.
    """
    residuals = (1 - eigenvalues * filters).abs()
    return ~(residuals <= 1 + TOLERANCE).all(-1)


def warn_where_most_diverge(
    parameters: str, diverging: Bool[Tensor, "context"], condition: str, quantity: str, values: Float[Tensor, "context"]
) -> None:
    """Warn of parameters that diverge on more than half of the contexts.

    The message names the algorithm's `parameters`, the `condition` for convergence, and the `values` on the contexts of
    the `quantity` that the condition bounds, or of its bound.
    """
    share = diverging.double().mean().item()
    if share > 0.5:  # False for no contexts, whose mean is NaN
        middle, low, high = (value.item() for value in (values.median(), values.min(), values.max()))
        warn(
            f"{parameters} diverges on {share:.0%} of {len(diverging)} contexts. It converges {condition}; {quantity} "
            f"is {middle:.4g} on the median context, {low:.4g} to {high:.4g} on all",
            DivergenceWarning,
        )


def warn_of_divergence(parameters: str, largest_eigenvalue: float, condition: str) -> None:
    """Warn of parameters that diverge on prompts whose S has this largest eigenvalue."""
    words = f"{parameters} diverges where λ_max(S) is {largest_eigenvalue:.4g}. It converges {condition}"
    warn(words, DivergenceWarning)
