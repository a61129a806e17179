"""Gradient descent on features."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import constructions
from tests.algorithms.reference import descend
from tests.constructions.reference import assert_same, at_query, cases

ACTIVATIONS = {
    "relu": lambda h: np.maximum(h, 0),
    "tanh": np.tanh,
    "square": np.square,
    "identity": lambda h: h,
    "cos": np.cos,
}


@settings(max_examples=20)
@given(cases(), st.sampled_from(sorted(ACTIVATIONS)), st.integers(1, 20), st.booleans())
def test_the_transformer_is_gradient_descent_on_the_features(case, act_fn, n_features, with_bias):
    weights = case.rng.standard_normal((case.prompts.x_dim, n_features)) / case.prompts.x_dim**0.5
    bias = case.rng.standard_normal(n_features) if with_bias else np.zeros(n_features)
    model = constructions.kernel_gradient_descent(
        weights=torch.from_numpy(weights),
        bias=torch.from_numpy(bias) if with_bias else None,
        n_context=case.n_context,
        y_dim=case.prompts.y_dim,
        step_size=0.01,
        steps=case.steps,
        act_fn=act_fn,
    )

    def features(x):
        return ACTIVATIONS[act_fn](x @ weights + bias)

    plain = descend(case.steps, 0.01)
    assert_same(model.predict(case.prompts), at_query(case.prompts, lambda x, y, q: plain(features(x), y, features(q))))
    assert model.cfg.d_model == case.prompts.x_dim + case.prompts.y_dim + n_features
    assert (model.cfg.n_layers, model.cfg.n_heads) == (case.steps, 1)
    assert model.cfg.recurrent == (case.steps > 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be an int of at least 1"),
        ({"step_size": math.nan}, "step_size must be a finite number, got nan"),
        ({"act_fn": "nonsense"}, "act_fn='nonsense'"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = {"weights": torch.ones(2, 3), "n_context": 4, "step_size": 0.1, **change}
    with pytest.raises(ValueError, match=message):
        constructions.kernel_gradient_descent(**arguments)
