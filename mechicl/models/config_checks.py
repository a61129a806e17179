"""What configs of models refuse: unknown choices, numbers out of range, fields that exclude each other, bad data."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch

from mechicl.base.checks import is_finite, require_whole
from mechicl.models.transformer.elementwise import ELEMENTWISE

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHOICES: dict[str, tuple[Any, ...]] = {
    "prompt_format": ("paired", "interleaved", "token_ids"),
    "mlp_location": ("blocks", "input"),
    "attention_weights": ("learned", "gradient_descent"),
    "keys": (None, "causal", "context", "full"),
    "momentum_over": ("outputs", "values"),
    "sink": ("none", "fixed", "learned"),
    "normalization_type": (None, "LN", "LNPre", "RMS", "RMSPre"),
    "attention_dir": (None, "causal", "bidirectional"),
    "read_in": (None, "identity", "linear"),
    "read_out": (None, "identity", "linear"),
    "positional_embedding_type": (None, "none", "standard", "rotary", "one_hot", "sinusoidal"),
    "dtype": tuple(DTYPES),
}
LEAST_INTEGERS = {
    "x_dim": 1, "y_dim": 1, "n_context": 0, "d_vocab": 1, "n_ctx": 1, "n_layers": 0, "n_heads": 1, "d_model": 1,
    "d_head": 1, "d_mlp": 1, "d_pos": 0, "rotary_dim": 0, "d_vocab_out": 1, "seed": 0,
}  # fmt: skip
NUMBERS = (
    "attention_slope", "score_scale", "sink_score", "eps", "damping", "initializer_range", "token_clip", "momentum",
    "rotary_base", "attn_scale",
)  # fmt: skip
# What TransformerLens' configs have and ours do not, as it is in a model that both compute.
THEIRS: dict[str, Any] = {
    "model_name": "custom", "original_architecture": None, "tokenizer_name": None, "init_weights": True,
    "init_mode": "gpt2", "n_devices": 1, "from_checkpoint": False, "use_attn_scale": True, "final_rms": False,
    "parallel_attn_mlp": False, "use_local_attn": False, "window_size": None, "attn_types": None, "num_experts": None,
    "experts_per_token": None, "use_normalization_before_and_after": False, "post_embedding_ln": False,
    "attn_scores_soft_cap": -1.0, "output_logits_soft_cap": -1.0, "use_qk_norm": False, "use_hook_tokens": False,
    "scale_attn_by_inverse_layer_idx": False, "ungroup_grouped_query_attention": False,
}  # fmt: skip
FLAGS = (
    "normalize_by_context", "skip_first_norm", "final_norm", "recurrent", "attn_bias", "read_bias", "use_attn_result",
    "attn_only", "gated_mlp", "share_mlp", "rotary_adjacent_pairs", "use_attn_in", "use_split_qkv_input",
    "use_hook_mlp_in", "default_prepend_bos",
)  # fmt: skip


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of one of torch's dtypes; a name as it is. "torch.int64" and the like for those that models have not."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def require(condition: bool, message: str) -> None:
    """Refuse a config.

    Raises:
        ValueError: the condition does not hold.
    """
    if not condition:
        raise ValueError(message)


def check_fields(cfg: Any) -> None:
    """Refuse a `TransformerConfig` with an unknown choice, a number out of range, or fields its format has no use for.

    Raises:
        ValueError: names the field.
    """
    for name, choices in {**CHOICES, "act_fn": tuple(sorted(ELEMENTWISE))}.items():
        value = getattr(cfg, name)
        require(value in choices, f"{name}={value!r} is not one of {[c for c in choices if c is not None]}")
    require(isinstance(cfg.attention, str), f"attention={cfg.attention!r} is no name, or names with commas between")
    kinds = ["softmax", "linear", *sorted(ELEMENTWISE)]
    for kind in cfg.attention.split(","):
        require(kind in kinds, f"attention={kind!r} is not one of {kinds}")

    if cfg.prompt_format == "token_ids":
        require(cfg.d_vocab is not None and cfg.n_ctx is not None, "token_ids need d_vocab and n_ctx")
        require(cfg.x_dim is None, f"token_ids have no x_dim, got {cfg.x_dim}")
    else:
        require(cfg.x_dim is not None, f"prompt_format {cfg.prompt_format!r} needs x_dim")
        require(cfg.n_context is not None, f"prompt_format {cfg.prompt_format!r} needs n_context")
        require(cfg.d_vocab is None, "d_vocab is for prompt_format='token_ids'")
        require(cfg.d_vocab_out is None, "d_vocab_out is for prompt_format='token_ids'")

    left_out = {field.name for field in dataclasses.fields(cfg) if field.default is None is getattr(cfg, field.name)}
    require_whole(cfg, **{name: least for name, least in LEAST_INTEGERS.items() if name not in left_out})
    for name in (*NUMBERS, *FLAGS):
        value = getattr(cfg, name)
        if name in left_out:
            continue
        if name in FLAGS:
            require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        else:
            require(is_finite(value), f"{name} must be a finite number, got {value!r}")
    for name in ("rotary_base", "attn_scale"):
        value = getattr(cfg, name)
        require(value is None or value > 0, f"{name} must be positive, got {value}")
    for name in ("eps", "initializer_range"):
        value = getattr(cfg, name)
        require(value is None or value >= 0, f"{name} must not be negative, got {value}")
    require(0 <= cfg.momentum < 1, f"momentum must be at least 0 and below 1, got {cfg.momentum}")
    require(cfg.token_clip is None or cfg.token_clip > 0, f"token_clip must be positive, got {cfg.token_clip}")


def check_combinations(cfg: Any) -> None:
    """Refuse a `TransformerConfig`, its defaults filled in, whose fields exclude each other.

    Raises:
        ValueError: names the fields.
    """
    kinds = cfg.attention.split(",")
    require(
        len(kinds) in (1, cfg.n_layers), f"attention={cfg.attention!r} is for {len(kinds)} layers, not {cfg.n_layers}"
    )
    require(
        len(kinds) == 1 or not cfg.recurrent, "the layers of a recurrent model are one and have one kind of attention"
    )
    if cfg.attention_weights == "gradient_descent":
        plain = (cfg.attention, cfg.n_heads, cfg.attn_bias, cfg.read_out) == ("linear", 1, False, "identity")
        require(
            plain and cfg.d_head == cfg.d_model,
            "attention_weights='gradient_descent' needs attention='linear', n_heads=1, attn_bias=False, "
            "d_head=d_model and read_out='identity'",
        )
    require(
        cfg.momentum == 0 or cfg.keys == "causal",
        f"momentum={cfg.momentum} is over the positions before and needs keys='causal', got keys={cfg.keys!r}: "
        f"set keys='causal', or momentum=0",
    )
    require("softmax" in kinds or cfg.sink == "none", f"a sink needs softmax attention, got {cfg.attention!r}")
    require(cfg.attention != "softmax" or not cfg.normalize_by_context, "softmax attention is normalised already")
    require(not (cfg.final_norm and not cfg.normalization_type), "final_norm needs a normalization_type")
    require(not (cfg.skip_first_norm and not cfg.normalization_type), "skip_first_norm needs a norm to skip")
    require(cfg.mlp_location == "blocks" or cfg.d_mlp is not None, "mlp_location='input' needs d_mlp")
    require(
        cfg.attn_only == (cfg.d_mlp is None or cfg.mlp_location == "input"),
        f"attn_only={cfg.attn_only} and d_mlp={cfg.d_mlp} (mlp_location={cfg.mlp_location!r}) exclude each other",
    )
    require(not cfg.share_mlp or cfg.block_mlp, "share_mlp needs MLPs in the blocks: give d_mlp")
    require(
        not (cfg.share_mlp and cfg.recurrent), "the blocks of a recurrent model share their MLP already: no share_mlp"
    )
    require(not cfg.gated_mlp or cfg.d_mlp is not None, "gated_mlp needs an MLP: give d_mlp")
    require(
        cfg.rotates or cfg.rotary_dim == 0,
        f"rotary_dim={cfg.rotary_dim} needs positional_embedding_type='rotary', got {cfg.positional_embedding_type!r}",
    )
    require(
        not cfg.rotates or (0 < cfg.rotary_dim <= cfg.d_head and cfg.rotary_dim % 2 == 0),
        f"rotary positions turn pairs of a head's dimensions: rotary_dim must be even, 2 to d_head={cfg.d_head}, got "
        f"{cfg.rotary_dim}",
    )
    require(
        not cfg.rotates or cfg.attention_weights == "learned", "attention_weights='gradient_descent' has no positions"
    )
    if cfg.prompt_format == "token_ids":
        require(cfg.read_in == cfg.read_out == "linear", "a vocabulary needs a learned read-in and read-out")
        require(cfg.d_pos == 0, "a vocabulary takes positional_embedding_type 'none', 'standard' or 'rotary'")
    if cfg.read_out == "identity":
        require(
            cfg.d_model >= cfg.y_dim,
            f"an identity read-out reads y_dim={cfg.y_dim} dimensions of the stream, but d_model={cfg.d_model}",
        )
    if cfg.read_in == "identity":
        require(
            cfg.d_model >= cfg.identity_width,
            f"an identity read-in needs d_model >= {cfg.identity_width} (token, position, and y where an identity "
            f"read-out has it apart from the token), got {cfg.d_model}",
        )


Config = TypeVar("Config")


def read_config(kind: type[Config], data: dict[str, Any]) -> Config:
    """A config dataclass from plain JSON data, which may come from anybody.

    Raises:
        ValueError: an unknown field, a value of another type than the field's, or a value that the config refuses.
    """
    require(isinstance(data, Mapping), f"{kind.__name__} takes a mapping of its fields, got {type(data).__name__}")
    unknown = sorted(map(str, set(data) - {field.name for field in dataclasses.fields(cast(Any, kind))}))
    require(not unknown, f"{kind.__name__} has no field {unknown}")
    for name, value in data.items():
        require(
            value is None or isinstance(value, (bool, int, float, str)),
            f"{name} must be a number, a string, true, false or null, got {type(value).__name__}",
        )
    try:
        return kind(**data)
    except (TypeError, AttributeError, ArithmeticError) as error:  # a string where a number belongs, and the like
        raise ValueError(f"a field has a value of the wrong type: {error}") from error


def check_device(device: str) -> None:
    """Refuse a name that is no device's.

    Raises:
        ValueError: it is none.
    """
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device: {str(error).splitlines()[0]}") from error
