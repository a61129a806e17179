"""Networks on prompts, each activation of which can be read and replaced.

`HookedTransformer(TransformerConfig(...))` and `HookedLSTM(LSTMConfig(...))` are learners (`predict`,
`predict_prefixes`) with TransformerLens' hooks (`run_with_cache`, `run_with_hooks`), and so is
`TableTransformer(TableConfig(...))`, which reads tables; `build(cfg, seed)` makes any of them.
`wrap(module, ...)` gives any other torch module the same.
"""

from mechicl.models.architectures import Model as Model
from mechicl.models.architectures import ModelConfig as ModelConfig
from mechicl.models.architectures import build
from mechicl.models.architectures import config_from_dict as config_from_dict
from mechicl.models.layered import LayeredModel as LayeredModel
from mechicl.models.lstm import HookedLSTM, LSTMConfig
from mechicl.models.prompted import PromptedModel
from mechicl.models.tables import TableConfig, TableTransformer
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.hooked_transformer import HookedTransformer
from mechicl.models.transformer.lens_config import HookedTransformerConfig
from mechicl.models.transformer.weight_processing import process_weights
from mechicl.models.wrapping.wrap import wrap
from mechicl.models.wrapping.wrapped import Reading, WrappedModel

__all__ = [
    "HookedLSTM", "HookedTransformer", "HookedTransformerConfig", "LSTMConfig", "PromptedModel", "Reading",
    "TableConfig", "TableTransformer", "TransformerConfig", "WrappedModel", "build", "process_weights", "wrap",
]  # fmt: skip
