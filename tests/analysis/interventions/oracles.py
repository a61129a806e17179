"""Plain loops that the sweeps are compared with, and the models that they run on."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.prompts import Prompts
from tests.strategies import random_model, random_prompts

BASE: dict[str, Any] = {
    "x_dim": 2, "n_context": 2, "prompt_format": "interleaved", "n_layers": 2, "n_heads": 2, "d_model": 8, "d_head": 4,
    "attention": "softmax", "keys": "causal", "dtype": "float64",
}  # fmt: skip
PAIRED = {"prompt_format": "paired", "attention": "linear", "keys": "context", "n_context": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"normalization_type": "LN", "d_mlp": 12, "act_fn": "gelu_new"},
    "float32": {"normalization_type": "LN", "d_mlp": 12, "dtype": "float32"},
    "sink": {"sink": "learned", "attn_bias": True},
    "linear": PAIRED,
    "identity": PAIRED | {"d_model": None, "read_in": "identity", "read_out": "identity"},
    "full": {"keys": "full", "normalization_type": "LNPre", "d_mlp": 5},
    "looped": {"recurrent": True, "damping": 0.6, "normalization_type": "LN"},
    "clipped": {"token_clip": 0.7, "d_mlp": 6, "damping": 0.8},
    "mixed": {"attention": "softmax,linear", "normalize_by_context": True, "keys": "context"},
    "one head, one layer": {"n_heads": 1, "n_layers": 1, "attention": "relu"},
    "results": {"use_attn_result": True},
    "no context": {"n_context": 0, "prompt_format": "paired", "keys": "full"},
    "nothing to see": PAIRED | {"n_context": 0, "attention": "softmax"},
    "ids": {
        "prompt_format": "token_ids", "x_dim": None, "n_context": None, "d_vocab": 6, "n_ctx": 5,
        "normalization_type": "LN", "d_mlp": 9,
    },
}  # fmt: skip


def model_of(kind: str = "gpt", seed: int = 0, **fields: Any) -> HookedTransformer:
    """A model with random weights, in eval mode."""
    return random_model(TransformerConfig(**(BASE | MODELS[kind] | fields)), seed, scale=0.4).eval()


def lstm() -> HookedLSTM:
    config = LSTMConfig(x_dim=2, n_context=3, n_layers=2, d_model=5, dtype="float64")
    return HookedLSTM(config, seed=3).eval()


def ids(seed: int, n: int = 3, n_pos: int = 6, d_vocab: int = 6) -> Tensor:
    return torch.randint(d_vocab, (n, n_pos), generator=torch.Generator().manual_seed(seed))


def inputs(model: Any, seed: int, n: int = 3) -> Any:
    """Prompts, or token ids."""
    if getattr(model.cfg, "prompt_format", "token_ids") == "token_ids":
        return ids(seed, n, n_pos=min(model.cfg.n_ctx, 5), d_vocab=model.cfg.d_vocab)
    return random_prompts(model.cfg, n, seed)


def bridge(kind: str = "gpt2", seed: int = 0, **fields: Any) -> Any:
    """A tiny model of transformers, as TransformerLens opens it."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        sizes = {"n_layer": 3, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 16, "initializer_range": 0.5}
        config = GPT2Config(**(sizes | fields))
        return build_bridge_from_module(GPT2LMHeadModel(config).eval(), "GPT2LMHeadModel", hf_config=config)
    config = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=8,
        vocab_size=20, max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    return build_bridge_from_module(LlamaForCausalLM(config).eval(), "LlamaForCausalLM", hf_config=config)


# ---- hooks and runs by hand ----


def hook_name(component: str, layer: int) -> str:
    inside = component in ("q", "k", "v", "z", "result", "attn_scores", "pattern")
    return f"blocks.{layer}.{'attn.' if inside else ''}hook_{component}"


def place(component: str, where: dict[str, int]) -> tuple[Any, ...]:
    """Index of part of an activation `[prompt ...]`."""
    if component in ("attn_scores", "pattern"):
        order = ["head", "query", "key"]
    elif component in ("q", "k", "v", "z", "result"):
        order = ["pos", "head"]
    else:
        order = ["pos"]
    return (slice(None), *(where.get(axis, slice(None)) for axis in order))


def tokens_of(model: Any, given: Any) -> Tensor:
    return model.encode(given) if isinstance(given, Prompts) else given


@torch.no_grad()
def run(model: Any, given: Any, hooks: Sequence[tuple[str, Callable[..., Any]]] = (), at: str = "query") -> Tensor:
    """Predictions of one hooked run."""
    outputs = model.run_with_hooks(tokens_of(model, given), fwd_hooks=list(hooks))
    if at == "positions":
        return outputs
    if at == "points":
        return model.decode(outputs)
    return outputs[:, -1]


def recorded(model: Any, given: Any, name: str) -> Tensor:
    seen = []

    def keep(activation: Tensor, hook: Any) -> None:
        seen.append(activation.detach().clone())

    run(model, given, [(name, keep)])
    return seen[0]


def putting(component: str, layer: int, where: dict[str, int], values: Tensor) -> tuple[str, Callable[..., Tensor]]:
    """A hook that puts part of `values` in."""

    def put(activation: Tensor, hook: Any) -> Tensor:
        out = activation.clone()
        out[place(component, where)] = values[place(component, where)]
        return out

    return hook_name(component, layer), put


def cells(model: Any, component: str, axes: Sequence[str], sample: Tensor) -> list[dict[str, int]]:
    """All combinations of the axes' indices, layer included, in order."""
    by_key = component in ("attn_scores", "pattern")
    at = {"head": 1, "query": 2, "key": 3} if by_key else {"pos": 1, "head": 2}
    sizes = [model.cfg.n_layers if axis == "layer" else sample.shape[at[axis]] for axis in axes]
    return [dict(zip(axes, index, strict=True)) for index in itertools.product(*map(range, sizes))]


def loop_patch(
    model: Any, into: Any, source: Any, component: str, axes: Sequence[str], at: str = "query"
) -> tuple[Tensor, list[dict[str, int]]]:
    """Predictions `[cell prompt ...]`, one run a cell."""
    values = [recorded(model, source, hook_name(component, layer)) for layer in range(model.cfg.n_layers)]
    every = cells(model, component, axes, values[0])
    found = []
    for cell in every:
        where = {axis: i for axis, i in cell.items() if axis != "layer"}
        found.append(run(model, into, [putting(component, cell["layer"], where, values[cell["layer"]])], at))
    return torch.stack(found), every


def no_hook_left(model: Any) -> bool:
    return not any(point.fwd_hooks or point.bwd_hooks or point._forward_hooks for point in model.hook_dict.values())
