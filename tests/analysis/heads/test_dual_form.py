"""The dual form against plain loops, against gradient descent, and for softmax against what it drops."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from mechicl import constructions
from mechicl.analysis import read_dual_form
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.tasks import LinearRegression
from tests.analysis.interventions.oracles import bridge, ids
from tests.strategies import random_model, random_tokens

PROMPTS = LinearRegression(x_dim=3, n_context=5).sample(6, seed=0, dtype=torch.float64)


def test_the_update_of_gradient_descent_is_the_weights_of_one_step():
    model = constructions.gradient_descent(x_dim=3, n_context=5, step_size=0.7)
    update = read_dual_form(model, PROMPTS).update[:, :, 0]
    for p in range(6):
        x, y = PROMPTS.xs[p, :-1].numpy(), PROMPTS.ys[p, :-1].numpy()
        np.testing.assert_allclose(update[:3, 3, p].numpy(), -0.7 * (x.T @ y)[:, 0], atol=1e-12)
        np.testing.assert_allclose(update[:3, :3, p].numpy(), 0, atol=1e-12)


def test_for_softmax_the_error_is_that_of_the_linear_reading():
    cfg = TransformerConfig(x_dim=3, n_context=5, attention="softmax", initializer_range=0.5, dtype="float64")
    model = HookedTransformer(cfg, seed=2).eval()
    error = read_dual_form(model, PROMPTS).relative_error[0]
    tokens = model.encode(PROMPTS)
    _, cache = model.run_with_cache(tokens)
    attn = model.blocks[0].attn
    for p in range(6):
        q, k, v = (cache[f"blocks.0.attn.hook_{name}"][p, :, 0] for name in "qkv")
        scores = k[:-1] @ q[-1] * cfg.score_scale
        linear, softmax = (weights @ v[:-1] @ attn.W_O[0] for weights in (scores, scores.softmax(0)))
        assert error[p].item() == pytest.approx(((linear - softmax).norm() / softmax.norm()).item(), rel=1e-9)
    assert error.min() > 0.1


IDS: dict[str, Any] = {
    "prompt_format": "token_ids", "d_vocab": 6, "n_ctx": 7, "d_model": 6, "d_head": 3, "n_heads": 2, "n_layers": 2,
    "attn_bias": True, "dtype": "float64", "attention": "linear", "attn_only": True, "normalization_type": None,
}  # fmt: skip
SPLIT: dict[str, tuple[dict[str, Any], int | None]] = {
    "context": ({"x_dim": 3, "n_context": 5}, None),
    "several heads": ({"x_dim": 3, "n_context": 5, "keys": "causal", "n_heads": 3, "d_head": 2, "damping": 0.6}, None),
    "context, split": ({"x_dim": 3, "n_context": 5, "n_heads": 2, "normalize_by_context": True}, 2),
    "causal, split": ({"x_dim": 3, "n_context": 5, "keys": "causal", "score_scale": 0.4, "attn_bias": True}, 4),
    "interleaved, split": ({"x_dim": 3, "n_context": 5, "prompt_format": "interleaved", "d_model": 8, "d_head": 2}, 7),
    "ids": (IDS, None),
    "ids, split": (IDS | {"normalize_by_context": True}, 3),
    "ids, no demonstration": (IDS, 0),
}


@pytest.mark.parametrize("kind", SPLIT)
def test_linear_attention_against_plain_loops(kind: str):
    fields, n_demonstrations = SPLIT[kind]
    cfg = TransformerConfig(**fields)
    model = random_model(cfg.replace(dtype="float64")).eval()
    prompts: Any = random_tokens(model.cfg, batch=3) if cfg.prompt_format == "token_ids" else PROMPTS[:3]
    result = read_dual_form(model, prompts, n_demonstration_tokens=n_demonstrations)
    stream = model(prompts, stop_at_layer=0).detach().numpy()
    weights = {name: weight.detach().numpy() for name, weight in model.blocks[0].attn.named_parameters()}
    n_pos = stream.shape[1]
    n = n_pos - 1 if n_demonstrations is None else n_demonstrations
    visible = range(n_pos - 1) if cfg.keys == "context" else range(n_pos)
    assert result.zero_shot.shape == result.update.shape == (cfg.d_head, cfg.d_model, cfg.n_heads, 3)
    for p in range(3):
        for h in range(cfg.n_heads):
            parts = {name: stream[p] @ weights[f"W_{name}"][h] for name in "QKV"}
            if cfg.attn_bias:
                parts = {name: part + weights[f"b_{name}"][h] for name, part in parts.items()}
            maps = np.zeros((2, cfg.d_head, cfg.d_model))
            written = np.zeros(cfg.d_model)
            for i in visible:
                value = parts["V"][i] @ weights["W_O"][h] * cfg.damping * cfg.score_scale
                value = value / len(visible) if cfg.normalize_by_context else value
                maps[int(i < n)] += np.outer(parts["K"][i], value)
                written += parts["Q"][-1] @ parts["K"][i] * value
            np.testing.assert_allclose(result.zero_shot[:, :, h, p].numpy(), maps[0], rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(result.update[:, :, h, p].numpy(), maps[1], rtol=1e-10, atol=1e-12)
            both = (result.zero_shot + result.update)[:, :, h, p].numpy()
            np.testing.assert_allclose(parts["Q"][-1] @ both, written, rtol=1e-9, atol=1e-11)
    assert result.relative_error.max() < 1e-12
    assert result.update.abs().max() > 0 or n == 0
    assert result.zero_shot.abs().max() > 0 or kind == "context"


def rotated(x: np.ndarray, base: float = 10_000.0) -> np.ndarray:
    """Llama's rotation of `[pos head d]`: dimensions i and i + d/2 turn by pos / base^(2i/d)."""
    out, half = np.empty_like(x), x.shape[-1] // 2
    for pos in range(len(x)):
        for i in range(half):
            angle = pos / base ** (2 * i / x.shape[-1])
            a, b = x[pos, :, i], x[pos, :, i + half]
            out[pos, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[pos, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("n_demonstrations", [None, 0, 4])
def test_a_bridge_against_plain_loops(kind: str, n_demonstrations: int | None):
    model, tokens = bridge(kind), ids(3, n=4, n_pos=7, d_vocab=20)
    n = 6 if n_demonstrations is None else n_demonstrations
    for layer in range(model.cfg.n_layers):
        result = read_dual_form(model, tokens, layer, n_demonstration_tokens=n_demonstrations)
        _, cache = model.run_with_cache(tokens)
        cached = {part: cache[f"blocks.{layer}.attn.hook_{part}"].double().numpy() for part in "qkvz"}
        # [d_model d_model] as the wrapped modules hold it: GPT-2's maps from rows, Llama's from columns
        if kind == "gpt2":
            output = model.original_model.transformer.h[layer].attn.c_proj.weight
        else:
            output = model.original_model.model.layers[layer].self_attn.o_proj.weight.T
        output = output.detach().double().numpy()
        n_heads, d_head = cached["q"].shape[2:]
        shared = n_heads // cached["k"].shape[2]
        assert result.relative_error.shape == (n_heads, 4)
        for p in range(4):
            q, k = cached["q"][p], cached["k"][p]
            q, k = (rotated(q), rotated(k)) if kind == "llama" else (q, k)
            for h in range(n_heads):
                W_O = output[h * d_head : (h + 1) * d_head]
                maps = np.zeros((2, d_head, output.shape[1]))
                for i in range(7):
                    value = cached["v"][p, i, h // shared] @ W_O
                    maps[int(i < n)] += np.outer(k[i, h // shared], value) / math.sqrt(d_head)
                written = cached["z"][p, -1, h] @ W_O
                error = np.linalg.norm(q[-1, h] @ maps.sum(0) - written) / np.linalg.norm(written)
                np.testing.assert_allclose(result.zero_shot[:, :, h, p].numpy(), maps[0], rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(result.update[:, :, h, p].numpy(), maps[1], rtol=1e-4, atol=1e-4)
                assert result.relative_error[h, p].item() == pytest.approx(error, rel=1e-4)
        assert result.relative_error.min() > 1e-3


TINY: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "head_dim": 4,
    "intermediate_size": 8, "vocab_size": 20, "max_position_embeddings": 16, "initializer_range": 0.5,
}  # fmt: skip


def test_keys_outside_a_window_have_no_part():
    config = MistralConfig(sliding_window=3, **TINY)
    torch.manual_seed(0)
    model = build_bridge_from_module(MistralForCausalLM(config).eval(), "MistralForCausalLM", hf_config=config)
    tokens = ids(0, d_vocab=20)
    assert read_dual_form(model, tokens, n_demonstration_tokens=3).update.abs().max() == 0  # the last of six sees three
    assert read_dual_form(model, tokens, n_demonstration_tokens=4).update.abs().min() > 0


def test_scores_that_are_more_than_products_are_refused():
    config = Gemma2Config(attn_logit_softcapping=5.0, **TINY)
    torch.manual_seed(0)
    model = build_bridge_from_module(Gemma2ForCausalLM(config).eval(), "Gemma2ForCausalLM", hf_config=config)
    with pytest.raises(ValueError, match="hook_attn_scores of this TransformerBridge is not the scaled products"):
        read_dual_form(model, ids(0, d_vocab=20))


def test_within_little_memory_the_form_is_the_same():
    model, sizes = random_model(TransformerConfig(**IDS)).eval(), []
    tokens = random_tokens(model.cfg, batch=5)
    whole = read_dual_form(model, tokens)
    model.add_hook("hook_embed", lambda tensor, hook: sizes.append(len(tensor)))
    part = read_dual_form(model, tokens, memory=2.5 * ModelAdapter(model).bytes_per_row(tokens))
    assert sizes[-3:] == [2, 2, 1]
    torch.testing.assert_close(part.update, whole.update)
