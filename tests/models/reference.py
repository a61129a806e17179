"""A second implementation of the transformer, from the docstring of `TransformerConfig` alone.

Plain loops over positions and heads, numpy, float64, one prompt at a time.
"""

import cmath
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mechicl.models import TransformerConfig

Array = np.ndarray
Weights = dict[str, Array]

FUNCTIONS: dict[str, Callable[[float], float]] = {
    "abs": abs,
    "cos": math.cos,
    "elu": lambda s: s if s > 0 else math.exp(s) - 1,
    "exp": math.exp,
    "gelu": lambda s: s * (1 + math.erf(s / math.sqrt(2))) / 2,
    "identity": lambda s: s,
    "leaky_relu": lambda s: s if s > 0 else 0.01 * s,
    "relu": lambda s: max(s, 0.0),
    "relu_squared": lambda s: max(s, 0.0) ** 2,
    "sigmoid": lambda s: 1 / (1 + math.exp(-s)),
    "silu": lambda s: s / (1 + math.exp(-s)),
    "softplus": lambda s: math.log(1 + math.exp(s)),
    "square": lambda s: s * s,
    "tanh": math.tanh,
}
FUNCTIONS |= dict.fromkeys(
    ("gelu_fast", "gelu_new", "gelu_pytorch_tanh"),
    lambda s: s * (1 + math.tanh(math.sqrt(2 / math.pi) * (s + 0.044715 * s**3))) / 2,
)


def forward(cfg: TransformerConfig, weights: Weights, tokens: Array) -> tuple[Array, list[Array], list[Array]]:
    """Outputs `[pos d_out]`, the stream before the blocks and after each, and each block's pattern."""
    stream = np.stack([embed(cfg, weights, tokens[t], t) for t in range(len(tokens))])
    if cfg.mlp_location == "input":
        stream = np.stack([row + mlp(cfg, part(weights, "input_mlp."), row) for row in stream])
    streams, patterns = [stream], []
    for layer in range(cfg.n_layers):
        block = part(weights, f"blocks.{0 if cfg.recurrent else layer}.")
        skip_norm = cfg.skip_first_norm and (layer == 0 or cfg.recurrent)
        block = with_descent(cfg, block) if cfg.attention_weights == "gradient_descent" else block
        kinds = cfg.attention.split(",")
        update, pattern = attention(cfg, block, stream, kinds[layer if len(kinds) > 1 else 0], skip_norm=skip_norm)
        stream = stream + cfg.damping * update
        if cfg.d_mlp is not None and cfg.mlp_location == "blocks":
            hidden = part(weights, "blocks.0.mlp.") if cfg.share_mlp else part(block, "mlp.")
            rows = [mlp(cfg, hidden, normalize(cfg, block, "ln2.", row)) for row in stream]
            stream = stream + cfg.damping * np.stack(rows)
        if cfg.token_clip is not None:
            stream = np.minimum(np.maximum(stream, -cfg.token_clip), cfg.token_clip)
        streams.append(stream)
        patterns.append(pattern)
    return np.stack([read_out(cfg, weights, row) for row in stream]), streams, patterns


def part(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def embed(cfg: TransformerConfig, weights: Weights, token: Array, position: int) -> Array:
    kind = cfg.positional_embedding_type
    concatenated = np.zeros(0)
    if kind == "one_hot":
        concatenated = np.array([1.0 if i == position else 0.0 for i in range(cfg.d_pos)])
    elif kind == "sinusoidal":
        angles = [position / 10000 ** (2 * (i // 2) / cfg.d_pos) for i in range(cfg.d_pos)]
        concatenated = np.array([math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angles)])
    if cfg.read_in == "identity":
        filled = np.concatenate([token, concatenated])
        row = np.concatenate([filled, np.zeros(cfg.d_model - len(filled))])
    else:
        ids = cfg.prompt_format == "token_ids"
        row = weights["embed.W_E"][token] if ids else token @ weights["embed.W_E"]
        if len(concatenated):
            row = row + concatenated @ weights["pos_embed.W_pos"]
        if cfg.read_bias and not ids:
            row = row + weights["embed.b_E"]
    return row + weights["pos_embed.W_pos"][position] if kind == "standard" else row


def read_out(cfg: TransformerConfig, weights: Weights, row: Array) -> Array:
    if cfg.final_norm:
        row = normalize(cfg, weights, "ln_final.", row)
    if cfg.read_out == "identity":
        return np.array([-row[i] for i in targets(cfg)])
    return row @ weights["unembed.W_U"] + (weights["unembed.b_U"] if cfg.read_bias else 0)


def targets(cfg: TransformerConfig) -> list[int]:
    """The y-dimensions of the stream: those of a paired token unchanged, else the last ones."""
    if cfg.prompt_format == "paired" and cfg.read_in == "identity":
        assert cfg.x_dim is not None
        return [cfg.x_dim + i for i in range(cfg.y_dim)]
    return [cfg.d_model - cfg.y_dim + i for i in range(cfg.y_dim)]


def normalize(cfg: TransformerConfig, weights: Weights, prefix: str, row: Array) -> Array:
    if cfg.normalization_type is None:
        return row
    if cfg.normalization_type in ("RMS", "RMSPre"):
        row = row / math.sqrt(sum(entry**2 for entry in row) / len(row) + cfg.eps)
        return row * weights[prefix + "w"] if cfg.normalization_type == "RMS" else row
    mean = sum(row) / len(row)
    variance = sum((entry - mean) ** 2 for entry in row) / len(row)
    row = (row - mean) / math.sqrt(variance + cfg.eps)
    return row * weights[prefix + "w"] + weights[prefix + "b"] if cfg.normalization_type == "LN" else row


def mlp(cfg: TransformerConfig, weights: Weights, row: Array) -> Array:
    if cfg.gated_mlp:
        gate = np.array([FUNCTIONS[cfg.act_fn](h) for h in row @ weights["W_gate"]])
        return (gate * (row @ weights["W_in"]) + weights["b_in"]) @ weights["W_out"] + weights["b_out"]
    hidden = row @ weights["W_in"] + weights["b_in"]
    return np.array([FUNCTIONS[cfg.act_fn](h) for h in hidden]) @ weights["W_out"] + weights["b_out"]


def visible(cfg: TransformerConfig, position: int, n_pos: int) -> list[int]:
    return {
        "causal": list(range(position + 1)),
        "context": list(range(n_pos - 1)),
        "full": list(range(n_pos)),
    }[cfg.keys]


def with_descent(cfg: TransformerConfig, block: Weights) -> Weights:
    """The weights of gradient descent from 0: `-step_size Σ_s <x_t, x_s> y_s` is written to the y-dimensions."""
    ys = np.diag([1.0 if i in targets(cfg) else 0.0 for i in range(cfg.d_model)])[None]
    xs = np.eye(cfg.d_model) - ys
    matrices = {"W_Q": xs, "W_K": xs, "W_V": -ys, "W_O": block["attn.step_size"][0] * ys}
    return block | {f"attn.{name}": matrix for name, matrix in matrices.items()}


def momentum(cfg: TransformerConfig, outputs: Array, values: Array) -> Array:
    """One head's outputs `[pos d]` with momentum: each position takes over a state from the one before."""
    if cfg.momentum == 0:
        return outputs
    made, state = [], np.zeros(outputs.shape[1])
    for t in range(len(outputs)):
        if cfg.momentum_over == "outputs":
            state = outputs[0] if t == 0 else cfg.momentum * state + (1 - cfg.momentum) * outputs[t]
            made.append(state)
        else:
            made.append(outputs[t] + state)
            state = cfg.momentum * (state + values[t])
    return np.stack(made)


def attention(
    cfg: TransformerConfig, block: Weights, stream: Array, kind: str, *, skip_norm: bool
) -> tuple[Array, Array]:
    """The attention's output `[pos d_model]`, undamped, and its pattern `[head query_pos key_pos]`."""
    n_pos = len(stream)
    x = stream if skip_norm else np.stack([normalize(cfg, block, "ln1.", row) for row in stream])
    weights = part(block, "attn.")
    output, pattern = np.zeros_like(stream), np.zeros((cfg.n_heads, n_pos, n_pos))
    for head in range(cfg.n_heads):
        values = np.stack([project(cfg, weights, "V", head, row) for row in x])
        zs = np.zeros_like(values)
        for t in range(n_pos):
            keys = visible(cfg, t, n_pos)
            query = turn(cfg, project(cfg, weights, "Q", head, x[t]), t)
            scores = [cfg.score_scale * (query @ turn(cfg, project(cfg, weights, "K", head, x[s]), s)) for s in keys]
            sink = weights["sink"][head] if cfg.sink == "learned" and kind == "softmax" else cfg.sink_score
            for s, weight in zip(keys, attention_weights(cfg, kind, scores, sink), strict=True):
                pattern[head, t, s] = weight
                zs[t] += weight * values[s]
        output += momentum(cfg, zs, values) @ weights["W_O"][head]
    return output + (weights["b_O"] if cfg.attn_bias else 0), pattern


def project(cfg: TransformerConfig, weights: Weights, which: str, head: int, row: Array) -> Array:
    return row @ weights[f"W_{which}"][head] + (weights[f"b_{which}"][head] if cfg.attn_bias else 0)


def turn(cfg: TransformerConfig, vector: Array, position: int) -> Array:
    """Rotary positions, one pair of dimensions after the other, as a complex number."""
    turned, width = vector.copy(), cfg.rotary_dim
    for pair in range(width // 2 if cfg.positional_embedding_type == "rotary" else 0):
        i, j = (2 * pair, 2 * pair + 1) if cfg.rotary_adjacent_pairs else (pair, pair + width // 2)
        number = complex(vector[i], vector[j]) * cmath.exp(1j * position * cfg.rotary_base ** (-2 * pair / width))
        turned[i], turned[j] = number.real, number.imag
    return turned


def attention_weights(cfg: TransformerConfig, kind: str, scores: list[Any], sink: float) -> list[float]:
    if kind == "softmax":
        total = sum(math.exp(s) for s in scores) + (math.exp(sink) if cfg.sink != "none" else 0)
        return [math.exp(s) / total for s in scores]
    if kind == "linear":
        weights = scores
    elif kind == "leaky_relu":
        weights = [s if s > 0 else cfg.attention_slope * s for s in scores]
    else:
        weights = [FUNCTIONS[kind](s) for s in scores]
    return [w / len(scores) for w in weights] if cfg.normalize_by_context else weights
