"""Recurrent layers by theorem against plain loops over points, on every prompt; several epochs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl import constructions
from mechicl.prompts import Prompts
from tests.algorithms.reference import at_query, discounted, pass_over
from tests.constructions.reference import Case, assert_same, cases, quick, random_prompts

DISCOUNTS = st.sampled_from([1.0, 0.9, 0.5])


@quick
@given(cases(), st.floats(1e-3, 0.3), DISCOUNTS)
def test_a_delta_layer_is_online_gradient_descent(case: Case, step_size: float, discount: float):
    model = constructions.online_gradient_descent(**case.sizes, step_size=step_size, discount=discount)
    assert_same(model.predict(case.prompts), at_query(case.prompts, pass_over(step_size, discount=discount)))


@quick
@given(cases(), st.floats(1e-3, 10), DISCOUNTS)
def test_a_mesa_layer_is_discounted_ridge(case: Case, penalty: float, discount: float):
    model = constructions.recursive_least_squares(**case.sizes, penalty=penalty, discount=discount)
    assert_same(model.predict(case.prompts), at_query(case.prompts, discounted(discount, penalty=penalty)))


@quick
@given(cases(), st.floats(-1, 1), DISCOUNTS)
def test_gated_linear_attention_is_discounted_descent(case: Case, step_size: float, discount: float):
    model = constructions.discounted_gradient_descent(**case.sizes, step_size=step_size, discount=discount)
    assert_same(model.predict(case.prompts), at_query(case.prompts, discounted(discount, scale=step_size)))


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.5])
def test_a_mamba_layer_is_an_exponentially_weighted_average(discount: float):
    prompts = random_prompts(7, 3, 2)
    model = constructions.discounted_averaging(x_dim=3, y_dim=2, n_context=7, discount=discount)
    assert_same(model.predict(prompts), at_query(prompts, discounted(discount, mean=True)))


def test_the_context_given_twice_is_two_epochs_and_two_layers_are_not():
    prompts, sizes = random_prompts(7, 3, 2), {"x_dim": 3, "y_dim": 2, "n_context": 14}
    twice = Prompts(*(torch.cat([part[:, :-1], part], dim=1) for part in (prompts.xs, prompts.ys)))
    model = constructions.online_gradient_descent(**sizes, step_size=0.2)
    two_epochs = at_query(prompts, pass_over(0.2, epochs=2))
    assert_same(model.predict(twice), two_epochs)
    stream = model(prompts, stop_at_layer=1)
    again = -model(stream, start_at_layer=0, stop_at_layer=1)[:, -1, 3:]  # a second layer with the same weights
    assert np.abs(again.detach().numpy() - two_epochs).max() > 0.01 * np.abs(two_epochs).max()
