"""Paths between models against hand-mixed weights and plain formulas."""

import numpy as np
import pytest
import torch

from mechicl import constructions
from mechicl.analysis import connect_modes, fit_construction, interpolate
from mechicl.analysis.weights.paths import LossPath, ModeConnectivity, WeightCurve, bend, straight_line
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.statistics import ratio_interval
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
    # where only one α is between the ends nothing is chosen; three are three chances of a large value
    noise = torch.rand(5, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    three, one = (LossPath("raw", tuple(i / (len(part) - 1) for i in range(len(part))), part) for part in
                  (noise[[0, 1, 1, 1, 4]], noise[[0, 1, 4]]))  # fmt: skip
    assert one.barrier() == one.midpoint_excess()
    assert three.barrier().level == 0.95
    assert three.barrier().half_width > 1.1 * max(ratio_interval(e, (noise[0] + noise[4]) / 2).half_width for e in
        (noise[1] - (1 - a) * noise[0] - a * noise[4] for a in (0.25, 0.5, 0.75)))  # fmt: skip


def test_an_end_that_clips_otherwise_than_its_model_is_named():
    a = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.2)
    b = HookedTransformer(a.cfg.replace(token_clip=0.1), seed=0)
    b.load_state_dict(a.state_dict())
    prompts = LinearRegression(x_dim=3, n_context=6).sample(50, seed=3)
    with pytest.warns(UserWarning, match=r"token_clip=None of a.*; b, with token_clip=0.1"):
        interpolate(a, b, prompts, n_alphas=3, kind="raw")


def test_the_barrier_of_a_curve_made_by_hand():
    def path(*losses: float) -> LossPath:
        values = torch.tensor(losses, dtype=torch.float64)[:, None].expand(-1, 4)
        return LossPath("raw", tuple(np.linspace(0, 1, len(losses)).tolist()), values)

    assert path(1, 4, 5).barrier().mean == pytest.approx((4 - 3) / 3)
    assert path(1, 4, 5).midpoint_excess().mean == pytest.approx((4 - 3) / 3)
    assert path(2, 1, 2).barrier().mean == 0  # a valley has no barrier
    assert path(2, 1, 2).midpoint_excess().mean == pytest.approx(-0.5)
    assert path(1, 1, 1, 3, 1).barrier().mean == pytest.approx(2)
    assert path(1, 1, 1, 3, 1).midpoint_excess().mean == pytest.approx(0)
    assert np.isnan(path(1, float("nan"), 1).barrier().mean)


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


def test_bending_lowers_the_loss_and_keeps_the_ends():
    a, b = (constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.3) for _ in range(2))
    with torch.no_grad():  # half-way, the step is 1.56 times as long
        b.blocks[0].attn.W_Q.mul_(4)
        b.blocks[0].attn.W_V.div_(4)
    line, task = straight_line(a, b), TASK.replace(inputs="gaussian")
    bending = task.sample(2000, seed=3, dtype=torch.float64)

    def worst(curve: WeightCurve) -> float:
        losses = []
        for alpha in np.linspace(0, 1, 9):
            predictions = curve.model(float(alpha)).predict(bending)
            losses.append((predictions - bending.query.ys).square().mean().item())
        return max(losses)

    bent = bend(line, task, steps=60, seed=0, progress=False)
    assert len(bent.points) == 5
    assert worst(bent) < worst(line)
    for alpha in (0, 1):
        for name, weight in bent.weights(alpha).items():
            torch.testing.assert_close(weight, line.weights(alpha)[name], rtol=0, atol=0)
    assert not any(w.requires_grad for point in bent.points for w in point.values())


def test_a_bend_that_does_not_help_or_is_not_a_number_is_not_taken():
    exact = constructions.gradient_descent(x_dim=3, n_context=4, step_size=1.0)
    assert len(bend(straight_line(exact, exact), TASK, steps=2, seed=0, progress=False).points) == 2  # one model
    huge = TASK.replace(weight_scale=1e30)  # whose squared errors overflow in float32
    a, b = model(0), model(1)
    assert len(bend(straight_line(a, b), huge, steps=2, seed=0, progress=False).points) == 2


def test_all_kinds_between_the_same_models(tmp_path):
    a, b = model(0, n_heads=2), model(1)
    result = connect_modes(a, b, TASK, n_prompts=50, bending_steps=3, seed=6)
    assert list(result.paths) == ["raw", "rescaled", "aligned", "lifted", "curved"]
    assert result.fitted == {}
    held_out = TASK.sample(50, seed=7, dtype=torch.float64)
    for path in result.paths.values():
        for i, m in enumerate((a, b)):
            errors = (m.predict(held_out) - held_out.query.ys).square().mean(-1).detach()
            torch.testing.assert_close(path.squared_errors[-i], errors, rtol=1e-9, atol=1e-11)
    again = connect_modes(a, b, TASK, n_prompts=50, bending_steps=3, seed=6)
    assert torch.equal(again.paths["curved"].squared_errors, result.paths["curved"].squared_errors)
    assert result.barriers()["raw"] == result.paths["raw"].barrier()
    table = result.to_dataframe()
    assert len(table) == 5 * 11
    assert ModeConnectivity.load(result.save(tmp_path / "result")).to_dataframe().equals(table)


def test_paths_to_the_fitted_construction():
    a, b = model(0), model(1)
    kinds = ("raw", "lifted")
    result = connect_modes(a, b, TASK, kinds=kinds, family="gd", n_prompts=50)
    assert list(result.barriers()) == ["raw", "lifted", "fitted, raw", "fitted, lifted"]
    assert list(result.to_dataframe()["path"].unique()) == list(result.barriers())
    fit = fit_construction(a, "gd", TASK, refine=False, n_prompts=50)
    assert fit.layerwise is not None
    step_size = fit.layerwise.parameters["step_size"].item()
    held_out = TASK.sample(50, seed=1, dtype=torch.float64)
    for path in result.fitted.values():
        truth = held_out.ys[:, -1, 0]
        moments = (held_out.xs[:, :-1] * held_out.ys[:, :-1]).sum(1)
        prediction = step_size * (held_out.xs[:, -1] * moments).sum(-1)
        torch.testing.assert_close(path.squared_errors[-1], (prediction - truth) ** 2, rtol=1e-8, atol=1e-10)
