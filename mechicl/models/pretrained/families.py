"""Families of language models in `transformers`: their configs and weight names, in terms of ours.

A family's tables name modules. "attn.Q" stands for the parameters W_Q and b_Q of the attention, "ln1" for w and b of a
norm; two of our names next to each other share one module of theirs. "attn.QKV" and "mlp.gate_in" are several matrices
in one.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mechicl.models.transformer.config_rules import ELEMENTWISE, ROPE_TYPES

BRIDGE = (
    "TransformerLens' bridge computes it: interop.load_language_model(..., bridge=True), or "
    "TransformerBridge.boot_transformers"
)
ACTIVATIONS = {"swish": "silu", "relu2": "relu_squared"}
"""Functions that have another name in `transformers`."""
PARTLY_ROTATED = ("gpt_neox", "phi", "phi3", "stablelm")
"""Families that rotate `partial_rotary_factor` of a head's dimensions; the others ignore it."""
Fields = dict[str, Any]


class UnsupportedModelError(ValueError):
    """A model of an unknown family, or with a choice in its config that is not computed here."""

    def __init__(self, reason: str):
        super().__init__(f"{reason} is not computed by a HookedTransformer: {BRIDGE}")


@dataclass(frozen=True)
class Family:
    """Names of the weights and of the config's choices in a family of models.

    Attributes:
        blocks: their name of the list of blocks.
        ends: their modules outside the blocks, with ours.
        block: their modules in a block, with ours.
        fields: fields of a `TransformerConfig` from a config of transformers, in addition to `common_fields`.
        biases: our biases (letters: "Q K") that the family has not, or has only if a field of the config is True.
        refused: fields of the config with the only value that we compute.
        transposed: matrices are `[in out]`.
        grouped: "attn.QKV" contains queries, key and value of a group of heads together, else all queries, all keys ...
        norm_offset: number that is added to the weights of norms.
        scale_embedding: the embedding is multiplied by the square root of d_model.
        position_offset: rows of the positions that come before position 0.
    """

    blocks: str
    ends: Mapping[str, str]
    block: Mapping[str, str]
    fields: Callable[[Any], Fields]
    biases: Mapping[str, str | None] = field(default_factory=dict)
    refused: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False
    grouped: bool = False
    norm_offset: int = 0
    scale_embedding: bool = False
    position_offset: int = 0

    def modules(self, n_layers: int) -> dict[str, list[str]]:
        """Return their modules, each with the names of ours."""
        named = {theirs: ours.split() for theirs, ours in self.ends.items()}
        for layer in range(n_layers):
            for theirs, ours in self.block.items():
                named[f"{self.blocks}.{layer}.{theirs}"] = [f"blocks.{layer}.{name}" for name in ours.split()]
        return named

    def lacks(self, config: Any) -> set[str]:
        """Return our biases that models with this config do not have: "b_Q" ..."""
        return {
            f"b_{letter}" for letters, flag in self.biases.items() if flag is None or not getattr(config, flag)
            for letter in letters.split()
        }  # fmt: skip


def config_fields(config: Any) -> Fields:
    """Translate a config of `transformers` to fields of a `TransformerConfig`; may raise UnsupportedModelError."""
    kind = find_family(config)
    for name, computed in {"is_causal": True, **kind.refused}.items():
        if (value := getattr(config, name, computed)) not in (computed, None):
            raise UnsupportedModelError(f"{name}={value!r} of {config.model_type}")
    try:
        fields = _common_fields(config) | kind.fields(config)
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"the config of {config.model_type} has impossible sizes ({error}): {config}") from error
    fields["act_fn"] = ACTIVATIONS.get(fields["act_fn"], fields["act_fn"])
    if fields["act_fn"] not in ELEMENTWISE:
        raise UnsupportedModelError(f"the activation {fields['act_fn']!r}, not one of {sorted(ELEMENTWISE)},")
    return fields


def is_computed(config: Any) -> bool:
    """Return True if a `HookedTransformer` computes models with a config of `transformers`."""
    try:
        config_fields(config)
    except UnsupportedModelError:
        return False
    return True


def find_family(config: Any) -> Family:
    """Return the family of a config of `transformers`; UnsupportedModelError for an unknown one."""
    name = getattr(config, "model_type", None)
    if name not in FAMILIES:
        raise UnsupportedModelError(f"the family {name!r}, not one of {', '.join(FAMILIES)},")
    kind = FAMILIES[name]
    return kind(config) if callable(kind) else kind


def _common_fields(config: Any) -> Fields:
    n_heads, d_model = config.num_attention_heads, config.hidden_size
    d_head = getattr(config, "head_dim", None) or d_model // n_heads
    groups = getattr(config, "num_key_value_heads", None)
    return {
        "prompt_format": "token_ids", "n_layers": config.num_hidden_layers, "n_heads": n_heads, "d_model": d_model,
        "d_head": d_head,
        "d_mlp": _first(config, "intermediate_size", "n_inner", "ffn_dim", otherwise=4 * d_model),
        "d_vocab": config.vocab_size, "n_ctx": getattr(config, "max_position_embeddings", None),
        "n_key_value_heads": None if groups in (None, n_heads) else groups,
        "act_fn": _first(config, "hidden_act", "activation_function", "hidden_activation", "activation"),
        "eps": _first(config, "layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", otherwise=1e-5),
        "normalization_type": "LN", "attn_scale": math.sqrt(d_head),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
    }  # fmt: skip


def _first(config: Any, *names: str, otherwise: Any = None) -> Any:
    return next((value for value in (_declared(config, name) for name in names) if value is not None), otherwise)


def _declared(config: Any, name: str) -> Any:
    """Return a field that the config's class has; transformers keeps other fields of a file too, and ignores them."""
    return getattr(config, name) if hasattr(_default(type(config)), name) else None


@functools.cache
def _default(kind: type) -> Any:
    return kind()


def _rotary(config: Any) -> Fields:
    """Rotary positions: transformers computes their angles in float32 in models of any type."""
    rope = config.rope_parameters
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    d_head = _common_fields(config)["d_head"]
    is_partial = config.model_type in PARTLY_ROTATED or rope["rope_type"] != "default"
    fields = {
        "positional_embedding_type": "rotary", "rotary_float32": True, "rotary_base": rope["rope_theta"],
        "rotary_dim": int(d_head * rope.get("partial_rotary_factor", 1.0)) if is_partial else d_head,
    }  # fmt: skip
    if rope["rope_type"] not in ("default", *ROPE_TYPES):
        raise UnsupportedModelError(f"rope_type={rope['rope_type']!r}")
    if rope["rope_type"] != "default":
        # n_ctx may be another number
        fields["rope_scaling"] = {**rope, "max_position_embeddings": config.max_position_embeddings}
    if local is not None and "sliding_attention" in config.layer_types:
        if local["rope_type"] != "default":
            raise UnsupportedModelError(f"rope_type={local['rope_type']!r} of local layers")
        fields["rotary_base_local"] = local["rope_theta"]
    return fields


def _windows(config: Any) -> Fields:
    window, kinds = _declared(config, "sliding_window"), _declared(config, "layer_types")
    kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
    if window is None or "sliding_attention" not in kinds:
        return {}
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModelError(f"layer_types={sorted(unknown)}")
    names = ["local" if kind == "sliding_attention" else "global" for kind in kinds]
    return {"use_local_attn": True, "window_size": window, "attn_types": names}


# ---- GPT-2 and models with its block: layer norm, biases, an MLP without gates ----


def _gpt_neo(config: Any) -> Fields:
    kinds = list(config.attention_layers)
    windows = {"use_local_attn": True, "window_size": config.window_size, "attn_types": kinds}
    return {"attn_scale": 1.0} | (windows if "local" in kinds else {})


def _gptj(config: Any) -> Fields:
    return {
        "positional_embedding_type": "rotary", "rotary_float32": True, "rotary_adjacent_pairs": True,
        "rotary_dim": config.rotary_dim or config.hidden_size // config.num_attention_heads, "parallel_attn_mlp": True,
    }  # fmt: skip


def _opt(config: Any) -> Fields:
    if config.word_embed_proj_dim != config.hidden_size:
        raise UnsupportedModelError(
            f"word_embed_proj_dim={config.word_embed_proj_dim} of opt, which is not hidden_size={config.hidden_size},"
        )
    return {}


def _bloom(config: Any) -> Fields:
    # its config has no largest length, since ALiBi has none; this is the length of the prompts in training
    return {
        "positional_embedding_type": "alibi", "post_embedding_ln": True, "n_ctx": getattr(config, "seq_length", 2048),
        "act_fn": "gelu_new", "default_prepend_bos": False,
    }  # fmt: skip


def _falcon(config: Any) -> Family:
    norms = {"input_layernorm": "ln1 ln2"}
    if not config.parallel_attn and not config.new_decoder_architecture:
        norms = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}
    elif config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2):
        norms = {"ln_attn": "ln1", "ln_mlp": "ln2"}
    return Family(
        blocks="transformer.h",
        ends={"transformer.word_embeddings": "embed.E", "transformer.ln_f": "ln_final", "lm_head": "unembed.U"},
        block=norms | {
            "self_attention.query_key_value": "attn.QKV", "self_attention.dense": "attn.O",
            "mlp.dense_h_to_4h": "mlp.in", "mlp.dense_4h_to_h": "mlp.out",
        },
        fields=_falcon_fields, biases={"Q K V O in out": "bias", "U": None}, grouped=True,
    )  # fmt: skip


def _falcon_fields(config: Any) -> Fields:
    if config.new_decoder_architecture:
        groups = config.num_kv_heads
    else:
        groups = 1 if config.multi_query else config.num_attention_heads
    if config.new_decoder_architecture and not config.parallel_attn:
        raise UnsupportedModelError("new_decoder_architecture=True with parallel_attn=False")
    positions = {"positional_embedding_type": "alibi", "falcon_alibi": True} if config.alibi else _rotary(config)
    return positions | {
        "n_key_value_heads": None if groups == config.num_attention_heads else groups,
        "d_mlp": config.ffn_hidden_size,
        "parallel_attn_mlp": bool(config.parallel_attn or config.new_decoder_architecture),
    }


_GPT2_ENDS = {
    "transformer.wte": "embed.E", "transformer.wpe": "pos_embed.pos", "transformer.ln_f": "ln_final",
    "lm_head": "unembed.U",
}  # fmt: skip
_GPT2_BLOCK = {"ln_1": "ln1", "ln_2": "ln2", "mlp.c_fc": "mlp.in", "mlp.c_proj": "mlp.out"}
_NEOX_BLOCK = {
    "input_layernorm": "ln1", "post_attention_layernorm": "ln2", "mlp.dense_h_to_4h": "mlp.in",
    "mlp.dense_4h_to_h": "mlp.out",
}  # fmt: skip
_QKV = {"self_attn.q_proj": "attn.Q", "self_attn.k_proj": "attn.K", "self_attn.v_proj": "attn.V"}
_HEADS = _QKV | {"self_attn.o_proj": "attn.O"}


# ---- Llama and models with its block: root-mean-square norm, no biases, an MLP with gates ----

_LLAMA_ENDS = {"model.embed_tokens": "embed.E", "model.norm": "ln_final", "lm_head": "unembed.U"}
_GATED = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.in", "mlp.down_proj": "mlp.out"}
_NORMS = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}
_HEAD_NORMS = {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}
_GEMMA_NORMS = {
    "input_layernorm": "ln1", "post_attention_layernorm": "ln1_post", "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ln2_post",
}  # fmt: skip
_NO_BIAS = {"Q K V O": "attention_bias", "in out U": None}


def _llama(config: Any, **more: Any) -> Fields:
    return {"normalization_type": "RMS", "gated_mlp": True} | _rotary(config) | _windows(config) | more


def _qwen(config: Any) -> Fields:
    norms = {"use_qk_norm": True, "qk_norm_over": "head"} if config.model_type == "qwen3" else {}
    return _llama(config, default_prepend_bos=False, **norms)


def _gemma(config: Any) -> Fields:
    scale = {"embedding_scale": math.sqrt(config.hidden_size)} if config.tie_word_embeddings else {}
    if config.model_type == "gemma":
        return _llama(config, **scale)
    fields = _llama(config, norm_location="both", **scale)
    fields["attn_scale"] = math.sqrt(config.query_pre_attn_scalar)
    caps = {"output_logits": config.final_logit_softcapping}
    if config.model_type == "gemma2":  # transformers does not apply that of Gemma 3
        caps["attn_scores"] = config.attn_logit_softcapping
    fields |= {f"{place}_soft_cap": cap for place, cap in caps.items() if cap is not None}
    return fields | ({"use_qk_norm": True, "qk_norm_over": "head"} if config.model_type == "gemma3_text" else {})


def _stablelm(config: Any) -> Family:
    norms = {"input_layernorm": "ln1 ln2"} if config.use_parallel_residual else _NORMS
    return Family(
        blocks="model.layers", ends=_LLAMA_ENDS, block=norms | _HEADS | _GATED, refused={"qk_layernorm": False},
        fields=lambda config: _llama(
            config, normalization_type="LN", parallel_attn_mlp=config.use_parallel_residual
        ),
        biases={"Q K V": "use_qkv_bias", "O in out U": None},
    )  # fmt: skip


def _of_llama(fields: Callable[[Any], Fields], *blocks: Mapping[str, str], **more: Any) -> Family:
    block = {theirs: ours for part in blocks or (_NORMS, _HEADS, _GATED) for theirs, ours in part.items()}
    return Family(**{
        "blocks": "model.layers", "ends": _LLAMA_ENDS, "block": block, "fields": fields, "biases": _NO_BIAS, **more,
    })  # fmt: skip


_GEMMA: dict[str, Any] = {
    "norm_offset": 1, "scale_embedding": True, "refused": {"use_bidirectional_attention": False},
}  # fmt: skip
_FUSED = {
    "self_attn.qkv_proj": "attn.QKV", "self_attn.o_proj": "attn.O", "mlp.gate_up_proj": "mlp.gate_in",
    "mlp.down_proj": "mlp.out",
}  # fmt: skip
_PROJECTED = {"Q K V O": None, "in out U": None}

FAMILIES: dict[str, Family | Callable[[Any], Family]] = {
    "gpt2": Family(
        blocks="transformer.h", ends=_GPT2_ENDS, biases={"U": None}, transposed=True,
        fields=lambda config: ({} if config.scale_attn_weights else {"attn_scale": 1.0})
        | {"scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx},
        block=_GPT2_BLOCK | {"attn.c_attn": "attn.QKV", "attn.c_proj": "attn.O"},
        refused={"add_cross_attention": False},
    ),
    "gpt_neo": Family(
        blocks="transformer.h", ends=_GPT2_ENDS, fields=_gpt_neo, biases={"Q K V U": None},
        block=_GPT2_BLOCK | {
            "attn.attention.q_proj": "attn.Q", "attn.attention.k_proj": "attn.K", "attn.attention.v_proj": "attn.V",
            "attn.attention.out_proj": "attn.O",
        },
    ),
    "gptj": Family(
        blocks="transformer.h", fields=_gptj, biases={"Q K V O": None},
        ends={name: ours for name, ours in _GPT2_ENDS.items() if name != "transformer.wpe"},
        block={
            "ln_1": "ln1 ln2", "mlp.fc_in": "mlp.in", "mlp.fc_out": "mlp.out", "attn.q_proj": "attn.Q",
            "attn.k_proj": "attn.K", "attn.v_proj": "attn.V", "attn.out_proj": "attn.O",
        },
    ),
    "gpt_neox": Family(
        blocks="gpt_neox.layers", biases={"Q K V O": "attention_bias", "U": None}, grouped=True,
        ends={"gpt_neox.embed_in": "embed.E", "gpt_neox.final_layer_norm": "ln_final", "lm_head": "unembed.U"},
        block=_NEOX_BLOCK | {"attention.query_key_value": "attn.QKV", "attention.dense": "attn.O"},
        fields=lambda config: _rotary(config)
        | {"parallel_attn_mlp": config.use_parallel_residual, "default_prepend_bos": False},
    ),
    "opt": Family(
        blocks="model.decoder.layers", fields=_opt, position_offset=2,
        biases={"Q K V O in out": "enable_bias", "U": None},
        ends={
            "model.decoder.embed_tokens": "embed.E", "model.decoder.embed_positions": "pos_embed.pos",
            "model.decoder.final_layer_norm": "ln_final", "lm_head": "unembed.U",
        },
        block={
            "self_attn_layer_norm": "ln1", "final_layer_norm": "ln2", "fc1": "mlp.in", "fc2": "mlp.out", **_QKV,
            "self_attn.out_proj": "attn.O",
        },
        refused={
            "do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True,
        },
    ),
    "bloom": Family(
        blocks="transformer.h", fields=_bloom, biases={"U": None}, grouped=True,
        ends={
            "transformer.word_embeddings": "embed.E", "transformer.word_embeddings_layernorm": "embed.ln",
            "transformer.ln_f": "ln_final", "lm_head": "unembed.U",
        },
        block=_NEOX_BLOCK | {"self_attention.query_key_value": "attn.QKV", "self_attention.dense": "attn.O"},
        refused={"apply_residual_connection_post_layernorm": False},
    ),
    "falcon": _falcon,
    "llama": _of_llama(_llama, refused={"mlp_bias": False}),
    "mistral": _of_llama(_llama, biases=_PROJECTED),
    "qwen2": _of_llama(_qwen, biases={"O in out U": None}),
    "qwen3": _of_llama(_qwen, _NORMS, _HEADS, _HEAD_NORMS, _GATED),
    "gemma": _of_llama(_gemma, **_GEMMA),
    "gemma2": _of_llama(_gemma, _GEMMA_NORMS, _HEADS, _GATED, **_GEMMA),
    "gemma3_text": _of_llama(_gemma, _GEMMA_NORMS, _HEADS, _HEAD_NORMS, _GATED, **_GEMMA),
    "phi": Family(
        blocks="model.layers", refused={"qk_layernorm": False},
        fields=lambda config: _rotary(config) | {"parallel_attn_mlp": True, "default_prepend_bos": False},
        ends={"model.embed_tokens": "embed.E", "model.final_layernorm": "ln_final", "lm_head": "unembed.U"},
        block={
            "input_layernorm": "ln1 ln2", "mlp.fc1": "mlp.in", "mlp.fc2": "mlp.out", **_QKV,
            "self_attn.dense": "attn.O",
        },
    ),
    "phi3": _of_llama(_llama, _NORMS, _FUSED, biases=_PROJECTED),
    "olmo": _of_llama(
        lambda config: _llama(config, normalization_type="LNPre", clip_qkv=config.clip_qkv), _HEADS, _GATED,
        ends={"model.embed_tokens": "embed.E", "lm_head": "unembed.U"},
    ),
    "olmo2": _of_llama(
        lambda config: _llama(config, norm_location="after", use_qk_norm=True, qk_norm_over="all"),
        {"post_attention_layernorm": "ln1", "post_feedforward_layernorm": "ln2"}, _HEADS, _HEAD_NORMS, _GATED
    ),
    "stablelm": _stablelm,
}  # fmt: skip
"""Families by the config's `model_type`; one that has several arrangements of modules is a function of the config."""
