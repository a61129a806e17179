"""Configs: defaults, copies, files, TransformerLens' names for them, and state dicts in other names."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from transformer_lens.config import TransformerBridgeConfig

from mechicl.models import HookedTransformer, HookedTransformerConfig, TransformerConfig
from mechicl.prompts import Interleaved, Paired
from tests.strategies import configs, random_model, random_tokens

PAIRED: dict[str, Any] = {"x_dim": 3, "y_dim": 2, "n_context": 4}
INTERLEAVED: dict[str, Any] = PAIRED | {"prompt_format": "interleaved", "d_model": 8}
IDS: dict[str, Any] = {"n_layers": 2, "d_model": 12, "n_ctx": 8, "d_head": 4, "d_vocab": 7, "act_fn": "relu"}
DEFAULTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PAIRED, {
        "n_ctx": 5, "d_token": 5, "d_model": 5, "d_head": 5, "d_out": 2, "d_pos": 0, "keys": "context",
        "positional_embedding_type": "none", "read_in": "identity", "read_out": "identity", "y_slot": slice(3, 5),
        "score_scale": 1.0, "final_norm": False, "attn_bias": False, "read_bias": False,
        "attention_dir": "bidirectional",
        "initializer_range": math.sqrt(0.002 / 5), "format": Paired(x_dim=3, y_dim=2),
    }),
    (INTERLEAVED | {"attention": "softmax", "n_heads": 2, "normalization_type": "LN"}, {
        "n_ctx": 9, "d_token": 3, "d_head": 4, "d_out": 2, "d_pos": 0, "keys": "causal",
        "positional_embedding_type": "standard", "read_in": "linear", "read_out": "linear", "score_scale": 0.5,
        "final_norm": True, "attn_bias": True, "read_bias": True, "initializer_range": 0.02,
        "format": Interleaved(x_dim=3, y_dim=2),
    }),
    (IDS, {
        "prompt_format": "token_ids", "attention": "softmax", "keys": "causal", "n_heads": 3, "d_mlp": 48,
        "attn_only": False, "gated_mlp": False, "normalization_type": "LN", "final_norm": True, "eps": 1e-5,
        "attn_bias": True, "read_bias": True, "positional_embedding_type": "standard", "attention_dir": "causal",
        "attn_scale": 2.0, "d_vocab_out": 7, "d_out": 7, "seed": None, "initializer_range": 0.8 / math.sqrt(12),
    }),
    # an identity read-in leaves space for positions and, where an x token has none, for y
    (PAIRED | {"positional_embedding_type": "one_hot"}, {"d_model": 5 + 5}),
    (PAIRED | {"positional_embedding_type": "sinusoidal"}, {"d_model": 5 + 20}),
    (PAIRED | {"prompt_format": "interleaved", "read_in": "identity", "read_out": "identity",
               "positional_embedding_type": "one_hot"}, {"d_model": 3 + 9 + 2, "y_slot": slice(12, 14)}),
    (PAIRED | {"d_model": 9}, {"read_in": "linear"}),  # another width needs a map
    # an identity read-out after a learned read-in reads the last dimensions
    *((fields | {"d_model": 9, "read_in": "linear", "read_out": "identity", "normalization_type": "LN"},
       {"y_slot": slice(7, 9), "d_out": 2, "final_norm": False}) for fields in (PAIRED, INTERLEAVED)),
    (PAIRED | {"d_model": 9, "read_in": "identity", "read_out": "identity"}, {"y_slot": slice(3, 5)}),
    (INTERLEAVED | {"d_model": 4, "read_in": "linear", "read_out": "identity"}, {"y_slot": slice(2, 4)}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), DEFAULTS)
def test_defaults(fields: dict[str, Any], expected: dict[str, Any]):
    cfg = TransformerConfig(**fields)
    assert {name: getattr(cfg, name) for name in expected} == expected


# ---- one kind of attention for each layer ----
def test_a_layer_has_the_config_with_its_own_attention():
    cfg = TransformerConfig(
        **PAIRED, n_layers=3, attention="softmax,relu,linear", sink="learned", normalize_by_context=True, n_heads=2,
        d_head=4, damping=0.3,
    )  # fmt: skip
    layers = [cfg.for_layer(layer) for layer in range(3)]
    assert [c.attention for c in layers] == ["softmax", "relu", "linear"]
    assert [c.sink for c in layers] == ["learned", "none", "none"]
    assert [c.normalize_by_context for c in layers] == [False, True, True]
    changed = ("attention", "sink", "normalize_by_context")
    shared = {name: value for name, value in cfg.to_dict().items() if name not in changed}
    assert all(layer.to_dict().items() >= shared.items() for layer in layers)


def test_layers_that_are_all_alike_are_the_config_of_one_name():
    for name in ("softmax", "relu"):
        two = TransformerConfig(**PAIRED, n_layers=2, attention=f"{name},{name}")
        assert two == TransformerConfig(**PAIRED, n_layers=2, attention=name)
    looped = TransformerConfig(**PAIRED, n_layers=2, attention="linear,linear", recurrent=True)
    assert looped.for_layer(1) is looped


# ---- copies and files ----
def test_replace_lets_defaults_follow():
    cfg = TransformerConfig(**PAIRED).replace(x_dim=7, n_context=9)
    assert (cfg.d_model, cfg.d_head, cfg.n_ctx) == (9, 9, 10)
    assert cfg.initializer_range == math.sqrt(0.002 / 9)
    assert cfg.replace(d_head=2).replace(x_dim=1).d_head == 2  # arguments stay
    one_hot = TransformerConfig(**PAIRED, positional_embedding_type="one_hot").replace(n_context=9)
    assert (one_hot.d_pos, one_hot.d_model) == (10, 15)
    assert TransformerConfig(**PAIRED).replace(prompt_format="interleaved", d_model=6).n_ctx == 9


@settings(max_examples=40)
@given(cfg=configs())
def test_json_round_trip(cfg: TransformerConfig):
    data = json.loads(json.dumps(cfg.to_dict(), allow_nan=False))
    assert TransformerConfig.from_dict(data) == cfg
    assert cfg.replace() == cfg
    assert "device" not in data


@pytest.mark.parametrize("attention", ["mesa,gated_linear", "mesa,mamba2", "delta,gated_linear", "mesa,delta,softmax"])
@pytest.mark.parametrize("given", [{}, {"normalize_keys": True, "gate": "head"}])
def test_layers_of_a_mixture_keep_their_defaults_in_files(attention: str, given: dict[str, Any]):
    cfg = TransformerConfig(**INTERLEAVED | given, attention=attention, n_layers=attention.count(",") + 1)
    again = TransformerConfig.from_dict(json.loads(json.dumps(cfg.to_dict())))
    assert [again.for_layer(i) for i in range(cfg.n_layers)] == [cfg.for_layer(i) for i in range(cfg.n_layers)]
    decays = (
        {"delta": "none", "mamba2": "none", "softmax": "none"} if not given else {"mamba2": "none", "softmax": "none"}
    )
    expected = [decays.get(kind, "head") for kind in attention.split(",")]
    assert [again.for_layer(i).gate for i in range(cfg.n_layers)] == expected


def test_configs_of_earlier_versions():
    data = TransformerConfig(**INTERLEAVED).to_dict()
    assert (data["momentum"], data["momentum_over"]) == (0.0, "outputs")
    old = {name: value for name, value in data.items() if not name.startswith("momentum")}
    assert TransformerConfig.from_dict(old) == TransformerConfig(**INTERLEAVED)
    ids = {"prompt_format": "token_ids", "d_vocab": 7, "n_ctx": 6, "d_model": 8, "d_mlp": None}
    assert TransformerConfig.from_dict(ids).attn_only  # no MLP by default
    assert TransformerConfig.from_dict({k: v for k, v in ids.items() if k != "d_mlp"}).d_mlp == 32


# ---- TransformerLens' names ----
@pytest.mark.parametrize(("theirs", "ours"), [
    ({}, {}),
    ({"attn_only": True, "d_mlp": 48}, {"d_mlp": None}),
    ({"attention_dir": "bidirectional"}, {"keys": "full"}),
    ({"attn_scale": 3.0}, {"score_scale": 1 / 3}),
    ({"use_attn_scale": False}, {"score_scale": 1.0}),
    ({"d_vocab_out": 5}, {"d_out": 5}),
    ({"n_heads": -1, "d_vocab_out": -1, "attn_scale": -1.0, "initializer_range": -1.0}, {"n_heads": 3, "d_out": 7}),
    ({"normalization_type": None}, {"normalization_type": None, "final_norm": False}),
    ({"positional_embedding_type": "rotary", "rotary_dim": 2}, {"rotary_dim": 2}),
    ({"positional_embedding_type": "rotary"}, {"rotary_dim": 4}),
    ({"rotary_dim": 4}, {"rotary_dim": 0}),
    ({"dtype": torch.float64, "device": torch.device("cpu")}, {"dtype": torch.float64, "device": "cpu"}),
    ({"model_name": "mine", "n_devices": 1, "init_weights": True, "device": None}, {"device": "cpu"}),
    ({"n_key_value_heads": 3, "n_heads": 3, "window_size": None, "parallel_attn_mlp": False}, {"n_heads": 3}),
])  # fmt: skip
def test_their_names(theirs: dict[str, Any], ours: dict[str, Any]):
    cfg: Any = HookedTransformerConfig(**(IDS | theirs))
    assert {name: getattr(cfg, name) for name in ours} == ours
    assert TransformerConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    assert HookedTransformerConfig.from_dict(cfg.to_dict()) == HookedTransformerConfig.unwrap(cfg) == cfg
    assert [isinstance(each, HookedTransformerConfig) for each in (cfg, IDS)] == [True, False]
    assert (cfg.model_name, cfg.final_rms, cfg.use_attn_scale, cfg.n_devices) == ("custom", False, True, 1)


def test_what_a_config_prints_makes_it_again():
    for cfg in (HookedTransformerConfig(**IDS), TransformerConfig(x_dim=2, n_context=3, n_layers=2)):
        assert eval(repr(cfg)) == cfg
    text = repr(HookedTransformerConfig(**IDS))
    assert text.startswith("HookedTransformerConfig(d_vocab=7, ")
    assert " keys=" not in text
    assert "attention_dir='causal'" in text


def test_fields_cannot_be_set():
    cfg: Any = HookedTransformerConfig(**IDS)
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"model\.set_use_attn_result\(True\)"):
        cfg.use_attn_result = True
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"cfg\.replace\(d_model="):
        cfg.d_model = 3
    assert HookedTransformerConfig(**(IDS | {"act_fn": "solu_ln"})).is_layer_norm_activation()
    assert not cfg.is_layer_norm_activation()


def test_models_are_made_of_mappings_and_their_objects():
    expected = HookedTransformer(TransformerConfig(**IDS)).state_dict()
    theirs = TransformerBridgeConfig(**IDS, architecture="TransformerLensNative", device="cpu")
    for cfg in (IDS, theirs, SimpleNamespace(**IDS, made_up=3)):
        state = HookedTransformer(cfg).state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_the_seed_of_a_config_is_the_models():
    seeded = TransformerConfig(**IDS, seed=3)
    for model in (HookedTransformer(seeded), HookedTransformer(TransformerConfig(**IDS), seed=3)):
        assert torch.equal(model.W_E, HookedTransformer(seeded).W_E)
    assert not torch.equal(HookedTransformer(seeded, seed=4).W_E, HookedTransformer(seeded).W_E)


def test_synonyms_follow_changes():
    cfg = TransformerConfig(**IDS, attention_dir="causal", attn_scale=4.0)
    assert cfg.replace(keys="full").attention_dir == "bidirectional"
    assert cfg.replace(score_scale=0.5).attn_scale == 2.0
    assert cfg.replace(attn_scale=5.0).score_scale == 0.2
    assert cfg.replace(attention_dir="bidirectional").keys == "full"


# ---- state dicts in other names ----
@pytest.mark.parametrize("fields", [IDS, INTERLEAVED | {"attention": "softmax", "normalization_type": "LN"}])
def test_state_dicts_of_earlier_versions_and_of_transformer_lens(fields: dict[str, Any]):
    cfg = TransformerConfig(**fields)
    model, other = random_model(cfg), HookedTransformer(cfg, seed=5)
    names = {"embed.W_E": "embed", "embed.b_E": "embed_bias", "pos_embed.W_pos": "pos_embed"}
    names |= {"unembed.W_U": "unembed", "unembed.b_U": "unembed_bias"}
    state = {names.get(str(name), str(name)): weight.clone() for name, weight in model.state_dict().items()}
    state["blocks.0.attn.mask"] = torch.ones(6, 6, dtype=torch.bool).tril()  # buffers that follow from the config
    state["blocks.0.attn.IGNORE"] = torch.tensor(-torch.inf)
    other.load_state_dict(state, strict=True)
    tokens = random_tokens(cfg)
    assert torch.equal(model(tokens), other(tokens))
    if cfg.d_vocab:  # a bias on the embeddings of ids is added to each of them
        bias = torch.randn(12)
        other.load_state_dict(state | {"embed_bias": bias})
        with torch.no_grad():
            model.W_E.add_(bias)
        torch.testing.assert_close(other(tokens), model(tokens))
