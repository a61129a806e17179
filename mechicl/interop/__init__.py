"""Models of other projects as hooked transformers, and language models with their tokenizers."""

from mechicl.interop.garg import from_garg, garg_task, load_garg, load_garg_state
from mechicl.interop.language_models import LanguageModel, load_language_model
from mechicl.interop.linear_transformer import from_linear_transformer

__all__ = [
    "LanguageModel",
    "from_garg",
    "from_linear_transformer",
    "garg_task",
    "load_garg",
    "load_garg_state",
    "load_language_model",
]
