"""Hooked networks."""

from mechicl.models.architectures import Model, ModelConfig, build, config_from_dict
from mechicl.models.config import ELEMENTWISE, TransformerConfig
from mechicl.models.lstm import HookedLSTM, LSTMConfig
from mechicl.models.prompted import PromptedModel
from mechicl.models.transformer import HookedTransformer

__all__ = [
    "ELEMENTWISE",
    "HookedLSTM",
    "HookedTransformer",
    "LSTMConfig",
    "Model",
    "ModelConfig",
    "PromptedModel",
    "TransformerConfig",
    "build",
    "config_from_dict",
]
