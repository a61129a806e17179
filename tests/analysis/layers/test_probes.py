"""Probes on models that are built to carry a quantity, and on none."""

import numpy as np
import pytest
import torch

from mechicl.algorithms import gradient_descent, newton, ridge_path
from mechicl.analysis import probe
from mechicl.analysis.layers import algorithm_weights, cross_moments, ols_weights, second_moments
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=2, n_context=4, inputs="gaussian")
FITTING, HELD_OUT = (TASK.sample(n, seed=s, dtype=torch.float64) for n, s in ((600, 0), (200, 1)))


def _averaging_model() -> HookedTransformer:
    """One layer of uniform attention: each position contains the mean of the tokens that it sees."""
    cfg = TransformerConfig(
        x_dim=2, n_context=4, prompt_format="interleaved", n_layers=1, d_model=40, d_head=40, attention="softmax",
        positional_embedding_type="one_hot", read_in="identity", read_out="linear", dtype="float64",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval()
    with torch.no_grad():
        for name in "QKVO":
            getattr(model.blocks[0].attn, f"W_{name}").zero_()
        model.blocks[0].attn.W_V[0, :2, 20:22] = torch.eye(2)
        model.blocks[0].attn.W_O[0] = torch.eye(40)
    return model


def _mean_of_tokens(prompts):
    """The content of that model at x tokens: the sum of the x and y before, without its own x."""
    xs, ys = prompts.xs, torch.nn.functional.pad(prompts.ys, (0, 1))
    sums = (xs + ys).cumsum(1) - (xs + ys)
    return sums


def test_a_quantity_is_found_after_the_layer_that_writes_it():
    result = probe(_averaging_model(), {"sum": _mean_of_tokens}, FITTING, HELD_OUT)
    explained = result.explained()[0]
    assert explained.shape == (2, 9)
    assert (explained[1, 1:] > 1 - 1e-6).all()  # after the layer, at every position that has seen a point
    assert explained[0, 2:].max() < 0.9  # before it, a position contains only its own token
    assert explained[:, 0].isnan().all()  # nothing varies before the first point
    assert result.control()[0, :, 1:].max() < 0.05
    assert (result.selectivity()[0, 1, 1:] > 0.95).all()


def test_r_squared_is_that_of_numpys_regression_on_the_cached_stream():
    model = _averaging_model()
    result = probe(model, {"cross": cross_moments}, FITTING, HELD_OUT, penalties=[0.0])
    position, seen = 5, 3  # the third y token has seen three points
    _, cache = model.run_with_cache(model.encode(FITTING))
    _, cache_held = model.run_with_cache(model.encode(HELD_OUT))
    x, x_held = (c["blocks.0.hook_resid_post"][:, position].detach().numpy() for c in (cache, cache_held))
    y, y_held = ((p.xs[:, :seen, :] * p.ys[:, :seen, :]).sum(1).numpy() for p in (FITTING, HELD_OUT))
    x, x_held = (np.concatenate([a, np.ones((len(a), 1))], axis=1) for a in (x, x_held))
    predicted = x_held @ np.linalg.lstsq(x, y, rcond=1e-10)[0]
    expected = 1 - ((predicted - y_held) ** 2).sum() / ((y_held - y_held.mean(0)) ** 2).sum()
    assert result.explained()[0, 1, position].item() == pytest.approx(expected, abs=1e-8)
    interval = result.interval("cross", 1, position)
    assert interval.mean == pytest.approx(expected, abs=1e-8)
    assert interval.low < interval.mean < interval.high
    bounded = probe(model, {"cross": cross_moments}, FITTING, HELD_OUT, penalties=[0.0], memory=3e6)
    torch.testing.assert_close(bounded.control_squared_errors, result.control_squared_errors)


def test_quantities_are_those_of_plain_loops():
    prompts = TASK.sample(3, seed=5, dtype=torch.float64)
    xs, ys = prompts.xs.numpy(), prompts.ys.numpy()
    of_newton = algorithm_weights(newton, steps=[2])(prompts)
    gd = algorithm_weights(gradient_descent, steps=[3], step_size=0.1)(prompts)
    for p in range(3):
        for t in range(5):
            x, y = xs[p, :t], ys[p, :t]
            second, cross = x.T @ x, x.T @ y
            np.testing.assert_allclose(cross_moments(prompts)[p, t], cross[:, 0], atol=1e-12)
            upper = [second[0, 0], second[0, 1], second[1, 1]]
            np.testing.assert_allclose(second_moments(prompts)[p, t], upper, atol=1e-12)
            np.testing.assert_allclose(ols_weights(prompts)[p, t], (np.linalg.pinv(x) @ y)[:, 0], atol=1e-7)
            inverse = second / np.linalg.norm(second @ second.T) if t else second
            for _ in range(2):
                inverse = 2 * inverse - inverse @ second @ inverse
            np.testing.assert_allclose(of_newton[p, t], (inverse @ cross)[:, 0], atol=1e-9)
            w = np.zeros((2, 1))
            for _ in range(3):
                w = w - 0.1 * (second @ w - cross)
            np.testing.assert_allclose(gd[p, t], w[:, 0], atol=1e-12)


def test_the_best_site_is_among_the_given_positions():
    result = probe(_averaging_model(), {"sum": _mean_of_tokens}, FITTING, HELD_OUT)
    layer, _position, explained = result.best("sum")
    assert layer == 1
    assert explained.mean == pytest.approx(1, abs=1e-6)
    assert explained.n == 100  # the other half chose the site
    assert result.best("sum", [4, 6])[1] in (4, 6)


def test_the_weights_of_a_ridge_path_are_those_of_ridge_regression():
    second = HELD_OUT.context.xs.mT @ HELD_OUT.context.xs
    penalty = (second @ second).norm(dim=(1, 2)).sqrt() / 8
    eye = torch.eye(2, dtype=torch.float64)
    expected = torch.linalg.solve(second + penalty[:, None, None] * eye, HELD_OUT.context.xs.mT @ HELD_OUT.context.ys)
    torch.testing.assert_close(algorithm_weights(ridge_path, steps=[3])(HELD_OUT)[:, -1], expected[..., 0])
