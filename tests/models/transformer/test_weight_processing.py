"""Processed weights: the same outputs, the same weights as TransformerLens', parts that sum to the outputs."""

import copy
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformer_lens.tools.analysis import direct_logit_attribution
from transformer_lens.weight_processing import ProcessWeights

from mechicl.checkpoints import load
from mechicl.models import HookedTransformer, HookedTransformerConfig, TransformerConfig, process_weights
from mechicl.models.transformer.weight_processing import STEPS, why_not
from mechicl.tasks import LinearRegression
from tests.strategies import configs, random_model, random_tokens

WORDS: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_ctx": 6, "d_head": 4, "d_vocab": 11, "dtype": "float64"}


def words(**fields: Any) -> HookedTransformer:
    return random_model(HookedTransformerConfig(**(WORDS | fields))).eval()


def outputs(model: HookedTransformer, tokens: Tensor) -> Tensor:
    """Predictions, or log-probabilities of tokens."""
    out = model(tokens)
    return out.log_softmax(-1) if model.cfg.prompt_format == "token_ids" else out


@settings(max_examples=30)
@given(cfg=configs(dtype="float64"), seed=st.integers(0, 3))
def test_outputs_stay_what_they_are(cfg: TransformerConfig, seed: int):
    model = random_model(cfg, seed=seed)
    tokens = random_tokens(cfg)
    before = outputs(model, tokens)
    assume(before.numel() == 0 or before.abs().max() < 100)
    processed = process_weights(model)
    torch.testing.assert_close(outputs(processed, tokens), before, rtol=1e-7, atol=1e-8)
    assert torch.equal(outputs(model, tokens), before)
    if why_not(model, "fold_ln") is None:
        assert not any(name.endswith((".w", "ln1.b", "ln2.b", "ln_final.b")) for name in processed.state_dict())
    # once more changes nothing
    again = process_weights(processed)
    for name, weight in processed.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=1e-7, atol=1e-9)


@settings(max_examples=30)
@given(cfg=configs(dtype="float64"), name=st.sampled_from([*STEPS]))
def test_a_step_that_is_asked_for_is_taken_or_refused(cfg: TransformerConfig, name: str):
    model = random_model(cfg)
    tokens = random_tokens(cfg)
    before = outputs(model, tokens)
    assume(before.numel() == 0 or before.abs().max() < 100)
    wanted: dict[str, Any] = dict.fromkeys(STEPS, False) | {name: True}
    kinds = {"fold_ln": ("LN", "RMS"), "center_writing_weights": ("LN", "LNPre")}
    has_norm = cfg.normalization_type in kinds.get(name, (cfg.normalization_type,))
    no_biases = name == "fold_value_biases" and not cfg.attn_bias
    if why_not(model, name) is not None and has_norm and not no_biases:
        with pytest.raises(ValueError, match=f"^{name} would change"):
            process_weights(model, **wanted)
    else:
        processed = process_weights(model, **wanted)
        torch.testing.assert_close(outputs(processed, tokens), before, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("norm", ["LN", "LNPre", "RMS", "RMSPre"])
@pytest.mark.parametrize("attn_only", [True, False])
def test_weights_are_those_of_transformer_lens(norm: str, attn_only: bool):
    model = words(normalization_type=norm, attn_only=attn_only)
    cfg = model.cfg
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    # its functions one by one: all at once are in float32
    if norm in ("LN", "RMS"):
        layer_norm = norm == "LN"
        expected = ProcessWeights.fold_layer_norm(expected, cfg, fold_biases=layer_norm, center_weights=layer_norm)
    if norm in ("LN", "LNPre"):
        expected = ProcessWeights.center_writing_weights(expected, cfg)
    expected = ProcessWeights.center_unembed(expected, cfg)
    expected = ProcessWeights.fold_value_biases(expected, cfg)
    processed = process_weights(model)
    for name, weight in processed.state_dict().items():
        theirs = expected[name]
        if name.endswith("b_O") and norm in ("LN", "LNPre"):
            theirs = theirs - theirs.mean()
        torch.testing.assert_close(weight, theirs, rtol=1e-12, atol=1e-12)


def test_factors_become_orthogonal():
    model = words()
    processed = process_weights(model, refactor_factored_attn_matrices=True)
    gram = processed.W_O @ processed.W_O.mT
    torch.testing.assert_close(gram, torch.eye(4, dtype=torch.float64).expand_as(gram))
    plain = process_weights(model, fold_value_biases=False)
    torch.testing.assert_close(processed.OV.AB, plain.OV.AB)


def test_in_place_as_transformer_lens_does_it():
    model = words()
    model.set_use_attn_result(True)
    tokens = random_tokens(model.cfg)
    before, expected = outputs(model, tokens), process_weights(model).state_dict()
    blocks = model.blocks
    model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
    assert model.cfg.normalization_type == "LNPre"
    assert model.blocks is not blocks
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
    torch.testing.assert_close(outputs(model, tokens), before)
    _, cache = model.run_with_cache(tokens)
    assert cache["blocks.1.attn.hook_result"].shape == (2, 6, 2, 8)
    assert not model.has_hooks()
    model.add_hook("hook_embed", cast(Any, lambda x, hook: x))
    with pytest.raises(ValueError, match="reset_hooks"):
        model.process_weights()
    model.reset_hooks()


# ---- attribution ----


def check_that_parts_sum(model: HookedTransformer, tokens: Tensor, output: int, cut: float) -> None:
    """Assert that every decomposition of TransformerLens sums to an output, less its bias."""
    out, cache = model.run_with_cache(tokens)
    expected = out[..., output] - model.output_biases[output]
    scale = out.abs().max()
    stacks = [
        cache.decompose_resid(),
        cache.stack_head_results(incl_remainder=True),
        cache.get_full_resid_decomposition(expand_neurons=False),
        cache.accumulated_resid(incl_mid=model.cfg.block_mlp)[-1:],
    ]
    for stack in stacks:
        total = cache.logit_attrs(stack, tokens=output).sum(0)
        assert (total - expected).abs().max() / scale < cut


@settings(max_examples=30)
@given(cfg=configs(dtype="float64", mlp_location="blocks", token_clip=None))
def test_parts_sum_to_the_outputs(cfg: TransformerConfig):
    assume(cfg.n_layers > 0 and (cfg.normalization_type is None or cfg.final_norm))
    model = random_model(cfg)
    tokens = random_tokens(cfg)
    assume(model(tokens).abs().max() < 100)
    for same in (model, process_weights(model)):
        check_that_parts_sum(same, tokens, cfg.d_out - 1, cut=1e-9)


def test_parts_sum_to_the_predictions_of_a_trained_model():
    model: Any = load("gpt2-8l")
    tokens = model.encode(LinearRegression(x_dim=model.cfg.x_dim, n_context=model.cfg.n_context).sample(4, seed=0))
    with torch.no_grad():
        processed = process_weights(model)
        precise = copy.deepcopy(model).double()
        torch.testing.assert_close(process_weights(precise)(tokens.double()), precise(tokens.double()))
        torch.testing.assert_close(processed.output_biases, processed.b_U)
        for same in (model, processed):
            check_that_parts_sum(same, tokens, 0, cut=1e-5)
            logits, cache = same.run_with_cache(tokens)
            for unit in ("component", "head"):
                result = direct_logit_attribution(same, answer_tokens=0, unit=unit, pos=None, cache=cache)
                error = result.attribution.sum(0) - (logits[..., 0] - same.output_biases[0])
                assert error.abs().max() / logits.abs().max() < 1e-5
