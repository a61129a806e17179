"""Half-precision models against the same weights in float64: large streams, long sums, both routes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl.models import HookedLSTM, LSTMConfig, TransformerConfig
from mechicl.models.wrapping.fused_attention import _attend
from tests.strategies import random_model, random_prompts, random_tokens

SIZES: dict[str, Any] = {
    "x_dim": 3, "n_context": 60, "prompt_format": "interleaved", "n_layers": 2, "n_heads": 2, "d_model": 16,
    "d_head": 8, "read_in": "linear", "read_out": "linear", "keys": "causal", "attention": "softmax",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "LN": {"normalization_type": "LN", "d_mlp": 32},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS", "d_mlp": 32, "gated_mlp": True},
    "RMSPre": {"normalization_type": "RMSPre", "positional_embedding_type": "rotary"},
    "learned sink": {"normalization_type": "LN", "sink": "learned"},
    "momentum": {"normalization_type": "LN", "momentum": 0.99, "momentum_over": "values"},
    "linear": {"normalization_type": "LN", "attention": "linear", "normalize_by_context": True},
    "gates of keys": {
        "normalization_type": "RMS", "attention": "gated_linear", "gate": "key", "normalize_keys": True,
    },
    "convolved": {"normalization_type": "LN", "attention": "gated_linear", "gate": "head", "conv_width": 3},
    "mamba2": {"normalization_type": "LN", "attention": "mamba2"},
}  # fmt: skip
TOLERANCES = {torch.float16: 0.004, torch.bfloat16: 0.03}
"""Largest error, relative to the largest value; bfloat16 rounds to 0.004 at every step."""


def relative_error(values: Tensor, expected: Tensor) -> float:
    finite = expected.isfinite()
    return float((values.double() - expected)[finite].abs().max() / expected[finite].abs().max())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_half_precision_is_near_double(kind: str, scale: float, dtype: torch.dtype):
    model = random_model(TransformerConfig(**(SIZES | KINDS[kind])))
    for name, weight in model.named_parameters():
        if name.startswith(("embed.", "pos_embed.")):
            weight *= scale
    half = copy.deepcopy(model).to(dtype)
    exact, tokens = copy.deepcopy(half).double(), random_tokens(model.cfg, 3).to(dtype)
    expected, activations = exact.run_with_cache(tokens.double())
    hooked, cache = half.run_with_cache(tokens)
    quick = half(tokens)
    assert hooked.dtype == quick.dtype == dtype
    for outputs in (hooked, quick):
        assert relative_error(outputs, expected) < TOLERANCES[dtype]
    for name, activation in cache.items():
        assert relative_error(activation, activations[name]) < TOLERANCES[dtype], name
        assert activation.dtype == dtype or name.endswith(("scale", "normalized", "scores", "pattern", "gate", "step"))


@pytest.mark.parametrize("dtype", TOLERANCES)
@torch.no_grad()
def test_an_lstm_collects_no_rounding_errors(dtype: torch.dtype):
    half = HookedLSTM(LSTMConfig(x_dim=3, n_context=60, n_layers=2, d_model=16)).to(dtype)
    prompts, exact = random_prompts(half.cfg, 3), copy.deepcopy(half).double()
    error = relative_error(half.predict_prefixes(prompts), exact.predict_prefixes(prompts))
    assert error < {torch.float16: 0.001, torch.bfloat16: 0.006}[dtype]


@pytest.mark.parametrize("keys", ["causal", "context"])
@torch.no_grad()
def test_linear_attention_sums_what_float16_cannot_represent(keys: Any):
    """Scores and second moments over 65504, whose mean over the keys is small."""
    model = random_model(TransformerConfig(x_dim=3, n_context=50, n_layers=1, keys=keys, normalize_by_context=True))
    model.blocks[0].attn.W_V.mul_(0.01)
    half = copy.deepcopy(model).half()
    tokens = 50 * random_tokens(model.cfg, 3).half()
    expected = copy.deepcopy(half).double()(tokens.double())
    assert relative_error(half(tokens), expected) < 0.004
    assert relative_error(half.run_with_cache(tokens)[0], expected) < 0.004


@torch.no_grad()
def test_keys_of_large_length_are_normalized_in_half_precision():
    cfg = TransformerConfig(**(SIZES | KINDS["gates of keys"]))
    attn = random_model(cfg).half().blocks[0].attn
    for k in (torch.full((1, 1, 1, 8), 6e4).half(), torch.zeros(1, 1, 1, 8).half()):
        expected = torch.nn.functional.normalize(k.double(), dim=-1)
        torch.testing.assert_close(attn.normalized(k).double(), expected, rtol=1e-3, atol=0)


@torch.no_grad()
def test_streams_of_queries_agree_with_whole_passes_in_half_precision():
    sizes: dict[str, Any] = SIZES | KINDS["LN"] | {"n_context": 8}
    model = random_model(TransformerConfig(**sizes)).half()
    prompts = random_prompts(model.cfg, 3)
    queries = prompts.xs[:, :, None]
    for shared, whole in zip(model.query_streams(prompts, queries), model.layer_streams(prompts), strict=True):
        assert shared.dtype == torch.float16
        assert relative_error(shared[:, :, 0], whole.double()) < 0.004


def test_fused_attention_that_is_opened_has_scores_in_float32():
    q, k, v = (x.half() for x in 30 * torch.randn(3, 1, 2, 5, 64, generator=torch.Generator().manual_seed(0)))
    z = _attend(lambda name, activation: activation, 4 * q, 4 * k, v, None, 1 / 64)
    exact = [x.double() for x in (4 * q, 4 * k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(exact[0], exact[1], exact[2], scale=1 / 64)
    assert z.dtype == torch.float16
    assert relative_error(z, expected) < 0.004


@pytest.mark.parametrize("dtype", TOLERANCES)
@torch.no_grad()
def test_losses_are_computed_in_float32(dtype: torch.dtype):
    cfg = TransformerConfig(
        prompt_format="token_ids", d_vocab=50, n_ctx=12, d_model=16, normalization_type="LN", attention="softmax"
    )
    model, ids = random_model(cfg).to(dtype), random_tokens(cfg, 3)
    logits = model(ids)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].double().mT, ids[:, 1:], reduction="none")
    torch.testing.assert_close(model(ids, "loss", loss_per_token=True).double(), expected, rtol=1e-5, atol=1e-5)
    sizes: dict[str, Any] = SIZES | {"n_layers": 1}
    regression = random_model(TransformerConfig(**sizes)).to(dtype)
    prompts = random_prompts(regression.cfg, 3)
    outputs = regression.decode(regression(prompts)).double()
    losses = (outputs - prompts.ys.to(dtype).double()).square().mean(-1)
    torch.testing.assert_close(regression(prompts, "loss", loss_per_token=True).double(), losses, rtol=1e-2, atol=1e-3)
