"""Repeated layers against the algorithm that they repeat."""

import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.analysis import Lens
from mechicl.analysis.weights import repeat_layers
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

PROMPTS = LinearRegression(x_dim=3, n_context=4).sample(50, seed=0, dtype=torch.float64)


@pytest.mark.parametrize("damping", [1.0, 0.75])
def test_a_repeated_step_is_gradient_descent_with_a_damped_step_size(damping: float):
    one_step = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    trajectory = Lens(repeat_layers(one_step, 12, damping)).trajectory(PROMPTS)
    expected = algorithms.gradient_descent(PROMPTS, list(range(13)), step_size=0.5 * damping, at="query")
    assert trajectory.steps == tuple(range(13))
    torch.testing.assert_close(trajectory.predictions, expected.predictions, rtol=1e-11, atol=1e-12)


def test_repeating_leaves_the_model_as_it_was():
    model = HookedTransformer(TransformerConfig(x_dim=3, n_context=4, initializer_range=0.5))
    before = model.state_dict()
    looped = repeat_layers(model, 5)
    with torch.no_grad():
        looped.blocks[0].attn.W_Q.zero_()
    assert model.cfg.n_layers == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert before["blocks.0.attn.W_Q"].abs().sum() > 0


def test_what_cannot_be_repeated_is_refused():
    with pytest.raises(ValueError, match="2 different ones"):
        repeat_layers(HookedTransformer(TransformerConfig(x_dim=3, n_context=4, n_layers=2)), 3)
    with pytest.raises(ValueError, match="at least 1"):
        repeat_layers(HookedTransformer(TransformerConfig(x_dim=3, n_context=4)), 0)
