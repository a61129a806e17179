"""Configs in TransformerLens' names, and state dicts in the names of TransformerLens and of earlier versions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.config_rules import DESCRIPTIVE, UNCOMPUTED

FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
INSTEAD = (
    "a bridge computes it (TransformerLens' TransformerBridge.boot_native or boot_transformers), and mechicl's "
    "analyses open bridges"
)
# mechicl's names of the two ends of a model before they were modules of TransformerLens' names
RENAMED = {
    "embed": "embed.W_E",
    "embed_bias": "embed.b_E",
    "pos_embed": "pos_embed.W_pos",
    "unembed": "unembed.W_U",
    "unembed_bias": "unembed.b_U",
}
SCALED = ("NTK_by_parts_", "NTK_original_", "yarn_")
"""Beginnings of TransformerLens' fields that are `rope_scaling` here."""
DERIVED = ("attn.mask", "attn.IGNORE", "attn.rotary_sin", "attn.rotary_cos")
"""Buffers of TransformerLens' attention, which follow from the config."""


class _MakesConfigs(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, TransformerConfig)


class HookedTransformerConfig(metaclass=_MakesConfigs):
    """A `TransformerConfig` of token ids from TransformerLens' names, with TransformerLens' defaults.

    Code that was written for `transformer_lens.HookedTransformerConfig` runs unchanged. It takes n_layers, d_model,
    n_ctx, d_head, d_vocab and TransformerLens' other keywords, and any field of `TransformerConfig`. Keywords that only
    describe a file, a tokenizer or a machine are ignored. Configs that it makes are its instances.
    Source: `transformer_lens.HookedTransformerConfig` of TransformerLens 3.

    Returns:
        A config with softmax attention, scores over `sqrt(d_head)`, causal keys, layer norm, biases and an MLP of
        4 d_model (none with attn_only), unless the fields differ. The device is the CPU if none is named.

    Raises:
        TypeError: a name that neither TransformerLens nor `TransformerConfig` has.
        ValueError: a choice that TransformerLens offers and our transformer does not, or a value out of range.

    Example:
        >>> HookedTransformerConfig(n_layers=2, d_model=32, n_ctx=20, d_head=8, d_vocab=50, attn_only=True).n_heads
        4
    """

    def __new__(cls, **fields: Any) -> TransformerConfig:  # type: ignore[misc]
        """Make a `TransformerConfig`, see the class."""
        fields = _ours({"prompt_format": "token_ids", **fields})
        if not fields.get("use_attn_scale", True):
            fields["attn_scale"] = 1.0
        for name in ("n_heads", "d_vocab_out", "attn_scale", "initializer_range"):
            if fields.get(name) is not None and fields[name] == -1:
                del fields[name]
        _refuse_uncomputed(fields)
        fields = {name: value for name, value in fields.items() if name not in UNCOMPUTED and name not in DESCRIPTIVE}
        fields.pop("n_params", None)
        if unknown := sorted(set(fields) - FIELDS):
            raise TypeError(f"neither TransformerLens nor TransformerConfig has a field {unknown}")
        if fields.get("attn_only"):
            fields["d_mlp"] = None
        if fields.get("positional_embedding_type") != "rotary":
            fields.pop("rotary_dim", None)
        fields["device"] = str(fields.get("device") or "cpu")
        return TransformerConfig(**fields)

    @classmethod
    @checked
    def from_dict(cls, config_dict: Mapping[str, Any]) -> TransformerConfig:
        """Make a `TransformerConfig` from a mapping of TransformerLens' names."""
        return cls(**config_dict)  # type: ignore[return-value]

    @classmethod
    @checked
    def unwrap(cls, config: Any) -> TransformerConfig:
        """Make a `TransformerConfig` from a TransformerLens config or a mapping; mechicl's own stays unchanged."""
        return read_lens_config(config)


def read_lens_config(cfg: Any) -> TransformerConfig:
    """Return a `TransformerConfig` unchanged; read a mapping or TransformerLens config as `HookedTransformerConfig`."""
    if isinstance(cfg, TransformerConfig):
        return cfg
    if isinstance(cfg, Mapping):
        return HookedTransformerConfig(**cfg)
    if not isinstance(cfg, type) and hasattr(cfg, "n_layers") and hasattr(cfg, "d_model") and hasattr(cfg, "__dict__"):
        return HookedTransformerConfig(**known_fields(vars(cfg)))
    raise TypeError(f"cfg must be a TransformerConfig or TransformerLens' fields, got {type(cfg).__name__}")


def known_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a config of TransformerLens or ours has; others are notes on the training."""
    known = {*FIELDS, *UNCOMPUTED, *DESCRIPTIVE} - {"tie_word_embeddings"}  # state dicts have both
    return {name: value for name, value in given.items() if name in known or name.startswith(("NTK_", "yarn_"))}


def _ours(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return TransformerLens' fields with ours in the place of those that have another form there."""
    fields = dict(fields)
    if fields.pop("use_normalization_before_and_after", None):
        fields["norm_location"] = "both"
    if fields.get("original_architecture") in ("Olmo2ForCausalLM", "Olmo3ForCausalLM"):
        fields |= {"norm_location": "after", "qk_norm_over": "all"}
    if not fields.get("use_local_attn"):
        for name in ("window_size", "attn_types", "rotary_base_local"):
            fields.pop(name, None)
    if fields.pop("use_NTK_by_parts_rope", None):
        names = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
        scaling = {name: fields.pop(f"NTK_by_parts_{name}", default) for name, default in names.items()}
        scaling["original_max_position_embeddings"] = fields.pop("NTK_original_ctx_len", 8192)
        fields["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if fields.pop("use_yarn_rope", None):
        names = {"factor": 1.0, "attention_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
                 "original_max_position_embeddings": 4096}  # fmt: skip
        scaling = {name: fields.pop(f"yarn_{name}", default) for name, default in names.items()}
        fields["rope_scaling"] = {"rope_type": "yarn", **scaling}
    if (factor := fields.pop("rotary_scaling_factor", 1.0)) != 1.0:
        fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return {name: value for name, value in fields.items() if not name.startswith(SCALED)}


def _refuse_uncomputed(fields: Mapping[str, Any]) -> None:
    refused = [name for name, neutral in UNCOMPUTED.items() if fields.get(name) not in (neutral, None, False)]
    if fields.get("positional_embedding_type") == "relative_positional_bias":
        refused.append("positional_embedding_type")
    for name in refused:
        raise ValueError(f"{name}={fields[name]!r} is not computed by a HookedTransformer: {INSTEAD}")


def current_names(cfg: TransformerConfig, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a state dict's entries to today's names; drop derived ones, and add an old embedding bias to W_E."""
    state = {RENAMED.get(name, name): weight for name, weight in state_dict.items() if not name.endswith(DERIVED)}
    if cfg.prompt_format == "token_ids" and "embed.b_E" in state:
        bias = state.pop("embed.b_E")
        weights = state.get("embed.W_E")
        if weights is None or weights.ndim < 2 or bias.shape != (*weights.shape[:-2], weights.shape[-1]):
            raise ValueError("embed.b_E does not fit embed.W_E, to whose rows it is to be added")
        state["embed.W_E"] = state["embed.W_E"] + bias[..., None, :]  # [seed token d_model] in a stack of models
    return state
