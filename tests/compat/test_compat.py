"""TransformerLens 3's imports: from mechicl's names for them, and after `install()` from `transformer_lens` itself."""

import re
import subprocess
import sys

import pytest

IMPORTS = """
import transformer_lens
import transformer_lens.utils as utils
from transformer_lens import (
    ActivationCache, FactoredMatrix, HookedRootModule, HookedTransformer, HookedTransformerConfig,
    HookedTransformerKeyValueCache, SVDInterpreter, evals, head_detector, hook_points, loading, patching, train,
)
from transformer_lens.ActivationCache import ActivationCache as SameCache
from transformer_lens.FactoredMatrix import FactoredMatrix as SameMatrix
from transformer_lens.components import MLP, Attention, Embed, LayerNorm, PosEmbed, TransformerBlock, Unembed
from transformer_lens.hook_points import HookedRootModule as SameRoot, HookPoint
from transformer_lens.HookedTransformer import HookedTransformer as Same
from transformer_lens.HookedTransformerConfig import HookedTransformerConfig as SameConfig
from transformer_lens.loading_from_pretrained import OFFICIAL_MODEL_NAMES
from transformer_lens.past_key_value_caching import HookedTransformerKeyValueCache as SameKeys
from transformer_lens.train import HookedTransformerTrainConfig
from transformer_lens.utils import get_act_name, lm_accuracy, test_prompt, to_numpy

assert Same is HookedTransformer is transformer_lens.HookedTransformer
assert SameConfig is HookedTransformerConfig and SameRoot is HookedRootModule
assert SameKeys is HookedTransformerKeyValueCache
assert SameCache is ActivationCache and SameMatrix is FactoredMatrix and utils.get_act_name is get_act_name
assert "gpt2" in OFFICIAL_MODEL_NAMES and loading.OFFICIAL_MODEL_NAMES is OFFICIAL_MODEL_NAMES

cfg = HookedTransformerConfig(n_layers=1, d_model=8, n_ctx=6, d_head=4, d_vocab=7, act_fn="relu", seed=0)
model = HookedTransformer(cfg)
assert isinstance(model.blocks[0], TransformerBlock) and isinstance(model.blocks[0].attn, Attention)
assert isinstance(model.blocks[0].mlp, MLP) and isinstance(model.ln_final, LayerNorm)
assert isinstance(model, HookedRootModule) and isinstance(cfg, HookedTransformerConfig)
"""


@pytest.mark.parametrize("how", ["installed", "renamed"])
def test_the_imports_of_old_code_work(how: str):
    if how == "installed":
        code = "import mechicl.compat\nmechicl.compat.install()\nmechicl.compat.install()\n" + IMPORTS
    else:
        code = re.sub(r"(from|import) transformer_lens\b", r"\1 mechicl.compat.transformer_lens", IMPORTS)
        code = "from mechicl.compat import transformer_lens\n" + code
    subprocess.run([sys.executable, "-c", code], check=True)
