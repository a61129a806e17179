"""Recurrent layers that are learning algorithms: least mean squares, recursive least squares, discounted sums.

Each is one layer on paired prompts whose head's keys and queries are inputs and whose values are targets, so its state
is a weight matrix `[x y]` (for recursive least squares, two moments). The query reads the state without writing to it,
and the query's stream takes in minus the prediction.

Two things they cannot do. Stacked layers are not epochs: a layer is causal, so a context point's residual is that of
the weights after this point, not after the whole pass; for several epochs give the context several times. Nor is there
momentum: the state does not contain a velocity.
"""

import math
from typing import Annotated

import torch

from mechicl.base.arguments import Count, Positive, between, checked
from mechicl.constructions.vocabulary import Head, Stream, assemble
from mechicl.models import HookedTransformer
from mechicl.models.transformer.recurrent import Recurrence, softplus_inverse

_Discount = Annotated[float, between(1e-3, 1)]


@checked
def online_gradient_descent(
    *, x_dim: Count, n_context: int, step_size: Positive, discount: _Discount = 1.0, y_dim: Count = 1
) -> HookedTransformer:
    """Build a DeltaNet layer that makes one pass of gradient descent, one point a step: least mean squares.

    `W ← γ W`, `W ← W - a x_tᵀ (x_t W - y_t)` for each context point, from 0. Exact: `model.predict(prompts)` equals
    `algorithms.online_gradient_descent` up to rounding, for any number of points. Source: Yang et al. 2024, section
    2.2, for DeltaNet as online gradient descent; Yang et al. 2025 for the gate.

    Args:
        step_size: a.
        discount: γ, the factor on the weights before each step (weight decay); with 1 the layer has no gate.

    Example:
        >>> model = online_gradient_descent(x_dim=10, n_context=10, step_size=0.6)
        >>> model.predict(LinearRegression().sample(4, seed=0)).shape
        torch.Size([4, 1])
    """
    # the step is sigmoid(0) = 1/2 of <k, k> = 2a |x|² and <k, v> = 2a x y, so that the state is W
    scale = math.sqrt(2 * step_size)
    return _layer("delta", x_dim, y_dim, n_context, discount, scale=scale)


@checked
def recursive_least_squares(
    *, x_dim: Count, n_context: int, penalty: Positive, discount: _Discount = 1.0, y_dim: Count = 1
) -> HookedTransformer:
    """Build a Mesa layer that solves regularised least squares in which old points count less.

    The weights minimise `Σ_i γ^(n-1-i) (x_i W - y_i)² + penalty |W|²`. Exact: `model.predict(prompts)` equals
    `algorithms.ridge` for γ = 1 and `algorithms.recursive_least_squares` with `fading=False` otherwise, up to rounding,
    for any number of points. Source: von Oswald et al. 2025, section 3.

    Args:
        penalty: λ, which does not decay.
        discount: γ; with 1 the layer has no gate.

    Example:
        >>> recursive_least_squares(x_dim=10, n_context=10, penalty=0.1).cfg.attention
        'mesa'
    """
    model = _layer("mesa", x_dim, y_dim, n_context, discount)
    with torch.no_grad():  # steps are 1/2, so both moments are halved
        _mixer(model).ridge.fill_(softplus_inverse(penalty / 2))
    return model


@checked
def discounted_gradient_descent(
    *, x_dim: Count, n_context: int, step_size: float, discount: _Discount = 1.0, y_dim: Count = 1
) -> HookedTransformer:
    """Build gated linear attention that takes one step of gradient descent in which old points count less.

    The weights are `W = a Σ_i γ^(n-1-i) x_iᵀ y_i`. Exact: `model.predict(prompts)` equals
    `algorithms.discounted_gradient_descent`, and with γ = 1 one step of `algorithms.gradient_descent`, up to rounding,
    for any number of points. Source: von Oswald et al. 2023, Proposition 1, with the decay of Yang et al. 2024.

    Args:
        step_size: a, the factor on the summed gradient.
        discount: γ; with 1 the layer is linear attention, without a gate.
    """
    return _layer("gated_linear", x_dim, y_dim, n_context, discount, output=step_size)


@checked
def discounted_averaging(
    *, x_dim: Count, n_context: Count, discount: _Discount = 1.0, y_dim: Count = 1
) -> HookedTransformer:
    """Build a Mamba-2 layer that predicts `x W` with the exponentially weighted average W of `x_iᵀ y_i`.

    `W = Σ_i γ^(n-1-i) x_iᵀ y_i / Σ_i γ^(n-1-i)`. Exact: on prompts of n_context points `model.predict(prompts)` equals
    `algorithms.discounted_averaging` up to rounding. For other numbers the divisor differs, since the layer only sums.
    Source: Dao & Gu 2024, section 5, for the layer; Garg et al. 2022, section 3, for the average.

    Args:
        n_context: number n of context points, which determines the divisor.
        discount: γ.
    """
    step = math.log(2)  # softplus(0)
    total = sum(discount**k for k in range(n_context))
    model = _layer("mamba2", x_dim, y_dim, n_context, 1.0, output=1 / (step * total))
    with torch.no_grad():  # γ = exp(-step A)
        _mixer(model).A_log.fill_(math.log(-math.log(discount) / step) if discount < 1 else -math.inf)
    return model


def _layer(
    kind: str, x_dim: int, y_dim: int, n_context: int, discount: float, *, scale: float = 1.0, output: float = 1.0
) -> HookedTransformer:
    """A head with queries x, keys `scale x`, values `scale y` and a constant gate; it writes minus `output z` to y."""
    stream = Stream(x=x_dim, y=y_dim)
    x, y = stream.read("x"), stream.read("y")
    head = Head(query=x, key=scale * x, value=scale * y, output=-output * stream.write("y"))
    gate = "none" if discount == 1 else "head"
    model = assemble(stream, [[head]], n_context=n_context, attention=kind, normalize_keys=False, gate=gate)
    if discount < 1:
        with torch.no_grad():
            _mixer(model).b_gate.fill_(math.log(discount) - math.log1p(-discount))
    return model


def _mixer(model: HookedTransformer) -> Recurrence:
    attn = model.blocks[0].attn
    assert isinstance(attn, Recurrence)
    return attn
