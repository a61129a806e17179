"""Calls and configs that are refused, and the name that the message has to contain."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import mechicl
from mechicl.analysis import attribute, composition_scores, corrupt, fit_readouts, patch
from mechicl.analysis.heads import score_heads
from mechicl.analysis.interventions import patch_paths
from mechicl.analysis.layers import Lens
from mechicl.models import (
    HookedLSTM,
    HookedTransformer,
    HookedTransformerConfig,
    LSTMConfig,
    Reading,
    TransformerConfig,
)
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edge_graph import EdgeGraph
from mechicl.models.opening.edits import check_edits
from mechicl.models.wrapping.wrapped import refuse_wrapped
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.models.modules import Encoder, KeywordsOnly, NanoGPT, mlp, seeded
from tests.models.transformer.test_lens import word_tokenizer

PAIRED: dict[str, Any] = {"x_dim": 3, "y_dim": 2, "n_context": 4}
INTERLEAVED: dict[str, Any] = PAIRED | {"prompt_format": "interleaved", "d_model": 8}
DESCENT: dict[str, Any] = PAIRED | {"attention_weights": "gradient_descent"}
MLPS: dict[str, Any] = INTERLEAVED | {"d_mlp": 4, "share_mlp": True}
IDS: dict[str, Any] = {"prompt_format": "token_ids", "d_vocab": 7, "n_ctx": 6, "d_model": 8}
LENS: dict[str, Any] = {"n_layers": 2, "d_model": 12, "n_ctx": 8, "d_head": 4, "d_vocab": 7, "act_fn": "relu"}

CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"x_dim": 4}, "needs n_context"),
    (PAIRED | {"d_vocab": 5}, "d_vocab"),
    (PAIRED | {"n_ctx": 6}, "n_ctx"),
    ({"prompt_format": "token_ids", "d_vocab": 5, "d_model": 4}, "n_ctx"),
    (IDS | {"x_dim": 3}, "x_dim"),
    (IDS | {"read_in": "identity"}, "read-in"),
    (MLPS | {"d_mlp": None}, "share_mlp"),
    (MLPS | {"recurrent": True}, "share_mlp"),
    (IDS | {"positional_embedding_type": "one_hot"}, "positional_embedding_type"),
    (PAIRED | {"prompt_format": "interleaved"}, "d_model"),
    (PAIRED | {"attention": "softmax", "n_heads": 2}, "n_heads=2"),
    (PAIRED | {"sink": "fixed"}, "sink"),
    (PAIRED | {"attention": "softmax", "normalize_by_context": True}, "normalised already"),
    (PAIRED | {"final_norm": True}, "final_norm"),
    (PAIRED | {"skip_first_norm": True}, "skip_first_norm"),
    (PAIRED | {"mlp_location": "input"}, "mlp_location"),
    (PAIRED | {"d_model": 4, "read_in": "identity"}, "d_model >= 5"),
    (PAIRED | {"n_layers": 3, "attention": "softmax,linear"}, "2 layers, not 3"),
    (PAIRED | {"n_layers": 2, "attention": "softmax,lineer"}, "attention='lineer'"),
    (PAIRED | {"n_layers": 2, "attention": "softmax,linear", "recurrent": True}, "recurrent"),
    *((DESCENT | change, "attention_weights") for change in (
        {"n_heads": 2}, {"attention": "softmax"}, {"attn_bias": True}, {"normalization_type": "LN"}, {"d_head": 3},
        {"read_out": "linear"},
    )),
    (PAIRED | {"d_model": 1, "read_in": "linear", "read_out": "identity"}, "y_dim=2"),
    (PAIRED | {"d_pos": 3}, "d_pos"),
    (PAIRED | {"positional_embedding_type": "sinusoidal", "d_pos": 0}, "d_pos >= 1"),
    (PAIRED | {"n_layers": -1}, "n_layers"),
    *((PAIRED | {name: 0}, name) for name in ("n_heads", "d_mlp", "d_head", "x_dim", "y_dim")),
    *((PAIRED | {name: value}, name) for name in ("damping", "score_scale", "sink_score") for value in
      (torch.nan, torch.inf, 10**400, "1")),
    (INTERLEAVED | {"momentum": 1.0}, "momentum"),
    (PAIRED | {"momentum": 0.5}, "keys='causal'"),
    *((PAIRED | {name: -0.1}, name) for name in ("eps", "initializer_range", "rotary_base")),
    (PAIRED | {"act_fn": "swish"}, "act_fn"),
    (PAIRED | {"dtype": "int8"}, "dtype"),
    (PAIRED | {"device": "abacus"}, "device"),
    (PAIRED | {"keys": ["causal"]}, "keys"),
    *((IDS | {"keys": "context", "positional_embedding_type": kind}, f"'{kind}' needs keys='causal' or 'full'")
      for kind in ("alibi", "shortformer")),
    (IDS | {"n_heads": 4, "n_key_value_heads": 2, "use_attn_in": True}, "use_attn_in.*n_key_value_heads=2"),
    (IDS | {"n_heads": 4, "n_key_value_heads": 2, "use_qk_norm": True, "qk_norm_over": "all",
            "ungroup_grouped_query_attention": True}, "no ungroup_grouped_query_attention"),
    (PAIRED | {"colour": "red"}, "colour"),
    *((PAIRED | fields, named) for fields, named in (
        ({"attention": "delta", "keys": "full"}, "keys must be 'causal'"),
        ({"attention": "mesa", "dtype": "float16"}, "need dtype 'float32' or 'float64', got 'float16'"),
        ({"attention": "mesa", "gate": "key"}, "one gate a head"),
        ({"attention": "mamba2", "gate": "head"}, "gate='head' is for attention"),
        ({"attention": "linear", "gate": "head"}, "gate='head' is for attention"),
        ({"attention": "linear", "use_attn_state": True}, "normalize_keys, conv_width and use_attn_state are for"),
        ({"attention": "softmax", "conv_width": 2}, "normalize_keys, conv_width and use_attn_state are for"),
        ({"attention": "delta", "conv_width": -1}, "conv_width"),
        ({"attention": "delta", "keys": "causal", "momentum": 0.5}, "no pattern"),
    )),
]  # fmt: skip
LENS_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"n_key_value_heads": 5}, "n_key_value_heads=5"),
    ({"positional_embedding_type": "relative_positional_bias"}, "TransformerBridge"),
    ({"act_fn": "solu_ln", "gated_mlp": True}, "solu_ln"),
    ({"num_experts": 4}, "num_experts=4"),
    ({"use_local_attn": True}, "window_size"),
    ({"use_local_attn": True, "window_size": 2, "attn_types": ["local"]}, "attn_types"),
    ({"d_head": 5}, "n_heads"),
    ({"attn_scale": 2.5, "score_scale": 0.5}, "attn_scale=2.5"),
    ({"attention_dir": "causal", "keys": "full"}, "attention_dir"),
    ({"d_modell": 3}, "d_modell"),
]


@pytest.mark.parametrize(("fields", "named"), CONFIGS, ids=str)
def test_configs(fields: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        TransformerConfig.from_dict(fields)


@pytest.mark.parametrize(("fields", "named"), LENS_CONFIGS, ids=str)
def test_configs_in_transformer_lens_names(fields: dict[str, Any], named: str):
    with pytest.raises((ValueError, TypeError), match=named):
        HookedTransformerConfig(**(LENS | fields))


@pytest.mark.parametrize(
    ("change", "named"), [({"x_dim": 0}, "x_dim"), ({"dtype": "int8"}, "dtype"), ({"architecture": "gru"}, "'gru'")]
)
def test_lstm_configs(change: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        LSTMConfig.from_dict({"x_dim": 3, "n_context": 4, "d_model": 5} | change)


# ---- calls ----
TASK = LinearRegression(x_dim=3, n_context=4)
PROMPTS = TASK.sample(8, seed=0)
ONE_DIM = Prompts(torch.zeros(2, 3, 2), torch.zeros(2, 3, 1))


@cache
def gpt() -> Any:
    return HookedTransformer(TransformerConfig(
        x_dim=3, n_context=4, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, attention="softmax"
    ))  # fmt: skip


@cache
def linear(**fields: Any) -> Any:
    return HookedTransformer(TransformerConfig(x_dim=3, n_context=4, n_layers=2, **fields))


@cache
def words() -> Any:
    model = HookedTransformer(HookedTransformerConfig(**LENS))
    model.set_tokenizer(word_tokenizer(bos_token="<bos>", eos_token="<eos>"))
    return model


@cache
def ids() -> Any:
    return HookedTransformer(HookedTransformerConfig(**LENS))


@cache
def lstm() -> Any:
    return HookedLSTM(LSTMConfig(x_dim=3, n_context=4, n_layers=2, d_model=7)).eval()


def wrapping(**kwargs: Any) -> Any:
    return mechicl.wrap(seeded(NanoGPT), **{"encode": "interleaved", **kwargs})


def layers(**kwargs: Any) -> Any:
    return wrapping(layers="blocks.{}", **kwargs)


def attention(**parts: Any) -> Any:
    return layers(attention=parts)


def unused() -> Any:
    """Torch's fused layers, in which the output projection of the attention does not run as a module."""
    heads = {"z": "blocks.{}.self_attn.out_proj", "n_heads": 4}
    return mechicl.wrap(seeded(Encoder), encode="interleaved", layers="blocks.{}", attention=heads)


def read(model: Any) -> None:
    model.predict(PROMPTS)
    model.run_with_cache(PROMPTS)


def patched(model: Any, component: str) -> None:
    patch(model, PROMPTS, corrupt(PROMPTS, "labels"), component, progress=False)


def enter(context: Any) -> None:
    with context:
        pass


class Twice(nn.Module):
    def forward(self, x):
        for _ in range(2):
            x = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return x


TOKENS = torch.tensor([[1, 2, 3]])
CALLS: list[tuple[Callable[[], object], str]] = [
    # wrap: names
    (lambda: wrapping(layers="block.{}"), r"no 'block.0'; it has \['blocks.{}'"),
    (lambda: wrapping(layers=["blocks.0", "blocks.7"]), "'blocks.7'"),
    (lambda: layers(attention=["blocks.0.attn"]), "1 sub-modules, and there are 2 layers"),
    (lambda: wrapping(attention="blocks.{}.attn"), "attention="),
    (lambda: attention(z="blocks.{}.attn.proj"), "'n_heads'"),
    (lambda: attention(heads="blocks.{}.attn"), "'heads'"),
    (lambda: attention(n_heads=4), "names no sub-module"),
    (lambda: attention(q="a", qkv="b", n_heads=4), "'q' and 'qkv'"),
    (lambda: attention(out="blocks.{}.attn", split=len), "'split'"),
    (lambda: wrapping(encode="pairs"), "encode must be .* 'paired', 'interleaved' or .*, got 'pairs'"),
    (lambda: mechicl.wrap(lambda tokens: tokens, encode="paired"), "AlgorithmLearner"),
    (lambda: mechicl.wrap(gpt(), encode="paired"), "hooks already"),
    (lambda: mechicl.wrap(torch.jit.ScriptModule(), encode="paired", layers=["0"]), "torch.jit"),
    (lambda: mechicl.wrap(seeded(KeywordsOnly), encode="interleaved"), "call="),
    # wrap: when prompts are read
    (lambda: read(wrapping(encode=lambda prompts: prompts.xs[0])), "encode returned the shape"),
    (lambda: read(wrapping(encode=lambda p: torch.cat([p.xs, p.ys], -1)[..., 1:])), "sees the query's target"),
    (lambda: read(wrapping(encode=lambda prompts: (prompts.xs, prompts.ys))), "encode returned tuple"),
    (lambda: read(wrapping(encode=lambda prompts: prompts.xs[..., :2])), "NanoGPT cannot read"),
    (lambda: read(wrapping(decode=lambda outputs: None)), "decode returned NoneType"),
    (lambda: read(wrapping(decode=lambda outputs: outputs[:, -1, 0])), "decode returned the shape"),
    (lambda: read(layers(unembed="head")), "unembed="),
    (lambda: read(layers(encode=Reading("interleaved", batch_first=False))), "batch_first=False"),
    (lambda: read(attention(z="blocks.{}.attn.proj", n_heads=5)), "n_heads=5"),
    (lambda: read(attention(qkv="blocks.{}.attn.qkv", n_heads=5)), "multiple of 15"),
    (lambda: read(attention(pattern="blocks.{}.mlp")), r"\[prompt head query key\]"),
    (lambda: read(attention(fused="blocks.{}.attn", n_heads=4)), "'scores' and 'pattern'"),
    (lambda: read(mechicl.wrap(nn.Sequential(nn.Linear(3, 4), Twice(), nn.Linear(4, 1)), encode="interleaved",
                               layers=["1"], attention={"fused": ["1"], "n_heads": 1})), "2 times in a run"),
    (lambda: read(mechicl.wrap(seeded(Encoder), encode="interleaved", layers="blocks.{}",
                               attention={"fused": "blocks.{}.self_attn", "n_heads": 2})), "4 heads"),
    (lambda: wrapping()(PROMPTS, at="layer"), "at='layer'"),
    (lambda: refuse_wrapped([wrapping()], "the dual form is made of W_O"), "NanoGPT is a wrapped module"),
    # wrap: parts that were not declared
    (lambda: patched(layers(), "z"), r"declare it with wrap.*attention=\{'z'"),
    (lambda: patched(layers(), "attn_out"), "declare it with wrap.*attention="),
    (lambda: patched(layers(), "pattern"), "or 'fused'"),
    (lambda: patched(layers(), "result"), "a wrapped module does not have it"),
    (lambda: Lens(layers()).trajectory(PROMPTS), "unembed="),
    (lambda: patch_paths(layers(), PROMPTS, corrupt(PROMPTS, "labels")), "edges are cut in a HookedTransformer"),
    (lambda: score_heads(layers()), r"attention="),
    (lambda: composition_scores(layers()), "composition|W_Q|weights"),
    *((lambda use=use: use(unused(), PROMPTS, corrupt(PROMPTS, "labels"), "z"), "named as 'z', does not run: name")
      for use in (patch, attribute)),
    (lambda: fit_readouts(mechicl.wrap(seeded(nn.Sequential, nn.Linear(4, 6), nn.Linear(6, 1)), encode="paired",
                                       layers=["0", "1"]), PROMPTS, progress=False), r"\[4, 6, 1\]"),
    *((lambda use=use: use(mechicl.wrap(seeded(mlp, 20), encode="paired")), "layers=") for use in (
        lambda model: patched(model, "z"), ModelAdapter, lambda model: fit_readouts(model, PROMPTS, progress=False))),
    # prompts and tokens
    (lambda: gpt().predict(ONE_DIM), "x_dim=3, y_dim=1; the prompts have x_dim=2, y_dim=1"),
    (lambda: gpt()(torch.zeros(2, 9, 4)), r"\[batch pos 3\]"),
    (lambda: gpt().predict(LinearRegression(x_dim=3, n_context=5).sample(2, seed=0)), "11 positions"),
    *((lambda name=name, layer=layer: gpt()(gpt().encode(PROMPTS), **{name: layer}), f"{name}={layer}")
      for name in ("start_at_layer", "stop_at_layer") for layer in (3, -3)),
    (lambda: gpt()(torch.zeros(1, 2, 4), start_at_layer=0), r"\[batch pos 8\]"),
    (lambda: gpt()(PROMPTS, start_at_layer=1.5), "start_at_layer"),
    (lambda: gpt().run_with_cache(gpt().encode(PROMPTS).double()), "dtype"),
    (lambda: ids().embed_tokens(torch.zeros(2, 6)), r"ids \[batch pos\]"),
    (lambda: ids().embed_tokens([[1]]), r"tokens must be ids \[batch pos\] .*, got the list \[\[1\]\]"),
    (lambda: lstm().embed_tokens([[1]]), r"tokens must be \[batch pos 3\], got the list \[\[1\]\]"),
    (lambda: lstm().read_out(None), r"residual must be \[batch row 7\], got None"),
    (lambda: ids().load_state_dict([3]), r"state_dict must be a dictionary of tensors, got the list \[3\]"),
    (lambda: ids().tokens_to_residual_directions(7), "tokens must be below 7, got 7"),
    (lambda: lstm().count_points(0.5), "prompts must be Prompts, got 0.5"),
    (lambda: HookedLSTM(3), "cfg must be LSTMConfig, got 3"),  # type: ignore[arg-type]
    (lambda: wrapping()(3), "tokens must be a tensor or Prompts, got 3"),
    (lambda: HookedTransformer(ids().cfg, default_padding_side={}), "default_padding_side must be 'left', 'right' or"),  # type: ignore
    (lambda: ids().embed_tokens(torch.zeros(1, 2, dtype=torch.int64, device="meta")), "meta"),
    *((lambda bad=bad: ids()(torch.full((1, 2), bad)), f"got {bad} to {bad}") for bad in (7, -1)),
    (lambda: ids()(torch.zeros(1, 9, dtype=torch.long)), "9 positions"),
    *((lambda use=use: use(PROMPTS), "takes ids") for use in
      (lambda p: ids().predict(p), lambda p: ids().encode(p), lambda p: ids()(p), lambda p: ids().predict_prefixes(p))),
    (lambda: HookedTransformer(linear().cfg, initial_weights=torch.zeros(1, 3)), "initial_weights"),
    (lambda: HookedTransformer(gpt().cfg, initial_weights=torch.zeros(3, 1)), "initial_weights"),
    *((lambda model=model, bad=bad: model().query_streams(PROMPTS, bad), "queries") for model in (gpt, linear, lstm)
      for bad in (torch.zeros(1, 5, 2, 3), torch.zeros(8, 4, 2, 3), torch.zeros(8, 5, 2, 2), torch.zeros(8, 5, 3))),
    (lambda: gpt().query_streams(PROMPTS, torch.zeros(8, 5, 2, 3), at="query"), r"\[8, 1, any, 3\]"),
    (lambda: gpt().query_streams(PROMPTS, torch.zeros(8, 5, 2, 3), at="positions"), "at='positions'"),
    # losses
    (lambda: gpt()(gpt().encode(PROMPTS), return_type="loss"), "loss of the Prompts"),
    (lambda: gpt()(PROMPTS, return_type="predictions"), "return_type='predictions'"),
    (lambda: gpt()(PROMPTS, return_type="loss", at="query"), "at="),
    (lambda: ids()(ids()(TOKENS, stop_at_layer=1), start_at_layer=1, return_type="loss"), "tokens="),
    *((lambda bad=bad: ids().loss_fn(torch.zeros(1, 2, 7), torch.tensor([[1, bad]])), "ids from") for bad in (-1, 7)),
    (lambda: ids()(TOKENS, attention_mask=torch.tensor([[0, 1]])), "attention_mask must be"),
    # hooks
    (lambda: gpt().run_with_hooks(PROMPTS, fwd_hooks=[("no_such_hook", print)]), "no_such_hook"),
    (lambda: enter(gpt().hooks(fwd_hooks=[("blocks.9.hook_resid_post", print)])), r"blocks\.9"),
    (lambda: enter(gpt().hooks(fwd_hooks=[("blocks.0", print)])), "part of the model"),
    (lambda: gpt().run_with_cache(PROMPTS, names_filter=["blocks.0.attn.hook_zz"]), "mean 'blocks.0.attn.hook_z'"),
    (lambda: gpt().run_with_cache(PROMPTS, remove_batch_dim=True), "batch size"),
    (lambda: ModelAdapter(gpt()).record(gpt().encode(PROMPTS), ["blocks.0.attn.hook_zz"], 2), "did you mean"),
    (lambda: check_edits(ModelAdapter(lstm()), torch.zeros(1), ["blocks.0.hook_nothing"]), "hook_nothing"),
    (lambda: EdgeGraph(ModelAdapter(lstm()), TOKENS, torch.zeros(1, 1, 5, 8)), "HookedLSTM"),
    (lambda: EdgeGraph(ModelAdapter(linear(token_clip=1.0)), TOKENS, torch.zeros(1, 1, 5, 8)), "clips its stream"),
    (lambda: ids().run_with_hooks(TOKENS, fwd_hooks=[(lambda name: "nowhere" in name, print)]), "selects no hook"),
    # text
    *((lambda use=use: use(), "no tokenizer") for use in
      (lambda: ids()("the cat"), lambda: ids().to_string([1]), lambda: ids().to_single_token("cat"))),
    (lambda: ids().set_tokenizer("gpt2"), "tokenizer"),
    (lambda: linear().set_tokenizer(word_tokenizer()), "reads points"),
    (lambda: words().to_tokens("the", padding_side="middle"), "padding_side='middle'"),
    (lambda: words().sample_datapoint(), r"set model\.dataset"),
    (lambda: words().to_str_tokens(torch.zeros(2, 2, dtype=torch.long)), "one prompt"),
    (lambda: words().to_single_token(8), "d_vocab=7"),
    (lambda: linear().to_single_token(1), "not a token id"),
    (lambda: words().get_token_position("sat", "the cat"), "'sat' does not occur"),
    (lambda: ids().generate(TOKENS, 2), "eos_token_id"),
    (lambda: words().generate("the", 2, return_type="embeds"), "return_type='embeds'"),
    (lambda: ids().cfg.no_such, "no_such"),
    (lambda: HookedTransformer(HookedTransformerConfig(**LENS, positional_embedding_type="rotary")).W_pos, "pos"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_calls(number: int):
    call, named = CALLS[number]
    with pytest.raises((ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError), match=named):
        call()
