"""Interleaved prompts: each target onto the token of its input."""

import math

import pytest
import torch
from hypothesis import given

from mechicl import constructions
from tests.algorithms.reference import descend
from tests.constructions.reference import assert_same, at_query, cases, quick, random_prompts


def after_copying(model, prompts):
    """Token and y parts of the stream after the first layer, `[prompt pos d]` each."""
    stream = model(prompts, stop_at_layer=1)
    width = model.cfg.d_token
    return stream[..., :width], stream[..., -prompts.y_dim :]


@quick
@given(cases())
def test_every_target_is_at_its_input_and_nothing_anywhere_else(case):
    prompts = case.prompts
    model = constructions.copy_targets(**case.sizes)
    token, y = after_copying(model, prompts)
    assert torch.equal(y[:, :-1:2], prompts.context.ys)
    assert torch.equal(token[:, ::2, : prompts.x_dim], prompts.xs)
    assert not token[:, 1::2].any()
    assert not y[:, 1::2].any()
    assert not y[:, -1].any()
    assert not token[:, ::2, prompts.x_dim :].any()
    assert model.cfg.d_model == max(prompts.x_dim, prompts.y_dim) + 2 * case.n_context + 1 + prompts.y_dim
    assert (model.cfg.n_layers, model.cfg.n_heads, model.cfg.prompt_format) == (1, 2, "interleaved")


@pytest.mark.parametrize(("score_scale", "n_context"), [(4.0, 6), (8.0, 1), (16.0, 20), (32.0, 6)])
def test_the_softmax_copy_errs_as_stated(score_scale, n_context):
    prompts = random_prompts(n_context=n_context)
    sizes = {"x_dim": 3, "y_dim": 2, "n_context": n_context}
    model = constructions.copy_targets(**sizes, attention="softmax", score_scale=score_scale)
    token, y = after_copying(model, prompts)
    largest = model.encode(prompts).abs().max().item()
    bound = 2 * (n_context + 1) * math.exp(-score_scale / 2) * largest
    assert (y[:, :-1:2] - prompts.context.ys).abs().max().item() < bound
    assert y[:, 1::2].abs().max().item() < bound
    assert token[:, 1::2].abs().max().item() < bound
    assert (token[:, ::2] - model.encode(prompts)[:, ::2]).abs().max().item() < bound


def test_prompts_with_more_points_than_positions_are_refused():
    for model in (
        constructions.copy_targets(x_dim=3, y_dim=2, n_context=5),
        constructions.copy_then_gradient_descent(x_dim=3, y_dim=2, n_context=5, step_size=0.1),
    ):
        with pytest.raises(ValueError, match="13 positions, but this model has 11"):
            model.predict(random_prompts(n_context=6))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("copy_targets", {"attention": "relu"}, "attention must be"),
        *(("copy_targets", {"score_scale": scale}, "score_scale must be positive") for scale in (0.0, math.inf)),
        ("copy_targets", {"score_scale": math.nan}, "score_scale must be a finite number, got nan"),
        ("copy_then_gradient_descent", {"step_size": 0.1, "steps": 0}, "steps must be an int of at least 1"),
        ("copy_then_gradient_descent", {"step_size": math.nan}, "step_size must be a finite number, got nan"),
        ("copy_targets", {"n_context": -1}, "n_context must be an int of at least 0, got -1"),
        ("copy_targets", {"y_dim": 0}, "y_dim must be an int of at least 1, got 0"),
        ("copy_targets", {"y_dim": 2**31}, "'y': 2147483648} is wider than 16384 dimensions"),
        ("copy_then_gradient_descent", {"step_size": 0.1, "n_context": -1}, "n_context must be an int of at least 0"),
    ],
)
def test_bad_arguments_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        getattr(constructions, name)(**{"x_dim": 3, "n_context": 4, **change})


# ---- and gradient descent on what it has put together ----


@quick
@given(cases())
def test_copying_and_descending_is_gradient_descent_on_every_prompt(case):
    prompts = case.prompts
    model = constructions.copy_then_gradient_descent(**case.sizes, step_size=0.03, steps=case.steps)
    assert_same(model.predict(prompts), at_query(prompts, descend(case.steps, 0.03)))
    assert (model.cfg.n_layers, model.cfg.n_heads) == (case.steps + 1, 2)
    assert not model.cfg.recurrent
