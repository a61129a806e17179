"""The quick routes against the hooked one; layer_streams and query_streams against plain passes with hooks."""

import copy
import functools
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, PromptedModel, TransformerConfig
from mechicl.models.transformer import fast
from mechicl.models.transformer.attention import Attention, key_mask
from mechicl.models.transformer.layers import Block
from mechicl.prompts import At, Prompts
from tests.strategies import configs, random_model, random_prompts, random_tokens

WATCH: list[Any] = [("hook_embed", lambda activation, hook: None)]


def run(model: HookedTransformer, tokens: Tensor, rows: At, *, hooked: bool) -> Tensor:
    """Outputs by one route or the other."""
    with model.hooks(fwd_hooks=WATCH if hooked else []):
        assert model.has_hooks() == hooked
        return model(tokens, at=rows)


def gradients(model: HookedTransformer, tokens: Tensor, rows: At, *, hooked: bool) -> dict[str, Tensor]:
    """Derivatives of a fixed mixture of the outputs, by all weights and by the tokens."""
    inputs: dict[str, Tensor] = dict(model.named_parameters())
    if tokens.is_floating_point():
        tokens = tokens.detach().requires_grad_()
        inputs["tokens"] = tokens
    outputs = run(model, tokens, rows, hooked=hooked)
    mixture = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).reshape(outputs.shape)
    grads = torch.autograd.grad((outputs * mixture).sum(), list(inputs.values()), allow_unused=True)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(inputs.items(), grads, strict=True)
    }


def largest(tensors: list[Tensor]) -> float:
    return max((tensor.detach().abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def check_routes(
    model: HookedTransformer, tokens: Tensor, rows: At, tolerance: float, quick_tokens: Tensor | None = None
) -> None:
    """Outputs and gradients of both routes; the quick one may get the tokens in another memory layout."""
    quick_tokens = tokens if quick_tokens is None else quick_tokens
    quick, expected = run(model, quick_tokens, rows, hooked=False), run(model, tokens, rows, hooked=True)
    torch.testing.assert_close(quick, expected, rtol=tolerance, atol=tolerance)
    hooked_grads = gradients(model, tokens, rows, hooked=True)
    for name, grad in gradients(model, quick_tokens, rows, hooked=False).items():
        scale = 1 + largest([hooked_grads[name]])
        torch.testing.assert_close(grad, hooked_grads[name], rtol=10 * tolerance, atol=tolerance * scale, msg=name)


DESCENT: dict[str, Any] = {"attention_weights": "gradient_descent", "read_out": "identity", "n_layers": 2}
FIELDS: list[dict[str, Any]] = [
    {"attention": "softmax,linear", "n_layers": 2, "read_in": "linear", "read_out": "identity"},
    DESCENT | {"read_in": "linear"},
    DESCENT | {"read_in": "linear", "recurrent": True, "normalize_by_context": True, "token_clip": 0.9},
    DESCENT | {"read_in": "identity", "d_mlp": 4},
    DESCENT | {"read_in": "identity", "n_layers": 1, "score_scale": 0.3},
    # an identity read-out of which other dimensions, or a bound, are part
    *({"read_in": "linear", "read_out": "identity", "normalization_type": kind, "norm_location": location}
      for kind, location in (("RMSPre", "after"), ("LN", "both"))),
    {"read_in": "linear", "read_out": "identity", "output_logits_soft_cap": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("keys", ["causal", "context", "full"])
@pytest.mark.parametrize("prompt_format", ["paired", "interleaved"])
@pytest.mark.parametrize("fields", FIELDS)
def test_routes_agree_for_layers_of_their_own_kind(fields: dict[str, Any], prompt_format: Any, keys: Any):
    base: dict[str, Any] = {"x_dim": 3, "y_dim": 2, "n_context": 6, "d_model": 8, "dtype": "float64"}
    cfg = TransformerConfig(**(base | fields), prompt_format=prompt_format, keys=keys)
    model, tokens = random_model(cfg), random_tokens(cfg, 3)
    kinds: tuple[At, ...] = ("positions", "query", "points")
    for rows in kinds:
        check_routes(model, tokens, rows, 1e-10)


@settings(max_examples=40)
@given(data=st.data(), cfg=configs(), seed=st.integers(0, 1000), batch=st.sampled_from([0, 1, 3]))
def test_routes_agree(data: st.DataObject, cfg: TransformerConfig, seed: int, batch: int):
    kinds: tuple[At, ...] = (
        ("positions", "query") if cfg.prompt_format == "token_ids" else ("positions", "query", "points")
    )
    rows = data.draw(st.sampled_from(kinds))
    model, tokens = random_model(cfg, seed), random_tokens(cfg, batch, seed)
    exact, exact_tokens = copy.deepcopy(model).double(), tokens.double() if tokens.is_floating_point() else tokens
    stream = largest([exact(exact_tokens, stop_at_layer=cfg.n_layers)])
    assume(stream < 100)
    hooked, quick = run(model, tokens, rows, hooked=True), run(model, tokens, rows, hooked=False)
    assert hooked.shape == quick.shape
    if cfg.dtype == torch.float64:
        assert largest([quick - hooked]) <= 1e-9 * (1 + stream)
    else:
        # what counts is the rounding that the config itself amplifies (a narrow layer norm, by 1 / sqrt(eps)),
        # which shows in the hooked route's own error against float64
        noise = largest([hooked - run(exact, exact_tokens, rows, hooked=True)])
        assert largest([quick - hooked]) <= 2e-5 * (1 + stream) + 30 * noise
    # in float64, where no kink of an activation is nearer than rounding
    hooked_grads = gradients(exact, exact_tokens, rows, hooked=True)
    for name, grad in gradients(exact, exact_tokens, rows, hooked=False).items():
        scale = 1 + largest([hooked_grads[name]]) + stream
        torch.testing.assert_close(grad, hooked_grads[name], rtol=1e-7, atol=1e-8 * scale, msg=name)


def attention_layer(**fields: Any) -> Attention:
    base: dict[str, Any] = {"x_dim": 5, "n_context": 6, "n_heads": 2, "d_head": 3, "dtype": "float64"}
    return cast(Block, random_model(TransformerConfig(**(base | fields))).blocks[0]).attn


@pytest.mark.parametrize("keys", ["causal", "context", "full"])
@pytest.mark.parametrize("attention", ["softmax", "sink", "linear", "normalized"])
@pytest.mark.parametrize("attn_bias", [False, True])
def test_every_route_on_its_own(keys: Any, attention: str, attn_bias: bool):
    # whatever the costs say: each route, for narrow and wide heads, few rows and many, one key and none
    fields = {
        "sink": {"attention": "softmax", "sink": "learned", "sink_score": 0.3},
        "normalized": {"attention": "softplus", "normalize_by_context": True},
    }.get(attention, {"attention": attention, "normalize_by_context": attention == "linear"})
    for d_head in (2, 5):
        layer = attention_layer(keys=keys, attn_bias=attn_bias, d_head=d_head, **fields)
        for n_pos, rows in ((1, slice(None)), (2, slice(-1, None)), (7, slice(-1, None)), (7, slice(0, 7, 2))):
            x = torch.randn(3, n_pos, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            expected = layer(x)[:, rows]
            mask = key_mask(layer.cfg, n_pos, rows, x.device) if keys == "causal" else None
            x_keys = x[:, :-1] if keys == "context" else x
            outputs = [fast._folded(layer, x[:, rows], x, x_keys.shape[1], mask)]
            outputs += [fast._plain(layer, x[:, rows], x_keys, rows, mask)]
            if layer.cfg.attention == "linear" and keys != "causal" and not attn_bias:
                outputs += [fast._associative(layer, x, rows), fast._merged(layer, x)[:, rows]]
            for output in [*outputs, fast.fast_attention(layer, x, rows)]:
                torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("keys", ["causal", "context", "full"])
@pytest.mark.parametrize("fields", [
    {}, {"attention": "leaky_relu", "score_scale": 0.7, "damping": 0.5}, {"attention": "softplus", "n_heads": 3},
])  # fmt: skip
@pytest.mark.parametrize("normalize", [False, True])
def test_the_route_across_prompts_agrees(routes: list[tuple[str, int]], keys: Any, fields: Any, normalize: bool):
    cfg = TransformerConfig(
        x_dim=3, n_context=6, d_head=2, keys=keys, normalize_by_context=normalize, dtype="float64", **fields
    )
    model, tokens = random_model(cfg), random_tokens(cfg, 5)
    assert cfg.prefers_prompts_last
    across = fast.put_prompts_last(tokens)
    assert torch.equal(across, tokens)
    assert across.stride() == (1, 20, 5)
    check_routes(model, tokens, "query", 1e-12, across)
    assert routes == [("_across_prompts", 1)] * 2
    seeds = fast.put_prompts_last(torch.stack([tokens, 2 * tokens]))  # under vmap it is the same route
    routes.clear()
    both = torch.func.vmap(lambda tokens: model(tokens, at="query"))(seeds)
    assert routes == [("_across_prompts", 1)]
    torch.testing.assert_close(both[1], run(model, 2 * tokens, "query", hooked=True), rtol=1e-12, atol=1e-12)


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The routes taken, each with the number of rows that it computed."""
    taken: list[tuple[str, int]] = []
    for name in ("_folded", "_plain", "_associative", "_merged", "_across_prompts"):
        original = getattr(fast, name)

        def route(attn: Attention, x: Tensor, *rest: Any, name: str = name, original: Any = original) -> Tensor:
            out = original(attn, x, *rest)
            taken.append((name, out.shape[1]))
            return out

        monkeypatch.setattr(fast, name, functools.wraps(original)(route))
    return taken


@pytest.mark.parametrize("attention", ["softmax", "linear", "tanh"])
@pytest.mark.parametrize("keys", ["causal", "context"])
def test_second_derivatives(attention: str, keys: Any):
    # training on sensitivities differentiates twice, which fused attention cannot
    cfg = TransformerConfig(
        x_dim=2, n_context=4, attention=attention, keys=keys, d_head=3, dtype="float64", n_layers=2, n_heads=2
    )
    model, tokens = random_model(cfg), random_tokens(cfg, 1)
    both = []
    for hooked in (False, True):
        x = tokens.detach().requires_grad_()
        out = run(model, x, "query", hooked=hooked)
        (sensitivity,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        both.append(torch.autograd.grad(sensitivity.square().sum(), list(model.parameters())))
    torch.testing.assert_close(both[0], both[1], rtol=1e-9, atol=1e-10)


ROUTES: dict[str, tuple[dict[str, Any], At, list[tuple[str, int]]]] = {
    "only the query of one layer": ({"x_dim": 10, "n_context": 10}, "query", [("_folded", 1)]),
    "all positions": ({"x_dim": 10, "n_context": 10, "n_layers": 2}, "query", [("_merged", 11), ("_folded", 1)]),
    "long contexts": ({"x_dim": 5, "n_context": 200}, "positions", [("_associative", 201)]),
    "momentum": ({"x_dim": 10, "n_context": 10, "keys": "causal", "momentum": 0.5}, "query", [("_plain", 11)]),
}


@pytest.mark.parametrize("case", ROUTES)
def test_the_cheapest_route_is_taken_and_only_without_hooks(routes: list[tuple[str, int]], case: str):
    fields, at, expected = ROUTES[case]
    cfg = TransformerConfig(**fields)
    model, tokens = HookedTransformer(cfg), random_tokens(cfg, 8)
    run(model, tokens, at, hooked=True)
    assert routes == []
    run(model, tokens, at, hooked=False)
    assert routes == expected


FULL: dict[str, Any] = {"x_dim": 3, "n_context": 4, "n_layers": 2, "d_model": 12, "n_heads": 2, "dtype": "float64"}
GPT = TransformerConfig(
    **FULL, prompt_format="interleaved", d_mlp=16, attention="softmax", normalization_type="LN", act_fn="gelu_new"
)
LSTM = HookedLSTM(LSTMConfig(x_dim=3, n_context=4, n_layers=2, d_model=6, dtype="float64"), seed=1)
MODELS = {
    "lstm": LSTM,
    "gpt": random_model(GPT),
    "sink": random_model(GPT.replace(sink="learned", damping=0.7, token_clip=2.5)),
    "normalized": random_model(
        TransformerConfig(**FULL, prompt_format="interleaved", attention="relu", normalize_by_context=True)
    ),
    "looped": random_model(GPT.replace(recurrent=True, mlp_location="input", positional_embedding_type="sinusoidal")),
    "paired": random_model(TransformerConfig(x_dim=3, n_context=4, n_layers=2, y_dim=2, dtype="float64")),
    "paired causal": random_model(TransformerConfig(**FULL, attention="softmax", keys="causal")),
    "interleaved context": random_model(GPT.replace(keys="context")),
    "full": random_model(GPT.replace(keys="full")),
    "momentum": random_model(GPT.replace(momentum=0.6)),
    "momentum over values": random_model(GPT.replace(momentum=0.6, momentum_over="values")),
}

every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
small_configs = st.integers(1, 3).flatmap(
    lambda n: configs(formats=("paired", "interleaved"), n_layers=n, dtype="float64")
)


def prompts_and_queries(model: PromptedModel, n_queries: int = 3) -> tuple[Prompts, Tensor]:
    prompts = random_prompts(model.cfg, batch=2)
    generator = torch.Generator().manual_seed(5)
    shape = (2, prompts.n_context + 1, n_queries, prompts.x_dim)
    return prompts, torch.randn(shape, generator=generator, dtype=torch.float64)


def plain_streams(model: PromptedModel, prompts: Prompts) -> list[Tensor]:
    """The stream at all positions before the first block and after each, from hooks (a cache drops gradients)."""
    streams: list[Tensor] = []
    names = ["blocks.0.hook_resid_pre", *(f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers))]
    model.run_with_hooks(prompts, fwd_hooks=[(name, lambda stream, hook: streams.append(stream)) for name in names])
    return streams


def run_alone(model: PromptedModel, prompts: Prompts, queries: Tensor) -> Tensor:
    """`[stream prompt point query d_model]`: a pass for each query at each point."""
    points = []
    for t in range(queries.shape[1]):
        rows = [plain_streams(model, prompts.prefix(t).with_query(xs)) for xs in queries[:, t].unbind(1)]
        points.append(torch.stack([torch.stack([stream[:, -1] for stream in streams]) for streams in rows], dim=2))
    return torch.stack(points, dim=2)


def assert_equal(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def assert_streams_and_jacobians_are_the_plain_ones(model: PromptedModel, *, with_weights: bool) -> None:
    prompts, queries = prompts_and_queries(model, 2)
    queries, ys = queries.requires_grad_(), prompts.ys.clone().requires_grad_()
    prompts, inputs = Prompts(prompts.xs, ys), [queries, *((ys, *model.parameters()) if with_weights else ())]
    expected = run_alone(model, prompts, queries)
    streams = torch.stack(list(model.query_streams(prompts, queries)))
    assert_equal(streams, expected)
    assert_equal(torch.stack(list(model.query_streams(prompts, queries[:, -1:], at="query"))), expected[:, :, -1:])
    # a separate direction for every row, which shows leaks into other rows
    directions = torch.randn(streams.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    shared, plain = (
        torch.autograd.grad((each * directions).sum(), inputs, allow_unused=True, materialize_grads=True)
        for each in (streams, expected)
    )
    assert_equal(shared[0], plain[0])
    for a, b in zip(shared[1:], plain[1:], strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


# ---- other queries ----
@every_model
def test_other_queries_are_what_plain_passes_make_of_them(model: PromptedModel):
    assert_streams_and_jacobians_are_the_plain_ones(model, with_weights=True)


@given(cfg=small_configs)
@settings(max_examples=12)
def test_other_queries_in_any_config(cfg: TransformerConfig):
    model = random_model(cfg)
    with torch.no_grad():
        largest = run_alone(model, *prompts_and_queries(model, 2)).abs().max().item()
    assume(largest < 1e4)  # some functions explode, layer upon layer
    assert_streams_and_jacobians_are_the_plain_ones(model, with_weights=False)


@pytest.mark.parametrize("name", ["lstm", "gpt", "paired", "full"])
def test_hooks_fire_in_a_pass_for_each_query(name: str):
    model = MODELS[name]
    prompts, queries = prompts_and_queries(model)
    free = torch.stack(list(model.query_streams(prompts, queries)))
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda activation, hook: activation / 2)]):
        hooked = torch.stack(list(model.query_streams(prompts, queries)))
        assert_equal(hooked, run_alone(model, prompts, queries))
    assert_equal(hooked[1], free[1] / 2)
    assert not torch.allclose(hooked[2], free[2])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "full" and "momentum" not in name])
def test_the_context_is_not_computed_for_each_query(name: str, monkeypatch: pytest.MonkeyPatch):
    model = MODELS[name]
    prompts, queries = prompts_and_queries(model, 40)
    sizes = []
    embed = model.embed_tokens
    monkeypatch.setattr(model, "embed_tokens", lambda tokens, *at: sizes.append(tokens.shape) or embed(tokens, *at))
    monkeypatch.setattr(model, "_query_streams_one_by_one", None)
    list(model.query_streams(prompts, queries))
    # contexts have a batch of two prompts; what has a batch of all queries has one row a point
    assert all(batch == 2 or pos <= queries.shape[1] for batch, pos, _ in sizes)


@pytest.mark.parametrize("n_groups", [1, 2, 4])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_momentum_over_values_that_heads_share(attention: str, n_groups: int):
    cfg = GPT.replace(n_heads=4, n_key_value_heads=n_groups, attention=attention, momentum=0.6, momentum_over="values")
    check_routes(random_model(cfg), random_tokens(cfg, 3), "positions", 1e-10)


@pytest.mark.parametrize("keys", ["causal", "context", "full"])
@pytest.mark.parametrize("prompt_format", ["paired", "interleaved"])
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_frequencies_are_those_of_the_whole_text(rope_type: str, prompt_format: Any, keys: Any):
    n_ctx = 5 if prompt_format == "paired" else 9
    scaling = {"rope_type": rope_type, "factor": 2.0}
    if rope_type == "longrope":  # other frequencies for more than n_ctx positions, as "dynamic" has
        scaling |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0], "original_max_position_embeddings": n_ctx}
    model = random_model(
        TransformerConfig(**FULL, d_head=4, prompt_format=prompt_format, keys=keys, attention="softmax",
                          positional_embedding_type="rotary", rotary_base=9.0, rope_scaling=scaling)
    )  # fmt: skip
    longer = random_tokens(model.cfg.replace(n_context=5), 3)
    kinds: tuple[At, ...] = ("positions", "query", "points")
    for rows in kinds:
        check_routes(model, longer, rows, 1e-10)
    prompts = random_prompts(model.cfg.replace(n_context=5), batch=2)
    assert_equal(torch.stack(list(model.query_streams(prompts, prompts.xs[:, :, None]))),
                 run_alone(model, prompts, prompts.xs[:, :, None]))  # fmt: skip


def test_no_prompts_no_queries_and_no_context():
    for model in MODELS.values():
        prompts, queries = prompts_and_queries(model)
        d = model.cfg.d_model
        assert [s.shape for s in model.query_streams(prompts[:0], queries[:0])] == [(0, 5, 3, d)] * 3
        assert [s.shape for s in model.query_streams(prompts, queries[:, :, :0])] == [(2, 5, 0, d)] * 3
        assert [s.shape for s in model.query_streams(prompts.prefix(0), queries[:, :1])] == [(2, 1, 3, d)] * 3


# ---- the stream, layer by layer ----
@every_model
@pytest.mark.parametrize("rows", ["positions", "points", "query"])
def test_layer_streams_are_those_of_a_plain_pass(model: PromptedModel, rows: Any):
    prompts, _ = prompts_and_queries(model)
    expected = plain_streams(model, prompts)
    streams = list(model.layer_streams(prompts, rows))
    n_pos = expected[0].shape[1]
    positions = {
        "positions": slice(None),
        "query": slice(n_pos - 1, n_pos),
        "points": model.cfg.format.prediction_positions(n_pos),
    }
    for actual, stream in zip(streams, expected, strict=True):
        assert_equal(actual, stream[:, positions[rows]])
    assert_equal(model.read_out(streams[-1]), model(prompts, at=rows))
