"""The fingerprint against closed forms, and the properties that algorithms have by theorem."""

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from mechicl import algorithms
from mechicl.algorithms.card import CARDS, Algorithm, FitProblem, cards
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.analysis.behaviour import fingerprint, fingerprint_on_tables, identify
from mechicl.analysis.behaviour.fingerprints import FILTER_TESTS, PROPERTIES
from mechicl.learners import AlgorithmLearner
from mechicl.tasks import Conjunctions, LinearRegression, RepeatedTokens, TableRegression, TaskPool

TASK = LinearRegression(x_dim=3, n_context=8, inputs="gaussian", noise_std=0.3)
N = 64


def learner(function):
    """A learner from a function of the context's x `[prompt point x]`, y `[prompt point]` and the query."""
    return AlgorithmLearner(lambda p: function(p.xs[:, :-1], p.ys[:, :-1, 0], p.xs[:, -1])[:, None])


def measured(function, task=TASK):
    return fingerprint(learner(function), task, n_prompts=N, progress=False)


def mean(x, y, q):
    return torch.einsum("pni,pn,pi->p", x, y, q) / x.shape[1]


RIDGE = AlgorithmLearner(algorithms.ridge, {"penalty": 2.0})


@pytest.mark.parametrize(("name", "function", "violation"), [
    ("scale of the inputs", mean, 9.0),  # 4 f - f = 3 f
    ("scale of the targets", lambda x, y, q: mean(x, y, q) * mean(x, y, q).abs(), 1.0),  # 4 f / 2 - f
    ("scale of the targets", lambda x, y, q: mean(x, y, q).sign(), 0.25),  # 1 / 2 - 1
    ("linear in the query", lambda x, y, q: torch.ones(N, dtype=x.dtype), 0.16),  # 1 - 0.6 - 0.8
    ("linear in the targets", lambda x, y, q: torch.ones(N, dtype=x.dtype), 0.16),
    ("order of the points", lambda x, y, q: torch.ones(N, dtype=x.dtype), 0.0),
    ("additive over points", lambda x, y, q: torch.ones(N, dtype=x.dtype), 0.0),
])  # fmt: skip
def test_violations_of_closed_forms(name, function, violation):
    assert measured(function).violation(name).mean == pytest.approx(violation, rel=1e-9, abs=1e-25)


def test_a_shift_of_the_targets_moves_averaging_by_the_mean_input():
    prompts = TASK.sample(N, seed=0, dtype=torch.float64)
    xs, ys = prompts.xs.numpy(), prompts.ys.numpy()
    size = np.sqrt((ys[:, :-1] ** 2).mean())
    rows = []
    for x, y in zip(xs, ys, strict=True):
        plain = sum(y[t, 0] * (x[t] @ x[-1]) for t in range(8)) / 8
        moved = sum((y[t, 0] + size) * (x[t] @ x[-1]) for t in range(8)) / 8
        rows.append((moved - size - plain, plain))
    differences, plain = np.array(rows).T
    expected = (differences**2).mean() / (plain**2).mean()
    assert measured(mean).violation("shift of the targets").mean == pytest.approx(expected, rel=1e-9)


def test_what_is_read_of_the_points_is_noticed():
    axis = measured(lambda x, y, q: (x[..., 0] * y).sum(1) * q[:, 0])
    assert "rotation of the inputs" in axis.violated
    assert "order of the points" in axis.exact
    first = measured(lambda x, y, q: (x[:, 0] * q).sum(1) * y[:, 0])
    assert {"order of the points", "moments"} <= set(first.violated)
    assert {"linear in the targets", "linear in the query", "additive over points"} <= set(first.exact)
    product = measured(lambda x, y, q: y[:, :4].sum(1) * y[:, 4:].sum(1))
    assert {"additive over points", "linear in the targets"} <= set(product.violated)


def test_the_filter_of_ridge_is_measured():
    result = fingerprint(RIDGE, TASK, n_prompts=N, progress=False)
    expected = result.eigenvalues / (result.eigenvalues + 2)
    torch.testing.assert_close(result.responses, expected, rtol=1e-9, atol=1e-12)
    assert result.is_filter
    assert result.violation("one filter").mean < 1e-4
    at, values = result.filter()
    assert at == sorted(at)
    assert all(low.mean < high.mean for low, high in itertools.pairwise(values))
    per_prompt = measured(lambda x, y, q: mean(x, y, q) / y.square().mean(1).sqrt() / x.square().mean((1, 2)))
    assert "one filter" in per_prompt.violated


def test_influence_forgets():
    discount = 0.5 ** torch.arange(7, -1, -1.0, dtype=torch.float64)
    result = measured(lambda x, y, q: (discount * y).sum(1))
    torch.testing.assert_close(result.influence.mean(1), discount.square())


def test_noise_and_size_of_the_sample_make_the_interval():
    noisy = learner(lambda x, y, q: mean(x, y, q) + 0.1 * torch.sin(1e4 * y.sum(1)))
    result = fingerprint(noisy, TASK, n_prompts=N, progress=False)
    interval = result.violation("order of the points")
    assert interval.low < interval.mean < interval.high
    table = str(result).splitlines()[:-1]
    assert sum(line.split()[-1] in ("exact", "nearly", "violated") for line in table) == len(PROPERTIES) + 2
    assert "nearly" in result.description
    assert "not exact: linear in the targets (0.003)" in result.description
    assert set(result.to_dataframe()["property"]) == {*PROPERTIES, *FILTER_TESTS}


def test_classes_have_the_properties_that_make_sense():
    task = Conjunctions(x_dim=4, n_context=8)
    result = fingerprint(AlgorithmLearner(algorithms.nearest_neighbours), task, n_prompts=16, progress=False)
    assert "order of the points" in result.violations
    assert set(result.not_tested) == {"linear in the targets", "scale of the targets", "shift of the targets",
                                      "moments", "function of S", "one filter"}  # fmt: skip
    with pytest.raises(ValueError, match="targets are classes"):
        result.filter()
    assert "classes" in result.description


def test_what_cannot_be_measured_is_refused():
    tokens: Any = RepeatedTokens()
    with pytest.raises(TypeError, match="RepeatedTokens"):
        fingerprint(RIDGE, tokens)
    with pytest.raises(ValueError, match="n_context is 1"):
        fingerprint(RIDGE, LinearRegression(n_context=1))
    with pytest.raises(ValueError, match="finite"):
        measured(lambda x, y, q: y.sum(1) / 0)
    with pytest.raises(ValueError, match="differ between two calls"):
        measured(lambda x, y, q: mean(x, y, q) + 0.01 * torch.randn(len(x)))
    cheating, own = AlgorithmLearner(lambda p: 0.1 * p.ys.sum(1)), "the query's own target"
    for task in (TASK, TASK.replace(n_context=1)):
        with pytest.raises(ValueError, match=own):
            identify(cheating, task, progress=False)
    with pytest.raises(ValueError, match=own):
        fingerprint_on_tables(cheating, TableRegression(n_context=8), progress=False)


def test_a_prediction_of_0_violates_only_the_shift_of_the_targets():
    zero = measured(lambda x, y, q: 0 * y.sum(1))
    assert zero.violated == ["shift of the targets"]
    assert zero.description == "it predicts 0 on all prompts"


def test_unknown_properties_are_refused():
    with pytest.raises(ValueError, match="order of points"):
        fingerprint(RIDGE, TASK, n_prompts=8, progress=False).violation("order of points")


# ---- theorems ----
LIBRARY = [card for card in cards() if card.holds or card.violates]


# fitted to ridge regression, these come near a limit in which they have more properties
APART = {"Huber regression": {"threshold": 0.1}, "kernel ridge": {"bandwidth": 2.0, "penalty": 0.3}}


def members(card: Algorithm):
    """Members of a family that are fitted to ridge regression, or the algorithm itself where nothing is fitted."""
    prompts = TASK.sample(128, seed=3, dtype=torch.float64)
    problem = FitProblem(prompts, RIDGE.predict(prompts)[None], 3)
    if card.name in APART:
        return [card.fitted(APART[card.name]).learner]
    found = [member.learner for member in card.members(problem)]
    if not found and card.trajectory is not None and card.path is not None:
        found = [card.on(prompts, steps=3)]
    if not found and card.step_forms is not None:
        found = [form for form in card.step_forms(problem) if isinstance(form, StepwiseAlgorithm)][:1]
    return found


def test_every_card_of_the_library_declares_its_properties():
    ours = [card for card in CARDS.values() if card.trajectory is None or "mechicl" in card.trajectory.__module__]
    assert [card.name for card in ours if not card.holds] == []


@pytest.mark.parametrize("card", LIBRARY, ids=[card.name for card in LIBRARY])
def test_an_algorithm_has_the_properties_of_its_theorem(card):
    assert {*card.holds, *card.violates} <= {*PROPERTIES, *FILTER_TESTS}
    assert not set(card.holds) & set(card.violates)
    found = members(card)
    assert found
    for member in found:
        with warnings.catch_warnings(action="ignore"):  # of descent that diverges on doubled inputs
            result = fingerprint(member, TASK, n_prompts=N, progress=False)
        assert {name: result.violation(name).mean for name in card.holds if result.violation(name).mean > 1e-20} == {}
        assert {name: result.violation(name).mean for name in card.violates if result.violation(name).mean < 1e-4} == {}


def test_pools_have_few_weights():
    result = fingerprint(RIDGE, TASK, n_prompts=512, progress=False)
    assert 0.3 < result.clustering.mean() < 3
    pool = TaskPool(x_dim=3, n_context=12, n_tasks=4)
    chosen = fingerprint(algorithms.references(pool)["dmmse"], pool, n_prompts=128, progress=False)
    assert chosen.clustering.median() < 1e-3
    assert "its weights take few values" in chosen.description
    assert "few values" not in result.description
