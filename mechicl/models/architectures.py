"""The kinds of models by their configs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mechicl.base.arguments import checked
from mechicl.models.lstm import HookedLSTM, LSTMConfig
from mechicl.models.prompted import without_initial_weights
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.hooked_transformer import HookedTransformer

if TYPE_CHECKING:  # callers know which kind theirs is, and need not prove it to a type checker
    ModelConfig = TransformerConfig | Any
    """The config of either architecture."""
    Model = HookedTransformer | Any
    """A model of either architecture."""
else:
    ModelConfig = TransformerConfig | LSTMConfig
    Model = HookedTransformer | HookedLSTM


@checked
def build(cfg: ModelConfig, seed: int = 0) -> Model:
    """A fresh model of a config's kind."""
    return HookedLSTM(cfg, seed=seed) if isinstance(cfg, LSTMConfig) else HookedTransformer(cfg, seed=seed)


def build_unfilled(cfg: ModelConfig) -> Model:
    """A model whose weights are to be copied into it: none are drawn."""
    with without_initial_weights():
        return build(cfg)


def outline(cfg: ModelConfig) -> Model:
    """A model on torch's "meta" device: its weights have names, shapes and types, and take no memory."""
    with torch.device("meta"):
        return build_unfilled(cfg.replace(device="meta"))


@checked
def config_from_dict(data: dict[str, Any]) -> ModelConfig:
    """The config that a `to_dict` wrote; without an "architecture" it is a transformer's.

    Raises:
        ValueError: no mapping, an unknown architecture or field, or a value that the config refuses.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a model's config must be a mapping of its fields, got {type(data).__name__}")
    if "architecture" in data:
        return LSTMConfig.from_dict(data)
    return TransformerConfig.from_dict(data)
