"""Small models of the families of `transformers` that open as `HookedTransformer`s, with random weights."""

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.families import D_VOCAB, FAMILIES

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GROUPED = {"num_attention_heads": 4, "hidden_size": 16, "multi_query": False}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
ROPE = {"rope_theta": 100.0, "factor": 2.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in (
        "GPT-2", "GPT-Neo", "GPT-J", "GPT-NeoX", "OPT", "BLOOM", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma",
        "Gemma 2", "Phi", "Phi-3", "OLMo", "OLMo 2", "StableLM", "Falcon", "Falcon (ALiBi)",
    )
} | {
    "GPT-2, scores by layer": ("GPT-2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    "GPT-2, own head": ("GPT-2", {"tie_word_embeddings": False, "n_inner": 20, "activation_function": "relu"}),
    "GPT-NeoX, sequential": ("GPT-NeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "OPT, no biases": ("OPT", {"enable_bias": False}),
    "Llama 3": ("Llama", {"rope_parameters": LLAMA_3, "attention_bias": True, "tie_word_embeddings": True}),
    "Qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "Gemma, own head": ("Gemma", {"tie_word_embeddings": False}),
    "Llama, no epsilon": ("Llama", {"rms_norm_eps": 0.0}),
    "Llama, YaRN": ("Llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 8}}),
    "Llama, dynamic": ("Llama", {"rope_parameters": ROPE | {"rope_type": "dynamic"}, "max_position_embeddings": 8}),
    "Gemma 3": ("Gemma 3", {"layer_types": MIXED, "rope_parameters": {
        "full_attention": ROPE | {"rope_type": "linear"},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }}),
    "Phi, groups": ("Phi", {"num_key_value_heads": 1}),
    "Phi-3, longrope": ("Phi-3", {"original_max_position_embeddings": 8, "rope_parameters": ROPE | {
        "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0],
        "original_max_position_embeddings": 8,
    }}),
    "Phi-3, window": ("Phi-3", {"sliding_window": 3}),
    "OLMo, clipped": ("OLMo", {"clip_qkv": 0.5}),
    "StableLM, parallel": ("StableLM", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "Falcon, groups": ("Falcon", GROUPED | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon, groups and one norm": (
        "Falcon", GROUPED | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    "Falcon, all heads": ("Falcon", {"multi_query": False, "bias": True, "tie_word_embeddings": False}),
}  # fmt: skip


def make_variant(name: str, **fields: Any) -> Any:
    """Make a model in eval mode whose weights are all random and large, float32."""
    stem, changes = VARIANTS[name]
    kind = FAMILIES[stem]
    tokens = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    fields = tokens | kind.sizes | changes | fields
    config = getattr(transformers, f"{kind.config_stem or kind.stem}Config")(**fields)
    # Falcon adds ALiBi twice in the eager implementation of transformers 5.23; soft caps need that one
    config._attn_implementation = "sdpa" if getattr(config, "alibi", False) else "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.stem}{kind.task}")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.5 * torch.randn_like(weight) + (weight if weight.ndim == 1 else 0))
    return model


def to_float64(model: Any) -> Any:
    """Convert the parameters of a model, and no buffers: frequencies of rotary positions stay float32."""
    for weight in model.parameters():
        weight.data = weight.data.double()
    return model


class _KeepsFloat64(TorchFunctionMode):
    """Norms and softmax of transformers are float32 at any type; in this mode they are float64 in float64 models."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float:
                return first
            if torch.float32 in (*args[1:], *kwargs.values()):
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
                kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in kwargs.items()}
        return func(*args, **kwargs)


@torch.no_grad()
def exact_logits(model: Any, tokens: Tensor) -> Tensor:
    """Compute a float64 model's logits without rounding to float32 inside."""
    with _KeepsFloat64():
        return model(tokens).logits
