"""Copying on interleaved prompts: each y onto the token of its x, after which paired constructions apply."""

import math

import torch

from mechicl.constructions.vocabulary import Head, Stream, assemble
from mechicl.models import HookedTransformer

Layers = list[list[Head]]


def copy_targets(
    *, x_dim: int, n_context: int, y_dim: int = 1, attention: str = "linear", score_scale: float = 40.0
) -> HookedTransformer:
    """One layer that moves each target from its own token to the y-subspace of the token of its input.

    Tokens carry one-hot positions, and a position scores the next one. A second head erases what the y tokens hold, so
    that later layers see points `(x_i, y_i)` at the x tokens and nothing at the others. Linear: exact. Softmax: a
    position gives the next one all but about `n e^(-score_scale)` of its attention.

    Args:
        x_dim: dimension of the inputs.
        n_context: number of context points; the positions are made for just so many or fewer.
        y_dim: dimension of the targets.
        attention: "linear", or "softmax" with a sink, to which positions turn that have nothing to copy.
        score_scale: of the softmax.

    Returns:
        A float64 model on interleaved prompts; the stream's labels are token, position and y.

    Raises:
        ValueError: another attention, or a score scale that is not positive.

    Source: von Oswald et al. 2023, Proposition 3.
    """
    if attention not in ("linear", "softmax"):
        raise ValueError(f"attention must be 'linear' or 'softmax', got {attention!r}")
    if not (score_scale > 0 and math.isfinite(score_scale)):
        raise ValueError(f"score_scale must be positive and finite, got {score_scale}")
    stream = _stream(x_dim, y_dim, n_context)
    options = {} if attention == "linear" else {
        "attention": "softmax", "score_scale": score_scale, "sink": "fixed", "sink_score": score_scale / 2
    }  # fmt: skip
    return _assemble(stream, [_copy(stream, n_context)], x_dim, y_dim, n_context, **options)


def copy_then_gradient_descent(
    *, x_dim: int, n_context: int, step_size: float, y_dim: int = 1, steps: int = 1
) -> HookedTransformer:
    """Copying, then gradient descent on the points that it has put together: `steps + 1` layers.

    Exact: equal to `algorithms.gradient_descent` from 0 up to rounding.

    Args:
        x_dim: dimension of the inputs.
        n_context: number of context points; the positions are made for just so many or fewer.
        step_size: a, the factor on the gradient of `Σ_i (x_i W - y_i)² / 2`.
        y_dim: dimension of the targets.
        steps: number of steps after the copying layer.

    Raises:
        ValueError: steps < 1, or a step size that is not finite.

    Source: von Oswald et al. 2023, Proposition 3 and section 4.
    """
    if steps < 1 or not math.isfinite(step_size):
        raise ValueError(f"needs steps >= 1 and a finite step_size, got {steps} and {step_size}")
    stream = _stream(x_dim, y_dim, n_context)
    x = stream.read("token")[:, :x_dim]
    step = [Head(query=x, key=x, value=stream.read("y"), output=-step_size * stream.write("y"))]
    return _assemble(stream, [_copy(stream, n_context), *[step] * steps], x_dim, y_dim, n_context)


def _stream(x_dim: int, y_dim: int, n_context: int) -> Stream:
    return Stream(token=max(x_dim, y_dim), position=2 * n_context + 1, y=y_dim)


def _copy(stream: Stream, n_context: int) -> list[Head]:
    """Two heads on one-hot positions: x tokens read the next token, y tokens erase themselves."""
    positions, y_dim = stream.read("position"), stream.dimensions["y"]
    at_x, at_y = positions[:, 0:-1:2], positions[:, 1::2]  # of the context's points, in pairs
    if not n_context:  # nothing to copy: heads that read nothing
        at_x = at_y = torch.zeros(stream.d_model, 1, dtype=torch.float64)
    token = stream.read("token")
    copied = Head(query=at_x, key=at_y, value=token[:, :y_dim], output=stream.write("y"))
    erased = Head(query=at_y, key=at_y, value=token, output=-stream.write("token"))
    return [copied, erased]


def _assemble(stream: Stream, layers: Layers, x_dim: int, y_dim: int, n_context: int, **options) -> HookedTransformer:
    return assemble(
        stream,
        layers,
        n_context=n_context,
        x_dim=x_dim,
        y_dim=y_dim,
        prompt_format="interleaved",
        positional_embedding_type="one_hot",
        keys="context",
        **options,
    )
