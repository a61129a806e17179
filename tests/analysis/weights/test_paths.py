"""Paths between models against hand-mixed weights and plain formulas."""

import numpy as np
import pytest
import torch

from mechicl import constructions
from mechicl.analysis import interpolate
from mechicl.analysis.weights.paths import LossPath, WeightCurve
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=4)
PROMPTS = TASK.sample(12, seed=0, dtype=torch.float64)


def model(seed: int, **fields) -> HookedTransformer:
    cfg = TransformerConfig(x_dim=3, n_context=4, initializer_range=0.5, dtype="float64")
    return HookedTransformer(cfg.replace(**fields), seed=seed)


def products(m: HookedTransformer) -> tuple[torch.Tensor, torch.Tensor]:
    return (m.W_Q @ m.W_K.mT).detach(), (m.W_V @ m.W_O).detach()


def by_hand(W_KQ: torch.Tensor, W_PV: torch.Tensor) -> torch.Tensor:
    """Predictions `[prompt 1]` of linear attention with these products `[layer head d d]`, by loops."""
    result = []
    for xs, ys in zip(PROMPTS.xs, PROMPTS.ys, strict=True):
        tokens = torch.cat([xs, ys], dim=1)
        tokens[-1, -1] = 0
        for layer_KQ, layer_PV in zip(W_KQ, W_PV, strict=True):
            update = torch.zeros_like(tokens)
            for i, query in enumerate(tokens):
                for key in tokens[:-1]:
                    for head_KQ, head_PV in zip(layer_KQ, layer_PV, strict=True):
                        update[i] += (query @ head_KQ @ key) * (key @ head_PV)
            tokens = tokens + update
        result.append(-tokens[-1, 3:])
    return torch.stack(result)


def loss_by_hand(W_KQ: torch.Tensor, W_PV: torch.Tensor) -> torch.Tensor:
    return (by_hand(W_KQ, W_PV) - PROMPTS.ys[:, -1]).square().mean(-1)


@pytest.mark.parametrize("fields", [{}, {"n_layers": 2, "n_heads": 2, "initializer_range": 0.3}])
def test_losses_along_the_raw_path_are_those_of_mixed_products(fields: dict):
    a, b = model(0, **fields), model(1, **fields)
    path = interpolate(a, b, PROMPTS, n_alphas=3, kind="raw")
    assert path.kind == "raw"
    for i, alpha in enumerate((0.0, 0.5, 1.0)):
        mixed = [(1 - alpha) * p + alpha * q for p, q in zip(products(a), products(b), strict=True)]
        torch.testing.assert_close(path.squared_errors[i], loss_by_hand(*mixed), rtol=1e-10, atol=1e-12)


def test_rescaling_flattens_the_path_to_a_rescaled_copy():
    a = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    b = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5)
    with torch.no_grad():
        b.blocks[0].attn.W_Q.mul_(-4)
        b.blocks[0].attn.W_V.div_(-4)
    for kind in ("rescaled", "aligned", "lifted"):
        flat = interpolate(a, b, PROMPTS, kind=kind)
        expected = flat.squared_errors[:1].expand(11, -1)
        torch.testing.assert_close(flat.squared_errors, expected, rtol=1e-9, atol=1e-12)
        assert abs(flat.midpoint_excess().mean) < 1e-9
    assert interpolate(a, b, PROMPTS).kind == "rescaled"
    raw = interpolate(a, b, PROMPTS, kind="raw")
    assert raw.midpoint_excess().mean > 0.1
    assert raw.barrier().mean >= raw.midpoint_excess().mean


def test_one_lifted_layer_predicts_the_linear_mix():
    a, b = model(0, n_heads=2), model(1, n_heads=2)
    path = interpolate(a, b, PROMPTS, n_alphas=4, kind="lifted")
    first, second = by_hand(*products(a)), by_hand(*products(b))
    for i, alpha in enumerate((0, 1 / 3, 2 / 3, 1)):
        mixed = (1 - alpha) * first + alpha * second
        torch.testing.assert_close(path.model(alpha).predict(PROMPTS).detach(), mixed, rtol=1e-9, atol=1e-11)
        errors = (mixed - PROMPTS.ys[:, -1]).square().mean(-1)
        torch.testing.assert_close(path.squared_errors[i], errors, rtol=1e-9, atol=1e-11)
    assert path.barrier().mean <= 1e-12  # squared errors are convex in predictions


def test_the_barrier_of_a_curve_made_by_hand():
    def path(*losses: float) -> LossPath:
        values = torch.tensor(losses, dtype=torch.float64)[:, None].expand(-1, 4)
        return LossPath("raw", tuple(np.linspace(0, 1, len(losses)).tolist()), values)

    assert path(1, 4, 5).barrier().mean == pytest.approx((4 - 3) / 3)
    assert path(1, 4, 5).midpoint_excess().mean == pytest.approx((4 - 3) / 3)
    assert path(2, 1, 2).barrier().mean == 0  # a valley is no barrier
    assert path(2, 1, 2).midpoint_excess().mean == pytest.approx(-0.5)
    assert path(1, 1, 1, 3, 1).barrier().mean == pytest.approx(2)
    assert path(1, 1, 1, 3, 1).midpoint_excess().mean == pytest.approx(0)
    assert np.isnan(path(1, float("nan"), 1).barrier().mean)


@pytest.mark.parametrize("kind", ["raw", "rescaled", "aligned", "lifted"])
def test_ends_are_the_models_themselves(kind):
    a, b = model(0, n_layers=2, initializer_range=0.3), model(1, n_layers=2, initializer_range=0.3, n_heads=2)
    path = interpolate(a, b, PROMPTS, n_alphas=2, kind=kind)
    for alpha, m in enumerate((a, b)):
        expected = m.predict(PROMPTS).detach()
        torch.testing.assert_close(path.model(alpha).predict(PROMPTS).detach(), expected, rtol=1e-9, atol=1e-10)
        errors = (expected - PROMPTS.query.ys).square().mean(-1)
        torch.testing.assert_close(path.squared_errors[alpha], errors, rtol=1e-9, atol=1e-10)


def test_a_curve_is_a_bezier_curve():
    points: tuple[dict[str, torch.Tensor], ...] = tuple(dict(model(i).named_parameters()) for i in range(3))
    template = model(0)
    for alpha in (0.0, 0.25, 1.0):
        curved, straight = (
            WeightCurve(template, points).weights(alpha),
            WeightCurve(template, points[:2]).weights(alpha),
        )
        for name, (p, q, r) in {n: [point[n] for point in points] for n in points[0]}.items():
            expected = (1 - alpha) ** 2 * p + 2 * alpha * (1 - alpha) * q + alpha**2 * r
            torch.testing.assert_close(curved[name], expected)
            torch.testing.assert_close(straight[name], (1 - alpha) * p + alpha * q)


def test_models_of_different_shape_and_empty_paths_are_refused():
    deep = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5, steps=2)
    with pytest.raises(ValueError, match="different shape"):
        interpolate(model(0), deep, PROMPTS)
    with pytest.raises(ValueError, match="two ends"):
        interpolate(model(0), model(1), PROMPTS, n_alphas=1)
    with pytest.raises(ValueError, match="kind must be one of"):
        interpolate(model(0), model(1), PROMPTS, kind="curved")


def test_initial_weights_that_agree_stay():
    start = torch.tensor([[0.5], [-1.0], [0.2]], dtype=torch.float64)
    a, b = (
        constructions.gradient_descent(x_dim=3, n_context=4, step_size=s, initial_weights=start) for s in (0.5, 1.0)
    )
    for kind in ("raw", "lifted"):
        path = interpolate(a, b, PROMPTS, n_alphas=3, kind=kind)
        for alpha, step_size in ((0, 0.5), (0.5, 0.75), (1, 1.0)):
            residual = (PROMPTS.ys - PROMPTS.xs @ start)[:, :-1]
            moved = start + step_size * PROMPTS.xs[:, :-1].mT @ residual
            expected = (PROMPTS.xs[:, -1:] @ moved)[:, 0]
            torch.testing.assert_close(path.model(alpha).predict(PROMPTS).detach(), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("alpha", [1e300, -1001.0, torch.tensor(2e3)])
def test_a_place_far_from_both_models_is_refused(alpha):
    path = interpolate(model(0), model(1), PROMPTS, n_alphas=3)
    assert path.curve is not None
    with pytest.raises(ValueError, match="alpha must be from -1000 to 1000, with models at 0 and 1, got"):
        path.curve.weights(alpha)


def test_a_place_is_one_number():
    path = interpolate(model(0), model(1), PROMPTS, n_alphas=3)
    assert path.curve is not None
    with pytest.raises(ValueError, match=r"alpha must be one number, got a tensor \[2\]"):
        path.curve.weights(torch.tensor([0.1, 0.2]))


def test_a_loaded_path_has_the_losses_and_no_models(tmp_path):
    path = interpolate(model(0), model(1), PROMPTS, n_alphas=3)
    loaded = LossPath.load(path.save(tmp_path / "path"))
    assert loaded.barrier() == path.barrier()
    with pytest.raises(ValueError, match="a loaded path has no models"):
        loaded.model(0.5)
