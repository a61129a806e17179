"""The defaults of a `TransformerConfig` that depend on its other fields, and fields that exclude each other."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mechicl.models.config_checks import check_dtype_and_device, require


def relu_squared(x: Tensor) -> Tensor:
    """Compute `max(x, 0)²`."""
    return F.relu(x).square()


def softmax_linear_units(x: Tensor) -> Tensor:
    """Compute `x · softmax(x)`."""
    return x * x.softmax(-1)


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "cos": torch.cos,
    "elu": F.elu,
    "exp": torch.exp,
    "gelu": F.gelu,
    "gelu_fast": partial(F.gelu, approximate="tanh"),  # TransformerLens' names for the same function
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "identity": torch.clone,  # a copy, so that changing mlp.hook_post in place leaves mlp.hook_pre unchanged
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "relu_squared": relu_squared,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "square": torch.square,
    "tanh": torch.tanh,
}
"""Functions that `act_fn` and `attention` may name, none of them a lambda: models pickle. Add your own:
`ELEMENTWISE["mine"] = function`."""

SOLU: dict[str, Callable[[Tensor], Tensor]] = dict.fromkeys(("solu", "solu_ln"), softmax_linear_units)
"""Activations of MLPs that see all neurons: `x · softmax(x)` (Elhage et al. 2022)."""

RECURRENT = ("delta", "gated_linear", "mamba2", "mesa")
"""Kinds of `attention` that keep a state; see `recurrent.py`."""

ROPE_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3")
"""Changes of rotary frequencies that `transformers.modeling_rope_utils` computes."""

# Fields of TransformerLens' configs that ours lack. Those that change what is computed, by the value that does not:
UNCOMPUTED: dict[str, Any] = {
    "num_experts": None, "experts_per_token": None,
    "use_normalization_before_and_after": False, "use_attention_sinks": False, "use_logn_attn": False,
    "use_NTK_by_parts_rope": False, "use_yarn_rope": False, "use_dynamic_ntk_rope": False, "rotary_scaling_factor": 1,
    "rmsnorm_uses_offset": False,
    "qk_norm_after_rope": False, "rotary_interleaved_cos_sin": False, "scale_embedding": None,
    "per_layer_head_dim": None, "per_layer_num_key_value_heads": None, "relative_attention_num_buckets": None,
}  # fmt: skip
# and those that describe a file, a tokenizer or a machine, by the values that ours give:
DESCRIPTIVE: dict[str, Any] = {
    "model_name": "custom", "original_architecture": None, "architecture": None, "from_checkpoint": False,
    "checkpoint_index": None, "checkpoint_label_type": None, "checkpoint_value": None, "tokenizer_name": None,
    "tokenizer_prepends_bos": None, "n_devices": 1, "trust_remote_code": False, "init_weights": True,
    "init_mode": "gpt2", "use_hook_tokens": False, "train_seq_length": None, "uses_rms_norm": False,
    "layer_norm_folding": False, "load_in_4bit": False, "quantization_method": None,
    "use_attn_scale": True,
}  # fmt: skip


def check_attends(cfg: Any) -> None:
    """Refuse (ValueError) a model with recurrent layers, for code that computes with attention's scores."""
    kinds = getattr(cfg, "attention", None)
    if isinstance(kinds, str) and set(kinds.split(",")) & set(RECURRENT):
        raise ValueError(f"this needs attention, and the model has attention={kinds!r}: its layers keep states instead")


def fill_defaults(cfg: Any) -> None:
    """Give the fields of a `TransformerConfig` that were left out their defaults, which depend on the other fields."""

    def fill(**defaults: Any) -> None:
        cfg._set(**{name: default for name, default in defaults.items() if getattr(cfg, name) is None})

    # the vocabulary: token ids have TransformerLens' defaults, points ours
    fill(prompt_format="paired" if cfg.d_vocab is None or cfg.x_dim is not None else "token_ids")
    tokens, paired = cfg.prompt_format == "token_ids", cfg.prompt_format == "paired"
    if cfg.normalization_type == "default":
        cfg._set(normalization_type="LN" if tokens else None)
    if tokens and cfg.n_heads is None and cfg.d_head and cfg.d_model:
        divisible = cfg.d_model % cfg.d_head == 0
        require(divisible, f"d_model={cfg.d_model} is not divisible by d_head={cfg.d_head}: give n_heads")
        cfg._set(n_heads=cfg.d_model // cfg.d_head)
    fill(n_heads=1, attention="softmax" if tokens else "linear")
    # an MLP on the input leaves the blocks without one
    fill(attn_only=cfg.mlp_location == "input" or (cfg.d_mlp is None and not tokens))
    if cfg.d_mlp is None and not cfg.attn_only and cfg.d_model is not None:
        cfg._set(d_mlp=4 * cfg.d_model)
    if tokens:
        fill(d_vocab_out=cfg.d_vocab)
    _check_format(cfg)
    check_dtype_and_device(cfg)
    activations = sorted(ELEMENTWISE | SOLU)
    require(cfg.act_fn in activations, f"act_fn={cfg.act_fn!r} is not one of {activations}")
    kinds, known = cfg.attention.split(","), ["softmax", "linear", *RECURRENT, *sorted(ELEMENTWISE)]
    for kind in kinds:
        require(kind in known, f"attention={kind!r} is not one of {known}")

    # synonyms
    if cfg.attention_dir is not None:
        allowed = {"causal": ("causal",), "bidirectional": ("full", "context")}[cfg.attention_dir]
        fill(keys=allowed[0])
        require(cfg.keys in allowed, f"attention_dir={cfg.attention_dir!r} and keys={cfg.keys!r} exclude each other")
    if cfg.attn_scale is not None:
        fill(score_scale=1 / cfg.attn_scale)
        require(
            math.isclose(cfg.score_scale * cfg.attn_scale, 1),
            f"attn_scale={cfg.attn_scale} is 1 / score_scale, which is {cfg.score_scale}: give one of them",
        )
    if len(kinds) == cfg.n_layers and len(set(kinds)) == 1:  # all layers alike: the same config as by one name
        cfg._set(attention=kinds[0])

    # the prompt format: positions and keys, read-in and read-out
    if not tokens:
        n_tokens = cfg.format.n_tokens(cfg.n_context)
        require(cfg.n_ctx in (None, n_tokens), f"n_ctx is {n_tokens} for this prompt format, got {cfg.n_ctx}")
        fill(n_ctx=n_tokens)
    fill(
        keys="context" if paired else "causal",
        positional_embedding_type="none" if paired else "standard",
        read_in="identity" if paired and cfg.d_model in (None, cfg.d_token) else "linear",
    )
    fill(read_out="identity" if paired and cfg.read_in == "identity" else "linear")
    kind, widths = cfg.positional_embedding_type, {"one_hot": cfg.n_ctx, "sinusoidal": 20}
    require(
        not cfg.d_pos or kind in widths,
        f"d_pos is the width of concatenated positions, and positional_embedding_type is {kind!r}",
    )
    fill(d_pos=widths.get(kind, 0))
    require(cfg.d_pos > 0 or kind not in widths, f"concatenated positions ({kind}) need d_pos >= 1, got {cfg.d_pos}")
    if kind == "one_hot":
        require(cfg.d_pos >= cfg.n_ctx, f"one-hot positions need d_pos >= n_ctx={cfg.n_ctx}, got {cfg.d_pos}")

    # sizes, and what depends on them
    follows = cfg.read_in == "identity" and not tokens
    require(follows or cfg.d_model is not None, "d_model is needed with a linear read-in or a vocabulary")
    fill(d_model=cfg.identity_width if follows else None)
    d_model: Any = cfg.d_model
    softmax, normed = cfg.attention == "softmax", cfg.normalization_type is not None
    recurrent = set(kinds) & set(RECURRENT)
    narrow = set(kinds) <= {"softmax", *RECURRENT}  # heads share the stream's width
    require(
        not narrow or cfg.d_head is not None or d_model % cfg.n_heads == 0,
        f"d_model={d_model} is not divisible by n_heads={cfg.n_heads}: give d_head",
    )
    fill(d_head=d_model // cfg.n_heads if narrow else d_model)
    d_head: Any = cfg.d_head
    spread = 0.02 if softmax or (recurrent and normed) else math.sqrt(0.002 / max(cfg.n_layers, 1) / d_model)
    fill(
        score_scale=1 / math.sqrt(d_head) if softmax else 1.0,
        final_norm=normed and cfg.read_out == "linear",
        attn_bias=normed or tokens,
        read_bias=normed or tokens,
        initializer_range=0.8 / math.sqrt(d_model) if tokens else spread,
        rotary_dim=d_head if cfg.rotates else 0,
        gate="head" if recurrent & {"gated_linear", "mesa"} else "none",
        normalize_keys=bool(recurrent & {"delta", "mesa"}),
    )


def _check_format(cfg: Any) -> None:
    if cfg.prompt_format == "token_ids":
        require(cfg.d_vocab is not None and cfg.n_ctx is not None, "token_ids need d_vocab and n_ctx")
        require(cfg.x_dim is None, f"token_ids have no x_dim, got {cfg.x_dim}")
        return
    for name in ("x_dim", "n_context"):
        require(getattr(cfg, name) is not None, f"prompt_format {cfg.prompt_format!r} needs {name}")
    for name in ("d_vocab", "d_vocab_out"):
        require(getattr(cfg, name) is None, f"{name} is for prompt_format='token_ids'")


def check_combinations(cfg: Any) -> None:
    """Refuse a `TransformerConfig`, its defaults filled in, whose fields exclude each other."""
    kinds, n_kinds = cfg.attention.split(","), cfg.attention.count(",") + 1
    tokens, derived = cfg.prompt_format == "token_ids", cfg.attention_weights == "gradient_descent"
    recurrent = set(kinds) & set(RECURRENT)
    plain = (cfg.attention, cfg.n_heads, cfg.attn_bias, cfg.read_out) == ("linear", 1, False, "identity")
    for holds, message in [
        (n_kinds in (1, cfg.n_layers), f"attention={cfg.attention!r} is for {n_kinds} layers, not {cfg.n_layers}"),
        (n_kinds == 1 or not cfg.recurrent, "the layers of a recurrent model are one and have one kind of attention"),
        (not derived or (plain and cfg.d_head == cfg.d_model),
         "attention_weights='gradient_descent' needs attention='linear', n_heads=1, attn_bias=False, d_head=d_model "
         "and read_out='identity'"),
        (0 <= cfg.momentum < 1, f"momentum must be at least 0 and below 1, got {cfg.momentum}"),
        (cfg.momentum == 0 or cfg.keys == "causal",
         f"momentum={cfg.momentum} is over the positions before and needs keys='causal', got keys={cfg.keys!r}: set "
         f"keys='causal', or momentum=0"),
        ("softmax" in kinds or cfg.sink == "none", f"a sink needs softmax attention, got {cfg.attention!r}"),
        (cfg.attention != "softmax" or not cfg.normalize_by_context, "softmax attention is normalised already"),
        (not recurrent or cfg.keys != "full",
         f"attention={cfg.attention!r} has states, which positions write one after the other: keys must be 'causal', "
         f"or 'context' for a query that writes nothing, got keys={cfg.keys!r}"),
        (not (recurrent and (cfg.momentum or cfg.normalize_by_context or cfg.rotates)),
         f"attention={cfg.attention!r} has no pattern: no momentum, normalize_by_context or rotary positions"),
        (not set(kinds) & {"delta", "mesa"} or cfg.dtype in ("float32", "float64"),
         f"attention={cfg.attention!r} solves linear systems, which need dtype 'float32' or 'float64', got "
         f"{cfg.dtype!r}"),
        (cfg.gate != "key" or not set(kinds) & {"mesa"}, "attention='mesa' has one gate a head: gate='head' or 'none'"),
        (recurrent - {"mamba2"} or cfg.gate == "none",
         f"gate={cfg.gate!r} is for attention 'delta', 'gated_linear' or 'mesa', got {cfg.attention!r}"),
        (recurrent or not (cfg.normalize_keys or cfg.conv_width or cfg.use_attn_state),
         f"normalize_keys, conv_width and use_attn_state are for attention {RECURRENT}, got {cfg.attention!r}"),
        (cfg.normalization_type or not cfg.final_norm, "final_norm needs a normalization_type"),
        (cfg.normalization_type or not cfg.skip_first_norm, "skip_first_norm needs a norm to skip"),
        (cfg.mlp_location == "blocks" or cfg.d_mlp is not None, "mlp_location='input' needs d_mlp"),
        (cfg.attn_only == (cfg.d_mlp is None or cfg.mlp_location == "input"),
         f"attn_only={cfg.attn_only} and d_mlp={cfg.d_mlp} (mlp_location={cfg.mlp_location!r}) exclude each other"),
        (not cfg.share_mlp or cfg.block_mlp, "share_mlp needs MLPs in the blocks: give d_mlp"),
        (not (cfg.share_mlp and cfg.recurrent),
         "the blocks of a recurrent model share their MLP already: no share_mlp"),
        (not cfg.gated_mlp or cfg.d_mlp is not None, "gated_mlp needs an MLP: give d_mlp"),
        (cfg.rotates or cfg.rotary_dim == 0,
         f"rotary_dim={cfg.rotary_dim} needs positional_embedding_type='rotary', got "
         f"{cfg.positional_embedding_type!r}"),
        (not cfg.rotates or (0 < cfg.rotary_dim <= cfg.d_head and cfg.rotary_dim % 2 == 0),
         f"rotary positions turn pairs of a head's dimensions: rotary_dim must be even, 2 to d_head={cfg.d_head}, got "
         f"{cfg.rotary_dim}"),
        (not cfg.rotates or not derived, "attention_weights='gradient_descent' has no positions"),
        (not tokens or cfg.read_in == cfg.read_out == "linear", "a vocabulary needs a learned read-in and read-out"),
        (not tokens or cfg.d_pos == 0,
         f"a vocabulary has no positional_embedding_type={cfg.positional_embedding_type!r}, which joins tokens"),
        (tokens or cfg.positional_embedding_type not in ("alibi", "shortformer"),
         f"positional_embedding_type={cfg.positional_embedding_type!r} is for prompt_format='token_ids'"),
        (cfg.keys != "context" or cfg.positional_embedding_type not in ("alibi", "shortformer"),
         f"positional_embedding_type={cfg.positional_embedding_type!r} needs keys='causal' or 'full', got 'context'"),
        (not cfg.falcon_alibi or cfg.positional_embedding_type == "alibi",
         "falcon_alibi needs positional_embedding_type='alibi'"),
        (tokens or not (cfg.tie_word_embeddings or cfg.post_embedding_ln),
         "tie_word_embeddings and post_embedding_ln are for prompt_format='token_ids'"),
        (not cfg.tie_word_embeddings or cfg.d_vocab == cfg.d_vocab_out,
         f"tied embeddings need d_vocab_out={cfg.d_vocab_out} to be d_vocab={cfg.d_vocab}"),
        (not cfg.n_key_value_heads or cfg.n_heads % cfg.n_key_value_heads == 0,
         f"n_heads={cfg.n_heads} is not divisible by n_key_value_heads={cfg.n_key_value_heads}"),
        (not cfg.use_attn_in or cfg.n_groups == cfg.n_heads,
         f"use_attn_in gives each head its own keys, and groups share them, with n_key_value_heads="
         f"{cfg.n_key_value_heads} and n_heads={cfg.n_heads}: set ungroup_grouped_query_attention too, or use "
         "use_split_qkv_input"),
        (not (cfg.use_qk_norm and cfg.qk_norm_over == "all" and cfg.ungroup_grouped_query_attention)
         or cfg.n_key_value_heads in (None, cfg.n_heads),
         f"qk_norm_over='all' norms the keys of n_key_value_heads={cfg.n_key_value_heads} groups together: no "
         "ungroup_grouped_query_attention"),
        (not (recurrent or derived) or cfg.has_plain_scores,
         f"attention={cfg.attention!r} has no n_key_value_heads, use_qk_norm, clip_qkv, window_size, soft cap or "
         "positions in its scores"),
        (not cfg.use_local_attn or (cfg.window_size is not None and cfg.keys == "causal"),
         f"use_local_attn needs a window_size and keys='causal', got {cfg.window_size} and {cfg.keys!r}"),
        (cfg.use_local_attn or (cfg.window_size, cfg.attn_types, cfg.rotary_base_local) == (None, None, None),
         "window_size, attn_types and rotary_base_local are for local layers: set use_local_attn"),
        (cfg.attn_types is None or len(cfg.attn_types) == cfg.n_layers,
         f"attn_types={cfg.attn_types} must have a kind for each of the {cfg.n_layers} layers"),
        (cfg.norm_location == "before" or (cfg.normalization_type and cfg.damping == 1),
         f"norm_location={cfg.norm_location!r} needs a normalization_type, and damping=1"),
        (not cfg.parallel_attn_mlp or cfg.block_mlp, "parallel_attn_mlp needs MLPs in the blocks: give d_mlp"),
        (cfg.rotates or (cfg.rope_scaling, cfg.rotary_base_local) == (None, None),
         "rope_scaling and rotary_base_local need positional_embedding_type='rotary'"),
        (cfg.rope_scaling is None or cfg.rope_scaling.get("rope_type") in ROPE_TYPES,
         f"rope_scaling={cfg.rope_scaling} must have a rope_type of {ROPE_TYPES}"),
        (cfg.act_fn not in SOLU or not cfg.gated_mlp, f"act_fn={cfg.act_fn!r} has no gated_mlp"),
        (cfg.read_out == "linear" or cfg.d_model >= cfg.y_dim,
         f"an identity read-out reads y_dim={cfg.y_dim} dimensions of the stream, but d_model={cfg.d_model}"),
        (tokens or cfg.read_in == "linear" or cfg.d_model >= cfg.identity_width,
         f"an identity read-in needs d_model >= {'' if tokens else cfg.identity_width} (token, position, and y where "
         f"an identity read-out has it after the token), got {cfg.d_model}"),
    ]:  # fmt: skip
        require(bool(holds), message)
