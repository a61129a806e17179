"""Networks on prompts, each activation of which can be read and replaced.

`HookedTransformer(TransformerConfig(...))` and `HookedLSTM(LSTMConfig(...))` are learners (`predict`,
`predict_prefixes`) with TransformerLens' hooks (`run_with_cache`, `run_with_hooks`); `build(cfg, seed)` makes either.
"""

from mechicl.models.architectures import Model, ModelConfig, build, config_from_dict
from mechicl.models.config import TransformerConfig
from mechicl.models.elementwise import ELEMENTWISE
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
