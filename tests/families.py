"""Tiny models of many families of `transformers` with random weights, as TransformerLens opens them."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.utilities import get_act_name

# ---- sizes, by the names that the families use ----
GPT2 = {"n_layer": 3, "n_head": 2, "n_embd": 8, "n_positions": 16}
LLAMA = {
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8,
    "intermediate_size": 12, "max_position_embeddings": 16, "head_dim": 4,
}  # fmt: skip
ALL_HEADS = LLAMA | {"num_key_value_heads": 2}
NO_HEAD_DIM = {name: value for name, value in LLAMA.items() if name != "head_dim"}


@dataclass(frozen=True)
class Family:
    """The beginning of the names of a family's classes in `transformers`, sizes that make it tiny, and the task."""

    stem: str
    sizes: dict[str, Any]
    task: str = "ForCausalLM"
    config_stem: str = ""


_LLAMA_LIKE = {
    "Llama": "Llama", "Qwen2": "Qwen2", "Qwen3": "Qwen3", "Gemma": "Gemma", "Phi-3": "Phi3", "OLMo": "Olmo",
    "OLMo 2": "Olmo2", "Starcoder 2": "Starcoder2", "Nemotron": "Nemotron", "Cohere": "Cohere", "Apertus": "Apertus",
    "SmolLM 3": "SmolLM3", "GLM": "Glm", "GLM 4": "Glm4", "Seed-OSS": "SeedOss", "ERNIE 4.5": "Ernie4_5",
    "Arcee": "Arcee", "HunYuan": "HunYuanDenseV1",
}  # fmt: skip
_FALCON = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 8, "alibi": False}
FAMILIES: dict[str, Family] = {name: Family(stem, LLAMA) for name, stem in _LLAMA_LIKE.items()} | {
    "GPT-2": Family("GPT2", GPT2, "LMHeadModel"),
    "GPT": Family("OpenAIGPT", GPT2, "LMHeadModel"),
    "GPT-J": Family("GPTJ", GPT2 | {"rotary_dim": 2}),
    "GPT-BigCode": Family("GPTBigCode", GPT2),
    "CodeGen": Family("CodeGen", GPT2 | {"n_head": 4, "n_embd": 16, "rotary_dim": 2}),
    "GPT-Neo": Family("GPTNeo", {
        "num_layers": 3, "num_heads": 2, "hidden_size": 8, "max_position_embeddings": 16, "window_size": 3,
        "attention_types": [[["global", "local", "global"], 1]],
    }),
    "GPT-NeoX": Family("GPTNeoX", ALL_HEADS | {"rotary_pct": 0.5}),
    "OPT": Family("OPT", {
        "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 8, "ffn_dim": 12,
        "max_position_embeddings": 16, "word_embed_proj_dim": 8,
    }),
    "BLOOM": Family("Bloom", {"n_layer": 3, "n_head": 2, "hidden_size": 8}),
    "XGLM": Family("XGLM", {
        "num_layers": 3, "attention_heads": 2, "d_model": 8, "ffn_dim": 12, "max_position_embeddings": 16,
    }),
    "Mistral": Family("Mistral", LLAMA | {"sliding_window": 3}),
    "Mixtral": Family("Mixtral", LLAMA | {"num_local_experts": 4}),
    "Gemma 2": Family("Gemma2", LLAMA | {"sliding_window": 3, "query_pre_attn_scalar": 4}),
    "Gemma 3": Family("Gemma3", LLAMA | {"sliding_window": 3, "query_pre_attn_scalar": 4}, config_stem="Gemma3Text"),
    "Phi": Family("Phi", ALL_HEADS | {"partial_rotary_factor": 0.5}),
    "Falcon": Family("Falcon", _FALCON),
    "Falcon (ALiBi)": Family(
        "Falcon", _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    ),
    "MPT": Family("Mpt", {"n_layers": 3, "n_heads": 2, "d_model": 8, "max_seq_len": 16}),
    "StableLM": Family("StableLm", LLAMA | {"partial_rotary_factor": 0.5}),
    "OLMoE": Family("Olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "Granite": Family(
        "Granite", LLAMA | {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.3}
    ),
    "Cohere 2": Family("Cohere2", LLAMA | {"sliding_window": 3}),
    "GPT-OSS": Family("GptOss", LLAMA | {"num_local_experts": 4, "sliding_window": 3}),
    "BERT": Family("Bert", NO_HEAD_DIM | {"num_key_value_heads": 2}, "ForMaskedLM"),
    "Mamba": Family("Mamba", {"num_hidden_layers": 3, "hidden_size": 8, "state_size": 4}),
    "RecurrentGemma": Family("RecurrentGemma", NO_HEAD_DIM | {"lru_width": 8, "attention_window_size": 16}),
    "T5": Family(
        "T5", {"num_layers": 3, "num_heads": 2, "d_model": 8, "d_kv": 4, "d_ff": 12}, "ForConditionalGeneration"
    ),
}  # fmt: skip

_QWEN3_NEXT = {
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8, "head_dim": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 3,
    "intermediate_size": 12, "mlp_only_layers": [0, 1, 2, 3],
}  # fmt: skip
_MAMBA2 = {
    "num_hidden_layers": 3, "hidden_size": 8, "state_size": 4, "num_heads": 4, "head_dim": 4, "n_groups": 2,
    "chunk_size": 4,
}  # fmt: skip
_BAMBA = NO_HEAD_DIM | {
    "mamba_n_heads": 4, "mamba_d_head": 4, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4,
    "attn_layer_indices": [1],
}  # fmt: skip
STATEFUL: dict[str, Family] = {
    "Mamba": FAMILIES["Mamba"],
    "Mamba-2": Family("Mamba2", _MAMBA2),
    "Qwen3-Next": Family("Qwen3Next", _QWEN3_NEXT),
    "Bamba": Family("Bamba", _BAMBA),
}
"""Families whose layers keep a state, or some of them."""

D_VOCAB = 20


def open_family(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Make a tiny model of a family with random weights, in eval mode: a `TransformerBridge`, and a plain copy."""
    family = (FAMILIES | STATEFUL)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
        config = getattr(transformers, f"{family.config_stem or family.stem}Config")(**(tokens | family.sizes))
        torch.manual_seed(seed)
        kind = f"{family.stem}{family.task}"
        model = getattr(transformers, kind)(config).eval().to(dtype)
        with torch.no_grad():  # large weights, so that every part matters
            for weight in model.parameters():
                weight.copy_(torch.randn_like(weight) * 0.5 + (weight if weight.ndim == 1 else 0))
        plain = copy.deepcopy(model)
        return build_bridge_from_module(model, kind, hf_config=config), plain


def token_ids(seed: int, n_prompts: int = 2, n_pos: int = 6) -> Tensor:
    """Draw token ids, none of them special."""
    return torch.randint(2, D_VOCAB, (n_prompts, n_pos), generator=torch.Generator().manual_seed(seed))


# ---- the same intervention by torch's hooks on the plain copy ----
def place_of(bridge: Any, plain: Any, component: str, layer: int) -> tuple[str, str] | None:
    """Find the plain model's sub-module of a component, and the side of its hook ("in" or "out"), or None."""
    hook = bridge.hook_dict.get(get_act_name(component, layer))
    if hook is None:
        return None
    *names, side = hook.name.split(".")[2:]
    part, path = bridge.blocks[layer], [bridge.adapter.component_mapping["blocks"].name, str(layer)]
    for name in names:
        part = getattr(part, name)
        path.append(part.name)
    there = None not in path and ".".join(path) in dict(plain.named_modules())
    return (".".join(path), side.removeprefix("hook_")) if there and side in ("hook_in", "hook_out") else None


@contextmanager
def putting(plain: Any, place: tuple[str, str], edit: Callable[[Tensor], object]) -> Iterator[None]:
    """Edit the input or the output of a sub-module in place, during a `with` block."""

    def first(values: Any) -> Any:
        return values[0] if isinstance(values, tuple | list) else values

    def before(module: Any, args: Any, kwargs: Any) -> None:
        edit(first(args) if args else next(value for value in kwargs.values() if isinstance(value, Tensor)))

    module, side = plain.get_submodule(place[0]), place[1]
    if side == "in":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(lambda module, args, output: edit(first(output)))
    try:
        yield
    finally:
        handle.remove()
