"""Copying of targets onto the tokens of their inputs, and induction on token ids."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mechicl import constructions
from mechicl.constructions import induction
from tests.algorithms.reference import descend
from tests.constructions.reference import assert_same, at_query, cases, quick, random_prompts


def after_copying(model, prompts):
    """Return token and y parts of the stream after the first layer, `[prompt pos d]` each."""
    stream = model(prompts, stop_at_layer=1)
    width = model.cfg.d_token
    return stream[..., :width], stream[..., -prompts.y_dim :]


@quick
@given(cases())
def test_every_target_is_copied_to_its_input_and_nowhere_else(case):
    prompts = case.prompts
    model = constructions.copy_targets(**case.sizes)
    token, y = after_copying(model, prompts)
    assert torch.equal(y[:, :-1:2], prompts.context.ys)
    assert torch.equal(token[:, ::2, : prompts.x_dim], prompts.xs)
    assert not token[:, 1::2].any()
    assert not y[:, 1::2].any()
    assert not y[:, -1].any()
    assert not token[:, ::2, prompts.x_dim :].any()
    assert model.cfg.d_model == max(prompts.x_dim, prompts.y_dim) + 2 * case.n_context + 1 + prompts.y_dim
    assert (model.cfg.n_layers, model.cfg.n_heads, model.cfg.prompt_format) == (1, 2, "interleaved")


@pytest.mark.parametrize(("score_scale", "n_context"), [(4.0, 6), (8.0, 1), (16.0, 20), (32.0, 6)])
def test_the_error_of_the_softmax_copy_is_as_stated(score_scale, n_context):
    prompts = random_prompts(n_context=n_context)
    sizes = {"x_dim": 3, "y_dim": 2, "n_context": n_context}
    model = constructions.copy_targets(**sizes, attention="softmax", score_scale=score_scale)
    token, y = after_copying(model, prompts)
    largest = model.encode(prompts).abs().max().item()
    bound = 2 * (n_context + 1) * math.exp(-score_scale / 2) * largest
    assert (y[:, :-1:2] - prompts.context.ys).abs().max().item() < bound
    assert y[:, 1::2].abs().max().item() < bound
    assert token[:, 1::2].abs().max().item() < bound
    assert (token[:, ::2] - model.encode(prompts)[:, ::2]).abs().max().item() < bound


def test_prompts_with_more_points_than_positions_are_refused():
    for model in (
        constructions.copy_targets(x_dim=3, y_dim=2, n_context=5),
        constructions.copy_then_gradient_descent(x_dim=3, y_dim=2, n_context=5, step_size=0.1),
    ):
        with pytest.raises(ValueError, match="13 positions, but this model has 11"):
            model.predict(random_prompts(n_context=6))


@quick
@given(cases())
def test_copying_then_gradient_descent_is_gradient_descent_on_every_prompt(case):
    prompts = case.prompts
    model = constructions.copy_then_gradient_descent(**case.sizes, step_size=0.03, steps=case.steps)
    assert_same(model.predict(prompts), at_query(prompts, descend(case.steps, 0.03)))
    assert (model.cfg.n_layers, model.cfg.n_heads) == (case.steps + 1, 2)
    assert not model.cfg.recurrent


# ---- induction ----


def sequences(d_vocab: int, n_pos: int, n: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(d_vocab, (n, n_pos), generator=torch.Generator().manual_seed(seed))


def frequencies(ids: Tensor, d_vocab: int) -> Tensor:
    """Count, by loops, the tokens after earlier occurrences of each token, as shares; 0 if there are none."""
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
def test_the_error_of_induction_is_as_stated(score_scale, n_ctx):
    ids = sequences(6, n_ctx, n=40)
    logits = induction(d_vocab=6, n_ctx=n_ctx, score_scale=score_scale)(ids)
    error = (logits - frequencies(ids, 6)).abs().max().item()
    assert 0.1 * math.exp(-score_scale / 2) < error < 2 * (n_ctx + 1) * math.exp(-score_scale / 2)


def test_distractors_attend_and_have_no_effect():
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


def test_other_heads_are_zero_without_a_seed():
    model = induction(d_vocab=5, n_ctx=6, n_heads=3, previous_token_head=2)
    for weights in (model.W_Q, model.W_K, model.W_V, model.W_O):
        moving = weights.abs().sum((2, 3)) > 0
        assert moving.tolist() == [[False, False, True], [True, False, False]]
    assert model.cfg.attn_only
    assert not model.training
    assert len(set(model.stream_labels or ())) == model.cfg.d_model == 3 * 5 + 6
