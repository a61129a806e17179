"""`HookedTransformer` with TransformerLens' tools, and its weights, copies, dtypes and hooks."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformer_lens import patching
from transformer_lens.model_protocol import TransformerLensModel, TransformerLensModelWithWeights

from mechicl.models import HookedTransformer, TransformerConfig
from tests.strategies import configs, random_model, random_prompts, random_tokens

SOFTMAX: dict[str, Any] = {
    "x_dim": 3, "y_dim": 1, "n_context": 4, "prompt_format": "interleaved", "n_layers": 3, "n_heads": 2, "d_model": 8,
    "d_mlp": 12, "attention": "softmax", "normalization_type": "LN", "act_fn": "gelu_new",
}  # fmt: skip
LINEAR: dict[str, Any] = {"x_dim": 3, "y_dim": 2, "n_context": 5, "n_layers": 2, "n_heads": 2, "dtype": "float64"}
IDS: dict[str, Any] = {
    "prompt_format": "token_ids", "d_vocab": 7, "n_ctx": 6, "n_layers": 2, "n_heads": 2, "d_model": 8, "d_mlp": 5,
    "attention": "softmax",
}  # fmt: skip


def config(fields: dict[str, Any], **changes: Any) -> TransformerConfig:
    return TransformerConfig(**(fields | changes))


def make(fields: dict[str, Any], **changes: Any) -> HookedTransformer:
    return random_model(config(fields, **changes)).eval()


# ---- names, shapes and tools of TransformerLens ----
@pytest.mark.parametrize("use_attn_result", [False, True])
def test_hook_names_and_shapes(use_attn_result: bool):
    model = make(SOFTMAX, use_attn_result=use_attn_result)
    tokens = random_tokens(model.cfg, batch=5)
    _, cache = model.run_with_cache(tokens)
    stream, one = (5, 9, 8), (5, 9, 1)
    expected = dict.fromkeys(("hook_embed", "hook_pos_embed", "ln_final.hook_normalized", "unembed.hook_in"), stream)
    expected |= {"ln_final.hook_scale": one, "unembed.hook_out": one}
    for layer in range(3):
        shapes = {f"hook_{name}": stream for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")}
        shapes |= {f"attn.hook_{name}": (5, 9, 2, 4) for name in "qkvz"}
        shapes |= {"attn.hook_attn_scores": (5, 2, 9, 9), "attn.hook_pattern": (5, 2, 9, 9)}
        shapes |= {"mlp.hook_pre": (5, 9, 12), "mlp.hook_post": (5, 9, 12)}
        shapes |= {f"{norm}.hook_scale": one for norm in ("ln1", "ln2")}
        shapes |= {f"{norm}.hook_normalized": stream for norm in ("ln1", "ln2")}
        if use_attn_result:
            shapes["attn.hook_result"] = (5, 9, 2, 8)
        expected |= {f"blocks.{layer}.{name}": shape for name, shape in shapes.items()}
    assert {name: tuple(value.shape) for name, value in cache.items()} == expected
    model.set_use_attn_result(not use_attn_result)
    assert ("blocks.1.attn.hook_result" in model.hook_dict) != use_attn_result
    assert set(HookedTransformer(model.cfg).hook_dict) == set(model.hook_dict)


@settings(max_examples=15)
@given(cfg=configs())
def test_every_hook_fires_once(cfg: TransformerConfig):
    model, fired = random_model(cfg), []
    model.run_with_hooks(random_tokens(cfg), fwd_hooks=[(lambda name: True, lambda x, hook: fired.append(hook.name))])
    assert sorted(fired) == sorted(model.hook_dict)


@settings(max_examples=15)
@given(cfg=configs(mlp_location="blocks", token_clip=None, dtype="float64", language=False))
def test_decompositions_sum_to_the_stream(cfg: TransformerConfig):
    # clipping and an MLP on the input are not sums of the parts that TransformerLens knows
    model = random_model(cfg)
    _, cache = model.run_with_cache(random_tokens(cfg))
    assume(cfg.n_layers > 0 and cache["resid_post", -1].abs().max() < 100)
    for layer in range(1, cfg.n_layers + 1):
        stream = cache["resid_post", layer - 1]
        close = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(cache.decompose_resid(layer).sum(0), stream, **close)
        torch.testing.assert_close(cache.stack_head_results(layer, incl_remainder=True).sum(0), stream, **close)
        torch.testing.assert_close(cache.accumulated_resid(layer)[-1], stream, **close)
        for expand_neurons in (True, False):
            parts = cache.get_full_resid_decomposition(layer, expand_neurons=expand_neurons)
            torch.testing.assert_close(parts.sum(0), stream, **close)
        if cfg.block_mlp:
            parts = cache.get_full_resid_decomposition(layer - 1, mlp_input=True)
            torch.testing.assert_close(parts.sum(0), cache["resid_mid", layer - 1], **close)


PARTS = ("stack_head_results", "stack_neuron_results", "get_full_resid_decomposition")
SUMS = ("decompose_resid", "get_full_resid_decomposition")


@pytest.mark.parametrize(("fields", "refused"), [
    ({"norm_location": "both"}, PARTS), ({"norm_location": "after"}, PARTS),
    ({"mlp_location": "input"}, SUMS), ({"token_clip": 1.0}, SUMS),
])  # fmt: skip
def test_sums_that_would_be_wrong_are_refused(fields, refused):
    model = make(SOFTMAX, normalization_type="RMS", d_mlp=8, **fields)
    _, cache = model.run_with_cache(random_tokens(model.cfg))
    for name in refused:
        with pytest.raises(ValueError, match=f"{name}: with {next(iter(fields))}"):
            getattr(cache, name)(1)
    assert torch.equal(cache.accumulated_resid()[-1], cache["resid_post", -1])


@pytest.mark.parametrize("fields", [LINEAR, SOFTMAX])
def test_weights_and_products(fields: dict[str, Any]):
    model = make(fields, attn_bias=False, dtype="float64")
    assert all(isinstance(model, protocol) for protocol in (TransformerLensModel, TransformerLensModelWithWeights))
    cfg, qk, ov = model.cfg, model.QK, model.OV
    _, cache = model.run_with_cache(random_tokens(cfg))
    for layer in range(cfg.n_layers):
        read = cache["resid_pre", layer]
        if cfg.normalization_type:
            norm = model.blocks[layer].ln1
            read = cache[f"blocks.{layer}.ln1.hook_normalized"] * norm.w + norm.b
            assert torch.equal(model.W_in[layer], model.blocks[layer].mlp.W_in)
            assert torch.equal(model.W_out[layer], model.blocks[layer].mlp.W_out)
        for head in range(cfg.n_heads):
            scores = cfg.score_scale * read @ qk[layer, head].AB @ read.mT
            ours = cache["attn_scores", layer][:, head]
            seen = ours.isfinite() & (ours != 0)
            torch.testing.assert_close(scores[seen], ours[seen])
        out = torch.einsum("bhqk,bkm,hmn->bqn", cache["pattern", layer], read, ov[layer].AB)
        torch.testing.assert_close(out, cache["attn_out", layer])


@settings(max_examples=15)
@given(cfg=configs(), data=st.data())
def test_start_and_stop_at_layer(cfg: TransformerConfig, data: st.DataObject):
    model, tokens = random_model(cfg), random_tokens(cfg)
    layer = data.draw(st.integers(0, cfg.n_layers))
    hooks: list[Any] = data.draw(st.sampled_from([[], [("hook_embed", lambda activation, hook: None)]]))
    with model.hooks(fwd_hooks=hooks):
        whole = model(tokens)
        assume(whole.numel() == 0 or whole.detach().abs().max() < 100)
        middle = model(tokens, stop_at_layer=layer)
        assert middle.shape == (*tokens.shape[:2], cfg.d_model)
        # the last layer before the cut may have gone by another route
        torch.testing.assert_close(model(middle, start_at_layer=layer), whole, rtol=1e-3, atol=1e-4)
        assert torch.equal(model(middle, start_at_layer=layer, stop_at_layer=layer), middle)
        query = model(tokens, stop_at_layer=layer, at="query")
        torch.testing.assert_close(query, middle[:, -1:], rtol=1e-3, atol=1e-4)
        if layer < cfg.n_layers:
            assert torch.equal(model(tokens, stop_at_layer=layer - cfg.n_layers), middle)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformer_lens_patching_on_token_ids():
    model: Any = make(IDS)
    clean, corrupted = torch.tensor([[1, 2, 3, 1]]), torch.tensor([[4, 2, 3, 4]])
    _, cache = model.run_with_cache(clean)
    results = patching.get_act_patch_resid_pre(model, corrupted, cache, lambda out: out[0, -1, 2])
    assert results.shape == (2, 4)

    def at_last(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x[:, 3] = cache[hook.name][:, 3]
        return x

    expected = model.run_with_hooks(corrupted, fwd_hooks=[("blocks.1.hook_resid_pre", at_last)])
    torch.testing.assert_close(results[1, 3], expected[0, -1, 2])
    assert not model.has_hooks()


def test_tokens_are_never_written_to():
    def zero(x: Tensor, hook: Any) -> Tensor:
        x.zero_()
        return x

    with torch.no_grad():
        for fields in (LINEAR, LINEAR | {"read_in": "linear", "d_model": 6, "positional_embedding_type": "standard"}):
            model = make(fields)
            tokens = random_tokens(model.cfg)
            stream = model(tokens, stop_at_layer=0)
            before, weights = [tokens.clone(), stream.clone()], copy.deepcopy(model.state_dict())
            for name in model.hook_dict:
                model.run_with_hooks(tokens, fwd_hooks=[(name, zero)])
                model.run_with_hooks(stream, fwd_hooks=[(name, zero)], start_at_layer=0)
            assert torch.equal(tokens, before[0])
            assert torch.equal(stream, before[1])
            for name, weight in model.state_dict().items():
                assert torch.equal(weight, weights[name])


@pytest.mark.parametrize(
    "path", ["", "blocks.1", "blocks.0.attn", "blocks.1.ln2", "ln_final", "blocks.0.mlp.hook_post"]
)
def test_any_torch_hook_forces_the_hooked_route(path: str):
    model = make(SOFTMAX)
    tokens, calls = random_tokens(model.cfg), []
    module = model.get_submodule(path)
    handles = [
        module.register_forward_hook(lambda *args: calls.append("forward")),
        module.register_forward_pre_hook(lambda *args: calls.append("pre")),
    ]
    model(tokens)
    assert calls == ["pre", "forward"]
    for handle in handles:
        handle.remove()
    handle = module.register_full_backward_hook(lambda *args: calls.append("backward"))
    assert model.has_hooks()
    handle.remove()
    assert not model.has_hooks()


# ---- prompts and tokens ----
@settings(max_examples=15)
@given(cfg=configs(formats=("paired", "interleaved"), dtype="float64"))
def test_predict_prefixes_is_predict_on_each_prefix(cfg: TransformerConfig):
    model, prompts = random_model(cfg), random_prompts(cfg)
    predictions = model.predict_prefixes(prompts)
    assume(predictions.detach().abs().max() < 100)
    assert predictions.shape == prompts.ys.shape
    for t in range(prompts.n_context + 1):
        torch.testing.assert_close(predictions[:, t], model.predict(prompts.prefix(t)), rtol=1e-7, atol=1e-8)


def test_initial_weights_start_the_query():
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    model = HookedTransformer(config(LINEAR, n_layers=0), initial_weights=weights)
    prompts = random_prompts(model.cfg)
    torch.testing.assert_close(model.predict(prompts), prompts.query.xs @ weights)


# ---- weights ----
def test_initial_weights_of_parts():
    cfg = config(SOFTMAX, sink="learned", sink_score=0.5)
    model = HookedTransformer(cfg.replace(d_model=64, d_mlp=256))
    for name, weight in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("W_E", "W_U"):
            assert weight.abs().max() <= 2 / weight.shape[0] ** 0.5
            assert weight.std() > 0
        elif leaf.startswith("W_"):
            assert 0.015 < weight.std() < 0.02  # a normal cut at two deviations is narrower than its scale
            assert weight.abs().max() <= 0.04
        else:
            assert (weight == {"w": 1.0, "sink": 0.5}.get(leaf, 0.0)).all(), name
    exact = HookedTransformer(cfg.replace(sink_score=0.1, dtype="float64"))
    assert (exact.blocks[0].attn.sink == 0.1).all()  # not rounded to float32 on the way
    zero = HookedTransformer(cfg.replace(initializer_range=0.0))
    assert (zero.W_Q == 0).all()


def test_config_follows_the_weights():
    model = make(SOFTMAX, positional_embedding_type="sinusoidal", sink="fixed", sink_score=-0.3)
    tokens = random_tokens(model.cfg)
    outputs = model(tokens)
    model.double()
    cfgs = [model.cfg, *(part.cfg for part in model.modules() if hasattr(part, "cfg"))]
    assert {cfg.dtype for cfg in cfgs} == {torch.float64}
    assert model.cfg.replace(dtype="float32") == config(
        SOFTMAX, positional_embedding_type="sinusoidal", sink="fixed", sink_score=-0.3
    )
    double = model(tokens.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), outputs, rtol=1e-4, atol=1e-5)
    assert model.encode(random_prompts(model.cfg).to(torch.float32)).dtype == torch.float64
    assert model.to(torch.bfloat16)(tokens.bfloat16()).isfinite().all()
    assert model.to("meta").cfg.device == "meta"
    assert model(tokens.to("meta")).shape == outputs.shape


def shared(model: HookedTransformer) -> bool:
    """True if the blocks have the first block's parameters, or those of its MLP."""
    first, *rest = (dict((block.mlp if model.cfg.share_mlp else block).named_parameters()) for block in model.blocks)
    return all(other[name] is first[name] for other in rest for name in first)


@pytest.mark.parametrize("sharing", ["recurrent", "share_mlp"])
def test_shared_weights_stay_shared(sharing: str):
    fields: dict[str, Any] = SOFTMAX | {"sink": "learned", sharing: True}
    model = make(fields)
    tokens = random_tokens(model.cfg)
    outputs = model(tokens)
    assigned = HookedTransformer(config(fields), seed=5)
    assigned.load_state_dict({name: w.clone() for name, w in model.state_dict().items()}, assign=True)
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), assigned):
        assert shared(again)
        assert torch.equal(again(tokens), outputs)
    double = copy.deepcopy(model).double()
    assert shared(double)
    torch.testing.assert_close(double(tokens.double()).float(), outputs, rtol=1e-4, atol=1e-5)
    assert shared(copy.deepcopy(model).to("meta"))
    assert torch.equal(model.W_in[0], model.W_in[2])
    assert not shared(make(SOFTMAX))
