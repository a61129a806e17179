"""Features of pretrained language models: plain, cached and padded runs give the same logits."""

import itertools
from typing import Any, cast

import pytest
import torch
from transformer_lens import TransformerLensKeyValueCache
from transformer_lens.utilities import get_act_name

from mechicl.analysis import patch
from mechicl.models import HookedTransformer, TransformerConfig

BASE: dict[str, Any] = {"d_vocab": 11, "n_ctx": 12, "n_layers": 2, "n_heads": 4, "d_model": 16, "d_head": 4}
ROTARY: dict[str, Any] = {"positional_embedding_type": "rotary"}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups of heads": {"n_key_value_heads": 2, **ROTARY},
    "parallel MLP": {"parallel_attn_mlp": True},
    "norms of outputs": {"norm_location": "after", "normalization_type": "RMS"},
    "norms of both": {"norm_location": "both", "normalization_type": "RMS"},
    "norms of queries and keys": {"use_qk_norm": True, "n_key_value_heads": 2},
    "norms over all heads": {"use_qk_norm": True, "qk_norm_over": "all"},
    "clipping": {"clip_qkv": 0.3},
    "soft caps": {"attn_scores_soft_cap": 0.5, "output_logits_soft_cap": 1.0},
    "windows": {"use_local_attn": True, "window_size": 3, "attn_types": ["global", "local"], "rotary_base_local": 9.0,
                **ROTARY},
    "scores by layer": {"scale_attn_by_inverse_layer_idx": True},
    "ALiBi": {"positional_embedding_type": "alibi", "n_heads": 6},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "norm of the embedding": {"post_embedding_ln": True},
    "tied embeddings": {"tie_word_embeddings": True, "embedding_scale": 4.0},
    "SoLU": {"act_fn": "solu_ln"},
    "another final norm": {"final_rms": True},
    "scaled frequencies": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8}, **ROTARY},
}  # fmt: skip


@pytest.fixture(params=FEATURES)
def model(request: pytest.FixtureRequest) -> HookedTransformer:
    model = HookedTransformer(TransformerConfig(**{**BASE, **FEATURES[request.param]}, dtype="float64"))
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data = 0.4 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("hooked", [False, True])
def test_cached_and_padded_texts_have_the_logits_of_plain_ones(model: HookedTransformer, hooked: bool):
    tokens = torch.randint(0, 11, (3, 10), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    hooks = [("blocks.0.hook_resid_pre", lambda stream, hook: None)] if hooked else []
    with model.hooks(hooks):
        torch.testing.assert_close(model(tokens, at="query"), expected[:, -1:])
        cache = TransformerLensKeyValueCache.init_cache(cast(Any, model.cfg), "cpu", 3)
        parts = [model(part, past_kv_cache=cache) for part in tokens.split([6, 1, 3], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)
        padded = torch.cat([torch.full((3, 2), 7), tokens], dim=1)
        mask = torch.ones_like(padded)
        mask[:, :2] = 0
        torch.testing.assert_close(model(padded, attention_mask=mask)[:, 2:], expected)
        # the padding, too, and texts after it
        cache = TransformerLensKeyValueCache.init_cache(cast(Any, model.cfg), "cpu", 3)
        first = model(padded[:, :5], attention_mask=mask[:, :5], past_kv_cache=cache)
        rest = model(padded[:, 5:], attention_mask=mask[:, 5:], past_kv_cache=cache)
        torch.testing.assert_close(torch.cat([first, rest], dim=1)[:, 2:], expected)


@pytest.mark.parametrize("component", ["z", "resid_pre", "mlp_out"])
def test_sweeps_at_positions_are_plain_runs_with_hooks(model: HookedTransformer, component: str):
    tokens, others = torch.randint(0, 11, (2, 3, 10), generator=torch.Generator().manual_seed(1))
    _, cache = model.run_with_cache(others)
    heads: list[int | None] = [0, 3] if component == "z" else [None]
    axes: dict[str, Any] = {"layer": None, "pos": [4, 9], **({"head": heads} if component == "z" else {})}
    swept = patch(model, others, tokens, component, axes, progress=False).predictions
    assert swept is not None
    for layer, (i, pos), (j, head) in itertools.product(range(2), enumerate([4, 9]), enumerate(heads)):
        index = (slice(None), pos) if head is None else (slice(None), pos, head)

        def put(activation: torch.Tensor, hook: Any, index: Any = index) -> torch.Tensor:
            activation = activation.clone()
            activation[index] = cache[hook.name][index]
            return activation

        expected = model.run_with_hooks(tokens, fwd_hooks=[(get_act_name(component, layer), put)])[:, -1]
        got = swept[layer, i] if head is None else swept[layer, i, j]
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)


def test_a_window_hides_earlier_tokens():
    fields = {**BASE, "n_layers": 1, "use_local_attn": True, "window_size": 3}
    model = HookedTransformer(TransformerConfig(**fields))
    _, cache = model.run_with_cache(torch.arange(10)[None])
    seen = cache["pattern", 0][0] > 0
    distance = torch.arange(10)[:, None] - torch.arange(10)
    assert torch.equal(seen, ((distance >= 0) & (distance < 3)).expand_as(seen))


def test_alibi_is_a_slope_for_each_head():
    model = HookedTransformer(TransformerConfig(**{**BASE, "n_heads": 6}, positional_embedding_type="alibi"))
    for block in model.blocks:
        block.attn.W_Q.data.zero_()
        block.attn.b_Q.data.zero_()
    _, cache = model.run_with_cache(torch.arange(4)[None])
    # Press et al. 2022: 2^-2, 2^-4, 2^-6, 2^-8 for four heads, then every second slope of eight heads
    slopes = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    for head, slope in enumerate(slopes):
        assert cache["attn_scores", 1][0, head, 3].tolist() == pytest.approx([-3 * slope, -2 * slope, -slope, 0])
