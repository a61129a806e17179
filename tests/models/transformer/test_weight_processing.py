"""Weight processing of the architectures of language models: the same outputs, and TransformerLens' weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_lens.weight_processing import ProcessWeights

from mechicl.models import HookedTransformer, HookedTransformerConfig, process_weights
from mechicl.models.transformer.weight_processing import STEPS, why_not
from tests.strategies import random_model

SIZES: dict[str, Any] = {
    "n_layers": 2, "d_model": 12, "n_ctx": 7, "d_head": 3, "n_heads": 4, "d_vocab": 11, "d_mlp": 10,
    "act_fn": "gelu", "dtype": "float64",
}  # fmt: skip
GROUPED = {"n_key_value_heads": 2}
ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 2}
LLAMA = GROUPED | ROTARY | {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu", "final_rms": True}
IN_BOTH: dict[str, dict[str, Any]] = {  # TransformerLens computes the same processed weights
    "gpt2": {},
    "neox": ROTARY | {"parallel_attn_mlp": True},
    "llama": LLAMA,
    "grouped": GROUPED,
    "grouped and parallel": GROUPED | ROTARY | {"parallel_attn_mlp": True},
    "qwen3": LLAMA | {"use_qk_norm": True},
    "attn-only": {"attn_only": True, "d_mlp": None},
    "folded": {"normalization_type": "LNPre"},
    "gemma2": LLAMA | {"norm_location": "both", "attn_scores_soft_cap": 5.0},
    "bloom": {"positional_embedding_type": "alibi", "post_embedding_ln": True},
    "solu": {"act_fn": "solu_ln"},
    "mistral": LLAMA | {"use_local_attn": True, "window_size": 3},
}
OTHERS: dict[str, dict[str, Any]] = {  # TransformerLens changes the outputs of some of these
    "olmo2": {"norm_location": "after", "normalization_type": "RMS", "use_qk_norm": True, "qk_norm_over": "all"},
    "after layer norm": {"norm_location": "after"},
    "both, layer norm": {"norm_location": "both"},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "final rms": {"final_rms": True},
    "soft cap": {"output_logits_soft_cap": 2.0},
    "clipped": {"clip_qkv": 0.5},
    "gated layer norm": {"gated_mlp": True},
    "solu rms": {"act_fn": "solu_ln", "normalization_type": "RMS"},
    "tied": {"tie_word_embeddings": True},
    "tied and scaled": LLAMA | {"tie_word_embeddings": True, "embedding_scale": 3.0},
    "as many groups": {"n_key_value_heads": 4},
}
TOKENS = torch.tensor([[1, 5, 3, 3, 0, 10, 2], [4, 4, 9, 7, 8, 6, 1]])


def made(fields: dict[str, Any]) -> HookedTransformer:
    return random_model(HookedTransformerConfig(**(SIZES | fields)), seed=1)  # biases and norms too


def log_probabilities(model: HookedTransformer) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).log_softmax(-1)


@pytest.mark.parametrize("fields", (IN_BOTH | OTHERS).values(), ids=IN_BOTH | OTHERS)
def test_outputs_stay_the_same(fields: dict[str, Any]):
    model = made(fields)
    before, weights = log_probabilities(model), {n: w.clone() for n, w in model.state_dict().items()}
    processed = process_weights(model)
    torch.testing.assert_close(log_probabilities(processed), before, rtol=0, atol=1e-8)
    assert any(not torch.equal(w, weights.get(n, w)) for n, w in processed.state_dict().items())
    assert all(torch.equal(w, weights[n]) for n, w in model.state_dict().items())
    for name in STEPS:
        wanted: Any = dict.fromkeys(STEPS, False) | {name: True}
        if why_not(model, name) is None:
            torch.testing.assert_close(log_probabilities(process_weights(model, **wanted)), before, rtol=0, atol=1e-8)
    model.process_weights_()
    assert model.cfg == processed.cfg
    assert not model.has_hooks()  # none of its parts looks like another one's, as a tied read-out would
    torch.testing.assert_close(log_probabilities(model), before, rtol=0, atol=1e-8)


@pytest.mark.parametrize("fields", IN_BOTH.values(), ids=IN_BOTH)
def test_single_steps_are_transformer_lens(fields: dict[str, Any]):
    model: Any = made(fields)
    cfg, state = model.cfg, {name: weight.clone() for name, weight in model.state_dict().items()}
    layer_norm = cfg.normalization_type in ("LN", "LNPre")
    theirs: dict[str, tuple[bool, ...]] = {  # and their arguments
        "fold_layer_norm": (layer_norm, layer_norm),
        "center_writing_weights": (),
        "center_unembed": (),
        "fold_value_biases": (),
    }
    for name, arguments in theirs.items():
        copied = {key: weight.clone() for key, weight in state.items()}  # which some steps change
        expected = getattr(ProcessWeights, name)(copied, cfg, *arguments)
        if name == "fold_layer_norm" and cfg.normalization_type == "LNPre":
            continue  # TransformerLens then centres the weights, although they have been folded
        got = getattr(model, name)(state)
        for weight, value in expected.items():
            if not torch.equal(value, state.get(weight, torch.empty(0))):
                torch.testing.assert_close(got[weight], value, rtol=1e-6, atol=1e-6, msg=f"{name} {weight}")
        assert {n for n in got if not torch.equal(got[n], state.get(n, torch.empty(0)))} <= set(expected)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, state[name])


def test_old_code_loads_and_processes():
    model, other = made({}), made({})
    other.init_weights()
    assert not torch.equal(other.W_Q, model.W_Q)
    other.load_and_process_state_dict(model.state_dict(), center_unembed=False)
    assert other.cfg.normalization_type == "LNPre"
    torch.testing.assert_close(other.W_Q, process_weights(model).W_Q)
    assert torch.equal(other.b_U.mean(), process_weights(model, center_unembed=False).b_U.mean())
    state = model.state_dict()
    for step in ("fold_layer_norm", "center_writing_weights", "fold_value_biases", "center_unembed"):
        state = getattr(model, step)(state)
    before = log_probabilities(model)
    model.load_state_dict(state)
    torch.testing.assert_close(log_probabilities(model), before, rtol=0, atol=1e-8)


def test_weights_are_drawn_anew():
    for seed, same in ((3, True), (None, False)):
        model = HookedTransformer(HookedTransformerConfig(**SIZES, seed=seed))
        first = model.W_Q
        model.init_weights()
        assert torch.equal(model.W_Q, first) == same
    torch.manual_seed(5)
    model.init_weights()
    second = model.W_Q
    torch.manual_seed(5)
    model.init_weights()
    assert torch.equal(model.W_Q, second)
