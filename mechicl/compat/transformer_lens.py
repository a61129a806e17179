"""TransformerLens 3's names, with mechicl's `HookedTransformer`: `import mechicl.compat.transformer_lens as tl`.

`from mechicl.compat.transformer_lens import HookedTransformer, utils` and
`from mechicl.compat.transformer_lens.hook_points import HookPoint` work as they did with `transformer_lens`. What
TransformerLens 4 kept is its own; what it removed is mechicl's. `transformer_lens.train` is TransformerLens 4's
`tools.training`. See `mechicl.compat.install` for code that imports `transformer_lens` and cannot be edited.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from transformer_lens import (
    ActivationCache,
    FactoredMatrix,
    HookedRootModule,
    SVDInterpreter,
    evals,
    head_detector,
    hook_points,
    patching,
    supported_models,
    utilities,
)
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
from transformer_lens.tools import training

from mechicl.models import HookedTransformer, HookedTransformerConfig, TransformerConfig
from mechicl.models.pretrained.loading import official_name
from mechicl.models.prompted import Output
from mechicl.models.transformer.attention import Attention
from mechicl.models.transformer.layers import MLP, Block, Embed, LayerNorm, PosEmbed, Unembed

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # the modules, which `register_classes` sets


HookPoint = hook_points.HookPoint
_CACHES: dict[str, Any] = {
    "HookedTransformerKeyValueCache": TransformerLensKeyValueCache,
    "HookedTransformerKeyValueCacheEntry": TransformerLensKeyValueCacheEntry,
}
LENS_CLASSES: dict[str, Any] = _CACHES | {
    "ActivationCache": ActivationCache, "FactoredMatrix": FactoredMatrix, "HookedRootModule": HookedRootModule,
    "HookedTransformer": HookedTransformer, "HookedTransformerConfig": HookedTransformerConfig,
    "SVDInterpreter": SVDInterpreter,
}  # fmt: skip
"""What `from transformer_lens import ...` imports, besides modules."""


def get_pretrained_model_config(model_name: str, device: Any = None, **options: Any) -> TransformerConfig:
    """Return the config that `HookedTransformer.from_pretrained_no_processing` gives a model; no weights are read."""
    model = HookedTransformer.from_pretrained_no_processing(model_name, device="meta", **options)
    return model.cfg.replace(device=str(device or "cpu"))


_PARTS = {
    "Attention": Attention, "Embed": Embed, "LayerNorm": LayerNorm, "MLP": MLP, "PosEmbed": PosEmbed,
    "TransformerBlock": Block, "Unembed": Unembed,
}  # fmt: skip
_LOADING = {
    "OFFICIAL_MODEL_NAMES": supported_models.OFFICIAL_MODEL_NAMES,
    "MODEL_ALIASES": supported_models.MODEL_ALIASES,
    "get_official_model_name": official_name,
    "get_pretrained_model_config": get_pretrained_model_config,
}
MODULES: dict[str, ModuleType | dict[str, Any]] = {
    "ActivationCache": {"ActivationCache": ActivationCache},
    "FactoredMatrix": {"FactoredMatrix": FactoredMatrix},
    "HookedTransformer": {
        "HookedTransformer": HookedTransformer, "HookedRootModule": HookedRootModule, "HookPoint": HookPoint,
        "Loss": torch.Tensor, "Output": Output,
    },
    "HookedTransformerConfig": {"HookedTransformerConfig": HookedTransformerConfig},
    "components": _PARTS,
    "components.mlps": {},
    "components.mlps.can_be_used_as_mlp": {"CanBeUsedAsMLP": MLP},
    "evals": evals,
    "head_detector": head_detector,
    "hook_points": vars(hook_points) | {"HookedRootModule": HookedRootModule},
    "loading": _LOADING,
    "loading_from_pretrained": _LOADING,
    "past_key_value_caching": _CACHES,
    "patching": patching,
    "train": {"HookedTransformerTrainConfig": training.TrainConfig, "train": training.train},
    "utilities": utilities,
    "utils": utilities,
}  # fmt: skip
"""The modules below `transformer_lens`: those of TransformerLens 4, or the names that others contain."""


def register_classes(package: str) -> None:
    """Make the names and modules importable from a loaded package; once more changes nothing."""
    for path, content in MODULES.items():
        name = f"{package}.{path}"
        if isinstance(content, dict):
            module = sys.modules.setdefault(name, ModuleType(name, "Names of TransformerLens 3."))
            missing = {key: value for key, value in content.items() if key not in vars(module)}
            vars(module).update({"__path__": []} | missing)  # a package, whose modules are registered too
        else:
            sys.modules.setdefault(name, content)
        parent, _, leaf = name.rpartition(".")
        if leaf not in LENS_CLASSES:  # a class of that name comes first, as in TransformerLens
            setattr(sys.modules[parent], leaf, sys.modules[name])
    vars(sys.modules[package]).update(LENS_CLASSES)


register_classes(__name__)
