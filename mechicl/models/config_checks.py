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


def check_ranges(cfg: Any) -> None:
    """Refuse a filled `TransformerConfig` with an unknown choice or a number out of range; types are checked before.

    Raises:
        ValueError: names the field.
    """
    for name, choices in {**CHOICES, "act_fn": tuple(sorted(ELEMENTWISE))}.items():
        value = getattr(cfg, name)
        require(value in choices, f"{name}={value!r} is not one of {[c for c in choices if c is not None]}")
    kinds = ["softmax", "linear", *sorted(ELEMENTWISE)]
    for kind in cfg.attention.split(","):
        require(kind in kinds, f"attention={kind!r} is not one of {kinds}")

    left_out = {field.name for field in dataclasses.fields(cfg) if field.default is None is getattr(cfg, field.name)}
    require_whole(cfg, **{name: least for name, least in LEAST_INTEGERS.items() if name not in left_out})
    for name in NUMBERS:
        value = getattr(cfg, name)
        require(name in left_out or is_finite(value), f"{name} must be a finite number, got {value!r}")
    for name in ("rotary_base", "attn_scale"):
        value = getattr(cfg, name)
        require(value is None or value > 0, f"{name} must be positive, got {value}")
    for name in ("eps", "initializer_range"):
        value = getattr(cfg, name)
        require(value is None or value >= 0, f"{name} must not be negative, got {value}")
    require(0 <= cfg.momentum < 1, f"momentum must be at least 0 and below 1, got {cfg.momentum}")
    require(cfg.token_clip is None or cfg.token_clip > 0, f"token_clip must be positive, got {cfg.token_clip}")


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
