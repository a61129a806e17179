"""TransformerLens 3's imports: from mechicl's names for them, and after `install()` from `transformer_lens` itself."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mechicl.compat.transformer_lens import loading
from mechicl.models import HookedTransformerConfig
from tests.models.transformer.test_lens import VOCABULARY, word_tokenizer
from tests.strategies import random_model

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


def renamed(code: str) -> str:
    """The code with imports of mechicl's names for what `transformer_lens` contained."""
    return re.sub(r"(from|import) transformer_lens\b", r"\1 mechicl.compat.transformer_lens", code)


@pytest.mark.parametrize("how", ["installed", "renamed"])
def test_the_imports_of_old_code_work(how: str):
    if how == "installed":
        code = "import mechicl.compat\nmechicl.compat.install()\nmechicl.compat.install()\n" + IMPORTS
    else:
        code = "from mechicl.compat import transformer_lens\n" + renamed(IMPORTS)
    subprocess.run([sys.executable, "-c", code], check=True)


GPT2: dict[str, Any] = {"act_fn": "gelu"}
LLAMA: dict[str, Any] = {
    "act_fn": "silu", "gated_mlp": True, "normalization_type": "RMS", "n_key_value_heads": 2,
    "positional_embedding_type": "rotary", "rotary_dim": 8,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("fields", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_notebook_runs(fields: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 30, "d_head": 8, "n_heads": 4, "d_vocab": len(VOCABULARY)}
    model = random_model(HookedTransformerConfig(**sizes, **fields))
    model.set_tokenizer(word_tokenizer(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"))
    code = renamed((Path(__file__).parent / "arena_notebook.py").read_text())
    with torch.random.fork_rng(), torch.set_grad_enabled(True):
        torch.manual_seed(0)
        exec(compile(code, "arena_notebook.py", "exec"), {"model": model})
    assert capsys.readouterr().out.endswith("all cells ran\n")


def test_the_config_of_a_folder(tmp_path: Path):
    GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=8, n_positions=6, vocab_size=7)).save_pretrained(tmp_path)
    cfg = loading.get_pretrained_model_config(str(tmp_path), first_n_layers=2)
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.n_ctx, cfg.d_vocab, cfg.device) == (2, 2, 8, 6, 7, "cpu")
    assert loading.get_official_model_name("gpt2-small") == "gpt2"
