"""Peers compute what ours do, so that their times are of the same work."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import Lasso, LinearRegression, Ridge

from mechicl import algorithms, tasks
from mechicl.models import HookedTransformer, TransformerConfig
from tests.scripts import import_script

learners = import_script("benchmarks.learners")
gpt2, torch_twins = import_script("benchmarks.gpt2_twins"), import_script("benchmarks.torch_twins")
SIZE = gpt2.SIZES["gpt2-8l"]
our_training, recurrent = import_script("benchmarks.our_training"), import_script("benchmarks.recurrent_twins")


@pytest.fixture(scope="module")
def prompts():
    task = tasks.LinearRegression(x_dim=4, n_context=9, inputs="gaussian", noise_std=0.1)
    return task.sample(5, seed=0, dtype=torch.float64)


@pytest.mark.parametrize(("theirs", "ours"), [
    (lambda p: learners.by_prompt_and_prefix(LinearRegression(fit_intercept=False), p), algorithms.ols),
    (
        lambda p: learners.by_prompt_and_prefix(Ridge(0.1, fit_intercept=False), p),
        lambda p: algorithms.ridge(p, penalty=0.1),
    ),
    (
        lambda p: learners.by_prompt_and_prefix(Lasso(0.1, fit_intercept=False, tol=1e-12, max_iter=10**5), p),
        lambda p: algorithms.lasso(p, penalty=0.1),
    ),
    (learners.THEIRS["gelsd"], algorithms.ols),
    (learners.THEIRS["gelsy"], algorithms.ols),
    (learners.THEIRS["Cholesky"], algorithms.ols),
    (learners.nearest_neighbours_by_prefix, algorithms.nearest_neighbours),
], ids=["LinearRegression", "Ridge", "Lasso", "gelsd", "gelsy", "Cholesky", "nearest"])  # fmt: skip
def test_solvers_predict_as_ours(theirs, ours, prompts):
    np.testing.assert_allclose(theirs(prompts), ours(prompts).predictions[-1, ..., 0], rtol=1e-6, atol=1e-8)


def test_the_plain_loop_attends_as_our_model(prompts):
    plain = torch_twins.PlainLinearAttention(5, n_layers=2).double()
    model = HookedTransformer(TransformerConfig(x_dim=4, n_context=9, n_layers=2, dtype="float64"), seed=0)
    with torch.no_grad():
        for layer, block in zip(plain.layers, model.blocks, strict=True):
            for name, weight in {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_O"}.items():
                layer[name].weight.copy_(getattr(block.attn, weight)[0].T)
        tokens = torch.cat([prompts.xs, prompts.ys], dim=2)
        tokens[:, -1, -1] = 0
        np.testing.assert_allclose(plain(tokens), model.predict(prompts)[:, 0], rtol=1e-9)


@pytest.mark.parametrize(
    "make", [lambda: gpt2.OfTransformers(SIZE, "sdpa", "gelu_pytorch_tanh"), lambda: gpt2.OfTorch(SIZE)]
)
def test_models_on_points_read_the_points_before_alone(make):
    torch.manual_seed(0)
    model = gpt2.OnPoints(make(), SIZE.x_dim, SIZE.width).eval()
    xs, ys = torch.randn(2, SIZE.n_context + 1, SIZE.x_dim), torch.randn(2, SIZE.n_context + 1)
    with torch.no_grad():
        before = model(xs, ys)
        ys[:, 10] += 1  # the label of a point, which its own prediction must not see
        after = model(xs, ys)
    assert before.shape == (2, SIZE.n_context + 1)
    np.testing.assert_allclose(before[:, :11], after[:, :11], rtol=1e-4, atol=1e-5)
    assert (before[:, 11:] - after[:, 11:]).abs().max() > 1e-4


@pytest.mark.parametrize("preset", gpt2.SIZES)
def test_the_peer_has_our_size(preset):
    size, config = gpt2.SIZES[preset], our_training.OfPreset(preset=preset).config
    with torch.device("meta"):
        peer = gpt2.OnPoints(gpt2.OfTransformers(size, "sdpa", "gelu_pytorch_tanh"), size.x_dim, size.width)
    unused = peer.backbone.model.wte.weight.numel() + size.width  # embeddings of tokens, and one more position
    ours = HookedTransformer(config.model, seed=0)
    assert sum(p.numel() for p in peer.parameters()) - unused == sum(p.numel() for p in ours.parameters())
    sizes = (
        config.task.x_dim,
        config.task.n_context,
        config.model.d_model,
        config.model.n_layers,
        config.model.n_heads,
    )
    assert (config.batch_size, *sizes) == (gpt2.BATCH_SIZE, *dataclasses.astuple(size))


@pytest.mark.parametrize("kind", ["delta", "gated_linear", "mamba2", "mesa"])
def test_the_loop_over_positions_is_our_layer(kind):
    layer = recurrent.Layer(kind).double()
    config = TransformerConfig(
        x_dim=5, n_context=20, prompt_format="interleaved", n_layers=1, n_heads=2, d_model=24, normalization_type="LN",
        positional_embedding_type="none", score_scale=1.0, attention=kind, dtype="float64",
    )  # fmt: skip
    block = HookedTransformer(config, seed=0).blocks[0]
    ours = dict(block.named_parameters())
    pairs = {"query": "Q", "key": "K", "value": "V", "gate": "gate", "step": "step"}
    with torch.no_grad():
        for name, weight in ours.items():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
        for theirs, letter in pairs.items():
            if f"attn.W_{letter}" in ours:
                getattr(layer, theirs).weight.copy_(ours[f"attn.W_{letter}"].transpose(1, 2).flatten(0, 1))
                getattr(layer, theirs).bias.copy_(ours[f"attn.b_{letter}"].flatten())
        layer.output.weight.copy_(ours["attn.W_O"].flatten(0, 1).T)
        layer.output.bias.copy_(ours["attn.b_O"])
        for theirs, name in {"ridge": "ridge", "skip": "skip", "rate": "A_log"}.items():
            if f"attn.{name}" in ours:
                getattr(layer, theirs).copy_(ours[f"attn.{name}"])
        layer.norm.weight.copy_(ours["ln1.w"])
        layer.norm.bias.copy_(ours["ln1.b"])
        stream = torch.randn(3, 9, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        torch.testing.assert_close(layer(stream), block(stream), rtol=1e-9, atol=1e-10)


def test_a_plain_loop_of_repeated_layers_is_our_looped_model(prompts):
    plain = torch_twins.PlainLinearAttention(5, n_layers=1, repeats=2).double()
    model = HookedTransformer(TransformerConfig(x_dim=4, n_context=9, n_layers=2, recurrent=True, dtype="float64"))
    with torch.no_grad():
        for name, weight in {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_O"}.items():
            plain.layers[0][name].weight.copy_(getattr(model.blocks[0].attn, weight)[0].T)
        loss = torch_twins.squared_error(plain, prompts.xs, prompts.ys)
        expected = (model.predict(prompts) - prompts.query.ys).square().mean()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
