"""What a config accepts, what it fills in, and how it travels."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings

from mechicl.models import TransformerConfig
from mechicl.prompts import Interleaved, Paired
from tests.strategies import configs

PAIRED: dict[str, Any] = {"x_dim": 3, "y_dim": 2, "n_context": 4}
INTERLEAVED: dict[str, Any] = PAIRED | {"prompt_format": "interleaved", "d_model": 8}
DESCENT: dict[str, Any] = PAIRED | {"attention_weights": "gradient_descent"}
MLPS: dict[str, Any] = INTERLEAVED | {"d_mlp": 4, "share_mlp": True}
IDS: dict[str, Any] = {"prompt_format": "token_ids", "d_vocab": 7, "n_ctx": 6, "d_model": 8}


def config(fields: dict[str, Any], **changes: Any) -> TransformerConfig:
    return TransformerConfig(**(fields | changes))


# ---- defaults ----


def test_paired_defaults():
    cfg = config(PAIRED)
    assert (cfg.n_ctx, cfg.d_token, cfg.d_model, cfg.d_head, cfg.d_out, cfg.d_pos) == (5, 5, 5, 5, 2, 0)
    assert (cfg.keys, cfg.positional_embedding_type) == ("context", "none")
    assert (cfg.read_in, cfg.read_out, cfg.y_slot) == ("identity", "identity", slice(3, 5))
    assert (cfg.score_scale, cfg.final_norm, cfg.attn_bias, cfg.read_bias) == (1.0, False, False, False)
    assert cfg.initializer_range == math.sqrt(0.002 / 5)
    assert cfg.format == Paired(x_dim=3, y_dim=2)


def test_interleaved_defaults():
    cfg = config(INTERLEAVED, attention="softmax", n_heads=2, normalization_type="LN")
    assert (cfg.n_ctx, cfg.d_token, cfg.d_head, cfg.d_out, cfg.d_pos) == (9, 3, 4, 2, 0)
    assert (cfg.keys, cfg.positional_embedding_type) == ("causal", "standard")
    assert (cfg.read_in, cfg.read_out) == ("linear", "linear")
    assert (cfg.score_scale, cfg.final_norm, cfg.attn_bias, cfg.read_bias) == (0.5, True, True, True)
    assert cfg.initializer_range == 0.02
    assert cfg.format == Interleaved(x_dim=3, y_dim=2)


def test_token_id_defaults():
    cfg = config(IDS)
    assert (cfg.d_out, cfg.keys, cfg.positional_embedding_type) == (7, "causal", "standard")
    with pytest.raises(ValueError, match="takes ids"):
        _ = cfg.format


def test_identity_read_in_leaves_room():
    positions: dict[str, Any] = {"positional_embedding_type": "one_hot"}
    assert config(PAIRED, **positions).d_model == 5 + 5
    assert config(PAIRED, positional_embedding_type="sinusoidal").d_model == 5 + 20
    fields = PAIRED | {"prompt_format": "interleaved", "read_in": "identity", "read_out": "identity"}
    cfg = config(fields, **positions)
    assert cfg.d_model == 3 + 9 + 2
    assert cfg.y_slot == slice(12, 14)
    assert config(PAIRED, d_model=9).read_in == "linear"  # another width needs a map


# ---- refusals ----

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n_context": 4}, "'paired' needs x_dim"),
    ({"x_dim": 4}, "'paired' needs n_context"),
    (PAIRED | {"d_vocab": 5}, "d_vocab is for prompt_format='token_ids'"),
    (PAIRED | {"n_ctx": 6}, "n_ctx is 5 for this prompt format, got 6"),
    ({"prompt_format": "token_ids", "d_vocab": 5, "d_model": 4}, "token_ids need d_vocab and n_ctx"),
    (IDS | {"x_dim": 3}, "token_ids have no x_dim"),
    (IDS | {"d_model": None}, "d_model is needed"),
    (IDS | {"read_in": "identity"}, "needs a learned read-in"),
    (MLPS | {"d_mlp": None}, "share_mlp needs MLPs in the blocks"),
    (MLPS | {"recurrent": True}, "share their MLP already"),
    (IDS | {"positional_embedding_type": "one_hot"}, "'none', 'standard' or 'rotary'"),
    (PAIRED | {"prompt_format": "interleaved"}, "d_model is needed with a linear read-in"),
    (PAIRED | {"attention": "softmax", "n_heads": 2}, "d_model=5 is not divisible by n_heads=2"),
    (PAIRED | {"sink": "fixed"}, "a sink needs softmax attention, got 'linear'"),
    (PAIRED | {"attention": "softmax", "normalize_by_context": True}, "normalised already"),
    (PAIRED | {"final_norm": True}, "final_norm needs a normalization_type"),
    (PAIRED | {"skip_first_norm": True}, "skip_first_norm needs a norm"),
    (PAIRED | {"mlp_location": "input"}, "mlp_location='input' needs d_mlp"),
    (PAIRED | {"d_model": 4, "read_in": "identity"}, "an identity read-in needs d_model >= 5"),
    (PAIRED | {"n_layers": 3, "attention": "softmax,linear"}, "attention='softmax,linear' is for 2 layers, not 3"),
    (PAIRED | {"n_layers": 2, "attention": "softmax,lineer"}, "attention='lineer' is not one of"),
    (PAIRED | {"n_layers": 2, "attention": "softmax,linear", "recurrent": True}, "have one kind of attention"),
    (PAIRED | {"n_layers": 2, "attention": "relu,linear", "sink": "fixed"}, "a sink needs softmax attention"),
    (PAIRED | {"n_layers": 2, "attention": "softmax,softmax", "normalize_by_context": True}, "normalised already"),
    (DESCENT | {"n_heads": 2}, "needs attention='linear', n_heads=1"),
    (DESCENT | {"attention": "softmax"}, "needs attention='linear'"),
    (DESCENT | {"attn_bias": True}, "attn_bias=False"),
    (DESCENT | {"normalization_type": "LN"}, "attn_bias=False"),  # where biases are the default
    (DESCENT | {"d_head": 3}, "d_head=d_model"),
    (DESCENT | {"read_out": "linear"}, "read_out='identity'"),
    (PAIRED | {"d_model": 1, "read_in": "linear", "read_out": "identity"}, "reads y_dim=2 dimensions"),
    (INTERLEAVED | {"read_in": "identity", "read_out": "identity", "d_model": 4}, "d_model >= 5 .*, got 4"),
    (PAIRED | {"d_pos": 3}, "d_pos is the width of concatenated positions"),
    (PAIRED | {"positional_embedding_type": "one_hot", "d_pos": 4}, "one-hot positions need d_pos >= n_ctx=5"),
    (PAIRED | {"positional_embedding_type": "sinusoidal", "d_pos": 0}, "need d_pos >= 1"),
    (PAIRED | {"n_layers": -1}, "n_layers must be an int of at least 0, got -1"),
    (PAIRED | {"n_heads": 0}, "n_heads must be an int of at least 1, got 0"),
    (PAIRED | {"d_mlp": 0}, "d_mlp must be an int of at least 1, got 0"),
    (PAIRED | {"n_context": -1}, "n_context must be an int of at least 0, got -1"),
    (PAIRED | {"d_head": 0}, "d_head must be an int of at least 1, got 0"),
    (PAIRED | {"damping": math.nan}, "damping must be a finite number, got nan"),
    (PAIRED | {"score_scale": math.inf}, "score_scale must be a finite number, got inf"),
    (INTERLEAVED | {"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
    (PAIRED | {"momentum": 0.5}, "momentum=0.5 is over .* needs keys='causal', got keys='context': set keys='causal'"),
    (INTERLEAVED | {"keys": "full", "momentum": 0.5}, "got keys='full': set keys='causal', or momentum=0"),
    (INTERLEAVED | {"keys": "context", "momentum": 0.5, "momentum_over": "values"}, "needs keys='causal'"),
    (PAIRED | {"eps": -1e-5}, "eps must not be negative"),
    (PAIRED | {"initializer_range": -0.1}, "initializer_range must not be negative"),
    (PAIRED | {"token_clip": 0.0}, "token_clip must be positive"),
    (PAIRED | {"attention": "none"}, "attention='none' is not one of"),
    (PAIRED | {"act_fn": "swish"}, "act_fn='swish' is not one of"),
    (PAIRED | {"dtype": "int8"}, "dtype='int8' is not one of"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**fields)


# ---- one kind of attention for each layer ----

MIXED: dict[str, Any] = PAIRED | {"n_layers": 3, "attention": "softmax,relu,linear"}


def test_a_layer_goes_by_the_config_with_its_own_attention():
    cfg = config(MIXED, sink="learned", normalize_by_context=True, n_heads=2, d_head=4, damping=0.3)
    layers = [cfg.for_layer(layer) for layer in range(3)]
    assert [c.attention for c in layers] == ["softmax", "relu", "linear"]
    assert [c.sink for c in layers] == ["learned", "none", "none"]
    assert [c.normalize_by_context for c in layers] == [False, True, True]
    attention_fields = {"attention", "sink", "normalize_by_context"}
    for layer in layers:
        assert {k: v for k, v in layer.to_dict().items() if k not in attention_fields} == {
            k: v for k, v in cfg.to_dict().items() if k not in attention_fields
        }


def test_layers_that_are_all_alike_are_the_config_of_one_name():
    for name in ("softmax", "relu"):
        assert config(PAIRED, n_layers=2, attention=f"{name},{name}") == config(PAIRED, n_layers=2, attention=name)
    looped = config(PAIRED, n_layers=2, attention="linear,linear", recurrent=True)
    assert looped.for_layer(1) is looped
    assert config(PAIRED, n_layers=2, attention="linear,linear", attention_weights="gradient_descent").n_heads == 1
    assert config(PAIRED, attention="softmax").for_layer(0).attention == "softmax"


# ---- an identity read-out ----


def test_an_identity_read_out_after_a_learned_read_in_reads_the_last_dimensions():
    for fields in (PAIRED, INTERLEAVED):
        cfg = config(fields, d_model=9, read_in="linear", read_out="identity", normalization_type="LN")
        assert (cfg.y_slot, cfg.d_out, cfg.final_norm) == (slice(7, 9), 2, False)
    assert config(PAIRED, d_model=2, read_in="linear", read_out="identity").y_slot == slice(0, 2)
    assert config(PAIRED, d_model=9, read_in="identity", read_out="identity").y_slot == slice(3, 5)
    # nothing has to be free where the read-in writes everywhere
    assert config(INTERLEAVED, d_model=4, read_in="linear", read_out="identity").y_slot == slice(2, 4)


# ---- momentum ----


def test_configs_from_before_momentum_are_of_plain_attention():
    data = config(INTERLEAVED).to_dict()
    assert (data["momentum"], data["momentum_over"]) == (0.0, "outputs")
    old = {name: value for name, value in data.items() if not name.startswith("momentum")}
    assert TransformerConfig.from_dict(old) == config(INTERLEAVED)
    new = config(INTERLEAVED, momentum=0.3, momentum_over="values", n_layers=2, attention="softmax,linear")
    assert TransformerConfig.from_dict(json.loads(json.dumps(new.to_dict()))) == new
    assert [(new.for_layer(layer).momentum, new.for_layer(layer).momentum_over) for layer in range(2)] == [
        (0.3, "values")
    ] * 2


# ---- copies ----


def test_replace_lets_defaults_follow():
    cfg = config(PAIRED).replace(x_dim=7, n_context=9)
    assert (cfg.d_model, cfg.d_head, cfg.n_ctx) == (9, 9, 10)
    assert cfg.initializer_range == math.sqrt(0.002 / 9)
    assert cfg.replace(d_head=2).replace(x_dim=1).d_head == 2  # what was given stays
    one_hot = config(PAIRED, positional_embedding_type="one_hot").replace(n_context=9)
    assert (one_hot.d_pos, one_hot.d_model) == (10, 15)
    assert config(PAIRED).replace(prompt_format="interleaved", d_model=6).n_ctx == 9
    with pytest.raises(ValueError, match="x_dim"):
        cfg.replace(x_dim=0)


@settings(max_examples=40)
@given(cfg=configs())
def test_json_round_trip(cfg: TransformerConfig):
    data = json.loads(json.dumps(cfg.to_dict(), allow_nan=False))
    assert TransformerConfig.from_dict(data) == cfg
    assert cfg.replace() == cfg
    assert "device" not in data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, r"no field \['colour'\]"),
        ({"n_layers": "2"}, "n_layers must be an int|wrong type"),
        ({"damping": "1"}, "damping must be a finite number|wrong type"),
        ({"damping": 10**400}, r"damping.* must be smaller than 2\*\*63|wrong type"),
        ({"recurrent": 1}, "recurrent must be true or false|wrong type"),
        ({"x_dim": None}, "needs x_dim"),
        ({"n_layers": None}, "n_layers must be an int|wrong type"),
        ({"keys": ["causal"]}, "keys must be a number, a string"),
        ({"x_dim": {"a": 1}}, "x_dim must be a number, a string"),
    ],
)
def test_tampered_data(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        TransformerConfig.from_dict(config(PAIRED).to_dict() | change)
