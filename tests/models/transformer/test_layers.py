"""The hooked route against a second implementation, feature by feature and over random configs."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechicl import algorithms, constructions
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.transformer.attention import Attention, elementwise_attention, with_momentum
from mechicl.models.transformer.config_rules import ELEMENTWISE
from mechicl.models.transformer.layers import MLP, Block
from tests.models import reference
from tests.strategies import configs, random_model, random_prompts, random_tokens

PAIRED: dict[str, Any] = {"x_dim": 3, "y_dim": 2, "n_context": 4, "n_layers": 2, "n_heads": 2, "dtype": "float64"}
INTERLEAVED = PAIRED | {"prompt_format": "interleaved", "d_model": 10, "d_head": 3, "attention": "softmax"}
NORMED = INTERLEAVED | {"normalization_type": "LN"}
DESCENT = PAIRED | {"n_heads": 1, "attention_weights": "gradient_descent", "read_out": "identity"}

FEATURES: dict[str, dict[str, Any]] = {
    "no context": PAIRED | {"n_context": 0},
    "no layers": PAIRED | {"n_layers": 0},
    "weight sharing": NORMED | {"recurrent": True, "n_layers": 3, "d_mlp": 5},
    "weight sharing, first norm skipped": NORMED | {"recurrent": True, "n_layers": 3, "skip_first_norm": True},
    "leaky_relu slope": PAIRED | {"attention": "leaky_relu", "attention_slope": 0.3},
    "keys causal, exp": PAIRED | {"keys": "causal", "attention": "exp", "n_layers": 1},
    "sink learned": INTERLEAVED | {"sink": "learned", "sink_score": 0.7},
    "sink, no context": PAIRED | {"attention": "softmax", "sink": "fixed", "n_context": 0, "d_head": 3},
    "final_norm, identity read-out": PAIRED | {"normalization_type": "LN", "final_norm": True},
    "mlp on input": PAIRED | {"d_mlp": 7, "mlp_location": "input"},
    "positions one_hot, identity": PAIRED | {"positional_embedding_type": "one_hot", "read_in": "identity"},
    "positions sinusoidal, identity": PAIRED
    | {"positional_embedding_type": "sinusoidal", "read_in": "identity", "d_pos": 5},
    "positions standard, identity": PAIRED | {"positional_embedding_type": "standard"},
    "interleaved, identity": PAIRED | {"prompt_format": "interleaved", "read_in": "identity", "read_out": "identity"},
    "1/n": PAIRED | {"normalize_by_context": True},
    "1/n, no context": PAIRED | {"normalize_by_context": True, "n_context": 0},
    "biases": PAIRED | {"attn_bias": True, "read_in": "linear", "read_bias": True},
    "softmax, then linear": PAIRED | {"attention": "softmax,linear", "d_head": 3},
    "linear, then softmax": INTERLEAVED | {"attention": "linear,softmax"},
    "mixed, sink, 1/n": NORMED
    | {"attention": "relu,softmax,leaky_relu", "n_layers": 3, "sink": "learned", "normalize_by_context": True}
    | {"sink_score": 0.7, "attention_slope": 0.4, "d_mlp": 5},
    "mixed, fixed sink": PAIRED | {"attention": "exp,softmax", "sink": "fixed", "sink_score": -0.4},
    "momentum over outputs": INTERLEAVED | {"momentum": 0.7, "sink": "learned", "sink_score": 0.7},
    "momentum over values": INTERLEAVED | {"momentum": 0.7, "momentum_over": "values"},
    "momentum over values, 1/n": PAIRED
    | {"keys": "causal", "momentum": 0.99, "momentum_over": "values", "normalize_by_context": True, "attn_bias": True},
    "momentum over values, mixed": NORMED
    | {"attention": "relu,softmax", "momentum": 0.5, "momentum_over": "values", "d_mlp": 5},
    "momentum, descent": DESCENT | {"keys": "causal", "momentum": 0.5},
    "momentum over values, descent": DESCENT | {"keys": "causal", "momentum": 0.5, "momentum_over": "values"},
    "descent": DESCENT,
    "descent, 1/n, causal": DESCENT | {"normalize_by_context": True, "keys": "causal", "score_scale": 0.3},
    "descent, looped": DESCENT | {"recurrent": True, "n_layers": 3, "damping": 0.7},
    "descent, interleaved": DESCENT | {"prompt_format": "interleaved", "read_in": "identity", "token_clip": 0.9},
    "descent, wide": DESCENT | {"read_in": "linear", "d_model": 8, "d_mlp": 6, "mlp_location": "input"},
    "descent, LN": DESCENT | {"normalization_type": "LN", "attn_bias": False, "d_mlp": 6},
    "descent, positions": DESCENT | {"positional_embedding_type": "sinusoidal", "read_in": "identity", "d_pos": 3},
    "linear in, identity out": PAIRED | {"d_model": 7, "read_in": "linear", "read_out": "identity"},
    "linear in, identity out, interleaved": INTERLEAVED | {"read_out": "identity", "d_mlp": 5},
    "linear in, identity out, norms": NORMED | {"read_out": "identity", "final_norm": True},
}
FEATURES |= {f"attention {name}": PAIRED | {"attention": name} for name in ("softmax", "linear", *ELEMENTWISE)}
FEATURES |= {f"act_fn {name}": PAIRED | {"d_mlp": 4, "act_fn": name} for name in ELEMENTWISE}
FEATURES["attention softmax"] |= {"d_head": 4}
FEATURES["biases"] |= {"d_model": 6}


def compare(model: HookedTransformer, tokens: Tensor, tolerance: float = 1e-10) -> None:
    """Outputs, streams and patterns of the hooked route and of the second implementation."""
    cfg = model.cfg
    outputs, cache = model.run_with_cache(tokens)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    torch.testing.assert_close(cache["unembed.hook_in"] @ model.W_U + model.b_U, outputs)  # the read-out as a matrix
    for prompt in range(len(tokens)):
        expected, streams, patterns = reference.forward(cfg, weights, tokens[prompt].numpy())
        scale = max(1.0, *(float(np.abs(stream).max()) for stream in streams))
        actual = {"outputs": outputs[prompt], "embedded": model(tokens, stop_at_layer=0)[prompt]}
        expectations = {"outputs": expected, "embedded": streams[0]}
        for layer in range(cfg.n_layers):
            actual |= {f"stream {layer}": cache["resid_post", layer][prompt]}
            actual |= {f"pattern {layer}": cache["pattern", layer][prompt]}
            expectations |= {f"stream {layer}": streams[layer + 1], f"pattern {layer}": patterns[layer]}
        for name, value in expectations.items():
            np.testing.assert_allclose(
                actual[name].detach().numpy(), value, rtol=tolerance, atol=tolerance * scale, err_msg=name
            )


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str):
    cfg = TransformerConfig(**FEATURES[feature])
    compare(random_model(cfg, scale=0.3), random_tokens(cfg))


@settings(max_examples=60)
@given(cfg=configs(dtype="float64", language=False), seed=st.integers(0, 1000))
def test_random_configs(cfg: TransformerConfig, seed: int):
    model, tokens = random_model(cfg, seed), random_tokens(cfg, seed=seed, batch=1)
    assume(model(tokens, stop_at_layer=cfg.n_layers).abs().max().item() < 100)
    # a narrow layer norm multiplies rounding by up to 1 / sqrt(eps) = 316, twice a layer
    compare(model, tokens, tolerance=1e-10 if cfg.normalization_type is None else 1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_momentum_near_1_in_half_precision(dtype: torch.dtype):
    cfg = TransformerConfig(x_dim=1, n_context=299, keys="causal", momentum=0.99, momentum_over="values")
    z, v = torch.zeros(1, 300, 1, 1, dtype=dtype), torch.ones(1, 300, 1, 1, dtype=dtype)
    last = with_momentum(cfg, z, v)[0, -1, 0, 0]
    assert last.item() == pytest.approx(sum(0.99**k for k in range(1, 300)), rel=0.01)


# ---- gradient descent with a learned step size ----
def descending(step_size: float, **fields: Any) -> HookedTransformer:
    base: dict[str, Any] = DESCENT | {"n_layers": 1}
    model = HookedTransformer(TransformerConfig(**(base | fields)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("step_size"):
                parameter.fill_(step_size)
    return model


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("recurrent", [False, True])
def test_the_layers_are_gradient_descent(steps: int, recurrent: bool):
    model = descending(0.15, n_layers=steps, recurrent=recurrent)
    prompts = random_prompts(model.cfg, batch=50)
    with torch.no_grad():
        predictions, prefixes = model.predict(prompts), model.predict_prefixes(prompts)
    algorithm = algorithms.gradient_descent(prompts, steps, step_size=0.15).predictions[0]
    construction = constructions.gradient_descent(x_dim=3, y_dim=2, n_context=4, step_size=0.15, steps=steps)
    torch.testing.assert_close(predictions, algorithm[:, -1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(prefixes, algorithm, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(predictions, construction.predict(prompts), rtol=1e-12, atol=1e-12)
    assert predictions.abs().max() > 0.1


# ---- parts ----
def test_elementwise_attention_uses_registered_functions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ELEMENTWISE, "cube", lambda x: x**3)
    cfg = TransformerConfig(x_dim=1, n_context=2, attention="cube", d_mlp=2, act_fn="cube")
    scores = torch.linspace(-1, 1, 5)
    assert torch.equal(elementwise_attention(cfg, scores), scores**3)
    model = random_model(cfg)
    tokens = random_tokens(cfg)
    torch.testing.assert_close(model(tokens), model.run_with_cache(tokens)[0])


def test_a_hidden_key_that_overflows_changes_nothing():
    cfg = TransformerConfig(
        x_dim=2, n_context=2, keys="causal", attention="exp", dtype="float64", score_scale=1.0, d_head=3
    )
    model = random_model(cfg)
    attn = cast(Block, model.blocks[0]).attn
    with torch.no_grad():
        for weight, read in ((attn.W_Q, 0), (attn.W_K, 1)):
            weight.zero_()
            weight[0, read, 0] = 1
    # only the first query's score with the last key, e^1000, overflows
    tokens = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1000.0, 0.0]]], dtype=torch.float64)
    watch: list[Any] = [("hook_embed", lambda activation, hook: None)]
    for hooks in ([], watch):
        tokens = tokens.detach().requires_grad_()
        with model.hooks(fwd_hooks=hooks):
            first = model(tokens, stop_at_layer=1)[:, :2]
        assert first.isfinite().all()
        (grad,) = torch.autograd.grad(first.sum(), tokens)
        assert grad.isfinite().all()
        assert (grad[:, 2] == 0).all()


def test_softmax_gives_no_weight_where_no_key_is_visible():
    cfg = TransformerConfig(x_dim=1, n_context=2, attention="softmax", d_head=2)
    attention = Attention(cfg)
    scores = torch.tensor([[[[-torch.inf, -torch.inf], [-torch.inf, 1.0]]]], requires_grad=True)
    pattern = attention.softmax(scores)
    assert torch.equal(pattern, torch.tensor([[[[0.0, 0.0], [0.0, 1.0]]]]))
    pattern.sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_mlp_activation_may_be_patched_in_place_without_changing_what_came_before():
    mlp = MLP(TransformerConfig(x_dim=2, n_context=1, d_mlp=4, act_fn="identity"))
    seen = {}
    mlp.hook_pre.add_hook(lambda tensor, *, hook: seen.update(pre=tensor))
    mlp.hook_post.add_hook(lambda tensor, *, hook: tensor.fill_(7.0))
    with torch.no_grad():
        mlp(torch.zeros(1, 2, 3))
    assert (seen["pre"] == 0).all()
