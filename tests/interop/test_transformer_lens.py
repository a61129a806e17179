"""Models from TransformerLens and back, and every activation against its own network with the same weights."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformer_lens import TransformerBridge
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources import boot_native
from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

from mechicl.interop import from_transformer_lens, to_transformer_lens
from mechicl.models import HookedTransformer, HookedTransformerConfig
from tests.strategies import random_model, random_tokens

SMALL: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_ctx": 6, "d_head": 4, "d_vocab": 11}


@st.composite
def lens_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a config of TransformerLens, of the kinds that its own network and ours both compute."""
    fields: dict[str, Any] = {
        "n_layers": draw(st.integers(1, 3)), "n_heads": draw(st.integers(1, 3)), "d_model": draw(st.integers(4, 9)),
        "n_ctx": draw(st.integers(2, 7)), "d_vocab": draw(st.integers(3, 12)), "d_head": draw(st.sampled_from([2, 4])),
        "normalization_type": draw(st.sampled_from(["LN", "LNPre", "RMS", "RMSPre", None])),
        "attn_only": draw(st.booleans()), "act_fn": draw(st.sampled_from(["relu", "gelu", "gelu_new", "silu"])),
        "eps": draw(st.sampled_from([1e-5, 0.1])), "attention_dir": draw(st.sampled_from(["causal", "bidirectional"])),
        "positional_embedding_type": draw(st.sampled_from(["standard", "rotary"])),
    }  # fmt: skip
    if not fields["attn_only"]:
        fields |= {"d_mlp": draw(st.integers(1, 9)), "gated_mlp": draw(st.booleans())}
    if fields["positional_embedding_type"] == "rotary":  # its own network turns neighbours
        fields |= {"rotary_adjacent_pairs": True, "rotary_dim": draw(st.sampled_from([2, fields["d_head"]]))}
        fields["rotary_base"] = draw(st.sampled_from([10000, 50]))
    return fields


def as_bridge(model: HookedTransformer) -> TransformerBridge:
    """TransformerLens 4's own network with the model's weights."""
    state, fields = to_transformer_lens(model)
    cfg = TransformerBridgeConfig(architecture="TransformerLensNative", **fields)
    bridge = boot_native(cfg, device="cpu")
    state = {name: weight for name, weight in state.items() if "rotary" not in name}
    expected = bridge.state_dict()
    converted = {name: weight for name, weight in convert_tl_checkpoint(state, cfg).items() if name in expected}
    bridge.load_state_dict(converted, strict=True)
    return bridge.eval()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest value; where one hides a score, both must."""
    seen = theirs.isfinite()
    assert torch.equal(seen, ours.isfinite())
    difference = (ours - theirs)[seen].abs().max()
    return float(difference / theirs[seen].abs().max().clamp(min=1e-3))


@settings(max_examples=25)
@given(fields=lens_fields())
def test_every_activation_equals_transformer_lens(fields: dict[str, Any]):
    model = random_model(HookedTransformerConfig(**fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():  # which its own gated MLPs do not have
            if fields.get("gated_mlp") and name.endswith(("mlp.b_in", "mlp.b_out")):
                weight.zero_()
        tokens = random_tokens(model.cfg)
        logits, ours = model.run_with_cache(tokens)
        expected, theirs = as_bridge(model).run_with_cache(tokens)
    assert relative_error(logits, expected) < 1e-5
    rotated = {name for name in ours if name.endswith(("hook_rot_q", "hook_rot_k"))}  # which its network does not show
    assert set(ours) - set(theirs) == rotated
    for name in set(ours) - rotated:
        if name.endswith("hook_attn_scores"):  # where its network shows the pattern instead (TransformerLens 4.3)
            scores, pattern = ours[name], ours[name.replace("attn_scores", "pattern")]
            assert relative_error(scores.softmax(-1), pattern) < 1e-5
            assert torch.equal(theirs[name], theirs[name.replace("attn_scores", "pattern")])
            continue
        assert ours[name].shape == theirs[name].shape, name
        assert relative_error(ours[name], theirs[name]) < 1e-5, name


@settings(max_examples=25)
@given(fields=lens_fields())
def test_there_and_back_bit_for_bit(fields: dict[str, Any]):
    model = random_model(HookedTransformerConfig(**fields))
    state, cfg = to_transformer_lens(model)
    same = from_transformer_lens(state, cfg)
    again, fields_again = to_transformer_lens(same)
    assert list(again) == list(state)
    assert all(torch.equal(again[name], weight) for name, weight in state.items())
    assert fields_again == cfg
    tokens = random_tokens(model.cfg)
    assert torch.equal(same(tokens), model(tokens))
    assert not same.training


@pytest.mark.parametrize("fields", [
    {"positional_embedding_type": "alibi"},
    {"act_fn": "solu_ln", "normalization_type": "RMSPre"},
    {"act_fn": "solu_ln", "normalization_type": None},
], ids=str)  # fmt: skip
def test_there_and_back_with_parameters_that_transformer_lens_has_elsewhere(fields: dict[str, Any]):
    model = random_model(HookedTransformerConfig(**(SMALL | fields)))
    state, cfg = to_transformer_lens(model)
    assert ("pos_embed.W_pos" in state) == (cfg["positional_embedding_type"] in ("standard", "alibi"))
    assert not [name for name in state if "mlp.ln" in name]  # LayerNormPre there
    tokens = random_tokens(model.cfg)
    assert torch.equal(from_transformer_lens(state, cfg)(tokens), model(tokens))


def test_local_layers_have_the_angles_of_their_own_base():
    fields = {"positional_embedding_type": "rotary", "rotary_dim": 4, "rotary_base": 1000, "rotary_base_local": 50.0}
    fields |= {"use_local_attn": True, "window_size": 3, "attn_types": ["local", "global"]}
    state, _ = to_transformer_lens(HookedTransformer(HookedTransformerConfig(**(SMALL | fields))))
    for layer, base in enumerate((50.0, 1000.0)):
        expected = torch.tensor([math.cos(5), math.cos(5 / base**0.5)])
        torch.testing.assert_close(state[f"blocks.{layer}.attn.rotary_cos"][5, :2], expected)


def test_a_config_as_an_object():
    state, fields = to_transformer_lens(random_model(HookedTransformerConfig(**SMALL)))
    tokens = torch.arange(6)[None]
    expected = from_transformer_lens(state, fields)(tokens)
    cfg = TransformerBridgeConfig(**fields)
    for same in (cfg, SimpleNamespace(**fields)):
        assert torch.equal(from_transformer_lens(state, same)(tokens), expected)


def test_missing_weights_are_zero():
    cfg = HookedTransformerConfig(**SMALL, attn_bias=False, read_bias=False, positional_embedding_type="none")
    model = random_model(cfg)
    state, fields = to_transformer_lens(model)
    for name in ("pos_embed.W_pos", "unembed.b_U", "blocks.1.attn.b_Q", "blocks.0.attn.b_O"):
        assert not state[name].any()
    tokens = random_tokens(cfg)
    torch.testing.assert_close(from_transformer_lens(state, fields)(tokens), model(tokens))


@pytest.mark.parametrize(
    "fields",
    [{"positional_embedding_type": "relative_positional_bias"}, {"num_experts": 4},
     {"rmsnorm_uses_offset": True, "normalization_type": "RMS"}, {"scale_embedding": True},
     {"rotary_interleaved_cos_sin": True}],
)  # fmt: skip
def test_features_that_ours_lacks_are_refused_by_name(fields: dict[str, Any]):
    state, cfg = to_transformer_lens(HookedTransformer(SMALL))
    for form in (cfg | fields, SimpleNamespace(**(cfg | fields))):
        with pytest.raises(ValueError, match=f"{next(iter(fields))}=.*TransformerBridge"):
            from_transformer_lens(state, form)


@pytest.mark.parametrize(
    "weight", [torch.full((11, 8), torch.nan), torch.full((11, 8), torch.inf), torch.ones(11, 8, device="meta")]
)
def test_weights_that_are_no_finite_numbers_are_refused_by_name(weight: Tensor):
    state, cfg = to_transformer_lens(HookedTransformer(SMALL))
    with pytest.raises(ValueError, match=r"embed\.W_E('\])? (must be a tensor of finite real|is on the device)"):
        from_transformer_lens(state | {"embed.W_E": weight}, cfg)


@pytest.mark.parametrize(
    "fields",
    [{"attention": "linear"}, {"keys": "context"}, {"sink": "learned"}, {"damping": 0.5}, {"final_norm": False},
     {"act_fn": "elu"}, {"score_scale": -1.0}, {"norm_location": "both"},
     {"falcon_alibi": True, "positional_embedding_type": "alibi"}],
)  # fmt: skip
def test_features_that_transformer_lens_lacks_are_refused_by_name(fields: dict[str, Any]):
    with pytest.raises(ValueError, match=f"TransformerLens has no {next(iter(fields))}="):
        to_transformer_lens(HookedTransformer(HookedTransformerConfig(**(SMALL | fields))))
