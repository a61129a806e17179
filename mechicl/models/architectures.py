"""`build`: make a model of any architecture from its config."""

from typing import TYPE_CHECKING, Any

import torch

from mechicl.base.arguments import checked
from mechicl.models.lstm import HookedLSTM, LSTMConfig
from mechicl.models.tables import TableConfig, TableTransformer
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.hooked_transformer import HookedTransformer

if TYPE_CHECKING:  # so that callers need not prove to a type checker which architecture theirs is
    ModelConfig = TransformerConfig | Any
    """The config of any architecture."""
    Model = HookedTransformer | Any
    """A model of any architecture."""
else:
    ModelConfig = TransformerConfig | LSTMConfig | TableConfig
    Model = HookedTransformer | HookedLSTM | TableTransformer


@checked
def build(cfg: ModelConfig, seed: int = 0) -> Model:
    """Make an untrained model from a config.

    Args:
        cfg: a `TransformerConfig` for a `HookedTransformer`, an `LSTMConfig` for a `HookedLSTM`, or a `TableConfig` for
            a `TableTransformer`.

    Returns:
        The model, on the config's device.

    Example:
        >>> build(TransformerConfig(x_dim=3, n_context=8, n_layers=2), seed=1).cfg.n_layers
        2
    """
    kinds: dict[type, Any] = {LSTMConfig: HookedLSTM, TableConfig: TableTransformer}
    return kinds.get(type(cfg), HookedTransformer)(cfg, seed=seed)


def build_unfilled(cfg: ModelConfig) -> Model:
    """Make a model with undefined weights, for others to be copied into it."""
    # as `to_empty`, whose `empty_like` of a meta tensor imports sympy: 0.4 s
    return outline(cfg)._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=cfg.device))


def outline(cfg: ModelConfig) -> Model:
    """Make a model on torch's "meta" device: its weights have names, shapes and dtypes, and take no memory."""
    return build(cfg.replace(device="meta"))


@checked
def config_from_dict(data: dict[str, Any]) -> ModelConfig:
    """Make the config that a `to_dict` wrote; without an "architecture" it is a transformer's."""
    if data.get("architecture") == "table":
        return TableConfig.from_dict(data)
    return LSTMConfig.from_dict(data) if "architecture" in data else TransformerConfig.from_dict(data)
