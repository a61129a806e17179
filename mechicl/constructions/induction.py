"""Induction on token ids: one head marks each position with the token before it, another looks for the marks."""

import math

import torch

from mechicl.base.checks import check_positive, check_whole, is_whole
from mechicl.constructions.vocabulary import Head, Stream, set_head
from mechicl.models import HookedTransformer, TransformerConfig

JUNK = 8
"""Dimensions that distractors write into, and their own width."""
WITHOUT_SINK = -1e3
"""The score of a sink that gets no attention: its exponential is 0."""


def induction(
    *,
    d_vocab: int,
    n_ctx: int,
    n_heads: int = 1,
    previous_token_head: int = 0,
    induction_head: int = 0,
    score_scale: float = 80.0,
    seed: int | None = None,
) -> HookedTransformer:
    """Two layers of attention that predict what followed the token before: an induction head and its helper.

    Tokens and positions are one-hot, each in a subspace of its own. A head of layer 0 reads the token at position
    i - 1 into the subspace "previous" of position i. A head of layer 1 asks with the token at i, is answered by the
    positions whose previous token it is, and reads their tokens into "next", which is the logits.

    So the logits are frequencies: of the tokens that have followed the current one so far in the sequence, each counts
    for one divided by their number. A token that occurred once before has logit 1 at its follower and 0 elsewhere; of
    several occurrences the mean is taken. Where the token has not occurred before, and at the first position of layer
    0, heads turn to a sink, half as high as a match, and all logits are 0. Exact up to a relative error of order
    `(n_ctx + 1) e^(-score_scale / 2)`, which is what sink and mismatches take; with the default below rounding.

    The other heads do nothing; or, with a seed, they are distractors: random weights that read the whole stream, with
    scores of deviation 1 or so and no sink, and write into a subspace "junk", which only distractors read. They have
    activations like any head, and removing them changes no logit.

    Args:
        d_vocab: number of different tokens.
        n_ctx: number of positions; longer sequences are refused by the model.
        n_heads: number of heads in each layer.
        previous_token_head: which head of layer 0 marks each position with the token before.
        induction_head: which head of layer 1 looks for the marks.
        score_scale: of the softmax.
        seed: of the distractors' weights; none without it.

    Returns:
        A float64 model on token ids, attention only; the stream's labels are token, position, previous, next and junk.

    Raises:
        ValueError: d_vocab, n_ctx or n_heads too small, a head that the layer does not have, or a score scale that is
            not positive and finite.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section "Induction heads".

    Example:
        >>> model = induction(d_vocab=10, n_ctx=8)
        >>> model(torch.tensor([[3, 1, 4, 2, 3]]))[0, -1].argmax().item()
        1
    """
    check_whole(1, d_vocab=d_vocab, n_heads=n_heads)
    check_whole(2, n_ctx=n_ctx)
    for name, value in (("previous_token_head", previous_token_head), ("induction_head", induction_head)):
        if not is_whole(value) or not 0 <= value < n_heads:
            raise ValueError(f"{name} must be one of the {n_heads} heads, 0 to {n_heads - 1}; got {value!r}")
    check_positive(score_scale=score_scale)
    junk = {} if seed is None else {"junk": JUNK}
    stream = Stream(token=d_vocab, position=n_ctx, previous=d_vocab, next=d_vocab, **junk)
    positions, token = stream.read("position"), stream.read("token")
    # position p asks with its own axis for the key at p - 1: one-hot axes, shifted by one against each other
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
    """Random weights; scores of deviation 1 where the stream is a token and a position."""
    query, key, value = torch.randn(3, stream.d_model, JUNK, generator=generator, dtype=torch.float64)
    size = (2 * math.sqrt(JUNK) * score_scale) ** -0.5
    return Head(query=size * query, key=size * key, value=value, output=stream.write("junk"))
