"""Algorithms are recognised among all families, and what is measured is what a loop in numpy measures."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.algorithms import descent_cards
from mechicl.algorithms.gradient_descent import gd_plus_plus_filters, momentum_filter
from mechicl.algorithms.newton import newton_filter
from mechicl.algorithms.preconditioned import descend_on_features
from mechicl.analysis import Identification, identify
from mechicl.analysis.behaviour import FamilyMatch, SpectralLearner
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, Learner
from mechicl.tasks import GaussianClusters, LinearRegression, Parities, TaskPool

TASK = LinearRegression(x_dim=3, n_context=5)
N = 120


def _fixed_newton(eigenvalues):
    return newton_filter(eigenvalues, 3, 0.4)


MATRIX = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 0.5], [0.1, 0.0, 1.0]])
OTHER = torch.tensor([[2.0, 0.5, 0.0], [0.0, 3.0, 0.5], [0.1, 0.0, 1.0]], dtype=torch.float64)
AFFINE = torch.tensor([[0.5, 0.2, 0.0, 0.1], [0.2, 1.0, 0.0, 0.0], [0, 0, 0.7, 0], [0, 0.3, 0, 0.4]]).double()


def run(algorithm, **settings) -> AlgorithmLearner:
    return AlgorithmLearner(algorithm, settings)


LEARNERS = {
    "gradient descent": run(algorithms.gradient_descent, steps=3, step_size=0.6),
    "many steps": run(algorithms.gradient_descent, steps=45, step_size=0.2),
    "GD++": run(algorithms.gd_plus_plus, steps=3, step_size=0.5, gamma=0.2),
    "GD++ each": run(algorithms.gd_plus_plus, steps=3, step_size=[0.4, 0.6, 1.5], gamma=[0.2, 0.4, 0.0]),
    "ridge": run(algorithms.ridge, penalty=0.37),
    "Newton": run(algorithms.newton, steps=4),
    "Newton, one alpha": SpectralLearner(_fixed_newton, "Newton"),
    "least squares": run(algorithms.ols),
    "online": run(algorithms.online_gradient_descent, step_size=0.8),
    "online, normalised": run(algorithms.online_gradient_descent),
    "averaging": run(algorithms.averaging),
    "Chebyshev": run(algorithms.chebyshev, steps=2),
    "preconditioned": run(algorithms.preconditioned_gd, preconditioner=MATRIX),
}
SINGULAR_VALUES = np.linalg.svd(MATRIX.numpy(), compute_uv=False)
PRECONDITIONED = {"largest singular value": SINGULAR_VALUES[0], "smallest": SINGULAR_VALUES[-1]}


@cache
def _identified(name: str) -> Identification:
    deep = name.startswith("GD++")  # for the others the families with parameters in each step are left out
    return identify(LEARNERS[name], TASK, steps=3 if deep else 1, n_prompts=N, progress=False)


def _named(result: Identification, name: str) -> FamilyMatch:
    (named,) = [match for match in result.matches if match.name == name]
    return named


def _learner(match: FamilyMatch) -> Learner:
    assert match.learner is not None
    return match.learner


@pytest.mark.parametrize(
    ("learner", "family", "hyperparameters", "tolerance"),
    [
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
    ],
)
def test_an_algorithm_is_recognised(learner, family, hyperparameters, tolerance):
    result = _identified(learner)
    assert result.best.name == family
    assert result.distance(result.best).mean < 1e-10
    assert result.best.hyperparameters.keys() >= hyperparameters.keys()
    for name, value in hyperparameters.items():
        assert result.best.hyperparameters[name] == pytest.approx(value, rel=tolerance)
    cosines = result.best.sensitivity_cosine
    torch.testing.assert_close(cosines, torch.ones_like(cosines), atol=1e-6, rtol=0)
    held_out = TASK.sample(N, seed=1, dtype=torch.float64)
    expected = LEARNERS[learner].predict(held_out)  # the learner in the result is the one that was measured
    torch.testing.assert_close(_learner(result.best).predict(held_out), expected, atol=1e-4, rtol=1e-4)


def test_neighbours_are_recognised_by_their_predictions():
    class Neighbours:
        """Two of them, with a slope too small to matter: the family itself has none."""

        def predict(self, prompts):
            distances = (prompts.xs[:, :-1] - prompts.xs[:, -1:].detach()).norm(dim=-1)
            nearest = distances.argsort(dim=1)[:, :2, None]
            return prompts.ys.take_along_dim(nearest, dim=1).mean(1) + 1e-9 * prompts.query.xs.sum(1, keepdim=True)

        def predict_prefixes(self, prompts):
            raise NotImplementedError

    result = identify(Neighbours(), TASK, steps=1, n_prompts=100, seed=3, progress=False)
    assert result.best.name == "nearest neighbours"
    assert result.best.hyperparameters == {"n_neighbours": 2}
    assert result.distance(result.best).mean < 1e-12
    assert result.best.sensitivity_cosine.isnan().all()


def test_constructions_are_recognised_with_as_many_steps_as_layers():
    model = constructions.gd_plus_plus(x_dim=3, n_context=5, step_size=0.5, gamma=0.15, steps=2)
    result = identify(model, TASK, n_prompts=N, progress=False)
    assert result.best.name == "GD++, 2 steps"
    assert result.best.hyperparameters == pytest.approx({"step_size": 0.5, "gamma": 0.15}, rel=1e-6)
    one = constructions.gradient_descent(x_dim=3, n_context=5, step_size=0.5, steps=1)
    result = identify(one, TASK, n_prompts=60, progress=False)
    assert result.best.name == "gradient descent, 1 step"
    assert not [match for match in result.matches if "GD++" in match.name or "first-order" in match.name]
    newton = identify(
        constructions.newton(x_dim=3, n_context=5, steps=2, alpha=0.3), TASK, steps=1, n_prompts=N, progress=False
    )
    assert newton.best.name == "Newton, 2 iterations"
    assert newton.best.hyperparameters == pytest.approx({"alpha": 0.3}, rel=1e-6)


def test_what_is_measured_is_what_it_says():
    result, learner = _identified("ridge"), LEARNERS["ridge"]
    held_out = TASK.sample(N, seed=1, dtype=torch.float64)
    predicted = learner.predict(held_out)[:, 0].numpy()
    match = _named(result, "least squares")
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
    assert distance.half_width == pytest.approx(1.980 * deviation, rel=1e-3)
    assert result.gap(match).mean == pytest.approx(ratio, rel=1e-6)  # the best one's distance is 0
    a, b = np.array(ols_slopes), np.array(slopes)
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(match.sensitivity_cosine.numpy(), cosines, atol=1e-8)
    spectra = [np.linalg.eigvalsh(xs.T @ xs) for xs in held_out.context.xs.numpy()]
    np.testing.assert_allclose(result.eigenvalues.T.numpy(), spectra, atol=1e-12)


def _result(**distances: list[float]) -> Identification:
    def match(name: str, values: list[float]) -> FamilyMatch:
        squared = torch.tensor(values, dtype=torch.float64)
        return FamilyMatch(name, LEARNERS["ridge"], {}, 0, squared, torch.ones_like(squared), squared)

    matches = [match(name, values) for name, values in distances.items()]
    ones = torch.ones_like(matches[0].squared_distances)
    return Identification(matches, [], ones, ones, ones[None])


def test_ties_are_decided_on_the_same_prompts():
    noise = np.abs(np.random.default_rng(0).standard_normal(400)) + 0.1
    result = _result(
        best=noise.tolist(),
        shuffled=np.random.default_rng(1).permutation(noise).tolist(),  # as far, on other prompts
        farther=(1.01 * noise).tolist(),  # by a little, but on each prompt
        astray=[*(3 * noise[:-1]), 1e9],  # one prompt makes any interval of the mean hold 0
        rounding=(noise + 1e-12).tolist(),
        infinite=[math.inf, *noise[1:]],
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
        if task is noisy:  # the Bayes predictor is ridge with this penalty
            assert limits["ridge"].hyperparameters["penalty"] == pytest.approx(0.09, rel=0.5)
            assert min(limits.values(), key=lambda m: m.squared_errors.mean().item()).name == "ridge"


def test_the_table_and_the_text_show_every_family():
    result = _identified("GD++")
    table = result.to_dataframe()
    families, limits = table[table["kind"] == "family"], table[table["kind"] == "limit"]
    cosines = families["sensitivity_cosine"].fillna(-np.inf).to_numpy()
    assert families["sensitivity_rank"].tolist() == [1 + (cosines > cosine).sum() for cosine in cosines]
    assert families["name"].tolist() == [match.name for match in result.matches]
    assert families["rank"].tolist() == list(range(1, 19))
    assert len(limits) == 3
    assert not limits["tied"].any()
    first, ridge = families.iloc[0], families[families["name"] == "ridge"].iloc[0]
    assert (first["tied"], first["fitted"], first["hyperparameters"]) == (True, 2, "step_size=0.5, gamma=0.2")
    assert not ridge["tied"]
    match = _named(result, "ridge")
    ratio = match.squared_errors.mean().item() / result.squared_errors.mean().item()
    assert ridge["loss_over_model"] == pytest.approx(ratio)
    assert ridge["low"] < ridge["distance"] < ridge["high"]
    assert (table["cosine_high"].dropna() <= 1).all()  # a cosine's interval does not leave its range
    lines = str(result).splitlines()
    assert len(lines) == 2 + 18 + 1 + 3 + 1
    assert all(str(result.distance(m)) in line for m, line in zip(result.matches, lines[2:20], strict=True))


def test_more_steps_than_families_fit_are_not_fitted(monkeypatch):
    monkeypatch.setattr(descent_cards, "MOST_STEPS", 2)
    result = identify(LEARNERS["gradient descent"], TASK, steps=4, n_prompts=40, progress=False)
    names = {match.name for match in result.matches}
    assert {"GD++, 2 steps", "any first-order learner, 4 steps"} <= names
    assert result.best.name == "gradient descent, 3 steps"


@pytest.mark.filterwarnings("ignore:the model's loss")  # two small steps
@pytest.mark.parametrize(
    ("x_dim", "n_context", "fields"),
    [(1, 1, {}), (3, 1, {"y_dim": 2, "noise_std": 0.5}), (4, 6, {"active_dims": 2, "inputs": "gaussian"})],
)
def test_small_and_degenerate_tasks(x_dim, n_context, fields):
    task = LinearRegression(x_dim=x_dim, n_context=n_context, **fields)
    result = identify(
        run(algorithms.gradient_descent, steps=2, step_size=0.07), task, steps=2, n_prompts=40, progress=False
    )
    assert result.distance(result.best).mean < 1e-10
    assert result.tied(_named(result, "gradient descent, 2 steps")) or task.x_dim == 1
    assert all(math.isfinite(result.distance(match).mean) for match in result.matches)


def test_deep_gd_plus_plus_is_found_where_each_step_has_larger_parameters():
    """Parameters like a trained model's: each layer shrinks the inputs, and the next makes up for it."""
    a, gamma = torch.tensor([0.5, 0.9, 3.0, 8.0, 20.0]).double(), torch.tensor([0.15, 0.25, 0.8, 2.0, 0.0]).double()
    deep = SpectralLearner(lambda eigenvalues: gd_plus_plus_filters(eigenvalues, a, gamma)[-1], "deep")
    result = identify(deep, LinearRegression(), steps=5, n_prompts=400, progress=False)
    assert result.best.name == "GD++, 5 steps, parameters for each step"
    assert result.best.n_fitted == 9  # the last γ moves nothing any more
    assert result.distance(result.best).mean < 1e-4
    assert result.distance(_named(result, "GD++, 5 steps")).low > 20 * result.distance(result.best).high


DOUBLE = LinearRegression(x_dim=3, n_context=8, y_dim=2)


@pytest.mark.parametrize(
    ("learner", "name", "steps"),
    [
        (SpectralLearner(lambda s: momentum_filter(s, 3, 0.12, 0.5), "momentum"),
         "gradient descent with momentum, 3 steps", 4),
        (run(descend_on_features, matrix=OTHER, steps=2, constant=False),
         "preconditioned gradient descent, 2 steps", 2),
        (run(descend_on_features, matrix=AFFINE, steps=1, constant=True),
         "kernel gradient descent on 1 and x, 1 step", 1),
    ],
)  # fmt: skip
def test_each_is_recognised_among_all_families(learner, name, steps):
    result = identify(learner, DOUBLE, steps=steps, n_prompts=150, with_limits=False, progress=False)
    assert result.best.name == name
    assert result.distance(result.best).mean < 1e-8
    assert result.answer.name == name
    if "momentum" in name:
        assert result.best.hyperparameters == pytest.approx({"step_size": 0.12, "momentum": 0.5}, rel=1e-3)
    assert result.best.sensitivity_cosine.min() > 0.999


# ---- learners of one's own ----


def _soft_threshold(prompts, penalty):
    """One step from zero of the lasso's proximal gradient, in numpy: no gradient flows through it."""
    xs, ys = (part.numpy() for part in prompts.context)
    moments = np.einsum("nix,niy->nxy", xs, ys)
    weights = np.sign(moments) * np.maximum(np.abs(moments) - penalty, 0)
    return np.einsum("nx,nxy->ny", prompts.query.xs.numpy(), weights)


@pytest.mark.filterwarnings("ignore:the model's loss")
def test_learners_of_ones_own_are_ranked_among_the_families():
    model = AlgorithmLearner(lambda prompts: 0.3 * prompts.query.xs.sum(1, keepdim=True))
    same = AlgorithmLearner(lambda prompts: 0.3 * prompts.query.xs.sum(1, keepdim=True))
    near = AlgorithmLearner(lambda prompts: 0.31 * prompts.query.xs.sum(1, keepdim=True))
    result = identify(model, TASK, also={"the same": same, "near": near}, steps=1, n_prompts=N, progress=False)
    assert [match.name for match in result.matches[:2]] == ["the same", "near"]
    assert result.best.n_fitted == 0
    assert result.best.squared_distances.max() < 1e-24
    assert result.distance(result.matches[1]).mean == pytest.approx((0.01 / 0.3) ** 2)
    torch.testing.assert_close(result.matches[1].sensitivity_cosine, torch.ones(N, dtype=torch.float64))
    names = {match.name for match in identify(model, TASK, steps=1, n_prompts=N, progress=False).matches}
    assert {match.name for match in result.matches} == names | {"the same", "near"}


def test_a_family_of_ones_own_is_fitted():
    penalties = (0.01, 0.02, 0.05, 0.3)
    family = AlgorithmFamily(_soft_threshold, "penalty", penalties)

    class Model:
        def predict(self, prompts):
            return (prompts.query.xs[:, None] @ self.weights(prompts))[:, 0]

        def weights(self, prompts):
            moments = prompts.context.xs.mT @ prompts.context.ys
            return moments.sign() * (moments.abs() - 0.05).clamp(min=0)

        def predict_prefixes(self, prompts):
            raise NotImplementedError

    result = identify(Model(), TASK, also=[family], n_prompts=N, progress=False)
    assert result.best.name == "_soft_threshold (penalty)"
    assert result.best.hyperparameters == {"penalty": 0.05}
    assert result.best.n_fitted == 1
    assert result.best.squared_distances.max() < 1e-24
    assert result.best.sensitivity_cosine.isnan().all()  # numpy has no slopes


def test_references_of_the_task_are_ranked_once():
    pool = TaskPool(x_dim=3, n_context=5, n_tasks=4, noise_std=0.5)
    learners = algorithms.references(pool)
    result = identify(learners["dmmse"], pool, steps=1, n_prompts=N, progress=False)
    names = [match.name for match in result.matches]
    assert result.best.name == "dmmse"
    assert result.distance(result.best).mean < 1e-20
    assert not result.tied(result.matches[1])
    assert len(set(names)) == len(names) == 1 + len(_identified("ridge").matches)  # ridge and OLS are families already
    ridge = identify(learners["ridge"], pool, steps=1, n_prompts=N, progress=False)
    assert ridge.best.name == "ridge"
    assert ridge.distance(_named(ridge, "dmmse")).low > 0.01


def test_it_says_where_the_families_do_not_apply():
    task = Parities(x_dim=4, n_context=12)
    result = identify(algorithms.references(task)["bayes"], task, steps=1, n_prompts=N, progress=False)
    assert result.best.name == "bayes"
    assert "targets of Parities are classes" in result.note
    assert result.note in str(result)
    assert "bayes 0" in result.note
    clusters = GaussianClusters(x_dim=3, n_context=4, n_classes=9)
    learner = algorithms.references(clusters)["in context"]
    assert "are classes" in identify(learner, clusters, steps=1, n_prompts=N, progress=False).note
    assert _identified("ridge").note == ""
    assert "note" not in str(_identified("ridge"))
    pool = TaskPool(x_dim=3, n_context=5, n_tasks=2, noise_std=0.1)
    result = identify(algorithms.references(pool)["dmmse"], pool, steps=1, n_prompts=N, progress=False)
    assert "dmmse 0.0" in result.note
    alone = identify(LEARNERS["ridge"], pool, with_references=False, steps=1, n_prompts=N, progress=False)
    assert "dmmse" not in [match.name for match in alone.matches]
    assert alone.note == ""
