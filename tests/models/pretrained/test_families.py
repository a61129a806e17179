"""Families of language models as `HookedTransformer`s: names, shapes and values of weights, and what is refused."""

import copy
from typing import Any

import pytest
import torch
import transformers

from mechicl.models import HookedTransformer
from mechicl.models.pretrained.families import FAMILIES, config_fields
from mechicl.models.pretrained.loading import from_transformers
from tests.families import token_ids
from tests.models.pretrained.variants import VARIANTS, exact_logits, make_variant, to_float64

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_every_family_has_a_variant():
    assert {make_variant(name).config.model_type for name in VARIANTS} == set(FAMILIES)


ROUNDED = {"BLOOM": 1e-8}
"""Tolerances on logits where transformers has a constant of eight digits, in Bloom's activation."""


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_logits_equal_those_of_transformers(name: str):
    theirs, tokens = to_float64(make_variant(name)), token_ids(0, n_pos=12)
    ours, atol = from_transformers(HookedTransformer, theirs), ROUNDED.get(name, 1e-10)
    expected = exact_logits(theirs, tokens)
    torch.testing.assert_close(ours(tokens), expected, atol=atol, rtol=0)
    torch.testing.assert_close(ours.run_with_cache(tokens)[0], expected, atol=atol, rtol=0)
    ours.process_weights()
    torch.testing.assert_close(ours(tokens).log_softmax(-1), expected.log_softmax(-1), atol=1e-8, rtol=0)


IGNORED: list[tuple[str, dict[str, Any]]] = [
    *((name, {"sliding_window": 3}) for name in ("Llama", "Gemma", "OLMo", "OLMo 2", "StableLM")),
    *((name, {"partial_rotary_factor": 0.5}) for name in ("Llama", "Mistral", "Qwen2", "Gemma 2", "Falcon")),
    *((name, {"layer_norm_eps": 0.5}) for name in ("Llama", "Qwen3", "Phi-3")), ("OLMo", {"rms_norm_eps": 0.5}),
    *((name, {"hidden_act": "relu"}) for name in ("GPT-2", "GPT-J", "Gemma 2")),
    ("Mistral", {"sliding_window": 3, "layer_types": ["full_attention"] * 3}),
    ("Gemma 3", {"attn_logit_softcapping": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), IGNORED, ids=str)
@torch.no_grad()
def test_fields_that_a_family_does_not_read_change_nothing(name: str, fields: dict[str, Any]):
    """As in transformers, which keeps them in the config."""
    theirs = to_float64(make_variant(name, **fields))
    ours, tokens = from_transformers(HookedTransformer, theirs), token_ids(0, n_pos=12)
    torch.testing.assert_close(ours(tokens), exact_logits(theirs, tokens), atol=1e-10, rtol=0)


LONG = {name: value for name, value in VARIANTS["Phi-3, longrope"][1]["rope_parameters"].items() if name != "factor"}


@pytest.mark.parametrize(("name", "fields"), [
    ("Llama, dynamic", {}), ("Phi-3, longrope", {"rope_parameters": LONG, "max_position_embeddings": 256}),
], ids=["dynamic", "longrope"])  # fmt: skip
@pytest.mark.parametrize("n_ctx", [12, 16, 300])
@torch.no_grad()
def test_rotary_frequencies_do_not_depend_on_the_largest_length(name: str, fields: dict[str, Any], n_ctx: int):
    theirs = make_variant(name, **fields)
    ours = from_transformers(HookedTransformer, theirs, fields={"n_ctx": n_ctx})
    for n_pos in (6, 12):
        tokens = token_ids(0, n_pos=n_pos)
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["Gemma", "Gemma, own head", "Gemma 2", "Gemma 3"])
def test_weights_are_shifted_and_scaled_in_the_type_that_they_are_opened_in(name: str):
    rounded = make_variant(name).bfloat16()
    ours = from_transformers(HookedTransformer, rounded, dtype=torch.float32)
    again = from_transformers(HookedTransformer, copy.deepcopy(rounded).float())
    assert ours.cfg.embedding_scale == again.cfg.embedding_scale
    torch.testing.assert_close(ours.state_dict(), again.state_dict(), rtol=0, atol=0)
    half = from_transformers(HookedTransformer, make_variant(name), dtype=torch.bfloat16)
    tokens = token_ids(0)
    torch.testing.assert_close(half.embed(tokens), rounded.get_input_embeddings()(tokens), rtol=0, atol=0)
    assert half.cfg.embedding_scale == from_transformers(HookedTransformer, rounded).cfg.embedding_scale


# ---- what is refused ----
Weights = dict[str, torch.Tensor]


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_that_do_not_fit_are_named(name: str, monkeypatch: pytest.MonkeyPatch):
    with torch.device("meta"):
        theirs = make_variant(name)
    weights = dict(theirs.state_dict())
    assert dict(from_transformers(HookedTransformer, theirs).named_parameters())

    def open_with(changed: Weights) -> None:
        monkeypatch.setattr(theirs, "state_dict", lambda: changed)
        from_transformers(HookedTransformer, theirs)

    inside = [each for each in weights if ".1." in each]
    for lost in inside:
        rest = {each: weight for each, weight in weights.items() if each != lost}
        with pytest.raises(ValueError, match=f"missing: {lost}$"):
            open_with(rest)
        with pytest.raises(ValueError, match=f"missing: {lost}; not used: {lost}s$"):
            open_with(rest | {f"{lost}s": weights[lost]})
        with pytest.raises(ValueError, match=rf"of another shape: {lost} \["):
            open_with(
                weights | {lost: torch.empty(*weights[lost].shape[:-1], weights[lost].shape[-1] + 1, device="meta")}
            )
    for extra in ("extra", inside[0].replace(".1.", ".3."), inside[0].replace("weight", "scale")):
        with pytest.raises(ValueError, match=f"not used: {extra}"):
            open_with(weights | {extra: torch.empty(8, device="meta")})


@pytest.mark.parametrize(("name", "fields", "message"), [
    ("StableLM", {"qk_layernorm": True}, "qk_layernorm=True of stablelm is not computed .*bridge=True"),
    ("Phi", {"qk_layernorm": True}, "qk_layernorm=True of phi"),
    ("OPT", {"do_layer_norm_before": False}, "do_layer_norm_before=False of opt"),
    ("OPT", {"word_embed_proj_dim": 4}, "word_embed_proj_dim=4 of opt, which is not hidden_size=8"),
    ("GPT-2", {"activation_function": "mish"}, "the activation 'mish', not one of"),
    ("Llama", {"mlp_bias": True}, "mlp_bias=True of llama"),
    ("BLOOM", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True"),
    ("Qwen2", {"layer_types": ["sliding_attention", "chunked_attention", "full_attention"],
               "use_sliding_window": True, "sliding_window": 3}, "layer_types="),
    ("Falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False"),
])  # fmt: skip
def test_choices_that_are_not_computed_are_named(name: str, fields: dict[str, Any], message: str):
    with torch.device("meta"):
        theirs = make_variant(name, **fields)
    with pytest.raises(ValueError, match=message):
        from_transformers(HookedTransformer, theirs)


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match=r"the family 'mamba', not one of gpt2, gpt_neo, .*: TransformerLens' bridge"):
        config_fields(transformers.MambaConfig())
