"""Models of other projects, compiled programs, language models with tokenizers, estimators of scikit-learn."""

from mechicl.interop.garg import from_garg, load_garg
from mechicl.interop.language_models import LanguageModel, load_language_model
from mechicl.interop.scikit_learn import from_sklearn
from mechicl.interop.states import open_states
from mechicl.interop.tracr import CompiledTransformer, from_tracr
from mechicl.interop.transformer_lens import from_transformer_lens, to_transformer_lens

__all__ = [
    "CompiledTransformer", "LanguageModel", "from_garg", "from_sklearn", "from_tracr", "from_transformer_lens",
    "load_garg", "load_language_model", "open_states", "to_transformer_lens",
]  # fmt: skip
