"""Measures of sweeps against plain loops, and against models whose algorithm is known."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch

from mechicl import constructions
from mechicl.algorithms import references, tuned_step_size
from mechicl.analysis.weights import one_step_optimum
from mechicl.checkpoints import Checkpoint, CheckpointError, Snapshots
from mechicl.learners import AlgorithmLearner
from mechicl.learners.token_learners import as_token_learner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.sweeps.measures import general as measures
from mechicl.sweeps.measures import regression
from mechicl.sweeps.measures.general import HELD_OUT, _phases, markov_phases
from mechicl.sweeps.measures.pools import compare_on_pool, fit_mixture, pool_distances
from mechicl.sweeps.measures.regression import descent_limits, gap_to_descent, target_copying
from mechicl.tasks import FixedTasks, LinearRegression, MarkovChains, TaskPool
from mechicl.training import TrainingConfig

REGRESSION = LinearRegression(x_dim=3, n_context=6)
POOL = TaskPool(x_dim=2, n_context=4, n_tasks=5, noise_std=0.4)
N_TUNING = 2000
"""Prompts that tests tune on, in place of many more."""


def checkpoint(model, task, **more) -> Checkpoint:
    """One model, with a record of what it was trained on."""
    training = TrainingConfig(task=task, model=model.cfg, seeds=(0,)).to_dict()
    return Checkpoint("made", [model], {"training": training, **more.pop("record", {})}, **more)


def untrained(task, **sizes) -> HookedTransformer:
    config = TransformerConfig(x_dim=task.x_dim, n_context=task.n_context, initializer_range=0.4, **sizes)
    return HookedTransformer(config, seed=0).eval()


@functools.cache
def step() -> tuple[HookedTransformer, float]:
    """A step of gradient descent, tuned on the prompts that the measure tunes on, as a layer."""
    tuning = REGRESSION.sample(N_TUNING, seed=HELD_OUT + 1, dtype=torch.float64)
    size = tuned_step_size(tuning)
    return constructions.gradient_descent(x_dim=3, n_context=6, step_size=size).double().eval(), size


def test_regret_is_the_difference_of_mean_errors():
    made = checkpoint(untrained(REGRESSION), REGRESSION)
    measured = measures.mean_regret(made, n_prompts=40)
    prompts = REGRESSION.sample(40, seed=HELD_OUT, dtype=torch.float64)
    predicted = made.models[0].predict(prompts).detach().numpy()
    error = np.mean([(a - b) ** 2 for a, b in zip(predicted, prompts.query.ys.numpy(), strict=True)])
    assert measured["held_out_loss"] == pytest.approx(error)
    assert measured["regret"] == pytest.approx(measured["held_out_loss"] - measured["best_known_loss"])


def test_alignment_is_with_the_learner_that_is_named():
    made = checkpoint(untrained(POOL), POOL)
    prompts = POOL.sample(20, seed=HELD_OUT)
    ridge = references(POOL)["ridge"]
    expected = (made.models[0].predict(prompts) - ridge.predict(prompts)).norm(dim=1).mean().item()
    named = functools.partial(measures.alignment, learner="ridge", n_prompts=20)
    assert named(made)["prediction_distance"] == pytest.approx(expected, rel=1e-5)
    assert measures.alignment(made, n_prompts=20) != named(made)
    with pytest.raises(KeyError, match="TaskPool has no reference learner 'rigde'; it has"):
        measures.alignment(made, learner="rigde")


def test_distances_to_families_are_those_of_identify():
    model, _ = step()
    measured = measures.identified(checkpoint(model.float(), REGRESSION), n_prompts=200)
    assert measured["relative_distance: gradient descent"] < 1e-4 < measured["relative_distance: averaging"]
    assert 0 < measured["confidence"] <= 1


def test_a_transition_is_read_off_the_curve():
    curve = {"eval_step": [0, 10, 20, 30, 40], "eval_loss": [[1.0], [1.0], [0.2], [0.0], [0.0]]}
    falls = measures.transition(checkpoint(untrained(POOL), POOL, record={"curve": curve}))
    assert falls == {"transition_step": 15.0, "transition_width": 10.0, "fell": 1.0, "final_loss": 0.0}
    flat = curve | {"eval_loss": [[1.0]] * 5}
    stays = measures.transition(checkpoint(untrained(POOL), POOL, record={"curve": flat}))
    assert stays["fell"] == 0.0
    assert math.isnan(stays["transition_step"])
    with pytest.raises(CheckpointError, match="has no curve"):
        measures.transition(checkpoint(untrained(POOL), POOL))


def test_a_delay_is_read_off_the_curves_of_training_and_new_tasks():
    task = FixedTasks(REGRESSION, 8)  # the middle between predicting 0 and the best step is near 0.2
    curve = {
        "step": [10, 20, 30, 40, 50], "loss": [[0.24], [0.1], [0.1], [0.05], [0.05]],
        "eval_step": [0, 20, 30, 40, 50], "eval_loss": [[9.0], [0.23], [0.46], [0.1], [0.3]],
    }  # fmt: skip
    measured = measures.fitting(checkpoint(untrained(REGRESSION), task, record={"curve": curve}))
    assert (measured["fit_step"], measured["new_step"], measured["delay"]) == (20.0, 40.0, 2.0)
    assert (measured["rise"], measured["fall"]) == (pytest.approx(3.0), 1.0)
    assert (measured["steady_rise"], measured["steady_fall"], measured["fit_change"]) == (1.0, 1.0, 1.0)  # of 4 losses
    assert (measured["fit_loss"], measured["new_loss"], measured["least_new_loss"]) == (0.05, 0.3, 0.1)
    assert measured["nothing_loss"] == pytest.approx(REGRESSION.x_dim / 12, rel=0.02)
    assert measured["step_loss"] == pytest.approx(one_step_optimum(REGRESSION).mse)
    never = curve | {"eval_loss": [[0.24]] * 5}
    assert math.isnan(measures.fitting(checkpoint(untrained(REGRESSION), task, record={"curve": never}))["delay"])
    with pytest.raises(CheckpointError, match="has no curves"):
        measures.fitting(checkpoint(untrained(REGRESSION), task))
    with pytest.raises(ValueError, match="is for models of FixedTasks"):
        measures.fitting(checkpoint(untrained(REGRESSION), REGRESSION))
    waves = [3.0, 2.0, 9.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0]  # a spike, and a rise that lasts
    steps = list(range(len(waves)))
    curve_of = {
        "step": steps,
        "loss": [[9.0 - x / 2] for x in steps],
        "eval_step": steps,
        "eval_loss": [[x] for x in waves],
    }
    measured = measures.fitting(checkpoint(untrained(REGRESSION), task, record={"curve": curve_of}))
    assert (measured["rise"], measured["steady_rise"], measured["steady_fall"]) == (4.5, 2.0, 4.0)
    assert measured["fit_change"] < 1


# ---- Markov chains ----
CHAINS = MarkovChains(d_vocab=3, n_ctx=6)


READER = TransformerConfig(prompt_format="token_ids", d_vocab=3, n_ctx=6, n_layers=1, n_heads=1, d_model=8)


def reader(seed: int) -> HookedTransformer:
    return HookedTransformer(READER, seed=seed).eval()


def test_phases_are_those_of_the_nearest_learner():
    def at(*divergences: float) -> dict[str, float]:
        return dict(zip(("uniform", "unigram", "bigram"), divergences, strict=True))

    both = [at(0.0, 1, 2), at(0.5, 0.1, 1), at(0.6, 0.2, 0.9), at(2, 1, 0.1)]
    phases = _phases((0, 10, 20, 30), both)
    assert phases == {
        "unigram_from": 10.0, "bigram_from": 30.0, "unigram_snapshots": 2.0, "least_to_unigram": 0.1,
        "final_to_unigram": 1, "final_to_bigram": 0.1, "order": 1.0,
    }  # fmt: skip
    at_once = _phases((0, 10), [at(0.0, 1, 2), at(2.0, 1, 0)])
    assert at_once["order"] == 0.0
    assert math.isnan(at_once["unigram_from"])
    assert math.isnan(_phases((0,), [at(0.0, 1, 2)])["order"])


def test_divergences_are_those_of_a_plain_loop():
    models = [reader(0), reader(1)]
    names = list(models[0].state_dict())
    weights = {name: torch.stack([torch.stack([m.state_dict()[name]]) for m in models]) for name in names}
    made = checkpoint(models[1], CHAINS, snapshots=Snapshots((0, 5), weights))
    measured = markov_phases(made, n_prompts=8)
    sequences = CHAINS.sample(8, seed=HELD_OUT)
    total, logs = 0.0, as_token_learner(models[1], "made").log_probabilities(sequences)
    for ids, own in zip(sequences.ids.tolist(), logs.double(), strict=True):
        for position in range(6):
            follows = [1.0, 1.0, 1.0]
            for a, b in itertools.pairwise(ids[: position + 1]):
                follows[b] += a == ids[position]
            for token in range(3):
                chance = follows[token] / sum(follows)
                total += chance * (math.log(chance) - own[position, token].item())
    assert measured["final_to_bigram"] == pytest.approx(total / 48, rel=1e-5)
    assert measured["apart"] > 0


def test_other_tasks_and_checkpoints_without_snapshots_are_refused():
    with pytest.raises(ValueError, match="is for models of MarkovChains; this one was trained on TaskPool"):
        markov_phases(checkpoint(untrained(POOL), POOL))
    with pytest.raises(CheckpointError, match="set n_snapshots"):
        markov_phases(checkpoint(reader(0), CHAINS))


# ---- measures of models of a pool of tasks against plain loops, and of predictions that are mixtures or not ----
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


# ---- measures of models of regression against plain loops, and against models whose algorithm is known ----
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
