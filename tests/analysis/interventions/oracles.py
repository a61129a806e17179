"""Plain loops that the sweeps are compared with, and the models that they run on."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mechicl.analysis.interventions import InterventionSweep
from mechicl.base.memory import TooLittleMemory
from mechicl.base.settings import settings
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.prompts import Prompts
from tests.strategies import random_model, random_prompts

EXACT: dict[str, Any] = {"atol": 1e-11, "rtol": 1e-9}
SINGLE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}  # of single precision

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
    "read by head": {"use_split_qkv_input": True, "use_hook_mlp_in": True, "normalization_type": "LN", "d_mlp": 5},
    "read by heads": {"use_attn_in": True, "normalization_type": "LN"},
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


def pair(model: Any, n: int = 3) -> tuple[Any, Any]:
    """Clean and corrupted inputs of a model."""
    return inputs(model, 0, n), inputs(model, 1, n)


def bridge(kind: str = "gpt2", seed: int = 0, **sizes: Any) -> Any:
    """A tiny model of transformers, as TransformerLens opens it."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        fields = {"n_layer": 3, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 16, "initializer_range": 0.5}
        config = GPT2Config(**(fields | sizes))
        return build_bridge_from_module(GPT2LMHeadModel(config).eval(), "GPT2LMHeadModel", hf_config=config)
    config = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=8,
        vocab_size=20, max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    return build_bridge_from_module(LlamaForCausalLM(config).eval(), "LlamaForCausalLM", hf_config=config)


shared_bridge = cache(bridge)  # for tests that do not change it


def bridge_pair() -> tuple[Tensor, Tensor]:
    """Clean and corrupted ids for a bridge."""
    return ids(0, d_vocab=20), ids(1, d_vocab=20)


def flat(sweep: InterventionSweep) -> Tensor:
    """A sweep's predictions, one cell after the other: `[cell prompt ...]`."""
    assert sweep.predictions is not None
    return sweep.predictions.flatten(0, len(sweep.axes) - 1)


def bounded(memory: float, sweep: Callable[[], Any]) -> Any:
    with settings(memory=memory):
        return sweep()


def least_memory(sweep: Callable[[], Any]) -> float:
    """The smallest bound that a sweep does not refuse."""
    memory = 1.0
    while True:
        try:
            bounded(memory, sweep)
        except TooLittleMemory as error:
            memory = error.needed
        else:
            return memory


# ---- hooks and runs by hand ----
def hook_name(component: str, layer: int) -> str:
    inside = component in ("q", "k", "v", "z", "result", "attn_scores", "pattern")
    return f"blocks.{layer}.{'attn.' if inside else 'mlp.' if component in ('pre', 'post') else ''}hook_{component}"


def place(component: str, where: dict[str, int]) -> tuple[Any, ...]:
    """Index of part of an activation `[prompt ...]`."""
    if component in ("attn_scores", "pattern"):
        order = ["head", "query", "key"]
    elif component in ("q", "k", "v", "z", "result", "attn_in", "q_input", "k_input", "v_input"):
        order = ["pos", "head"]
    elif component in ("pre", "post"):
        order = ["pos", "neuron"]
    else:
        order = ["pos"]
    return (slice(None), *(where.get(axis, slice(None)) for axis in order))


def tokens_of(model: Any, prompts: Any) -> Tensor:
    return model.encode(prompts) if isinstance(prompts, Prompts) else prompts


@torch.no_grad()
def run(model: Any, prompts: Any, hooks: Sequence[tuple[str, Callable[..., Any]]] = (), at: str = "query") -> Tensor:
    """Predictions of one hooked run."""
    outputs = model.run_with_hooks(tokens_of(model, prompts), fwd_hooks=list(hooks))
    if at == "positions":
        return outputs
    if at == "points":
        return model.decode(outputs)
    return outputs[:, -1]


def recorded(model: Any, prompts: Any, name: str) -> Tensor:
    activations = []

    def keep(activation: Tensor, hook: Any) -> None:
        activations.append(activation.detach().clone())

    run(model, prompts, [(name, keep)])
    return activations[0]


def putting(component: str, layer: int, where: dict[str, int], values: Tensor) -> tuple[str, Callable[..., Tensor]]:
    """A hook that puts part of `values` in."""

    def put(activation: Tensor, hook: Any) -> Tensor:
        out = activation if component == "resid_mid" else activation.clone()  # a bridge's stream is that tensor itself
        out[place(component, where)] = values[place(component, where)]
        return out

    return hook_name(component, layer), put


def cells(model: Any, component: str, axes: Sequence[str], sample: Tensor) -> list[dict[str, int]]:
    """All combinations of the axes' indices, layer included, in order."""
    by_key = component in ("attn_scores", "pattern")
    at = {"head": 1, "query": 2, "key": 3} if by_key else {"pos": 1, "head": 2, "neuron": 2}
    sizes = [model.cfg.n_layers if axis == "layer" else sample.shape[at[axis]] for axis in axes]
    return [dict(zip(axes, index, strict=True)) for index in itertools.product(*map(range, sizes))]


def loop_patch(
    model: Any, into: Any, source: Any, component: str, axes: Sequence[str], at: str = "query"
) -> tuple[Tensor, list[dict[str, int]]]:
    """Predictions `[cell prompt ...]`, one run a cell."""
    values = [recorded(model, source, hook_name(component, layer)) for layer in range(model.cfg.n_layers)]
    every = cells(model, component, axes, values[0])
    predictions = []
    for cell in every:
        where = {axis: i for axis, i in cell.items() if axis != "layer"}
        predictions.append(run(model, into, [putting(component, cell["layer"], where, values[cell["layer"]])], at))
    return torch.stack(predictions), every


def no_hook_left(model: Any) -> bool:
    return not any(point.fwd_hooks or point.bwd_hooks or point._forward_hooks for point in model.hook_dict.values())
