"""Gradient descent on features: an MLP on the tokens first, then linear attention on what it has written."""

from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.gradient_descent import per_step
from mechicl.base.checks import check_whole
from mechicl.constructions.gradient_descent import check_stability
from mechicl.constructions.vocabulary import Head, Hidden, Stream, assemble
from mechicl.models import HookedTransformer


def kernel_gradient_descent(
    *,
    weights: Float[Tensor, "x feature"],
    n_context: int,
    step_size: float,
    bias: Float[Tensor, "feature"] | None = None,
    act_fn: str = "relu",
    y_dim: int = 1,
    steps: int = 1,
    largest_eigenvalue: float | None = None,
) -> HookedTransformer:
    """Gradient descent from 0 on the features `m(x) = act(x weights + bias)`, one step a layer.

    Exact: equal to `algorithms.gradient_descent` on prompts whose inputs are replaced by their features, up to
    rounding. In the limit of many steps it is kernel regression with `k(x, x') = m(x)·m(x')`.

    Args:
        weights: of the features `[x feature]`.
        step_size: a, the factor on the gradient of `Σ_i (m(x_i) W - y_i)² / 2`.
        bias: of the features, 0 by default.
        act_fn: their activation, a name in `models.ELEMENTWISE`.
        largest_eigenvalue: λ_max of `Σ_i m(x_i)ᵀ m(x_i)` on the prompts that the model is meant for; a step size that
            diverges there gives a warning.

    Returns:
        A float64 model with one head, width `x_dim + y_dim + feature` and `steps` looped layers after the MLP.

    Raises:
        ValueError: steps < 1, a step size that is not finite, a bias that does not fit the weights, an unknown
            activation, or a largest eigenvalue that is not positive and finite.

    Warns:
        DivergenceWarning: more than one step, and a step size below 0 or above 2 / largest_eigenvalue.

    Source: von Oswald et al. 2023, Proposition 2.
    """
    check_whole(1, steps=steps)
    (step_size,) = per_step("step_size", step_size, 1)
    check_stability(f"gradient descent with step_size={step_size}", [step_size] * steps, None, largest_eigenvalue)
    x_dim, n_features = weights.shape
    stream = Stream(x=x_dim, y=y_dim, feature=n_features)
    features = Hidden(
        read=stream.read("x") @ weights.double(),
        write=stream.write("feature"),
        bias=None if bias is None else bias.double(),
    )
    phi = stream.read("feature")
    step = [Head(query=phi, key=phi, value=stream.read("y"), output=-step_size * stream.write("y"))]
    return assemble(stream, [step] * steps, n_context=n_context, input_mlp=features, act_fn=act_fn)
