"""Copying on interleaved prompts: each y onto the token of its x, after which paired constructions apply."""

import torch

from mechicl.algorithms.gradient_descent import per_step
from mechicl.base.checks import check_positive, check_whole
from mechicl.constructions.gradient_descent import check_stability
from mechicl.constructions.vocabulary import Head, Stream, assemble
from mechicl.models import HookedTransformer

Layers = list[list[Head]]


def copy_targets(
    *, x_dim: int, n_context: int, y_dim: int = 1, attention: str = "linear", score_scale: float = 80.0
) -> HookedTransformer:
    """One layer that moves each target from its own token to the y-subspace of the token of its input.

    Tokens carry one-hot positions, and the position of an input scores the next one. A second head erases the token
    part of the y tokens, so that later layers see points `(x_i, y_i)` at the x tokens and, apart from the positions,
    0 at the y tokens. The query's y-subspace stays 0, and so does the model's own prediction.

    Linear: exact. Softmax: relative error of order `(n + 1) e^(-score_scale / 2)`, since the sink, half as high as a
    match, takes `e^(-score_scale / 2)` of the attention of a position that copies or erases, and leaves
    `2 n e^(-score_scale / 2)` of it to the keys where there is nothing to copy: so much of the other tokens is added
    there. With the default that is below rounding.

    Args:
        n_context: number of context points; the positions are made for just so many or fewer.
        attention: "linear", or "softmax" with a sink, to which positions turn that have nothing to copy.
        score_scale: of the softmax.

    Returns:
        A float64 model on interleaved prompts; the stream's labels are token, position and y.

    Raises:
        ValueError: numbers of dimensions or points out of range, another attention, or a score scale that is not
            positive and finite. The model itself refuses prompts of more points than n_context, for which it has no
            positions.

    Source: von Oswald et al. 2023, Proposition 3.
    """
    if attention not in ("linear", "softmax"):
        raise ValueError(f"attention must be 'linear' or 'softmax', got {attention!r}")
    check_positive(score_scale=score_scale)
    stream = _stream(x_dim, y_dim, n_context)
    options = {} if attention == "linear" else {
        "attention": "softmax", "score_scale": score_scale, "sink": "fixed", "sink_score": score_scale / 2
    }  # fmt: skip
    return _assemble(stream, [_copy(stream, n_context)], x_dim, y_dim, n_context, **options)


def copy_then_gradient_descent(
    *,
    x_dim: int,
    n_context: int,
    step_size: float,
    y_dim: int = 1,
    steps: int = 1,
    largest_eigenvalue: float | None = None,
) -> HookedTransformer:
    """Copying, then gradient descent on the points that it has put together: `steps + 1` layers.

    Exact: equal to `algorithms.gradient_descent` from 0 up to rounding, on prompts of up to n_context points; the
    model refuses longer ones.

    Args:
        n_context: number of context points; the positions are made for just so many or fewer.
        step_size: a, the factor on the gradient of `Σ_i (x_i W - y_i)² / 2`.
        steps: number of steps after the copying layer.
        largest_eigenvalue: λ_max of S; parameters that diverge there give a warning.

    Raises:
        ValueError: numbers of dimensions, points or steps out of range, a step size that is not finite, or a largest
            eigenvalue that is not positive and finite.

    Warns:
        DivergenceWarning: more than one step, and a step size below 0 or above 2 / largest_eigenvalue.

    Source: von Oswald et al. 2023, Proposition 3 and section 4.
    """
    check_whole(1, steps=steps)
    (step_size,) = per_step("step_size", step_size, 1)
    check_stability(f"gradient descent with step_size={step_size}", [step_size] * steps, None, largest_eigenvalue)
    stream = _stream(x_dim, y_dim, n_context)
    x = stream.read("token")[:, :x_dim]
    step = [Head(query=x, key=x, value=stream.read("y"), output=-step_size * stream.write("y"))]
    return _assemble(stream, [_copy(stream, n_context), *[step] * steps], x_dim, y_dim, n_context)


def _stream(x_dim: int, y_dim: int, n_context: int) -> Stream:
    check_whole(1, x_dim=x_dim, y_dim=y_dim)
    check_whole(0, n_context=n_context)
    return Stream(token=max(x_dim, y_dim), position=2 * n_context + 1, y=y_dim)


def _copy(stream: Stream, n_context: int) -> list[Head]:
    """Two heads on one-hot positions: x tokens read the next token, y tokens erase themselves."""
    positions, y_dim = stream.read("position"), stream.dimensions["y"]
    # tokens are x_1 y_1 x_2 y_2 ... x_q: column i of at_x is 1 at x_i and of at_y at y_i, so that only they match
    at_x, at_y = positions[:, 0:-1:2], positions[:, 1::2]
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
