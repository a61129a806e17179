"""Named subspaces, models assembled from heads and MLPs, and operations, against plain tensors."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from analyses.support.proofs import mov, mul, total
from mechicl.constructions import Head, Layer, Stream, assemble
from mechicl.constructions.operations import aff, div
from mechicl.prompts import Prompts
from tests.constructions.reference import quick


# ---- vocabulary ----
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


# ---- operations ----
sizes = st.integers(1, 6)
seeds = st.integers(0, 2**20)
N_CONTEXT = 4


def random_stream(stream: Stream, seed: int, n_pos: int = N_CONTEXT + 1) -> torch.Tensor:
    """Draw a residual stream `[prompt pos d_model]`, random except for its one-hot positions."""
    values = torch.randn(3, n_pos, stream.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if "position" in stream.dimensions:
        start = list(stream.dimensions).index("position")
        before = sum(list(stream.dimensions.values())[:start])
        values[..., before : before + n_pos] = torch.eye(n_pos, dtype=torch.float64)
    return values


def run(stream: Stream, layers: list[Layer], residual: torch.Tensor, **config) -> torch.Tensor:
    """Run layers on a residual stream."""
    nothing = Head(stream.read("x"), stream.read("x"), stream.read("x"), 0 * stream.write("x"))  # a model has a head
    model = assemble(stream, [*layers, [nothing]], n_context=N_CONTEXT, **{"keys": "full", **config})
    return model(residual, start_at_layer=0, stop_at_layer=len(layers)).detach()


def part(stream: Stream, name: str, values: torch.Tensor) -> torch.Tensor:
    return values @ stream.read(name)


def assert_only_target(stream: Stream, before: torch.Tensor, after: torch.Tensor, **expected: torch.Tensor) -> None:
    """Assert that the named subspaces have the expected values, and others are unchanged."""
    for name in stream.dimensions:
        values = expected.get(name, part(stream, name, before))
        rounding = 1e-12 * (1 + before.abs().max().item()) ** 2
        torch.testing.assert_close(part(stream, name, after), values, rtol=0, atol=rounding)


@quick
@given(sizes, seeds, st.sampled_from(["linear", "relu"]), st.sampled_from(["source", "target"]))
def test_mov_copies_between_positions_and_replaces_the_content(size, seed, attention, source):
    stream = Stream(x=2, y=1, position=N_CONTEXT + 1, source=size, target=size)
    before = random_stream(stream, seed)
    moves = [(0, 3), (2, 1), (4, 4), (3, 0)]
    after = run(stream, [mov(stream, source, "target", moves)], before, attention=attention)
    expected = part(stream, "target", before).clone()
    for origin, to in moves:
        expected[:, to] = part(stream, source, before)[:, origin]
    assert_only_target(stream, before, after, target=expected)


@quick
@given(sizes, sizes, sizes, seeds, st.sampled_from(["identity", "relu", "square"]), st.booleans())
def test_aff_is_an_affine_map(first, second, size, seed, act_fn, with_bias):
    stream = Stream(x=first, y=second, target=size)
    before = random_stream(stream, seed)
    generator = torch.Generator().manual_seed(seed)
    w1, w2, b = (torch.randn(*s, size, generator=generator).double() for s in ((first,), (second,), ()))
    mlp = aff(stream, {"x": w1, "y": w2}, "target", bias=b if with_bias else None, act_fn=act_fn)
    after = run(stream, [Layer(mlp=mlp)], before, act_fn=act_fn)
    expected = part(stream, "x", before) @ w1 + part(stream, "y", before) @ w2 + (b if with_bias else 0)
    assert_only_target(stream, before, after, target=expected)


@quick
@given(sizes, seeds, st.sampled_from(["x", "target"]))
def test_mul_is_the_elementwise_product(size, seed, right):
    stream = Stream(x=size, y=1, left=size, target=size)
    before = random_stream(stream, seed)
    after = run(stream, [Layer(mlp=mul(stream, "left", right, "target"))], before, act_fn="square")
    assert_only_target(stream, before, after, target=part(stream, "left", before) * part(stream, right, before))


@quick
@given(sizes, seeds, st.integers(0, 9), st.floats(1.0, 20.0), st.floats(0.05, 5.0))
def test_the_error_of_div_is_within_its_bound(size, seed, steps, spread, low):
    stream = Stream(x=size, y=1, target=size, scratch=1)
    before, high = random_stream(stream, seed), spread * low
    fraction = torch.rand(3, N_CONTEXT + 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    before[..., size : size + 1] = low + (high - low) * fraction
    layers = div(stream, "x", "y", "target", scratch="scratch", low=low, high=high, steps=steps)
    assert len(layers) == steps + 1
    after = run(stream, layers, before, act_fn="square")
    exact = part(stream, "x", before) / before[..., size : size + 1]
    bound = ((high - low) / (high + low)) ** 2**steps
    error = (part(stream, "target", after) - exact).abs()
    assert (error <= bound * exact.abs() + 1e-12 * (1 + exact.abs().max()) ** 2).all()
    assert part(stream, "scratch", after).abs().max() <= bound + 1e-12
    torch.testing.assert_close(part(stream, "x", after), part(stream, "x", before))
    torch.testing.assert_close(part(stream, "y", after), part(stream, "y", before))


@quick
@given(sizes, seeds, st.sampled_from(["linear", "relu", "softmax"]), st.booleans())
def test_total_is_the_sum_over_all_positions(size, seed, attention, normalised):
    stream = Stream(x=2, y=1, position=N_CONTEXT + 1, source=size, target=size)
    before = random_stream(stream, seed)
    normalised = normalised or attention == "softmax"
    head = total(stream, "source", "target", n_positions=N_CONTEXT + 1 if normalised else 1)
    config = {"normalize_by_context": normalised} if attention != "softmax" else {}
    after = run(stream, [Layer([head])], before, attention=attention, **config)
    expected = part(stream, "target", before) + part(stream, "source", before).sum(1, keepdim=True)
    assert_only_target(stream, before, after, target=expected)
