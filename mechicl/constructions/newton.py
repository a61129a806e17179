"""Newton's method for the inverse of the context's second moments, in k + 2 layers."""

from typing import Literal

import torch

from mechicl.base.arguments import Count, Natural, Positive, checked
from mechicl.constructions.vocabulary import Head, Hidden, Layer, Stream, assemble, signed_pair
from mechicl.models import HookedTransformer


@checked
def newton(
    *,
    x_dim: Count,
    n_context: int,
    steps: Natural,
    alpha: Positive,
    y_dim: Count = 1,
    attention: Literal["linear", "relu"] = "linear",
) -> HookedTransformer:
    """Build iterative Newton for the inverse of S: `M_0 = αS`, `M_{k+1} = 2 M_k - M_k S M_k`, prediction `x M_k B`.

    S = XᵀX and B = XᵀY of the context. Exact: `model.predict(prompts)` equals `algorithms.newton` up to rounding. Every
    token carries `(x, y, M x)`. The first layer writes `αSx`; each following layer subtracts half of `M S M x` by
    attention and doubles the rest by an MLP; the last one reads the context's y by the scores `<M x_j, x>`. The model
    has k + 2 layers and width 2 x_dim + y_dim. Source: Fu et al. 2024, Theorem 1, in a shorter and exact form without
    its mov, mul and div layers.

    Args:
        steps: number k of iterations.
        alpha: α, below `2 / λ_max²` of every context, with λ_max the largest eigenvalue of S.
        attention: "linear", or "relu", where each score takes a pair of heads.

    Example:
        >>> newton(x_dim=5, n_context=20, steps=6, alpha=1e-3).cfg.n_layers
        8
    """
    stream = Stream(x=x_dim, y=y_dim, inverse=x_dim)  # inverse: M x
    x, m = stream.read("x"), stream.read("inverse")
    start = Head(query=x, key=x, value=x, output=alpha * stream.write("inverse"))
    # One layer turns M x into 2 M x - M S M x. The head sums <x_q, M x_j> M x_j = M (Σ x_jᵀ x_j) M x_q = M S M x_q over
    # the context (M is symmetric) and subtracts half of it; the MLP, which runs after the head, doubles the difference.
    refine = Head(query=x, key=m, value=m, output=-0.5 * stream.write("inverse"))
    answer = Head(query=x, key=m, value=stream.read("y"), output=-stream.write("y"))
    if attention == "relu":
        double = Hidden(read=torch.cat([m, -m], dim=1), write=torch.cat([m, -m], dim=1).T)  # relu(h) - relu(-h)
        first, middle, last = (signed_pair(head) for head in (start, refine, answer))
    else:
        double = Hidden(read=m, write=m.T)
        first, middle, last = ([head] for head in (start, refine, answer))
    layers = [Layer(first), *[Layer(middle, double)] * steps, Layer(last)]
    act_fn = "identity" if attention == "linear" else "relu"
    return assemble(stream, layers, n_context=n_context, attention=attention, act_fn=act_fn)
