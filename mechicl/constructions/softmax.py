"""Softmax attention that comes as near to a step of gradient descent as its normaliser lets it."""

import math

from mechicl.constructions.vocabulary import Head, Stream, assemble
from mechicl.models import HookedTransformer

SINK_SCORE = 30.0  # its normaliser outweighs n keys by n e^-30, below 1e-10 up to n = 1000


def softmax_gradient_descent(
    *, x_dim: int, n_context: int, step_size: float, score_scale: float, y_dim: int = 1, sink: bool = True
) -> HookedTransformer:
    """One layer of two softmax heads with opposite scores; as `score_scale` shrinks, a step of gradient descent.

    The difference of the two heads is odd in the scores `s_i = score_scale <x_i, x>`, so that its leading term is
    linear. With the sink (a key with score `SINK_SCORE` and value 0) the normaliser is the sink's and the limit is
    gradient descent from 0: relative error `O(score_scale²)`, and `n e^(-SINK_SCORE)` at most from the normaliser.
    Without it the normaliser follows the scores, and the limit is the *centred* sum `Σ y_i (s_i - mean s)` instead of
    `Σ y_i s_i`.

    Args:
        n_context: number of context points; without a sink the step size holds for just so many.
        step_size: a, the factor on the gradient of `Σ_i (x_i W - y_i)² / 2`.
        score_scale: factor on the scores, small against `1 / max |<x_i, x>|`; rounding grows as it shrinks.
        sink: with the sink, or as the paper has it.

    Returns:
        A float64 model with one layer of two heads.

    Raises:
        ValueError: a score scale or step size that is not finite, a score scale of 0 or less, or n_context < 1.

    Source: von Oswald et al. 2023, A.9, eq. 16 to 21, which drop the normaliser.
    """
    if not (score_scale > 0 and math.isfinite(score_scale)) or not math.isfinite(step_size) or n_context < 1:
        raise ValueError(
            f"needs a positive finite score_scale, a finite step_size and n_context >= 1; got {score_scale}, "
            f"{step_size}, {n_context}"
        )
    stream = Stream(x=x_dim, y=y_dim)
    # exp(s) - exp(-s) = 2 s + O(s³): the difference of the heads is linear in the scores once their normaliser is a
    # constant, which the output multiplies back. With a sink it is e^SINK_SCORE; without one it is Σ exp(±s_i), near n
    # but not constant, and its own first-order term takes the mean of the scores away.
    normalizer = math.exp(SINK_SCORE) if sink else n_context
    output = -step_size * normalizer / (2 * score_scale) * stream.write("y")
    plus = Head(stream.read("x"), stream.read("x"), stream.read("y"), output)
    minus = Head(-stream.read("x"), stream.read("x"), stream.read("y"), -output)
    return assemble(
        stream,
        [[plus, minus]],
        n_context=n_context,
        attention="softmax",
        score_scale=score_scale,
        sink="fixed" if sink else "none",
        sink_score=SINK_SCORE,
    )
