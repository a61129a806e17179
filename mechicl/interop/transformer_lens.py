"""Conversion of models of token ids between ours and TransformerLens' `HookedTransformer`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformer_lens.utilities import SUPPORTED_ACTIVATIONS

from mechicl.base.arguments import checked
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.transformer.lens_config import DERIVED, read_lens_config
from mechicl.models.transformer.weight_processing import zero_biases

_Weights = dict[str, Tensor]


@checked(undefined=True)  # masks, which are not read, contain -inf
def from_transformer_lens(state_dict: Mapping[str, Tensor], cfg: Any) -> HookedTransformer:
    """Convert a TransformerLens `HookedTransformer` to a mechicl one, with the same weights, names and logits.

    Args:
        state_dict: `HookedTransformer.state_dict()` of TransformerLens 1 to 3; masks and tables of rotary positions are
            ignored. (A `TransformerBridge` needs no conversion: analyses take it.)
        cfg: TransformerLens' config, or a mapping of its fields.

    Returns:
        A mechicl `HookedTransformer` of token ids, in eval mode, on the config's device and in the config's dtype.

    Raises:
        TypeError: cfg is not a config.
        ValueError: the config has features that mechicl's model lacks (experts, relative positions); the message names
            them, and an alternative. Or weights are not finite.
        RuntimeError: weights are missing, or have other names or shapes than the config requires.

    Example:
        >>> cfg = {"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 7, "attn_only": True}
        >>> state_dict, same = to_transformer_lens(HookedTransformer(cfg))
        >>> from_transformer_lens(state_dict, same).cfg.n_heads
        2
    """
    model = HookedTransformer(read_lens_config(cfg))
    weights = {name: weight for name, weight in state_dict.items() if not name.endswith(DERIVED)}
    if model.cfg.positional_embedding_type == "alibi":
        weights.pop("pos_embed.W_pos", None)  # TransformerLens has it, and does not use it
    for name, weight in weights.items():
        if weight.is_meta or weight.is_complex() or not weight.isfinite().all():
            raise ValueError(f"{name} must be a tensor of finite real numbers, got some that are not")
    model.load_state_dict(weights)
    return model.eval()


@checked
def to_transformer_lens(model: HookedTransformer) -> tuple[_Weights, dict[str, Any]]:
    """Convert a model of token ids to a state dict and config of TransformerLens 3.

    `HookedTransformer(HookedTransformerConfig(**fields)).load_state_dict(state_dict)` of TransformerLens 3 computes the
    same; `transformer_lens.utilities.tl_checkpoint_conversion.convert_tl_checkpoint` converts it to TransformerLens 4.
    Biases and positional embeddings that the model lacks are zeros. The tensors share memory with the model's weights.

    Args:
        model: a mechicl model of token ids (softmax attention).

    Returns:
        The state dict (weights by TransformerLens' names), and the fields of its `HookedTransformerConfig` by name.

    Raises:
        ValueError: TransformerLens cannot represent the model; the message names the field of the config.
    """
    cfg = model.cfg
    _check_representable(cfg)
    state = {name: weight.detach() for name, weight in model.state_dict().items()}
    if cfg.tie_word_embeddings:
        state["unembed.W_U"] = model.W_U.detach()
    zeros = zero_biases(state, cfg)
    del zeros["embed.b_E"]
    if cfg.positional_embedding_type in ("none", "alibi"):
        zeros["pos_embed.W_pos"] = state["embed.W_E"].new_zeros(cfg.n_ctx, cfg.d_model)
    return zeros | state | _buffers(cfg), _fields(cfg)


def _check_representable(cfg: TransformerConfig) -> None:
    for name, is_supported in {
        "prompt_format": cfg.prompt_format == "token_ids",
        "attention": set(cfg.attention.split(",")) == {"softmax"},
        "qk_norm_over": cfg.qk_norm_over == "head",
        "norm_location": cfg.norm_location == "before"
        or (cfg.norm_location == "both" and cfg.normalization_type in ("RMS", "RMSPre")),
        "falcon_alibi": not cfg.falcon_alibi,
        "rope_scaling": cfg.rope_scaling is None,
        "keys": cfg.keys in ("causal", "full"),
        "score_scale": cfg.score_scale > 0,  # TransformerLens reads -1 as "not given"
        "momentum": cfg.momentum == 0,
        "sink": cfg.sink == "none",
        "skip_first_norm": not cfg.skip_first_norm,
        "final_norm": cfg.final_norm == (cfg.normalization_type is not None),
        "damping": cfg.damping == 1,
        "token_clip": cfg.token_clip is None,
        "mlp_location": cfg.d_mlp is None or cfg.mlp_location == "blocks",
        "act_fn": cfg.attn_only or cfg.act_fn in SUPPORTED_ACTIVATIONS,
    }.items():
        if not is_supported:
            value = getattr(cfg, name)
            raise ValueError(f"TransformerLens has no {name}={value!r}; its tools take the model without conversion")


def _buffers(cfg: TransformerConfig) -> _Weights:
    device = torch.device(cfg.device)
    buffers = {}
    for layer in range(cfg.n_layers):
        of_layer = {"mask": torch.empty(0, 0, dtype=torch.bool, device=device)}
        of_layer["IGNORE"] = torch.tensor(-torch.inf, device=device)
        if cfg.positional_embedding_type == "rotary":
            precise = torch.promote_types(cfg.torch_dtype, torch.float32)
            exponents = torch.arange(cfg.rotary_dim // 2, dtype=precise, device=device) / (cfg.rotary_dim / 2)
            wavelengths = cfg.for_layer(layer).rotary_base ** exponents
            twice = wavelengths.repeat_interleave(2) if cfg.rotary_adjacent_pairs else wavelengths.repeat(2)
            angles = torch.arange(cfg.n_ctx, dtype=precise, device=device)[:, None] / twice
            of_layer |= {"rotary_sin": angles.sin().to(cfg.torch_dtype), "rotary_cos": angles.cos().to(cfg.torch_dtype)}
        buffers |= {f"blocks.{layer}.attn.{name}": buffer for name, buffer in of_layer.items()}
    return buffers


def _fields(cfg: TransformerConfig) -> dict[str, Any]:
    same = (
        "n_layers", "d_model", "n_ctx", "d_head", "n_heads", "d_mlp", "d_vocab", "d_vocab_out", "act_fn", "eps",
        "normalization_type", "attn_only", "gated_mlp", "attention_dir", "attn_scale", "initializer_range", "device",
        "use_attn_result", "use_attn_in", "use_split_qkv_input", "use_hook_mlp_in",
    )  # fmt: skip
    # not all versions have these
    pretrained = (
        "n_key_value_heads", "parallel_attn_mlp", "use_qk_norm", "clip_qkv", "attn_scores_soft_cap",
        "output_logits_soft_cap", "use_local_attn", "window_size", "attn_types", "scale_attn_by_inverse_layer_idx",
        "final_rms", "post_embedding_ln", "use_normalization_before_and_after", "rotary_base_local",
    )  # fmt: skip
    fields = {name: getattr(cfg, name) for name in same} | {"dtype": cfg.torch_dtype}
    fields |= {name: value for name in pretrained if (value := getattr(cfg, name)) not in (None, False, -1)}
    kind = cfg.positional_embedding_type
    fields["positional_embedding_type"] = "standard" if kind == "none" else kind
    if kind == "rotary":
        fields |= {name: getattr(cfg, name) for name in ("rotary_dim", "rotary_base", "rotary_adjacent_pairs")}
    return fields
