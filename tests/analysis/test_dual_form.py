"""The dual form against plain loops, against gradient descent, and for softmax against what it drops."""

import numpy as np
import pytest
import torch

from mechicl import constructions
from mechicl.analysis import dual_form
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

PROMPTS = LinearRegression(x_dim=3, n_context=5).sample(6, seed=0, dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keys": "full", "n_heads": 2, "damping": 0.5},
        {"normalize_by_context": True, "score_scale": 0.3, "n_layers": 3},
        {"prompt_format": "interleaved", "d_model": 8, "d_head": 3, "normalization_type": "LN"},
    ],
)
def test_it_is_exact_for_linear_attention(options):
    cfg = TransformerConfig(x_dim=3, n_context=5, initializer_range=0.5, dtype="float64", **options)
    for layer in range(cfg.n_layers):
        result = dual_form(HookedTransformer(cfg, seed=1), PROMPTS, layer)
        assert result.relative_error.shape == (cfg.n_heads, 6)
        assert result.relative_error.max() < 1e-12
    assert (result.zero_shot.abs().max() > 0) == (cfg.keys != "context")


def test_of_gradient_descent_it_is_the_weights_that_one_step_learns():
    model = constructions.gradient_descent(x_dim=3, n_context=5, step_size=0.7)
    update = dual_form(model, PROMPTS).update[:, :, 0]
    for p in range(6):
        x, y = PROMPTS.xs[p, :-1].numpy(), PROMPTS.ys[p, :-1].numpy()
        np.testing.assert_allclose(update[:3, 3, p].numpy(), -0.7 * (x.T @ y)[:, 0], atol=1e-12)
        np.testing.assert_allclose(update[:3, :3, p].numpy(), 0, atol=1e-12)


def test_for_softmax_it_says_how_wrong_the_reading_is():
    cfg = TransformerConfig(x_dim=3, n_context=5, attention="softmax", initializer_range=0.5, dtype="float64")
    model = HookedTransformer(cfg, seed=2)
    error = dual_form(model, PROMPTS).relative_error[0]
    tokens = model.encode(PROMPTS)
    _, cache = model.run_with_cache(tokens)
    attn = model.blocks[0].attn
    for p in range(6):
        q, k, v = (cache[f"blocks.0.attn.hook_{name}"][p, :, 0] for name in "qkv")
        scores = k[:-1] @ q[-1] * cfg.score_scale
        linear, softmax = (weights @ v[:-1] @ attn.W_O[0] for weights in (scores, scores.softmax(0)))
        assert error[p].item() == pytest.approx(((linear - softmax).norm() / softmax.norm()).item(), rel=1e-9)
    assert error.min() > 0.1


def test_a_layer_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="layer must be 0 to 0, got 1"):
        dual_form(constructions.gradient_descent(x_dim=3, n_context=5, step_size=0.7), PROMPTS, 1)
