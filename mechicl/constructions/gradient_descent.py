"""Linear attention that is gradient descent, plain and with the data transformation of GD++."""

import reprlib
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.gradient_descent import gd_plus_plus_filters, per_step
from mechicl.algorithms.stability import residuals_grow, warn_of_divergence
from mechicl.base.checks import check_positive, check_whole
from mechicl.constructions.vocabulary import Head, Stream, assemble
from mechicl.models import HookedTransformer


def gradient_descent(
    *,
    x_dim: int,
    n_context: int,
    step_size: float,
    y_dim: int = 1,
    steps: int = 1,
    initial_weights: Float[Tensor, "x y"] | None = None,
    largest_eigenvalue: float | None = None,
) -> HookedTransformer:
    """Gradient descent on the context's squared error, one step a layer.

    Exact: equal to `algorithms.gradient_descent` up to rounding, for every prompt and number of points.

    Args:
        step_size: a, the factor on the gradient of `Σ_i (x_i W - y_i)² / 2`.
        initial_weights: W_0 `[x y]`, 0 by default.
        largest_eigenvalue: λ_max of S; parameters that diverge there give a warning.

    Returns:
        A float64 model with one head, width `x_dim + y_dim` and `steps` looped layers.

    Raises:
        ValueError: steps < 1, a step size that is not finite, initial_weights of another shape, or a largest eigenvalue
            that is not positive and finite.

    Warns:
        DivergenceWarning: more than one step, and a step size below 0 or above 2 / largest_eigenvalue.

    Source: von Oswald et al. 2023, Proposition 1 and appendix A.1.

    Example:
        >>> model = gradient_descent(x_dim=10, n_context=10, step_size=0.6, steps=5)
        >>> model.predict(LinearRegression().sample(4, seed=0)).shape
        torch.Size([4, 1])
    """
    check_whole(1, steps=steps)
    (step_size,) = per_step("step_size", step_size, 1)
    check_stability(f"gradient descent with step_size={step_size}", [step_size] * steps, None, largest_eigenvalue)
    if initial_weights is None:
        initial_weights = torch.zeros(x_dim, y_dim, dtype=torch.float64)
    elif initial_weights.shape != (x_dim, y_dim):
        raise ValueError(f"initial_weights must be [x y] = {(x_dim, y_dim)}, got {tuple(initial_weights.shape)}")
    stream = Stream(x=x_dim, y=y_dim)
    step = Head(
        query=stream.read("x"),
        key=stream.read("x"),  # score <x_i, x_j>
        value=stream.read("x") @ initial_weights.double() - stream.read("y"),  # the residual x W_0 - y
        output=step_size * stream.write("y"),
    )
    return assemble(stream, [[step]] * steps, n_context=n_context, initial_weights=initial_weights)


def gd_plus_plus(
    *,
    x_dim: int,
    n_context: int,
    step_size: float | Sequence[float],
    gamma: float | Sequence[float],
    y_dim: int = 1,
    steps: int = 1,
    largest_eigenvalue: float | None = None,
) -> HookedTransformer:
    """GD++: gradient descent whose layers also transform every input by `x ← x - γ x S`.

    Exact: equal to `algorithms.gd_plus_plus` up to rounding.

    Args:
        step_size: a, one for all steps or one a step.
        gamma: γ, acting on the summed S, one for all steps or one a step.
        largest_eigenvalue: λ_max of S; parameters that diverge there give a warning.

    Returns:
        A float64 model with one head, width `x_dim + y_dim` and `steps` layers, looped if all steps are alike.

    Raises:
        ValueError: steps < 1, another number of parameters than of steps, one that is not finite, or a largest
            eigenvalue that is not positive and finite.

    Warns:
        DivergenceWarning: more than one step, after which the residual in the direction of the largest eigenvalue is
            larger than at the start. It cannot be if every a and γ is between 0 and 2 / largest_eigenvalue.

    Source: von Oswald et al. 2023, appendix A.10, eq. 23.
    """
    check_whole(1, steps=steps)
    step_sizes, gammas = per_step("step_size", step_size, steps), per_step("gamma", gamma, steps)
    parameters = f"GD++ with step_size={reprlib.repr(step_size)}, gamma={reprlib.repr(gamma)}"
    check_stability(parameters, step_sizes, gammas, largest_eigenvalue)
    stream = Stream(x=x_dim, y=y_dim)

    def layer(a: float, g: float) -> list[Head]:
        return [
            Head(
                query=stream.read("x"),
                key=stream.read("x"),
                value=torch.cat([stream.read("x"), -stream.read("y")], dim=1),
                output=torch.cat([-g * stream.write("x"), a * stream.write("y")]),
            )
        ]

    pairs = list(zip(step_sizes, gammas, strict=True))
    layers = [layer(*pairs[0])] * steps if len(set(pairs)) == 1 else [layer(a, g) for a, g in pairs]
    return assemble(stream, layers, n_context=n_context)


def check_stability(
    parameters: str, step_sizes: Sequence[float], gammas: Sequence[float] | None, largest_eigenvalue: float | None
) -> None:
    """Warn of parameters with which more than one step diverges in the direction of S's largest eigenvalue.

    Step sizes and gammas are one a step; no gammas are 0, and no largest eigenvalue checks nothing.
    """
    if largest_eigenvalue is None:
        return
    check_positive(largest_eigenvalue=largest_eigenvalue)
    eigenvalue = torch.tensor([largest_eigenvalue], dtype=torch.float64)
    after = gd_plus_plus_filters(eigenvalue, step_sizes, gammas or [0.0] * len(step_sizes))
    if len(step_sizes) > 1 and residuals_grow(eigenvalue, after[-1]):
        condition = f"with values between 0 and 2 / λ_max(S) = {2 / largest_eigenvalue:.4g}"
        warn_of_divergence(parameters, largest_eigenvalue, condition)
