"""Measures of models of regression against plain loops, and against models whose algorithm is known."""

import dataclasses

import pytest
import torch

from mechicl import constructions
from mechicl.models import HookedTransformer
from mechicl.sweeps.measures import regression
from mechicl.sweeps.measures.pools import pool_distances
from mechicl.sweeps.measures.regression import descent_limits, gap_to_descent, target_copying
from tests.sweeps.made import N_TUNING, POOL, REGRESSION, checkpoint, step, untrained


@pytest.fixture(autouse=True)
def _few_prompts_to_tune_on(monkeypatch):
    monkeypatch.setattr(regression, "N_TUNING", N_TUNING)


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
    assert measured["over_gd_plus_plus"] == pytest.approx(1, rel=1e-4)
    assert measured["over_first_order"] == pytest.approx(1, rel=1e-4)
    assert measured["gd"] == pytest.approx(measured["model_loss"], rel=1e-5)
    assert measured["ridge"] < measured["gd"]


def test_limits_of_two_layers_are_in_order():
    model = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.1, steps=2).eval()
    measured = descent_limits(checkpoint(model, REGRESSION), n_prompts=500)
    assert measured["first_order"] <= measured["gd"] * 1.01
    assert measured["gd_plus_plus"] <= measured["gd_plus_plus_shared"] * 1.01 <= measured["gd"] * 1.03
    assert measured["over_newton"] == pytest.approx(measured["model_loss"] / measured["newton"])
    assert measured["over_first_order"] > 1  # a step size that is not tuned


def test_other_tasks_and_several_models_are_refused():
    pool = checkpoint(untrained(POOL), POOL)
    for measure in (descent_limits, gap_to_descent, target_copying):
        with pytest.raises(ValueError, match="is for models of LinearRegression; this one was trained on"):
            measure(pool)
    with pytest.raises(ValueError, match="is for models of TaskPool; this one was trained on LinearRegression"):
        pool_distances(checkpoint(untrained(REGRESSION), REGRESSION))
    one = checkpoint(untrained(REGRESSION), REGRESSION)
    with pytest.raises(ValueError, match="one model; two has 2"):
        gap_to_descent(dataclasses.replace(one, name="two", models=one.models * 2))


CURVE = {"curve": {"eval_step": [0, 10, 20, 30], "eval_loss": [[9.0], [0.25], [0.05], [0.05]]}}


def test_a_construction_that_copies_is_recognised():
    model = constructions.copy_then_gradient_descent(x_dim=3, n_context=6, step_size=0.5).eval()
    measured = target_copying(checkpoint(model, REGRESSION, record=CURVE), n_prompts=400)
    assert measured["target_error"] < 1e-3
    assert measured["paired"] == 1
    # the plateau is that of predicting 0 (0.25), not the first loss: half of the way down is between 10 and 20
    assert measured["transition_step"] == 15


def test_untrained_weights_have_not_copied():
    model = untrained(
        REGRESSION, prompt_format="interleaved", positional_embedding_type="sinusoidal", read_in="identity",
        read_out="identity",
    )  # fmt: skip
    measured = target_copying(checkpoint(model, REGRESSION, record=CURVE), n_prompts=400)
    assert min(measured["target_error"], measured["input_error"]) > 0.5
    assert measured["paired"] == 0
