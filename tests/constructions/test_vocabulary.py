import pytest
import torch

from mechicl.constructions import Head, Hidden, Layer, Stream, assemble, signed_pair
from mechicl.prompts import Prompts


def head(stream, output_scale=1.0):
    return Head(stream.read("x"), stream.read("x"), stream.read("y"), output_scale * stream.write("y"))


def some_prompts(n_context=5, x_dim=2, y_dim=1):
    values = torch.randn(3, n_context + 1, x_dim + y_dim, generator=torch.Generator().manual_seed(0)).double()
    return Prompts(values[..., :x_dim], values[..., x_dim:])


# ---- Stream ----


def test_reading_picks_a_named_part_and_writing_puts_it_back_in_its_place():
    stream = Stream(x=3, y=1, memory=2)
    assert stream.d_model == 6
    values = torch.arange(6.0, dtype=torch.float64)
    parts = {name: values @ stream.read(name) for name in ("x", "y", "memory")}
    assert [part.tolist() for part in parts.values()] == [[0, 1, 2], [3], [4, 5]]
    assert torch.equal(torch.stack([parts[name] @ stream.write(name) for name in parts]).sum(0), values)


@pytest.mark.parametrize("access", [Stream.read, Stream.write])
def test_an_unknown_part_is_refused_with_the_known_names(access):
    with pytest.raises(ValueError, match=r"no subspace 'z', only \['x', 'y'\]"):
        access(Stream(x=3, y=1), "z")


# ---- Head ----


def test_a_key_that_would_be_broadcast_to_the_query_is_refused():
    stream = Stream(x=3, y=1)
    with pytest.raises((ValueError, TypeError)):
        Head(stream.read("x"), stream.read("y"), stream.read("y"), stream.write("y"))


def test_an_output_that_does_not_fit_the_value_is_refused():
    stream = Stream(x=3, y=1)
    with pytest.raises((ValueError, TypeError)):
        Head(stream.read("x"), stream.read("x"), stream.read("x"), stream.write("y"))


# ---- assemble ----


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


def test_more_subspaces_than_the_tokens_start_at_zero_and_carry_what_heads_write():
    prompts = some_prompts()
    stream = Stream(x=2, y=1, memory=2)
    store = Head(stream.read("x"), stream.read("x"), stream.read("x"), stream.write("memory"))
    recall = Head(stream.read("memory"), stream.read("x"), stream.read("y"), -stream.write("y"))
    model = assemble(stream, [[store], [recall]], n_context=5)
    xs, ys = prompts.context
    memory = prompts.query.xs[:, None] @ xs.mT @ xs
    torch.testing.assert_close(model.predict(prompts), (memory @ xs.mT @ ys)[:, 0])


def test_only_layers_that_are_the_same_list_are_looped():
    stream = Stream(x=2, y=1)
    layer = [head(stream)]
    assert assemble(stream, [layer, layer], n_context=3).cfg.recurrent
    assert not assemble(stream, [layer], n_context=3).cfg.recurrent
    different = assemble(stream, [layer, [head(stream, 2.0)]], n_context=3)
    assert not different.cfg.recurrent
    assert torch.equal(different.W_O[1], 2 * different.W_O[0])


def test_other_choices_of_the_config_are_passed_on():
    prompts = some_prompts()
    stream = Stream(x=2, y=1)
    plain = assemble(stream, [[head(stream)]], n_context=5)
    damped = assemble(stream, [[head(stream)]], n_context=5, damping=0.25, normalize_by_context=True)
    torch.testing.assert_close(damped.predict(prompts), plain.predict(prompts) * 0.25 / 5)


def test_a_norm_and_a_sink_that_the_config_adds_keep_their_initial_weights():
    stream = Stream(x=2, y=1)
    model = assemble(
        stream,
        [[head(stream)]],
        n_context=5,
        normalization_type="LN",
        attention="softmax",
        sink="learned",
        sink_score=3,
    )
    prompts = some_prompts()
    tokens = model.encode(prompts)
    normed = (tokens - tokens.mean(-1, keepdim=True)) / (tokens.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    scores = normed[:, -1:, :2] @ normed[:, :-1, :2].mT / 2**0.5
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + torch.tensor(3.0).double().exp())
    torch.testing.assert_close(model.predict(prompts), -(weights @ normed[:, :-1, 2:])[:, 0])


@pytest.mark.parametrize("layers", [[], [[]], [[], []]])
def test_a_model_without_heads_is_refused(layers):
    with pytest.raises(ValueError, match="at least one layer with a head"):
        assemble(Stream(x=2, y=1), layers, n_context=3)


def test_a_layer_with_fewer_heads_does_nothing_in_the_places_of_the_others():
    stream, prompts = Stream(x=2, y=1), some_prompts()
    model = assemble(stream, [[head(stream)], [head(stream), head(stream, 0.5)], []], n_context=5)
    assert (model.cfg.n_layers, model.cfg.n_heads) == (3, 2)
    alike = assemble(stream, [[head(stream)], [head(stream, 1.5)]], n_context=5)
    torch.testing.assert_close(model.predict(prompts), alike.predict(prompts))


def test_an_mlp_reads_what_the_heads_have_written():
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
    with pytest.raises(ValueError, match="not both"):
        assemble(stream, [Layer([head(stream)], features)], n_context=5, input_mlp=features)


def test_parts_of_an_mlp_must_fit():
    stream = Stream(x=2, y=1)
    with pytest.raises((ValueError, TypeError)):
        Hidden(read=stream.read("x"), write=stream.write("y"))
    with pytest.raises((ValueError, TypeError)):
        Hidden(read=stream.read("x"), write=stream.write("x"), bias=torch.zeros(3))


def test_two_relu_heads_are_a_linear_one():
    stream, prompts = Stream(x=2, y=1), some_prompts()
    linear = assemble(stream, [[head(stream)]], n_context=5)
    pair = assemble(stream, [signed_pair(head(stream))], n_context=5, attention="relu")
    torch.testing.assert_close(pair.predict(prompts), linear.predict(prompts))


@pytest.mark.parametrize("stream", [Stream(y=1, x=2), Stream(memory=2, x=2, y=1), Stream(x=3)])
def test_a_stream_that_does_not_begin_with_the_token_is_refused(stream):
    part = Head(stream.read("x"), stream.read("x"), stream.read("x"), stream.write("x"))
    with pytest.raises(ValueError, match="must begin with"):
        assemble(stream, [[part]], n_context=3)


def test_a_head_made_for_another_stream_is_refused():
    with pytest.raises(ValueError, match="width 3"):
        assemble(Stream(x=2, y=1), [[head(Stream(x=4, y=1))]], n_context=3)
