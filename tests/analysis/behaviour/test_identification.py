"""Algorithms are recognised among all families; filters, fits and distances are those of loops in numpy."""

import math
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.algorithms.gradient_descent import gd_plus_plus_filters
from mechicl.algorithms.newton import newton_filter
from mechicl.algorithms.preconditioned import descend_on_features
from mechicl.algorithms.spectral_fit import SpectralProblem, polynomials
from mechicl.algorithms.stepwise import ResidualDescent
from mechicl.analysis import Identification, identify, identify_on_tokens
from mechicl.analysis.behaviour import SpectralLearner
from mechicl.analysis.behaviour.families import FamilyMatch, family_weights
from mechicl.base.settings import settings
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, TokenAlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.statistics import load_result
from mechicl.tasks import GaussianClusters, LinearRegression, MarkovChains, Parities, TaskPool
from tests.algorithms.reference import at_query, precondition

TASK, DOUBLE = LinearRegression(x_dim=3, n_context=5), LinearRegression(x_dim=3, n_context=8, y_dim=2)
N = 100
QUICK: dict[str, Any] = {"n_prompts": N, "with_limits": False, "progress": False}
MATRIX = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 0.5], [0.1, 0.0, 1.0]], dtype=torch.float64)
AFFINE = torch.tensor([[0.5, 0.2, 0.0, 0.1], [0.2, 1.0, 0.0, 0.0], [0, 0, 0.7, 0], [0, 0.3, 0, 0.4]]).double()
SINGULAR_VALUES = np.linalg.svd(MATRIX.numpy(), compute_uv=False)
PRECONDITIONED = {"largest singular value": SINGULAR_VALUES[0], "smallest": SINGULAR_VALUES[-1]}


def run(algorithm, **settings) -> AlgorithmLearner:
    return AlgorithmLearner(algorithm, settings)


LEARNERS = {
    "gradient descent": run(algorithms.gradient_descent, steps=3, step_size=0.6),
    "many steps": run(algorithms.gradient_descent, steps=45, step_size=0.2),
    "GD++": run(algorithms.gd_plus_plus, steps=3, step_size=0.5, gamma=0.2),
    "GD++ each": run(algorithms.gd_plus_plus, steps=3, step_size=[0.4, 0.6, 1.5], gamma=[0.2, 0.4, 0.0]),
    "ridge": run(algorithms.ridge, penalty=0.37),
    "Newton": run(algorithms.newton, steps=4),
    "Newton, one alpha": SpectralLearner(lambda eigenvalues: newton_filter(eigenvalues, 3, 0.4), "Newton"),
    "least squares": run(algorithms.ols),
    "online": run(algorithms.online_gradient_descent, step_size=0.8),
    "online, normalised": run(algorithms.online_gradient_descent),
    "averaging": run(algorithms.averaging),
    "Chebyshev": run(algorithms.chebyshev, steps=2),
    "preconditioned": run(algorithms.preconditioned_gd, preconditioner=MATRIX.float()),
}


@cache
def identified(name: str) -> Identification:
    deep = name.startswith("GD++")  # for the others the families with parameters in each step are left out
    return identify(LEARNERS[name], TASK, steps=3 if deep else 1, **QUICK)


def named(result: Identification, name: str) -> FamilyMatch:
    (match,) = [match for match in result.matches if match.name == name]
    return match


@pytest.mark.parametrize(("learner", "family", "hyperparameters", "tolerance"), [
    ("gradient descent", "gradient descent, 3 steps", {"step_size": 0.6}, 1e-6),
    ("many steps", "gradient descent, 45 steps", {"step_size": 0.2}, 1e-6),
    ("GD++", "GD++, 3 steps", {"step_size": 0.5, "gamma": 0.2}, 1e-6),
    ("GD++ each", "GD++, 3 steps, parameters for each step", {"step_size_1": 0.4, "gamma_1": 0.2}, 0.2),
    ("ridge", "ridge", {"penalty": 0.37}, 1e-6),
    ("Newton", "Newton, 4 iterations", {"alpha over 1/|SSᵀ|": 1.0}, 1e-6),
    ("Newton, one alpha", "Newton, 3 iterations", {"alpha": 0.4}, 1e-6),
    ("least squares", "least squares", {}, 0),
    ("online", "online gradient descent", {"step_size": 0.8}, 1e-6),
    ("online, normalised", "online gradient descent", {}, 0),
    ("averaging", "averaging", {}, 0),
    ("Chebyshev", "Chebyshev, 2 steps", {"degree": 2}, 0),
    ("preconditioned", "preconditioned gradient descent, 1 step", PRECONDITIONED, 1e-5),
])  # fmt: skip
def test_an_algorithm_is_recognised(learner, family, hyperparameters, tolerance):
    result = identified(learner)
    assert result.best.name == family
    assert result.distance(result.best).mean < 1e-10
    for name, value in hyperparameters.items():
        assert result.best.hyperparameters[name] == pytest.approx(value, rel=tolerance)
    cosines = result.best.sensitivity_cosine
    torch.testing.assert_close(cosines, torch.ones_like(cosines), atol=1e-6, rtol=0)
    held_out, best = TASK.sample(N, seed=1, dtype=torch.float64), result.best.learner
    assert best is not None
    torch.testing.assert_close(best.predict(held_out), LEARNERS[learner].predict(held_out), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("learner", "name", "steps"), [
    (ResidualDescent(3, step_size=0.12, momentum=0.5), "gradient descent with momentum, 3 steps", 4),
    (run(descend_on_features, matrix=MATRIX, steps=2, constant=False),
     "preconditioned gradient descent, 2 steps", 2),
    (run(descend_on_features, matrix=AFFINE, steps=1, constant=True),
     "kernel gradient descent on 1 and x, 1 step", 1),
])  # fmt: skip
def test_variants_of_descent_are_recognised(learner, name, steps):
    result = identify(learner, DOUBLE, steps=steps, n_prompts=150, with_limits=False, progress=False)
    assert result.best.name == result.answer.name == name
    assert result.distance(result.best).mean < 1e-8
    if "momentum" in name:
        assert result.best.hyperparameters == pytest.approx({"step_size": 0.12, "momentum": 0.5}, rel=1e-3)
    assert result.best.sensitivity_cosine.min() > 0.999


def test_neighbours_are_recognised_by_their_predictions():
    class Neighbours:
        """Two of them, with a slope too small to matter: the family itself has none."""

        def predict(self, prompts):
            distances = (prompts.xs[:, :-1] - prompts.xs[:, -1:].detach()).norm(dim=-1)
            nearest = distances.argsort(dim=1)[:, :2, None]
            return prompts.ys.take_along_dim(nearest, dim=1).mean(1) + 1e-9 * prompts.query.xs.sum(1, keepdim=True)

    result = identify(Neighbours(), TASK, steps=1, seed=3, **QUICK)
    assert (result.best.name, result.best.hyperparameters) == ("nearest neighbours", {"n_neighbours": 2})
    assert result.distance(result.best).mean < 1e-12
    assert result.best.sensitivity_cosine.isnan().all()


@pytest.mark.parametrize(("make", "settings", "steps", "name", "hyperparameters"), [
    ("gd_plus_plus", {"step_size": 0.5, "gamma": 0.15}, 2, "GD++, 2 steps", {"step_size": 0.5, "gamma": 0.15}),
    ("gradient_descent", {"step_size": 0.5}, 1, "gradient descent, 1 step", {"step_size": 0.5}),
    ("newton", {"alpha": 0.3}, 2, "Newton, 2 iterations", {"alpha": 0.3}),
])  # fmt: skip
def test_a_construction_is_recognised_with_one_step_per_layer(make, settings, steps, name, hyperparameters):
    model = getattr(constructions, make)(x_dim=3, n_context=5, steps=steps, **settings)
    result = identify(model, TASK, steps=1 if make == "newton" else None, **QUICK)
    assert result.best.name == name
    assert result.best.hyperparameters == pytest.approx(hyperparameters, rel=1e-6)
    assert steps > 1 or not [match for match in result.matches if "GD++" in match.name or "first-order" in match.name]


def test_distances_cosines_and_intervals_are_those_of_numpy():
    result, learner = identified("ridge"), LEARNERS["ridge"]
    held_out = TASK.sample(N, seed=1, dtype=torch.float64)
    predicted = learner.predict(held_out)[:, 0].numpy()
    match = named(result, "least squares")
    ols, ols_slopes, slopes = [], [], []
    for xs, ys in zip(held_out.xs.numpy(), held_out.ys.numpy(), strict=True):
        ols_slopes.append(np.linalg.lstsq(xs[:-1], ys[:-1, 0], rcond=None)[0])
        slopes.append(np.linalg.solve(xs[:-1].T @ xs[:-1] + 0.37 * np.eye(3), xs[:-1].T @ ys[:-1, 0]))
        ols.append(xs[-1] @ ols_slopes[-1])
    distances = np.square(np.array(ols) - predicted)
    np.testing.assert_allclose(match.squared_distances.numpy(), distances, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(result.squared_predictions.numpy(), predicted**2, rtol=1e-9, atol=1e-12)
    errors = np.square(predicted - held_out.query.ys[:, 0].numpy())
    np.testing.assert_allclose(result.squared_errors.numpy(), errors, rtol=1e-6, atol=1e-12)
    ratio = distances.mean() / np.square(predicted).mean()
    distance = result.distance(match)
    assert distance.mean == pytest.approx(ratio, rel=1e-6)
    deviation = np.std((distances - ratio * predicted**2) / np.square(predicted).mean(), ddof=1) / math.sqrt(N)
    assert distance.half_width == pytest.approx(1.984 * deviation, rel=1e-3)
    assert result.gap(match).mean == pytest.approx(ratio, rel=1e-6)  # the best one's distance is 0
    assert not result.tied(match)
    a, b = np.array(ols_slopes), np.array(slopes)
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(match.sensitivity_cosine.numpy(), cosines, atol=1e-8)
    spectra = [np.linalg.eigvalsh(xs.T @ xs) for xs in held_out.context.xs.numpy()]
    np.testing.assert_allclose(result.eigenvalues.T.numpy(), spectra, atol=1e-12)


def result_of(**families: tuple[list[float], int]) -> Identification:
    """An identification of families with these distances and numbers of fitted parameters."""
    matches = []
    for name, (distances, fitted) in families.items():
        name, squared = name.replace("_", ", "), torch.tensor(distances, dtype=torch.float64)
        matches.append(FamilyMatch(name, None, {}, fitted, squared, torch.ones_like(squared), squared, squared))
    ones = torch.ones_like(matches[0].squared_distances)
    return Identification(matches, [], ones, ones, ones[None])


def test_ties_are_decided_on_the_same_prompts():
    noise = np.abs(np.random.default_rng(0).standard_normal(400)) + 0.1
    result = result_of(
        best=(noise.tolist(), 0),
        shuffled=(np.random.default_rng(1).permutation(noise).tolist(), 0),  # as far, on other prompts
        farther=((1.01 * noise).tolist(), 0),  # by a little, but on each prompt
        astray=([*(3 * noise[:-1]), 1e9], 0),  # one prompt makes any interval of the mean contain 0
        rounding=((noise + 1e-12).tolist(), 0),
        infinite=([math.inf, *noise[1:]], 0),
    )
    assert [match.name for match in result.matches if result.tied(match)] == ["best", "shuffled", "rounding"]
    assert 0 in result.gap(result.matches[3])


def test_the_limits_are_the_best_of_their_order():
    noisy = LinearRegression(x_dim=3, n_context=6, noise_std=0.3)
    for task in (TASK, noisy):
        limits = {m.name: m for m in identify(LEARNERS["ridge"], task, steps=2, n_prompts=200, progress=False).limits}
        assert list(limits) == ["first order, 2 steps", "second order: Newton, 2 iterations", "ridge"]
        held_out = task.sample(200, seed=1, dtype=torch.float64)
        for size in np.linspace(0.05, 1.2, 12):
            tuned = algorithms.gradient_descent(held_out, 2, step_size=float(size), at="query")
            error = (tuned.query()[0] - held_out.query.ys).square().mean().item()
            assert limits["first order, 2 steps"].squared_errors.mean().item() <= 1.05 * error
    assert limits["ridge"].hyperparameters["penalty"] == pytest.approx(0.09, rel=0.5)  # exact Bayes
    assert min(limits.values(), key=lambda m: m.squared_errors.mean().item()).name == "ridge"


def test_an_identification_is_the_same_after_saving_and_loading(tmp_path):
    result = identified("online")
    again = load_result(result.save(tmp_path / "result"))
    assert str(again) == str(result)
    pd.testing.assert_frame_equal(again.to_dataframe(), result.to_dataframe(), rtol=1e-12)
    for quantity, values in result.samples().items():
        assert torch.equal(again.samples()[quantity].nan_to_num(9), values.nan_to_num(9))


def test_the_table_ranks_every_family_and_its_sensitivity():
    result = identified("GD++")
    table = result.to_dataframe()
    families = table[table["kind"] == "family"]
    cosines = families["sensitivity_cosine"].fillna(-np.inf).to_numpy()
    assert families["sensitivity_rank"].tolist() == [1 + (cosines > cosine).sum() for cosine in cosines]
    assert families["name"].tolist() == [match.name for match in result.matches]
    match, ridge = named(result, "ridge"), families[families["name"] == "ridge"].iloc[0]
    assert ridge["loss_over_model"] == pytest.approx(
        (match.squared_errors.mean() / result.squared_errors.mean()).item()
    )


@pytest.mark.filterwarnings("ignore:the model's loss")  # two small steps
@pytest.mark.parametrize(
    ("x_dim", "n_context", "fields"),
    [(1, 1, {}), (3, 1, {"y_dim": 2, "noise_std": 0.5}), (4, 6, {"active_dims": 2, "inputs": "gaussian"})],
)
def test_small_and_degenerate_tasks(x_dim, n_context, fields):
    task = LinearRegression(x_dim=x_dim, n_context=n_context, **fields)
    learner = run(algorithms.gradient_descent, steps=2, step_size=0.07)
    result = identify(learner, task, steps=2, n_prompts=40, with_limits=False, progress=False)
    assert result.distance(result.best).mean < 1e-10
    assert result.tied(named(result, "gradient descent, 2 steps")) or task.x_dim == 1
    assert all(math.isfinite(result.distance(match).mean) for match in result.matches)


def test_deep_gd_plus_plus_is_found_where_each_step_has_larger_parameters():
    """Parameters like a trained model's: each layer shrinks the inputs, and the next compensates for it."""
    a, gamma = torch.tensor([0.5, 0.9, 3.0, 8.0, 20.0]).double(), torch.tensor([0.15, 0.25, 0.8, 2.0, 0.0]).double()
    deep = SpectralLearner(lambda eigenvalues: gd_plus_plus_filters(eigenvalues, a, gamma)[-1], "deep")
    result = identify(deep, LinearRegression(), steps=5, n_prompts=200, with_limits=False, progress=False)
    assert result.best.name == "GD++, 5 steps, parameters for each step"
    assert result.best.n_fitted == 9  # the last γ has no effect
    assert result.distance(result.best).mean < 1e-4
    assert result.distance(named(result, "GD++, 5 steps")).low > 20 * result.distance(result.best).high


@pytest.mark.filterwarnings("ignore:the model's loss")
def test_given_learners_are_ranked_among_the_families():
    def scaled(prompts, scale):
        return scale * prompts.query.xs.sum(1, keepdim=True)

    model, same, near = (run(scaled, scale=scale) for scale in (0.3, 0.3, 0.31))
    result = identify(model, TASK, also={"the same": same, "near": near}, steps=1, **QUICK)
    assert [match.name for match in result.matches[:2]] == ["the same", "near"]
    assert result.best.n_fitted == 0
    assert result.best.squared_distances.max() < 1e-24
    assert result.distance(result.matches[1]).mean == pytest.approx((0.01 / 0.3) ** 2)
    torch.testing.assert_close(result.matches[1].sensitivity_cosine, torch.ones(N, dtype=torch.float64))
    names = [match.name for match in result.matches]
    assert len(set(names)) == len(names)
    assert {"ridge", "averaging", "any function of S"} <= set(names)


def test_a_given_family_is_fitted():
    def soft_threshold(prompts, penalty):
        """One step from zero of the lasso's proximal gradient, in numpy: no gradient flows through it."""
        xs, ys = (part.numpy() for part in prompts.context)
        moments = np.einsum("nix,niy->nxy", xs, ys)
        weights = np.sign(moments) * np.maximum(np.abs(moments) - penalty, 0)
        return np.einsum("nx,nxy->ny", prompts.query.xs.numpy(), weights)

    def model(prompts):
        moments = prompts.context.xs.mT @ prompts.context.ys
        return (prompts.query.xs[:, None] @ (moments.sign() * (moments.abs() - 0.05).clamp(min=0)))[:, 0]

    family = AlgorithmFamily(soft_threshold, "penalty", (0.01, 0.02, 0.05, 0.3))
    result = identify(run(model), TASK, also=[family], steps=1, **QUICK)
    assert (result.best.name, result.best.hyperparameters) == ("soft_threshold (penalty)", {"penalty": 0.05})
    assert result.best.n_fitted == 1
    assert result.best.squared_distances.max() < 1e-24
    assert result.best.sensitivity_cosine.isnan().all()  # numpy has no slopes


def test_references_of_the_task_are_ranked_once():
    pool = TaskPool(x_dim=3, n_context=5, n_tasks=4, noise_std=0.5)
    learners = algorithms.references(pool)
    result = identify(learners["dmmse"], pool, steps=1, **QUICK)
    names = [match.name for match in result.matches]
    assert result.best.name == "dmmse"
    assert result.distance(result.best).mean < 1e-20
    assert not result.tied(result.matches[1])
    assert len(set(names)) == len(names)  # ridge and OLS are families already
    ridge = identify(learners["ridge"], pool, steps=1, **QUICK)
    assert ridge.best.name == "ridge"
    assert ridge.distance(named(ridge, "dmmse")).low > 0.01


def test_a_note_tells_where_the_families_do_not_apply():
    parities, clusters = Parities(x_dim=4, n_context=12), GaussianClusters(x_dim=3, n_context=4, n_classes=9)
    pool = TaskPool(x_dim=3, n_context=5, n_tasks=2, noise_std=0.1)
    noted = {}
    for task, name in ((parities, "bayes"), (clusters, "in context"), (pool, "dmmse")):
        noted[name] = identify(algorithms.references(task)[name], task, steps=1, **QUICK)
    assert noted["bayes"].best.name == "bayes"
    assert "targets of Parities are classes" in noted["bayes"].note
    assert noted["bayes"].note in str(noted["bayes"])
    assert "bayes 0" in noted["bayes"].note
    assert "are classes" in noted["in context"].note
    assert "dmmse 0.0" in noted["dmmse"].note
    assert identified("ridge").note == ""
    assert "note" not in str(identified("ridge"))
    alone = identify(LEARNERS["ridge"], pool, with_references=False, steps=1, **QUICK)
    assert "dmmse" not in [match.name for match in alone.matches]
    assert alone.note == ""


def test_weights_are_the_criterion_where_prompts_agree():
    numbers = [(0.05, 2), (0.1, 1), (0.02, 6)]
    matches = result_of(**{f"family_{k}": ([d] * 40, k) for d, k in numbers}).matches
    scores = [-(20 - 0.7 * k) / 2 * math.log(d + 1e-10) for d, k in (*numbers, (0.03, 0))]
    expected = np.exp(scores) / np.exp(scores).sum()
    measured = family_weights(matches, evidence=20.0, price=0.7, elsewhere=0.03)
    np.testing.assert_allclose(measured.numpy(), expected[:3], rtol=1e-6)
    infinite = result_of(infinite=([1.0, math.inf], 0), finite=([1.0, 1.0], 9)).matches
    assert family_weights(infinite, elsewhere=1e30).tolist() == [0, pytest.approx(1)]


def test_the_answer_is_the_likeliest_family_and_its_likeliest_member():
    nothing = result_of(other=([0.8] * 30, 3), one=([0.9] * 30, 2))
    assert next(iter(nothing.weights)) == "none of these"
    assert (nothing.answer.name, nothing.answer.learner) == ("none of these", None)
    assert nothing.confidence == nothing.weights["none of these"] > 0.99
    assert "none of these (with a confidence of 100%): the nearest is other" in nothing.verdict
    assert sum(nothing.weights.values()) == pytest.approx(1)
    plain = {"plain_3": ([1.01e-4] * 30, 2), "plain_4": ([1.03e-4] * 30, 2), "other": ([0.5] * 30, 0)}
    nested = result_of(general=([1e-4] * 30, 20), **plain)
    assert (nested.best.name, nested.answer.name) == ("general", "plain, 3")
    assert next(iter(nested.weights)) == "plain"
    assert nested.weights["plain"] > 1e3 * nested.weights["general"]
    assert nested.confidence == nested.weights["plain"] > 0.9
    assert "plain, 3 (with a confidence of 100%)" in str(nested).splitlines()[-1]
    assert result_of(general=([1e-8] * 30, 20), **plain).answer.name == "general"


def test_a_model_that_runs_its_algorithm_inexactly_is_named_after_it():
    """A family that contains the right one comes nearer, since it fits some of the noise too."""
    model = constructions.gradient_descent(x_dim=3, n_context=8, step_size=0.4, steps=3)
    noisy = constructions.hide(model, seed=2, noise=1e-3).model
    task = LinearRegression(x_dim=3, n_context=8)
    result = identify(noisy, task, n_prompts=100, with_limits=False, progress=False)
    assert result.limits == []
    assert result.distance(result.best).mean > 1e-8
    assert (result.answer.name, result.answer.family) == ("gradient descent, 3 steps", "gradient descent")


# ---- on tokens ----
CHAINS = MarkovChains(d_vocab=3, n_ctx=9)


def test_divergences_by_a_plain_loop():
    cfg = TransformerConfig(prompt_format="token_ids", d_vocab=3, n_ctx=9, n_layers=1, n_heads=1, d_model=8, d_head=4,
                            attention="softmax", initializer_range=0.5)  # fmt: skip
    model = HookedTransformer(cfg)
    result = identify_on_tokens(model, CHAINS, n_prompts=6, seed=4, progress=False)
    sequences = CHAINS.sample(6, seed=4)
    probabilities = model(sequences.read).detach().double().softmax(-1)
    bigram = algorithms.bigram_bayes(sequences, d_vocab=3).exp()
    for i in range(6):
        for t in range(9):
            p, q = probabilities[i, t].tolist(), bigram[i, t].tolist()
            expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            assert math.isclose(result.divergences["bigram"][t, i].item(), expected, abs_tol=1e-9)
    assert result.points == tuple(range(1, 10))


@pytest.mark.parametrize("name", ["bigram", "unigram", "uniform"])
def test_each_reference_is_recognised(name):
    with settings(memory=1e5):
        result = identify_on_tokens(algorithms.references(CHAINS)[name], CHAINS, n_prompts=50, progress=False)
    assert result.best == name
    assert result.divergence(name).mean < 1e-12
    assert result.gap(list(result.divergences)[1]).low > 0


def test_tokens_of_probability_0_contribute_nothing():
    def sure(sequences):
        logs = torch.full((*sequences.read.shape, 3), -torch.inf)
        logs[..., 0] = 0
        return logs

    result = identify_on_tokens(TokenAlgorithmLearner(sure), CHAINS, n_prompts=5, progress=False)
    assert result.divergence("uniform").mean == pytest.approx(math.log(3))


# ---- filters of eigenvalues ----
def _damped(eigenvalues):
    return 1 / (eigenvalues + 0.3)


def _by_hand(prompts: Prompts, function) -> np.ndarray:
    """`x f(S) B` of every prefix, one eigendecomposition at a time."""
    xs, ys = prompts.xs.double().numpy(), prompts.ys.double().numpy()
    predictions = np.zeros_like(ys)
    for i in range(xs.shape[0]):
        for t in range(xs.shape[1]):
            context, targets = xs[i, :t], ys[i, :t]
            values, vectors = np.linalg.eigh(context.T @ context)
            matrix = vectors @ np.diag(function(np.maximum(values, 0))) @ vectors.T
            predictions[i, t] = xs[i, t] @ matrix @ context.T @ targets
    return predictions


@pytest.mark.parametrize(("d", "n", "m"), [(1, 0, 1), (5, 3, 2), (2, 7, 3)])
def test_predictions_apply_the_filter_to_the_second_moments_of_every_prefix(d, n, m):
    prompts = LinearRegression(x_dim=d, n_context=n, y_dim=m, inputs="gaussian").sample(3, seed=0, dtype=torch.float64)
    expected = _by_hand(prompts, _damped)
    learner = SpectralLearner(_damped, "damped")
    np.testing.assert_allclose(learner.predict_prefixes(prompts).numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(learner.predict(prompts).numpy(), expected[:, -1], atol=1e-10)
    trajectory = learner.trajectory(prompts, with_weights=True)
    assert trajectory.steps == (1,)
    assert trajectory.name == "damped"
    assert trajectory.weights is not None
    implied = torch.einsum("ptx,ptxy->pty", prompts.xs, trajectory.weights[0])
    np.testing.assert_allclose(implied.numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_polynomials_are_fitted_by_least_squares(degree):
    prompts = LinearRegression(x_dim=4, n_context=6, y_dim=2).sample(60, seed=1, dtype=torch.float64)
    problem = SpectralProblem.from_prompts(prompts, prompts.query.ys)
    basis = polynomials(degree, problem.eigenvalues.max().item())
    powers = np.stack([problem.eigenvalues.numpy() ** k for k in range(degree)], -1)
    design = np.einsum("pxk,pxy->pyk", powers, problem.contributions.numpy()).reshape(-1, degree)
    best, *_ = np.linalg.lstsq(design, problem.targets.numpy().ravel(), rcond=None)
    fitted = basis(problem.eigenvalues) @ problem.linear(basis)
    np.testing.assert_allclose(fitted.numpy(), powers @ best, atol=1e-8)


def test_a_family_that_contains_another_must_come_twice_as_near():
    ridge, descent = run(algorithms.ridge, penalty=0.3), run(algorithms.gradient_descent, steps=[2], step_size=0.2)

    class Mixed:
        def predict_prefixes(self, prompts: Prompts) -> torch.Tensor:
            return 0.98 * ridge.predict_prefixes(prompts) + 0.02 * descent.predict_prefixes(prompts)

        def predict(self, prompts: Prompts) -> torch.Tensor:
            return self.predict_prefixes(prompts)[:, -1]

    found = identify(Mixed(), TASK, **QUICK)
    distance = {match.name: match.changed_distances.mean().item() for match in found.matches}
    assert distance["ridge"] > 1e-6
    assert distance["recursive least squares"] > distance["ridge"] / 2
    (excluded,) = (match.excluded for match in found.matches if match.name == "recursive least squares")
    assert excluded == "it is not much nearer than ridge, which it contains"


@pytest.mark.parametrize(("matrix", "constant"), [(MATRIX, False), (AFFINE, True)])
def test_descent_on_features_is_a_plain_loop(matrix, constant):
    prompts = DOUBLE.sample(5, seed=1, dtype=torch.float64)
    predicted = descend_on_features(prompts, matrix=matrix, steps=3, constant=constant)

    def features(xs):
        return np.insert(xs, 0, 1.0, axis=-1) if constant else xs

    plain = precondition([matrix.numpy()] * 3)
    expected = at_query(prompts, lambda xs, ys, query: plain(features(xs), ys, features(query)))
    np.testing.assert_allclose(predicted.numpy(), expected, atol=1e-12)
