"""Paths between models against hand-mixed weights."""

import pytest
import torch

from mechicl import constructions
from mechicl.analysis import interpolate
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=4)
PROMPTS = TASK.sample(200, seed=0, dtype=torch.float64)


def model(seed: int) -> HookedTransformer:
    cfg = TransformerConfig(x_dim=3, n_context=4, initializer_range=0.5, dtype="float64")
    return HookedTransformer(cfg, seed=seed)


def loss_by_hand(W_KQ: torch.Tensor, W_PV: torch.Tensor) -> torch.Tensor:
    errors = []
    for xs, ys in zip(PROMPTS.xs, PROMPTS.ys, strict=True):
        query = torch.cat([xs[-1], torch.zeros(1, dtype=torch.float64)])
        update = torch.zeros(4, dtype=torch.float64)
        for x, y in zip(xs[:-1], ys[:-1], strict=True):
            token = torch.cat([x, y])
            update += (query @ W_KQ @ token) * (token @ W_PV)
        errors.append((-(query + update)[3] - ys[-1, 0]) ** 2)
    return torch.stack(errors)


def test_losses_along_the_raw_path_are_those_of_mixed_products():
    a, b = model(0), model(1)
    path = interpolate(a, b, PROMPTS, n_alphas=3, rescale=False)
    products = [[(m.W_Q @ m.W_K.mT)[0, 0].detach(), (m.W_V @ m.W_O)[0, 0].detach()] for m in (a, b)]
    for i, alpha in enumerate((0.0, 0.5, 1.0)):
        mixed = [(1 - alpha) * p + alpha * q for p, q in zip(*products, strict=True)]
        torch.testing.assert_close(path.squared_errors[i], loss_by_hand(*mixed), rtol=1e-10, atol=1e-12)


def test_rescaling_flattens_the_path_to_a_rescaled_copy():
    a = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    b = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    with torch.no_grad():
        b.blocks[0].attn.W_Q.mul_(-4)
        b.blocks[0].attn.W_V.div_(-4)
    flat = interpolate(a, b, PROMPTS)
    torch.testing.assert_close(flat.squared_errors, flat.squared_errors[:1].expand(11, -1), rtol=1e-9, atol=1e-12)
    assert abs(flat.midpoint_excess().mean) < 1e-9
    raw = interpolate(a, b, PROMPTS, rescale=False)
    assert raw.midpoint_excess().mean > 0.1
    assert raw.barrier().mean >= raw.midpoint_excess().mean


def test_barrier_and_excess_are_their_definitions():
    path = interpolate(model(0), model(1), PROMPTS, n_alphas=5, rescale=False)
    losses = path.squared_errors.mean(-1).numpy()
    line = [(1 - a) * losses[0] + a * losses[-1] for a in (0, 0.25, 0.5, 0.75, 1)]
    end = (losses[0] + losses[-1]) / 2
    expected = max(loss - straight for loss, straight in zip(losses, line, strict=True)) / end
    assert path.barrier().mean == pytest.approx(expected)
    assert path.midpoint_excess().mean == pytest.approx(losses[2] / end - 1)
    assert path.barrier().n == 200


def test_ends_are_the_models_themselves():
    a, b = model(0), model(1)
    path = interpolate(a, b, PROMPTS, n_alphas=2)
    for i, m in enumerate((a, b)):
        expected = (m.predict(PROMPTS) - PROMPTS.query.ys).square().sum(-1).detach()
        torch.testing.assert_close(path.squared_errors[i], expected, rtol=1e-9, atol=1e-12)


def test_table_has_a_row_for_each_alpha():
    frame = interpolate(model(0), model(1), PROMPTS, n_alphas=3).to_dataframe()
    assert list(frame["alpha"]) == [0, 0.5, 1]
    assert (frame["low"] <= frame["mse"]).all()


def test_models_of_different_shape_and_empty_paths_are_refused():
    deep = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5, steps=2)
    with pytest.raises(ValueError, match="different shape"):
        interpolate(model(0), deep, PROMPTS)
    with pytest.raises(ValueError, match="two ends"):
        interpolate(model(0), model(1), PROMPTS, n_alphas=1)


def test_models_that_differ_in_more_than_their_weights_are_refused():
    plain = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    start = torch.ones(3, 1, dtype=torch.float64)
    moved = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5, initial_weights=start)
    with pytest.raises(ValueError, match="initial weights"):
        interpolate(plain, moved, PROMPTS)
    damped = HookedTransformer(plain.cfg.replace(damping=0.5))
    with pytest.raises(ValueError, match="differ in damping"):
        interpolate(plain, damped, PROMPTS)
