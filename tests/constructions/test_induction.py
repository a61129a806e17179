"""Induction: the logits are the frequencies with which tokens followed the current one, whatever stands beside."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mechicl.constructions import induction
from tests.constructions.reference import quick


def sequences(d_vocab: int, n_pos: int, n: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(d_vocab, (n, n_pos), generator=torch.Generator().manual_seed(seed))


def frequencies(ids: Tensor, d_vocab: int) -> Tensor:
    """Of the tokens after earlier occurrences of each token, by loops; 0 where there are none."""
    shares = torch.zeros(*ids.shape, d_vocab, dtype=torch.float64)
    for row, tokens in enumerate(ids.tolist()):
        for i, token in enumerate(tokens):
            followers = [tokens[j + 1] for j in range(i) if tokens[j] == token]
            for follower in followers:
                shares[row, i, follower] += 1 / len(followers)
    return shares


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    n_heads = draw(st.integers(1, 4))
    return {
        "d_vocab": draw(st.integers(1, 12)),
        "n_ctx": draw(st.integers(2, 20)),
        "n_heads": n_heads,
        "previous_token_head": draw(st.integers(0, n_heads - 1)),
        "induction_head": draw(st.integers(0, n_heads - 1)),
        "seed": draw(st.sampled_from([None, 0, 1])),
    }


@quick
@given(sizes(), st.integers(0, 5))
def test_the_logits_are_frequencies_of_followers(case, seed):
    model = induction(**case)
    ids = sequences(case["d_vocab"], case["n_ctx"], seed=seed)
    for tokens in (ids, ids[:, : max(1, case["n_ctx"] // 2)]):
        torch.testing.assert_close(model(tokens).detach(), frequencies(tokens, case["d_vocab"]), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("score_scale", "n_ctx"), [(8.0, 24), (16.0, 4), (32.0, 24)])
def test_it_errs_as_stated(score_scale, n_ctx):
    ids = sequences(6, n_ctx, n=40)
    logits = induction(d_vocab=6, n_ctx=n_ctx, score_scale=score_scale)(ids)
    error = (logits - frequencies(ids, 6)).abs().max().item()
    assert 0.1 * math.exp(-score_scale / 2) < error < 2 * (n_ctx + 1) * math.exp(-score_scale / 2)


def test_distractors_attend_but_carry_nothing():
    model = induction(d_vocab=10, n_ctx=12, n_heads=4, previous_token_head=3, induction_head=1, seed=0)
    ids = sequences(10, 12)
    logits, cache = model.run_with_cache(ids)
    planted = {0: 3, 1: 1}

    def remove(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, [head for head in range(4) if head != planted[hook.layer()]]] = 0
        return z

    names = [f"blocks.{layer}.attn.hook_z" for layer in (0, 1)]
    assert torch.equal(model.run_with_hooks(ids, fwd_hooks=[(name, remove) for name in names]), logits)
    assert model.stream_labels is not None
    junk = [i for i, label in enumerate(model.stream_labels) if label.startswith("junk")]
    assert len(junk) == 8
    for layer in (0, 1):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        for head in set(range(4)) - {planted[layer]}:
            torch.testing.assert_close(pattern[:, head].sum(-1), torch.ones(6, 12, dtype=torch.float64))
            assert 0.1 < pattern[:, head, -1].max() < 0.99
            assert cache[f"blocks.{layer}.attn.hook_z"][:, :, head].abs().max() > 0.1
            written = model.W_O[layer, head].abs().sum(0)
            assert [i for i in range(model.cfg.d_model) if written[i] > 0] == junk


def test_other_heads_are_0_without_a_seed():
    model = induction(d_vocab=5, n_ctx=6, n_heads=3, previous_token_head=2)
    for weights in (model.W_Q, model.W_K, model.W_V, model.W_O):
        moving = weights.abs().sum((2, 3)) > 0
        assert moving.tolist() == [[False, False, True], [True, False, False]]
    assert model.cfg.attn_only
    assert not model.training
    assert len(set(model.stream_labels or ())) == model.cfg.d_model == 3 * 5 + 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_vocab": 0}, "d_vocab must be an int of at least 1"),
        ({"n_ctx": 1}, "n_ctx must be an int of at least 2"),
        ({"n_heads": 0}, "n_heads must be an int of at least 1"),
        ({"previous_token_head": 2}, "previous_token_head must be one of the 2 heads, 0 to 1; got 2"),
        ({"induction_head": -1}, "induction_head must be one of the 2 heads"),
        *(({"score_scale": scale}, "score_scale must be positive") for scale in (0.0, math.inf)),
        ({"score_scale": math.nan}, "score_scale must be a finite number, got nan"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    sizes: dict[str, Any] = {"d_vocab": 4, "n_ctx": 5, "n_heads": 2}
    with pytest.raises(ValueError, match=message):
        induction(**(sizes | change))
