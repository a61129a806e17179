"""Measures of models of a pool of tasks against plain loops, and of predictions that are mixtures or not."""

import math

import numpy as np
import pytest
import torch

from mechicl.algorithms import references
from mechicl.checkpoints import Snapshots
from mechicl.learners import AlgorithmLearner
from mechicl.sweeps.measures.general import HELD_OUT
from mechicl.sweeps.measures.pools import compare_on_pool, fit_mixture, pool_distances
from tests.sweeps.made import POOL, checkpoint, untrained


def test_distances_on_a_pool_are_those_of_a_plain_loop():
    made = checkpoint(untrained(POOL), POOL)
    measured = pool_distances(made, n_prompts=30)
    for where, source in (("pool", POOL), ("new", POOL.new_tasks)):
        prompts = source.sample(30, seed=HELD_OUT)
        rows = []
        predicted = made.models[0].predict(prompts)
        for xs, ys, own in zip(prompts.xs.double().numpy(), prompts.ys.double().numpy(), predicted, strict=True):
            x, y, query = xs[:-1], ys[:-1, 0], xs[-1]
            ridge = query @ np.linalg.solve(x.T @ x + POOL.noise_std**2 * np.eye(2), x.T @ y)
            pool = POOL.weights.numpy()
            chances = np.array([math.exp(-sum((y - x @ w) ** 2) / (2 * POOL.noise_std**2)) for w in pool])
            dmmse = query @ (chances[:, None] * pool).sum(0) / chances.sum()
            rows.append((own.item(), dmmse, ridge, ys[-1, 0]))
        own, dmmse, ridge, y = np.array(rows).T
        (a, b), (left,), _, _ = np.linalg.lstsq(np.stack([dmmse, ridge], 1), own, rcond=None)
        expected = {
            "to_dmmse": ((own - dmmse) ** 2).mean(), "to_ridge": ((own - ridge) ** 2).mean(),
            "apart": ((dmmse - ridge) ** 2).mean(), "loss": ((own - y) ** 2).mean(),
            "dmmse_loss": ((dmmse - y) ** 2).mean(), "ridge_loss": ((ridge - y) ** 2).mean(),
            "position": b / (a + b), "scale": a + b, "residual": left / (own**2).sum(), "energy": (own**2).mean(),
        }  # fmt: skip
        assert {name: measured[f"{where}_{name}"] for name in expected} == pytest.approx(expected, rel=2e-4)
    assert measured["log_ratio"] == pytest.approx(math.log10(measured["pool_to_dmmse"] / measured["pool_to_ridge"]))


def mixture(of_dmmse: float, of_ridge: float) -> AlgorithmLearner:
    known = references(POOL)
    return AlgorithmLearner(
        lambda prompts: of_dmmse * known["dmmse"].predict(prompts) + of_ridge * known["ridge"].predict(prompts)
    )


@pytest.mark.parametrize(("of_dmmse", "of_ridge"), [(1.0, 0.0), (0.0, 1.0), (0.25, 0.75), (0.1, 0.3), (0.0, 0.5)])
def test_mixtures_have_their_weights_and_no_residual(of_dmmse, of_ridge):
    measured = compare_on_pool(mixture(of_dmmse, of_ridge), POOL, n_prompts=100)
    for where in ("pool", "new"):
        numbers = [measured[f"{where}_{name}"] for name in ("position", "scale", "residual")]
        scale = of_dmmse + of_ridge
        assert numbers == pytest.approx([of_ridge / scale, scale, 0], abs=1e-4)


def test_predictions_that_are_not_mixtures_are_recognised():
    """Predictions of 0 are nearer to ridge than to dMMSE here, but their position is NaN."""
    nothing = compare_on_pool(mixture(0.0, 0.0), POOL, n_prompts=500)
    assert nothing["log_ratio"] > 0
    assert nothing["pool_scale"] == 0
    assert all(math.isnan(nothing[f"pool_{name}"]) for name in ("position", "residual"))
    rng = torch.Generator().manual_seed(0)
    noise, one, two = torch.randn(3, 400, 1, generator=rng)
    fit = fit_mixture(noise, one, two)
    assert fit["residual"] > 0.98
    assert (fit["position_low"], fit["position_high"]) == (-math.inf, math.inf)
    alike = fit_mixture(0.5 * one, one, one)
    assert (alike["scale"], alike["residual"]) == pytest.approx((0.5, 0), abs=1e-12)
    assert all(math.isnan(alike[name]) for name in ("position", "position_low", "position_high"))
    for first, second in ((one, 2 * one), (one, 0 * one), (0 * one, one)):
        fit = fit_mixture(0.5 * one, first, second)
        assert all(math.isnan(fit[name]) for name in ("position", "position_low", "position_high", "scale"))
        assert fit["residual"] == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="level must be a number strictly between 0 and 1"):
        fit_mixture(noise, one, two, level=1)


def test_intervals_of_positions_hold_their_level_where_the_learners_are_nearly_alike():
    """Residuals are larger where predictions are, and ten times as large as the difference of the learners."""
    rng = torch.Generator().manual_seed(1)
    inside, widths = [], []
    for _ in range(400):
        one = torch.randn(300, 1, generator=rng)
        two = one + 0.05 * torch.randn(300, 1, generator=rng)
        p = 0.9 * (0.3 * one + 0.7 * two) + 0.5 * (0.2 + one.abs()) * torch.randn(300, 1, generator=rng)
        fit = fit_mixture(p, one, two)
        inside.append(fit["position_low"] <= 0.7 <= fit["position_high"])
        widths.append(fit["position_high"] - fit["position_low"])
    assert 0.91 <= sum(inside) / 400 <= 0.985
    assert min(widths) > 1  # the position is nearly undetermined


def test_positions_on_the_way_are_those_of_the_models_then():
    first, last = untrained(POOL), untrained(POOL, n_layers=2)
    for index, model in enumerate((first, last)):
        weights = {name: weight[None, None] for name, weight in model.state_dict().items()}
        made = checkpoint(model, POOL, snapshots=Snapshots((7,), weights))
        measured = pool_distances(made, n_prompts=20)
        for name in ("position", "scale", "residual"):
            assert measured[f"{name}_at_7"] == pytest.approx(measured[f"pool_{name}"]), index
