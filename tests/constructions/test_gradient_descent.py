"""Linear attention against gradient descent and GD++ as plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl import constructions
from mechicl.learners import Learner
from tests.algorithms.reference import descend, transform
from tests.constructions.reference import assert_same, at_query, cases, quick, random_prompts

SIZES = {"x_dim": 3, "y_dim": 2, "n_context": 6}

# ---- gradient descent ----


@quick
@given(cases(), st.floats(-0.01, 0.03), st.booleans())
def test_the_transformer_is_gradient_descent_on_every_prompt_and_prefix(case, step_size, other_weights):
    prompts = case.prompts
    start = case.rng.standard_normal((prompts.x_dim, prompts.y_dim)) if other_weights else None
    model = constructions.gradient_descent(
        **case.sizes,
        step_size=step_size,
        steps=case.steps,
        initial_weights=None if start is None else torch.from_numpy(start),
    )
    predict = descend(case.steps, step_size, start)
    prefixes = model.predict_prefixes(prompts)
    assert_same(model.predict(prompts), at_query(prompts, predict))
    for t in {0, prompts.n_context // 2, prompts.n_context}:
        assert_same(prefixes[:, t], at_query(prompts.prefix(t), predict))


@pytest.mark.parametrize("start", [None, torch.tensor([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]])])
def test_each_layer_is_one_step(start):
    prompts = random_prompts()
    model = constructions.gradient_descent(**SIZES, step_size=0.1, steps=5, initial_weights=start)
    _, cache = model.run_with_cache(model.encode(prompts))
    weights = None if start is None else start.double().numpy()
    for steps in range(6):
        name = f"blocks.{steps - 1}.hook_resid_post" if steps else "blocks.0.hook_resid_pre"
        assert_same(-cache[name][:, -1, 3:], at_query(prompts, descend(steps, 0.1, weights)))


def test_steps_share_the_weights_of_one_layer_in_a_float64_learner():
    one = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1)
    looped = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1, steps=12)
    assert not one.cfg.recurrent
    assert looped.cfg.recurrent
    assert sum(p.numel() for p in looped.parameters()) == sum(p.numel() for p in one.parameters())
    assert isinstance(looped, Learner)
    assert not looped.training
    assert {p.dtype for p in looped.parameters()} == {torch.float64}
    assert (looped.cfg.n_heads, looped.cfg.d_model, looped.cfg.n_layers) == (1, 4, 12)


# ---- GD++ ----


@quick
@given(cases(), st.booleans(), st.booleans())
def test_the_transformer_is_gd_plus_plus_on_every_prompt(case, one_step_size, one_gamma):
    step_size = case.rng.uniform(-0.01, 0.03, case.steps).tolist()
    gamma = case.rng.uniform(-0.01, 0.02, case.steps).tolist()
    if one_step_size:
        step_size = [step_size[0]] * case.steps
    if one_gamma:
        gamma = [gamma[0]] * case.steps
    model = constructions.gd_plus_plus(
        **case.sizes,
        step_size=step_size[0] if one_step_size else step_size,
        gamma=gamma[0] if one_gamma else gamma,
        steps=case.steps,
    )
    assert_same(model.predict(case.prompts), at_query(case.prompts, transform(step_size, gamma)))
    assert model.cfg.recurrent == (case.steps > 1 and one_step_size and one_gamma)


def test_every_token_is_transformed_not_the_querys_alone():
    prompts = random_prompts()
    model = constructions.gd_plus_plus(**SIZES, step_size=0.1, gamma=[0.05], steps=1)
    _, cache = model.run_with_cache(model.encode(prompts))
    (xs, ys), stream = prompts.context, cache["blocks.0.hook_resid_post"]
    second, update = xs.mT @ xs, 0.1 * xs.mT @ ys
    assert_same(stream[:, :, :3], (prompts.xs - 0.05 * prompts.xs @ second).numpy())
    assert_same(stream[:, :-1, 3:], (ys - xs @ update).numpy())


# ---- refusals ----


@pytest.mark.parametrize(
    ("construction", "change", "message"),
    [
        ("gradient_descent", {"steps": 0}, "steps must be an int of at least 1"),
        ("gradient_descent", {"initial_weights": torch.zeros(3, 1)}, "initial_weights must be"),
        ("gradient_descent", {"step_size": math.nan}, "step_size must be a finite number, got nan"),
        ("gd_plus_plus", {"gamma": 0.0, "steps": -3}, "steps must be an int of at least 1"),
        ("gd_plus_plus", {"gamma": 0.0, "step_size": math.inf}, "step_size must be"),
        ("gd_plus_plus", {"gamma": [0.1, math.nan], "steps": 2}, r"gamma\[1\] must be a finite number, got nan"),
        ("gd_plus_plus", {"gamma": 0.0, "step_size": [0.1] * 4, "steps": 3}, "step_size must be"),
    ],
)
def test_bad_arguments_are_refused(construction, change, message):
    with pytest.raises(ValueError, match=message):
        getattr(constructions, construction)(**{**SIZES, "step_size": 0.1, **change})
