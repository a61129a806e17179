"""nnsight, pyvene and SAELens on our models, and the first two on wrapped ones, against hooks."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.models.kinds import KINDS, TASK
from tests.tools import imported, require

PROMPTS = TASK.sample(4, seed=0)
pytestmark = pytest.mark.slow
POINT = "blocks.0.hook_resid_post"
PLACES = [("transformer", POINT), ("lstm", POINT), ("wrapped", POINT), ("wrapped", "module.blocks.0")]


def part_of(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def with_hook(name: str, hook: Any) -> torch.Tensor:
    return KINDS[name]().run_with_hooks(PROMPTS, fwd_hooks=[(POINT, hook)])


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_nnsight(name: str, path: str):
    nnsight = imported("nnsight")
    model = KINDS[name]()
    tokens, expected = model.encode(PROMPTS), with_hook(name, lambda stream, hook: 2 * stream)
    stream = model.run_with_cache(tokens)[1][POINT]
    plain, traced = model(tokens), nnsight.NNsight(model)
    with traced.trace(tokens):
        saved = part_of(traced, path).output.save()
        unedited = traced.output.save()
    torch.testing.assert_close(saved, stream)
    torch.testing.assert_close(unedited, plain)
    with traced.trace(tokens):
        part_of(traced, path).output = 2 * part_of(traced, path).output
        edited = traced.output.save()
    torch.testing.assert_close(edited, expected)
    torch.testing.assert_close(model(tokens), plain)


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_pyvene(name: str, path: str):
    pyvene = imported("pyvene")
    cards = imported("pyvene.models.intervenable_modelcard")
    model = KINDS[name]()
    cards.type_to_dimension_mapping[type(model)] = {}  # which pyvene needs for a model that it does not know
    tokens, keyword = model.encode(PROMPTS), "tokens" if name == "wrapped" else "input"
    source = model.run_with_cache(tokens.flip(0))[1][POINT]
    component = path.replace(".0", "[0]") + ".output"
    config = pyvene.IntervenableConfig([{"component": component, "intervention_type": pyvene.VanillaIntervention}])
    edited = pyvene.IntervenableModel(config, model=model)
    positions = {"sources->base": list(range(tokens.shape[1]))}
    _, outputs = edited({keyword: tokens}, [{keyword: tokens.flip(0)}], unit_locations=positions)
    torch.testing.assert_close(outputs, with_hook(name, lambda stream, hook: source))


SPARSE_AUTOENCODER = """
import mechicl.compat

mechicl.compat.install()  # before sae_lens, which imports transformer_lens.HookedTransformer
import torch
from sae_lens import HookedSAETransformer, StandardSAE, StandardSAEConfig
from sae_lens.saes.sae import SAEMetadata
from transformers import GPT2Config, GPT2LMHeadModel

from mechicl.models import HookedTransformer, HookedTransformerConfig

POINT = "blocks.0.hook_resid_post"
cfg = HookedTransformerConfig(n_layers=2, d_model=16, n_ctx=12, d_head=4, d_vocab=20, act_fn="gelu", seed=0)
fields = {"apply_b_dec_to_input": False, "normalize_activations": "none", "metadata": SAEMetadata(hook_name=POINT)}
sae = StandardSAE(StandardSAEConfig(d_in=16, d_sae=32, **fields))
with torch.no_grad():
    for weight in sae.parameters():
        weight.normal_(generator=torch.Generator().manual_seed(0))
theirs, ours = HookedSAETransformer(cfg), HookedTransformer(cfg)
tokens = torch.arange(36).view(3, 12) % 20
with torch.no_grad():
    plain, cache = ours.run_with_cache(tokens)
    expected = ours.run_with_hooks(tokens, fwd_hooks=[(POINT, lambda stream, hook: sae(stream))])
    edited, saved = theirs.run_with_cache_with_saes(tokens, saes=[sae])
    exact = theirs.run_with_saes(tokens, saes=[sae], use_error_term=True)
    assert (edited - plain).abs().max() > 0.1
    torch.testing.assert_close(edited, expected)
    torch.testing.assert_close(saved[f"{POINT}.hook_sae_acts_post"], sae.encode(cache[POINT]))
    torch.testing.assert_close(exact, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs(tokens), plain)

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=16, n_positions=12, vocab_size=20)).eval()
    opened = HookedSAETransformer.from_pretrained("gpt2", hf_model=gpt2, local_files_only=True)
    torch.testing.assert_close(opened(tokens).log_softmax(-1), gpt2(tokens).logits.log_softmax(-1))
    saved = opened.run_with_cache_with_saes(tokens, saes=[sae])[1]
    torch.testing.assert_close(saved[f"{POINT}.hook_sae_input"], opened.run_with_cache(tokens)[1][POINT])
"""


def test_sae_lens():
    require("sae_lens")
    # in a separate process, because `install` changes transformer_lens for all tests that follow
    subprocess.run([sys.executable, "-c", SPARSE_AUTOENCODER], check=True)
