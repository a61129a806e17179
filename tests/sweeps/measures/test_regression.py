"""Measures of models of regression against plain loops, and against models whose algorithm is known."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from mechicl import constructions
from mechicl.checkpoints import Snapshots
from mechicl.models import HookedTransformer
from mechicl.sweeps.measures import regression
from mechicl.sweeps.measures.one_model import HELD_OUT
from mechicl.sweeps.measures.regression import descent_limits, gap_to_descent, pool_distances
from tests.sweeps.made import N_TUNING, POOL, REGRESSION, checkpoint, step, untrained


@pytest.fixture(autouse=True)
def _few_prompts_to_tune_on(monkeypatch):
    monkeypatch.setattr(regression, "N_TUNING", N_TUNING)


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
        expected = {
            "to_dmmse": ((own - dmmse) ** 2).mean(), "to_ridge": ((own - ridge) ** 2).mean(),
            "apart": ((dmmse - ridge) ** 2).mean(), "loss": ((own - y) ** 2).mean(),
            "dmmse_loss": ((dmmse - y) ** 2).mean(), "ridge_loss": ((ridge - y) ** 2).mean(),
            "position": ((own - dmmse) * (ridge - dmmse)).sum() / ((ridge - dmmse) ** 2).sum(),
        }  # fmt: skip
        assert {name: measured[f"{where}_{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert measured["log_ratio"] == pytest.approx(math.log10(measured["pool_to_dmmse"] / measured["pool_to_ridge"]))


def test_the_nearer_one_is_the_one_on_whose_half_it_stands():
    """|f - d|² < |f - r|² exactly where f stands before the middle of the way from d to r."""
    measured = pool_distances(checkpoint(untrained(POOL), POOL), n_prompts=50)
    assert (measured["log_ratio"] < 0) == (measured["pool_position"] < 0.5)
    assert math.isnan(regression._share(torch.ones(3), torch.zeros(3)))
    assert math.isnan(regression._log_ratio(0.0, 1.0))


def test_a_tuned_step_has_no_gap_to_itself_and_predicting_0_has():
    model, _ = step()
    measured = gap_to_descent(checkpoint(model, REGRESSION), n_prompts=500)
    assert measured["gap"] == pytest.approx(0, abs=1e-5)
    assert measured["sensitivity_cosine"] == pytest.approx(1)
    silent = HookedTransformer(model.cfg, seed=0).eval()
    for weight in silent.parameters():
        torch.nn.init.zeros_(weight)
    zero = gap_to_descent(checkpoint(silent, REGRESSION), n_prompts=500)
    assert zero["model_loss"] == pytest.approx(zero["zero_loss"])
    assert zero["gap"] == pytest.approx(zero["zero_loss"] / zero["gd_loss"] - 1)


def test_limits_of_one_step_are_the_step_itself():
    model, _ = step()
    measured = descent_limits(checkpoint(model, REGRESSION), n_prompts=500)
    assert measured["over_gd_plus_plus"] == measured["over_first_order"] == pytest.approx(1, rel=1e-4)
    assert measured["gd"] == pytest.approx(measured["model_loss"], rel=1e-5)
    assert measured["ridge"] < measured["gd"]


def test_limits_of_two_layers_are_in_order():
    model = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1, steps=2).eval()
    measured = descent_limits(checkpoint(model, REGRESSION), n_prompts=500)
    assert measured["first_order"] <= measured["gd"] * 1.01
    assert measured["gd_plus_plus"] <= measured["gd_plus_plus_shared"] * 1.01 <= measured["gd"] * 1.03
    assert measured["over_newton"] == pytest.approx(measured["model_loss"] / measured["newton"])
    assert measured["over_first_order"] > 1  # a step size that is not tuned


def test_what_does_not_fit_is_refused():
    pool, linear = checkpoint(untrained(POOL), POOL), checkpoint(untrained(REGRESSION), REGRESSION)
    for measure, wrong, task in (
        (pool_distances, linear, "a TaskPool"), (descent_limits, pool, "LinearRegression"),
        (gap_to_descent, pool, "LinearRegression"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"is of models of {task}; this one was trained on"):
            measure(wrong)
    two = dataclasses.replace(pool, name="two", models=pool.models * 2)
    with pytest.raises(ValueError, match="one model; two has 2"):
        pool_distances(two)


def test_positions_on_the_way_are_those_of_the_models_then():
    first, last = untrained(POOL), untrained(POOL, n_layers=2)
    for index, model in enumerate((first, last)):
        weights = {name: weight[None, None] for name, weight in model.state_dict().items()}
        made = checkpoint(model, POOL, snapshots=Snapshots((7,), weights))
        measured = pool_distances(made, n_prompts=20)
        assert measured["position_at_7"] == pytest.approx(measured["pool_position"]), index
