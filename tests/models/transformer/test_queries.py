"""`layer_streams` and `query_streams` of both kinds of models against plain passes with hooks."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechicl.models import HookedLSTM, LSTMConfig, PromptedModel, TransformerConfig
from mechicl.prompts import Prompts
from tests.strategies import configs, random_model, random_prompts

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


def assert_streams_and_jacobians_are_the_plain_ones(model: PromptedModel, n_queries: int = 2) -> None:
    prompts, queries = prompts_and_queries(model, n_queries)
    shared, plain = queries.clone().requires_grad_(), queries.clone().requires_grad_()
    expected = run_alone(model, prompts, plain)
    streams = torch.stack(list(model.query_streams(prompts, shared)))
    assert_equal(streams, expected)
    assert_equal(torch.stack(list(model.query_streams(prompts, queries[:, -1:], at="query"))), expected[:, :, -1:])
    # a separate direction for every row, which shows leaks into other rows
    directions = torch.randn(streams.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (jacobian,) = torch.autograd.grad((streams * directions).sum(), shared)
    (expected_jacobian,) = torch.autograd.grad((expected * directions).sum(), plain)
    assert_equal(jacobian, expected_jacobian)


# ---- other queries ----


@every_model
def test_other_queries_are_what_plain_passes_make_of_them(model: PromptedModel):
    assert_streams_and_jacobians_are_the_plain_ones(model)


@given(cfg=small_configs)
@settings(max_examples=12)
def test_other_queries_in_any_config(cfg: TransformerConfig):
    model = random_model(cfg)
    with torch.no_grad():
        largest = run_alone(model, *prompts_and_queries(model, 2)).abs().max().item()
    assume(largest < 1e4)  # some functions explode, layer upon layer
    assert_streams_and_jacobians_are_the_plain_ones(model)


@pytest.mark.parametrize("name", ["lstm", "gpt", "paired", "full"])
def test_gradients_flow_to_the_context_and_the_weights(name: str):
    model = MODELS[name]
    prompts, queries = prompts_and_queries(model, 2)
    ys = prompts.ys.clone().requires_grad_()
    inputs = [ys, *model.parameters()]

    def gradients(streams: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(streams.square().sum(), inputs, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]

    watched = Prompts(prompts.xs, ys)
    shared = gradients(torch.stack(list(model.query_streams(watched, queries))))
    expected = gradients(run_alone(model, watched, queries))
    for a, b in zip(shared, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    assert shared[0].abs().max() > 0


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
