"""Attention that copies: targets onto the tokens of their inputs, and followers of earlier tokens (induction)."""

import math
from typing import Annotated, Any, Literal

import torch

from mechicl.algorithms.gradient_descent import per_step
from mechicl.base.arguments import Count, Natural, Positive, at_least, checked
from mechicl.constructions.vocabulary import Head, Stream, assemble, set_head
from mechicl.models import HookedTransformer, TransformerConfig

JUNK = 8
"""Dimensions that distractors write into, and their width."""
WITHOUT_SINK = -1e3
"""The score of a sink that gets no attention: its exponential is 0."""


@checked
def copy_targets(
    *,
    x_dim: Count,
    n_context: Natural,
    y_dim: Count = 1,
    attention: Literal["linear", "softmax"] = "linear",
    score_scale: Positive = 80.0,
) -> HookedTransformer:
    """Build a layer that copies each target from its own token to the y-subspace of its input's token.

    Prompts are interleaved: tokens `x_1, y_1, ..., x_q` with one-hot positions, and the query vector at an input's
    position matches the key of the next position. A second head erases the token part of the y tokens, so that later
    layers see points `(x_i, y_i)` at the x tokens and, apart from the positions, 0 at the y tokens. The query's
    y-subspace stays 0.

    Linear: exact. Softmax: relative error of order `(n + 1) e^(-score_scale / 2)`, below rounding with the default
    scale. The sink's score is half that of a match. A position that copies or erases loses `e^(-score_scale / 2)` of
    its attention to the sink; other positions leave `2 n e^(-score_scale / 2)` to the keys. Source: von Oswald et al.
    2023, Proposition 3.

    Args:
        n_context: largest number of context points; the model refuses longer prompts, for which it has no positions.
        attention: "linear", or "softmax" with a sink for positions that have nothing to copy.
        score_scale: softmax score of a match; larger is more exact. Not used with linear attention.

    Returns:
        A one-layer model. `model(prompts, stop_at_layer=1)` is the stream `[prompt pos d_model]`, whose last `y_dim`
        entries are the y-subspace; the model's own prediction is 0.
    """
    options: dict[str, Any] = {} if attention == "linear" else {
        "attention": "softmax", "score_scale": score_scale, "sink": "fixed", "sink_score": score_scale / 2
    }  # fmt: skip
    return _copy_then([], x_dim, y_dim, n_context, **options)


@checked
def copy_then_gradient_descent(
    *, x_dim: Count, n_context: Natural, step_size: float, y_dim: Count = 1, steps: Count = 1
) -> HookedTransformer:
    """Build `copy_targets` and gradient descent on the points after it: `steps + 1` layers, for interleaved prompts.

    Exact: `model.predict(prompts)` equals `algorithms.gradient_descent` from 0 up to rounding, on prompts of up to
    `n_context` points; the model refuses longer ones. Source: von Oswald et al. 2023, Proposition 3 and section 4.

    Args:
        n_context: largest number of context points.
        step_size: a, the factor on the gradient of `Σ_i (x_i W - y_i)² / 2`.
        steps: number of steps after the copying layer, one a layer.
    """
    (step_size,) = per_step("step_size", step_size, 1)
    return _copy_then([step_size] * steps, x_dim, y_dim, n_context)


def _copy_then(step_sizes: list[float], x_dim: int, y_dim: int, n_context: int, **options: Any) -> HookedTransformer:
    stream = Stream(token=max(x_dim, y_dim), position=2 * n_context + 1, y=y_dim)
    positions, token = stream.read("position"), stream.read("token")
    # tokens are x_1 y_1 x_2 y_2 ... x_q: column i of at_x is 1 at x_i and of at_y at y_i, so that only they match
    at_x, at_y = positions[:, 0:-1:2], positions[:, 1::2]
    if not n_context:  # nothing to copy: heads that read nothing
        at_x = at_y = torch.zeros(stream.d_model, 1, dtype=torch.float64)
    copied = Head(query=at_x, key=at_y, value=token[:, :y_dim], output=stream.write("y"))
    erased = Head(query=at_y, key=at_y, value=token, output=-stream.write("token"))
    x, y = token[:, :x_dim], stream.read("y")
    steps = {a: [Head(query=x, key=x, value=y, output=-a * stream.write("y"))] for a in step_sizes}
    return assemble(
        stream, [[copied, erased], *(steps[a] for a in step_sizes)], n_context=n_context, x_dim=x_dim, y_dim=y_dim,
        prompt_format="interleaved", positional_embedding_type="one_hot", keys="context", **options,
    )  # fmt: skip


@checked
def induction(
    *,
    d_vocab: Count,
    n_ctx: Annotated[int, at_least(2)],
    n_heads: Count = 1,
    previous_token_head: Natural = 0,
    induction_head: Natural = 0,
    score_scale: Positive = 80.0,
    seed: int | None = None,
) -> HookedTransformer:
    """Build a two-layer model of token ids with a previous-token head and an induction head, known by construction.

    Tokens and positions are one-hot, in separate subspaces. A head of layer 0 copies the token at position i - 1 into
    the subspace "previous" of position i. A head of layer 1 has the token at i as its query and "previous" as its key,
    and copies tokens into "next", which is the logits.

    So the logits are frequencies: each token's share of the tokens that have followed the current one so far. If the
    token has not occurred before, the head attends to a sink, whose score is half that of a match, and all logits are
    0. Exact up to a relative error of order `(n_ctx + 1) e^(-score_scale / 2)`, below rounding with the default scale.

    The other heads do nothing; or, with a seed, they are distractors: random weights that read the whole stream, with
    scores of standard deviation about 1 and no sink, and write into a subspace "junk", which only distractors read.
    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section "Induction heads".

    Args:
        d_vocab: number of different tokens.
        n_ctx: largest number of tokens in a sequence.
        n_heads: number of heads in each layer.
        previous_token_head: index of the head of layer 0 that marks each position with the token before.
        induction_head: index of the head of layer 1 that looks for the marks.
        score_scale: attention score of a match; larger is more exact.
        seed: seed of the distractors' weights; None for no distractors.

    Returns:
        A float64 model: `model(ids)` are the logits `[prompt pos d_vocab]`.

    Example:
        >>> model = induction(d_vocab=10, n_ctx=8)
        >>> model(torch.tensor([[3, 1, 4, 2, 3]]))[0, -1].argmax().item()
        1
    """
    for name, value in (("previous_token_head", previous_token_head), ("induction_head", induction_head)):
        if value >= n_heads:
            raise ValueError(f"{name} must be a head, 0 to {n_heads - 1}, got {value}")
    junk = {} if seed is None else {"junk": JUNK}
    stream = Stream(token=d_vocab, position=n_ctx, previous=d_vocab, next=d_vocab, **junk)
    positions, token = stream.read("position"), stream.read("token")
    # the query at position p matches the key at p - 1: one-hot axes, shifted by one against each other
    marking = Head(query=positions[:, 1:], key=positions[:, :-1], value=token, output=stream.write("previous"))
    inducing = Head(query=token, key=stream.read("previous"), value=token, output=stream.write("next"))
    cfg = TransformerConfig(
        prompt_format="token_ids", d_vocab=d_vocab, n_ctx=n_ctx, n_layers=2, n_heads=n_heads, d_model=stream.d_model,
        d_head=max(marking.width, inducing.width, *junk.values()), attention="softmax", score_scale=score_scale,
        sink="learned", sink_score=score_scale / 2, initializer_range=0.0, dtype="float64",
        attn_only=True, normalization_type=None, attn_bias=False, read_bias=False,
    )  # fmt: skip
    model = HookedTransformer(cfg)
    generator = torch.Generator().manual_seed(seed or 0)
    placed = [(previous_token_head, marking), (induction_head, inducing)]
    with torch.no_grad():
        model.embed.W_E.copy_(stream.write("token"))
        model.pos_embed.W_pos.copy_(stream.write("position"))
        model.unembed.W_U.copy_(stream.read("next"))
        for block, (place, head) in zip(model.blocks, placed, strict=True):
            set_head(block.attn, place, head)
            for other in sorted(set(range(n_heads)) - {place}) if junk else ():
                set_head(block.attn, other, _distractor(stream, score_scale, generator))
                block.attn.sink[other] = WITHOUT_SINK
    model.stream_labels = stream.labels
    return model.eval()


def _distractor(stream: Stream, score_scale: float, generator: torch.Generator) -> Head:
    """Draw random weights; scores have standard deviation 1 if the stream is a token and a position."""
    query, key, value = torch.randn(3, stream.d_model, JUNK, generator=generator, dtype=torch.float64)
    size = (2 * math.sqrt(JUNK) * score_scale) ** -0.5
    return Head(query=size * query, key=size * key, value=value, output=stream.write("junk"))
