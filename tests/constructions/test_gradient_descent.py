import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import algorithms, constructions
from mechicl.constructions import Head, Stream, assemble
from mechicl.learners import Learner
from mechicl.prompts import Prompts

quick = settings(max_examples=15)
anyhow = pytest.mark.filterwarnings("ignore::mechicl.algorithms.DivergenceWarning")  # equal where it diverges, too
step_sizes = st.floats(-0.02, 0.08)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Prompts, int, np.random.Generator]:
    """Prompts, a number of steps, and a source of more numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    n_context, x_dim, y_dim = draw(st.integers(0, 12)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
    xs = 0.5 * rng.standard_normal((2, n_context + 1, x_dim))
    ys = rng.standard_normal((2, n_context + 1, y_dim))
    return Prompts(torch.from_numpy(xs), torch.from_numpy(ys)), draw(st.integers(1, 12)), rng


def sizes(prompts):
    return {"x_dim": prompts.x_dim, "y_dim": prompts.y_dim, "n_context": prompts.n_context}


def some_prompts(n_context=6, x_dim=3, y_dim=2):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, n_context + 1, x_dim + y_dim, dtype=torch.float64, generator=generator)
    return Prompts(0.5 * values[..., :x_dim], values[..., x_dim:])


def assert_same(model, predictions):
    assert predictions.isfinite().all()
    scale = max(1.0, predictions.abs().max().item())
    torch.testing.assert_close(model, predictions, rtol=0, atol=1e-12 * scale)


# ---- gradient descent ----


@anyhow
@quick
@given(cases(), step_sizes)
def test_the_transformer_is_gradient_descent_on_every_prompt(case, step_size):
    prompts, steps, _ = case
    model = constructions.gradient_descent(**sizes(prompts), step_size=step_size, steps=steps)
    expected = algorithms.gradient_descent(prompts, steps, step_size=step_size)
    assert_same(model.predict(prompts), expected.query()[0])
    assert_same(model.predict_prefixes(prompts), expected.predictions[0])


@anyhow
@quick
@given(cases(), step_sizes)
def test_also_from_other_initial_weights(case, step_size):
    prompts, steps, rng = case
    start = torch.from_numpy(rng.standard_normal((prompts.x_dim, prompts.y_dim)))
    model = constructions.gradient_descent(**sizes(prompts), step_size=step_size, steps=steps, initial_weights=start)
    weights = start
    context = prompts.context
    for _ in range(steps):
        weights = weights - step_size * (context.xs.mT @ (context.xs @ weights - context.ys))
    assert_same(model.predict(prompts), (prompts.query.xs[:, None] @ weights)[:, 0])


@pytest.mark.parametrize("start", [None, torch.tensor([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]])])
def test_each_layer_is_one_step(start):
    prompts = some_prompts()
    model = constructions.gradient_descent(**sizes(prompts), step_size=0.1, steps=5, initial_weights=start)
    expected = algorithms.gradient_descent(prompts, range(6), step_size=0.1, initial_weights=start).query()
    _, cache = model.run_with_cache(model.encode(prompts))
    assert_same(-cache["blocks.0.hook_resid_pre"][:, -1, 3:], expected[0])
    for layer in range(5):
        assert_same(-cache[f"blocks.{layer}.hook_resid_post"][:, -1, 3:], expected[layer + 1])


def test_it_is_gradient_descent_on_longer_and_shorter_prompts_too():
    model = constructions.gradient_descent(x_dim=3, y_dim=2, n_context=6, step_size=0.05, steps=3)
    for n_context in (0, 1, 20):
        prompts = some_prompts(n_context=n_context)
        assert_same(model.predict(prompts), algorithms.gradient_descent(prompts, 3, step_size=0.05).query()[0])


def test_steps_share_the_weights_of_one_layer():
    one = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1)
    many = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1, steps=12)
    assert not one.cfg.recurrent
    assert many.cfg.recurrent
    assert sum(p.numel() for p in many.parameters()) == sum(p.numel() for p in one.parameters())
    with torch.no_grad():
        many.blocks[0].attn.W_O.zero_()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    assert not many.blocks[11].attn.W_O.any()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def test_it_is_a_float64_learner_in_eval_mode():
    model = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1, steps=2)
    assert isinstance(model, Learner)
    assert not model.training
    assert model.cfg.dtype == "float64"
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert (model.cfg.n_heads, model.cfg.d_model, model.cfg.n_layers) == (1, 4, 2)


def test_the_weights_are_those_of_proposition_1():
    start = torch.tensor([[2.0], [3.0]])
    model = constructions.gradient_descent(x_dim=2, n_context=6, step_size=0.25, initial_weights=start)
    scores = model.W_Q[0, 0] @ model.W_K[0, 0].T
    moved = model.W_V[0, 0] @ model.W_O[0, 0]
    assert torch.equal(scores, torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0]]).double())
    assert torch.equal(moved, 0.25 * torch.tensor([[0.0, 0, 2], [0, 0, 3], [0, 0, -1]]).double())


# ---- GD++ ----


@anyhow
@quick
@given(cases(), step_sizes, st.floats(-0.01, 0.03))
def test_the_transformer_is_gd_plus_plus_on_every_prompt(case, step_size, gamma):
    prompts, steps, _ = case
    model = constructions.gd_plus_plus(**sizes(prompts), step_size=step_size, gamma=gamma, steps=steps)
    expected = algorithms.gd_plus_plus(prompts, steps, step_size=step_size, gamma=gamma)
    assert_same(model.predict(prompts), expected.query()[0])
    assert model.cfg.recurrent == (steps > 1)


@anyhow
@quick
@given(cases())
def test_each_layer_of_gd_plus_plus_may_have_parameters_of_its_own(case):
    prompts, steps, rng = case
    a, gamma = rng.uniform(-0.02, 0.08, steps).tolist(), rng.uniform(-0.01, 0.03, steps).tolist()
    model = constructions.gd_plus_plus(**sizes(prompts), step_size=a, gamma=gamma, steps=steps)
    expected = algorithms.gd_plus_plus(prompts, steps, step_size=a, gamma=gamma)
    assert_same(model.predict(prompts), expected.query()[0])
    assert not model.cfg.recurrent


def test_one_parameter_for_all_layers_goes_with_one_of_its_own_for_each():
    prompts = some_prompts()
    model = constructions.gd_plus_plus(**sizes(prompts), step_size=0.1, gamma=[0.0, 0.05, 0.1], steps=3)
    expected = algorithms.gd_plus_plus(prompts, 3, step_size=0.1, gamma=[0.0, 0.05, 0.1])
    assert_same(model.predict(prompts), expected.query()[0])


@pytest.mark.parametrize(("step_size", "gamma"), [(0.1, 0.05), ([0.1] * 3, [0.05] * 3), (0.1, [0.05] * 3)])
def test_layers_that_are_alike_are_looped_however_their_parameters_are_given(step_size, gamma):
    model = constructions.gd_plus_plus(x_dim=3, n_context=6, step_size=step_size, gamma=gamma, steps=3)
    assert model.cfg.recurrent
    assert len({id(p) for p in model.parameters()}) == 4


def test_every_token_is_transformed_not_the_querys_alone():
    prompts = some_prompts()
    model = constructions.gd_plus_plus(**sizes(prompts), step_size=0.1, gamma=0.05, steps=1)
    _, cache = model.run_with_cache(model.encode(prompts))
    xs, ys = prompts.context
    second, update = xs.mT @ xs, 0.1 * xs.mT @ ys
    assert_same(cache["blocks.0.hook_resid_post"][:, :, :3], prompts.xs - 0.05 * prompts.xs @ second)
    assert_same(cache["blocks.0.hook_resid_post"][:, :-1, 3:], ys - xs @ update)


# ---- a sign that papers get wrong ----


def with_step_sign(sign, prompts, steps):
    """Nertinger's section 2 writes the step of preconditioned gradient descent as `W + a A ∇L` (sign = 1)."""
    stream = Stream(x=prompts.x_dim, y=prompts.y_dim)
    ascent = Head(stream.read("x"), stream.read("x"), -stream.read("y"), -sign * 0.05 * stream.write("y"))
    return assemble(stream, [[ascent]] * steps, n_context=prompts.n_context)


def test_the_step_along_the_gradient_that_is_printed_with_a_plus_sign_does_not_learn():
    prompts = some_prompts(n_context=40, y_dim=1)
    weights = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    prompts = Prompts(prompts.xs, prompts.xs @ weights)

    def loss(sign, steps):
        return (with_step_sign(sign, prompts, steps).predict(prompts) - prompts.query.ys).square().mean().item()

    zero = prompts.query.ys.square().mean().item()
    assert loss(-1, 1) < zero < loss(+1, 1) < loss(+1, 2) / 2
    assert loss(-1, 60) < 1e-3 * zero
    minus = with_step_sign(-1, prompts, 4).predict(prompts)
    assert_same(minus, algorithms.gradient_descent(prompts, 4, step_size=0.05).query()[0])


# ---- refusals ----


@pytest.mark.parametrize("steps", [0, -3])
def test_fewer_than_one_step_is_refused(steps):
    with pytest.raises(ValueError, match="steps must be at least 1"):
        constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1, steps=steps)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        constructions.gd_plus_plus(x_dim=3, n_context=6, step_size=0.1, gamma=0.0, steps=steps)


@pytest.mark.parametrize("shape", [(1, 3), (3, 2), (1, 1)])
def test_initial_weights_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="initial_weights must be"):
        constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1, initial_weights=torch.zeros(shape))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_parameters_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="step_size must be finite"):
        constructions.gradient_descent(x_dim=3, n_context=6, step_size=value)
    with pytest.raises(ValueError, match="step_size must be finite"):
        constructions.gd_plus_plus(x_dim=3, n_context=6, step_size=value, gamma=0.1)
    with pytest.raises(ValueError, match="gamma must be finite"):
        constructions.gd_plus_plus(x_dim=3, n_context=6, step_size=0.1, gamma=[0.1, value], steps=2)


@pytest.mark.parametrize("count", [1, 4])
def test_another_number_of_parameters_than_of_layers_is_refused(count):
    with pytest.raises(ValueError, match=f"step_size has {count} entries for 3 steps"):
        constructions.gd_plus_plus(x_dim=3, n_context=6, step_size=[0.1] * count, gamma=0.0, steps=3)
