"""The dual form and the copying of targets against plain loops, and on constructions that have them."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from mechicl import constructions
from mechicl.analysis import measure_target_copying, read_dual_form
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.pretrained.loading import from_transformers
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.families import token_ids
from tests.models.pretrained.variants import make_variant
from tests.strategies import random_model, random_tokens

SIX_PROMPTS = LinearRegression(x_dim=3, n_context=5).sample(6, seed=0, dtype=torch.float64)


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
    "ids, bounds": (IDS | {"clip_qkv": 0.3}, None),
    "ids, norms of queries and keys": (IDS | {"use_qk_norm": True}, 3),
}


@pytest.mark.parametrize("kind", SPLIT)
def test_linear_attention_against_plain_loops(kind: str):
    fields, n_demonstrations = SPLIT[kind]
    cfg = TransformerConfig(**fields)
    model = random_model(cfg.replace(dtype="float64")).eval()
    prompts: Any = random_tokens(model.cfg, batch=3) if cfg.prompt_format == "token_ids" else SIX_PROMPTS[:3]
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
            for name in "QK" if cfg.use_qk_norm else "":
                scale = np.sqrt((parts[name] ** 2).mean(-1, keepdims=True) + cfg.eps)
                parts[name] = parts[name] / scale * weights[f"{name.lower()}_norm.w"]
            if cfg.clip_qkv is not None:
                parts = {name: part.clip(-cfg.clip_qkv, cfg.clip_qkv) for name, part in parts.items()}
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


@pytest.mark.parametrize("fields", [{"attn_scores_soft_cap": 2.0}, {"positional_embedding_type": "alibi"}])
def test_scores_that_are_no_products_have_no_dual_form(fields: dict[str, Any]):
    model = random_model(TransformerConfig(**IDS | fields))
    with pytest.raises(ValueError, match=f"{next(iter(fields))}={next(iter(fields.values()))!r}"):
        read_dual_form(model, random_tokens(model.cfg, batch=3))


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
def test_a_pretrained_family_against_plain_loops(family: str):
    theirs = make_variant(family)
    model, tokens, n = from_transformers(HookedTransformer, theirs), token_ids(3, 4), 4
    for layer in range(model.cfg.n_layers):
        result = read_dual_form(model, tokens, layer, n_demonstration_tokens=n)
        _, cache = model.run_with_cache(tokens)
        cached = {part: cache[f"blocks.{layer}.attn.hook_{part}"].double().numpy() for part in "qkvz"}
        # [d_model d_model] as transformers has it: GPT-2's maps from rows, Llama's from columns
        if family == "GPT-2":
            output = theirs.transformer.h[layer].attn.c_proj.weight
        else:
            output = theirs.model.layers[layer].self_attn.o_proj.weight.T
        output = output.detach().double().numpy()
        n_heads, d_head = cached["q"].shape[2:]
        shared = n_heads // cached["k"].shape[2]
        assert result.relative_error.shape == (n_heads, 4)
        for p in range(4):
            q, k = cached["q"][p], cached["k"][p]
            q, k = (rotated(q), rotated(k)) if family == "Llama" else (q, k)
            for h in range(n_heads):
                W_O = output[h * d_head : (h + 1) * d_head]
                maps = np.zeros((2, d_head, output.shape[1]))
                for i in range(tokens.shape[1]):
                    value = cached["v"][p, i, h // shared] @ W_O
                    maps[int(i < n)] += np.outer(k[i, h // shared], value) / math.sqrt(d_head)
                written = cached["z"][p, -1, h] @ W_O
                error = np.linalg.norm(q[-1, h] @ maps.sum(0) - written) / np.linalg.norm(written)
                np.testing.assert_allclose(result.zero_shot[:, :, h, p].numpy(), maps[0], rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(result.update[:, :, h, p].numpy(), maps[1], rtol=1e-4, atol=1e-4)
                assert result.relative_error[h, p].item() == pytest.approx(error, rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_keys_outside_a_window_have_no_part():
    model = from_transformers(HookedTransformer, make_variant("Mistral"))
    tokens, window = token_ids(0, 2), model.cfg.window_size
    assert window is not None
    hidden = tokens.shape[1] - window
    assert read_dual_form(model, tokens, n_demonstration_tokens=hidden).update.abs().max() == 0
    assert read_dual_form(model, tokens, n_demonstration_tokens=hidden + 1).update.abs().max() > 0


# ---- copying ----
TASK = LinearRegression(x_dim=3, n_context=4, y_dim=2)
CONFIG = TransformerConfig(
    x_dim=3, n_context=4, y_dim=2, prompt_format="interleaved", keys="full", n_layers=2, n_heads=2, d_model=12, d_mlp=6,
    attention="softmax", normalization_type="LN", positional_embedding_type="standard", dtype="float64",
)  # fmt: skip


def prompts(n: int = 6, seed: int = 0, **fields) -> Prompts:
    return TASK.replace(**fields).sample(n, seed=seed, dtype=torch.float64)


def mirrored(n: int) -> Prompts:
    """Each prompt once more with its targets negated, so that the mean of all targets is 0."""
    p = prompts(n)
    return Prompts(torch.cat([p.xs, p.xs]), torch.cat([p.ys, -p.ys]))


def close(a: torch.Tensor, b: torch.Tensor | float, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype).expand(a.shape), rtol=0, atol=atol)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("n_context", [1, 4])
def test_the_construction_copies_everything(attention, n_context):
    model = constructions.copy_targets(x_dim=3, y_dim=2, n_context=4, attention=attention)
    p = mirrored(150)
    p = Prompts(p.xs[:, -n_context - 1 :], p.ys[:, -n_context - 1 :])
    result = measure_target_copying(model, p)
    close(result.attention[0], 1)
    close(result.pattern_cosine[0], 1)
    close(result.decoding_errors, 0)
    # no linear function of the input tells targets whose signs are random
    assert 0.9 < result.decoding_errors_before.mean() < 1.15
    squares = p.query.ys.square().mean(-1)  # it predicts 0
    for errors in (result.errors, result.errors_without, result.errors_without_elsewhere, result.errors_transplanted):
        close(errors, squares)


def reference(model: HookedTransformer, p: Prompts, layer: int) -> dict[str, np.ndarray]:
    """Attention, cosine and decoding errors by loops over numpy arrays."""
    names = {"pattern": "attn.hook_pattern", "before": "hook_resid_pre", "after": "hook_resid_post"}
    _, cache = model.run_with_cache(model.encode(p))
    arrays = {k: cache[f"blocks.{layer}.{name}"].detach().double().numpy() for k, name in names.items()}
    n, n_heads = p.n_context, model.cfg.n_heads
    share, cosine = np.zeros((n_heads, len(p))), np.zeros((n_heads, len(p)))
    for head in range(n_heads):
        for i in range(len(p)):
            for t in range(n):
                row = arrays["pattern"][i, head, 2 * t]
                share[head, i] += abs(row[2 * t + 1]) / np.abs(row).sum() / n
                cosine[head, i] += row[2 * t + 1] / np.sqrt((row**2).sum()) / n
    result = {"attention": share, "pattern_cosine": cosine}
    ys = p.context.ys.numpy()
    half = len(p) // 2
    for name, which in (("decoding_errors", "after"), ("decoding_errors_before", "before")):
        errors = np.zeros(len(p))
        for judged in range(len(p)):
            others = range(half, len(p)) if judged < half else range(half)
            rows = np.stack([[*arrays[which][i, 2 * t], 1] for i in others for t in range(n)])
            readout = np.linalg.lstsq(rows, np.stack([ys[i, t] for i in others for t in range(n)]), rcond=None)[0]
            inputs = np.stack([[*arrays[which][judged, 2 * t], 1] for t in range(n)])
            errors[judged] = ((inputs @ readout - ys[judged]) ** 2).mean()
        result[name] = errors / (ys**2).mean()
    return result


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("layer", [0, 1])
def test_shares_and_readouts_are_those_of_plain_loops(attention, layer):
    model, p = random_model(CONFIG.replace(attention=attention)).eval(), prompts(25)
    result = measure_target_copying(model, p, layer)
    for name, expected in reference(model, p, layer).items():
        np.testing.assert_allclose(getattr(result, name).numpy(), expected, rtol=1e-7, atol=1e-9)


def with_outputs(model: HookedTransformer, p: Prompts, layer: int, positions: list[int]) -> torch.Tensor:
    """Errors with the layer's attention output at some positions replaced by its mean, layer by layer."""
    streams = model.forward(p, stop_at_layer=layer)
    block = model.blocks[layer]
    out = block.attn(block.ln1(streams))
    for position in positions:
        out[:, position] = sum(out[i, position] for i in range(len(p))) / len(p)
    mid = streams + out
    streams = mid + block.mlp(block.ln2(mid))
    predictions = model.forward(streams, start_at_layer=layer + 1)[:, -1]
    return (predictions - p.query.ys).square().mean(-1).detach()


@torch.no_grad()
def test_ablations_are_those_of_a_pass_by_hand():
    model, p = random_model(CONFIG).eval(), prompts(8)
    result = measure_target_copying(model, p)
    close(result.errors, squared_errors(model, p)[:, 0])
    close(result.errors_without, with_outputs(model, p, 0, [0, 2, 4, 6]), 1e-9)
    close(result.errors_without_elsewhere, with_outputs(model, p, 0, [1, 3, 5, 7, 8]), 1e-9)
    assert (result.errors_without - result.errors).abs().max() > 1e-4


@torch.no_grad()
def test_a_transplant_gives_each_head_the_construction_times_its_own_weight():
    model, p = random_model(CONFIG.replace(attention="linear")).eval(), prompts(8)
    name = "blocks.0.attn.hook_pattern"
    _, cache = model.run_with_cache(model.encode(p), names_filter=name)
    pattern = cache[name].clone()
    for head in range(2):
        total = sum(pattern[i, head, 2 * t].sum() for i in range(8) for t in range(4)) / 32
        for t in range(4):
            pattern[:, head, 2 * t] = 0
            pattern[:, head, 2 * t, 2 * t + 1] = total
    outputs = model.run_with_hooks(model.encode(p), fwd_hooks=[(name, lambda value, hook: pattern)])
    close(measure_target_copying(model, p).errors_transplanted, (outputs[:, -1] - p.query.ys).square().mean(-1), 1e-10)
