"""Paths of several kinds between two models, and to the construction fitted to one of them."""

import numpy as np
import pytest
import torch

from mechicl import constructions
from mechicl.analysis import connect_modes, fit_construction
from mechicl.analysis.weights.paths import ModeConnectivity, WeightCurve, bend, straight_line
from mechicl.tasks import LinearRegression
from tests.analysis.weights.test_paths import model

TASK = LinearRegression(x_dim=3, n_context=4)


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
    result = connect_modes(a, b, TASK, n_prompts=50, n_alphas=3, bending_steps=3, seed=6)
    assert list(result.paths) == ["raw", "rescaled", "aligned", "lifted", "curved"]
    assert result.fitted == {}
    held_out = TASK.sample(50, seed=7, dtype=torch.float64)
    for path in result.paths.values():
        for i, m in enumerate((a, b)):
            errors = (m.predict(held_out) - held_out.query.ys).square().mean(-1).detach()
            torch.testing.assert_close(path.squared_errors[2 * i], errors, rtol=1e-9, atol=1e-11)
    again = connect_modes(a, b, TASK, n_prompts=50, n_alphas=3, bending_steps=3, seed=6)
    assert torch.equal(again.paths["curved"].squared_errors, result.paths["curved"].squared_errors)
    assert result.barriers()["raw"] == result.paths["raw"].barrier()
    table = result.to_dataframe()
    assert len(table) == 15
    assert ModeConnectivity.load(result.save(tmp_path / "result")).to_dataframe().equals(table)


def test_paths_to_the_fitted_construction():
    a, b = model(0), model(1)
    kinds = ("raw", "lifted")
    result = connect_modes(a, b, TASK, kinds=kinds, family="gd", n_prompts=50, n_alphas=3)
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


def test_other_attention_has_no_rescaled_path():
    for attention in ("relu", "softmax"):
        a, b = (model(i, attention=attention, d_head=4) for i in range(2))
        result = connect_modes(a, b, TASK, n_prompts=20, n_alphas=2, bending_steps=1)
        assert list(result.paths) == ["raw", "aligned", "lifted", "curved"]
        with pytest.raises(ValueError, match="linear attention only"):
            connect_modes(a, b, TASK, kinds=["rescaled"], n_prompts=20)


def test_what_cannot_be_connected_is_refused():
    deep = constructions.gradient_descent(x_dim=3, n_context=4, step_size=0.5, steps=2)
    with pytest.raises(ValueError, match="different shape"):
        connect_modes(model(0), deep, TASK)
    with pytest.raises(ValueError, match="no kinds"):
        connect_modes(model(0), model(1), TASK, kinds=())
    with pytest.raises(ValueError, match="newton takes at least 3 layers"):
        connect_modes(model(0), model(1), TASK, kinds=["raw"], family="newton")
