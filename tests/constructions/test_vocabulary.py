"""Named subspaces, and models assembled from heads and MLPs, against plain tensors."""

import torch

from mechicl.constructions import Head, Layer, Stream, assemble
from mechicl.constructions.vocabulary import Hidden
from mechicl.prompts import Prompts


def head(stream, output_scale=1.0):
    return Head(stream.read("x"), stream.read("x"), stream.read("y"), output_scale * stream.write("y"))


def some_prompts(n_context=5, x_dim=2, y_dim=1):
    values = torch.randn(3, n_context + 1, x_dim + y_dim, generator=torch.Generator().manual_seed(0)).double()
    return Prompts(values[..., :x_dim], values[..., x_dim:])


def test_reading_picks_a_named_part_and_writing_restores_it():
    stream = Stream(x=3, y=1, memory=2)
    assert stream.d_model == 6
    values = torch.arange(6.0, dtype=torch.float64)
    parts = {name: values @ stream.read(name) for name in ("x", "y", "memory")}
    assert [part.tolist() for part in parts.values()] == [[0, 1, 2], [3], [4, 5]]
    assert torch.equal(torch.stack([parts[name] @ stream.write(name) for name in parts]).sum(0), values)


def test_heads_of_different_widths_add_up_in_one_layer():
    prompts = some_prompts()
    stream = Stream(x=2, y=1)
    by_target = Head(stream.read("y"), stream.read("y"), stream.read("x"), stream.write("x"))
    model = assemble(stream, [[head(stream, 0.5), by_target]], n_context=5)
    assert (model.cfg.n_heads, model.cfg.d_head) == (2, 2)
    tokens = model.encode(prompts)
    keys, queries = tokens[:, :-1], tokens
    x, y = slice(0, 2), slice(2, 3)
    expected = tokens.clone()
    expected[..., y] += 0.5 * (queries[..., x] @ keys[..., x].mT) @ keys[..., y]
    expected[..., x] += (queries[..., y] @ keys[..., y].mT) @ keys[..., x]
    _, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(cache["blocks.0.hook_resid_post"], expected)
    torch.testing.assert_close(model.predict(prompts), -expected[:, -1, y])


def test_subspaces_without_tokens_start_at_zero_and_store_what_heads_write():
    prompts = some_prompts()
    stream = Stream(x=2, y=1, memory=2)
    store = Head(stream.read("x"), stream.read("x"), stream.read("x"), stream.write("memory"))
    recall = Head(stream.read("memory"), stream.read("x"), stream.read("y"), -stream.write("y"))
    model = assemble(stream, [[store], [recall]], n_context=5)
    xs, ys = prompts.context
    memory = prompts.query.xs[:, None] @ xs.mT @ xs
    torch.testing.assert_close(model.predict(prompts), (memory @ xs.mT @ ys)[:, 0])


def test_a_norm_and_a_sink_from_the_config_keep_their_initial_weights():
    stream = Stream(x=2, y=1)
    options = {"normalization_type": "LN", "attention": "softmax", "sink": "learned", "sink_score": 3}
    model = assemble(stream, [[head(stream)]], n_context=5, **options)
    prompts = some_prompts()
    tokens = model.encode(prompts)
    normed = (tokens - tokens.mean(-1, keepdim=True)) / (tokens.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    scores = normed[:, -1:, :2] @ normed[:, :-1, :2].mT / 2**0.5
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + torch.tensor(3.0).double().exp())
    torch.testing.assert_close(model.predict(prompts), -(weights @ normed[:, :-1, 2:])[:, 0])


def test_missing_heads_of_a_layer_do_nothing():
    stream, prompts = Stream(x=2, y=1), some_prompts()
    model = assemble(stream, [[head(stream)], [head(stream), head(stream, 0.5)], []], n_context=5)
    assert (model.cfg.n_layers, model.cfg.n_heads) == (3, 2)
    alike = assemble(stream, [[head(stream)], [head(stream, 1.5)]], n_context=5)
    torch.testing.assert_close(model.predict(prompts), alike.predict(prompts))


def test_an_mlp_runs_after_the_heads():
    stream, prompts = Stream(x=2, y=1, square=1), some_prompts()
    square = Hidden(read=stream.read("y"), write=-stream.write("y"), bias=torch.tensor([2.0], dtype=torch.float64))
    model = assemble(stream, [Layer([head(stream)], square)], n_context=5, act_fn="square")
    plain = assemble(stream, [[head(stream)]], n_context=5).predict(prompts)
    torch.testing.assert_close(model.predict(prompts), plain + (2 - plain).square())
    assert model.stream_labels == ("x1", "x2", "y", "square")


def test_an_mlp_on_the_input_comes_before_the_heads():
    stream, prompts = Stream(x=2, y=1, feature=3), some_prompts()
    weights = torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, 1.0]], dtype=torch.float64)
    features = Hidden(read=stream.read("x") @ weights, write=stream.write("feature"))
    phi = stream.read("feature")
    model = assemble(
        stream, [[Head(phi, phi, stream.read("y"), -stream.write("y"))]], n_context=5, input_mlp=features, act_fn="tanh"
    )
    keys, query = (prompts.context.xs @ weights).tanh(), (prompts.query.xs @ weights).tanh()
    expected = torch.einsum("pf,pnf,pny->py", query, keys, prompts.context.ys)
    torch.testing.assert_close(model.predict(prompts), expected)
