"""Families of estimators on tables: the right one is found, by distances of plain fits, without random differences."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import is_classifier
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsRegressor, NearestCentroid
from sklearn.svm import SVR

from mechicl.analysis import identify_on_tables
from mechicl.analysis.behaviour import table_learners
from mechicl.analysis.behaviour.table_learners import TableFamily
from mechicl.interop import from_sklearn
from mechicl.tasks import TableClassification, TableRegression

NUMBERS = TableRegression(x_dim=2, n_context=20, missing=0.2)
CLASSES = TableClassification(x_dim=2, n_context=20)
QUIET: dict[str, Any] = {"n_tables": 6, "n_queries": 8, "progress": False}


@pytest.fixture(autouse=True)
def few_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit hyperparameters to fewer tables, which is quicker."""
    monkeypatch.setattr(table_learners, "N_FITTED", 3)
    monkeypatch.setattr(table_learners, "TRIES", 15)


@pytest.mark.parametrize(("estimator", "right"), [
    (Ridge(0.3), "ridge"), (KNeighborsRegressor(4), "nearest neighbours"), (SVR(), "none of these"),
    (LogisticRegression(C=0.5, max_iter=1000), "logistic regression"), (NearestCentroid(), "nearest centroid"),
])  # fmt: skip
def test_the_family_of_an_estimator(estimator: Any, right: str):
    of_classes = is_classifier(estimator)
    families = ("logistic regression", "nearest centroid") if of_classes else ("ridge", "nearest neighbours")
    learner = from_sklearn(estimator, probabilities=of_classes)
    found = identify_on_tables(learner, CLASSES if of_classes else NUMBERS, families=families, **QUIET)
    assert found.answer.name == right


def test_the_distance_is_that_of_plain_fits():
    learner = from_sklearn(Ridge(5.0))
    found = identify_on_tables(learner, NUMBERS, families=("nearest neighbours",), **QUIET, seed=3).matches[0]
    tables = NUMBERS.replace(missing=0.0, n_queries=8).sample_tables(6, seed=4)
    learner: Any = found.learner
    chosen, squares, sizes = learner.estimator, [], []
    for xs, ys in zip(tables.xs.double().numpy(), tables.ys[..., 0].double().numpy(), strict=True):
        ours = Ridge(5.0).fit(xs[:20], ys[:20]).predict(xs[20:])
        squares.append(np.mean((chosen.fit(xs[:20], ys[:20]).predict(xs[20:]) - ours) ** 2))
        sizes.append(np.mean((ours - ys[:20].mean()) ** 2))
    np.testing.assert_allclose(found.squared_distances, squares, rtol=1e-6)
    np.testing.assert_allclose(found.changed_distances.mean(), np.mean(squares) / np.mean(sizes), rtol=1e-6)


def test_what_runs_of_chance_differ_by_is_taken_off(monkeypatch: pytest.MonkeyPatch):
    forests = TableFamily("forest", lambda: RandomForestRegressor(5), random=True)
    monkeypatch.setattr(table_learners, "table_families", lambda classes: [forests])
    learner = from_sklearn(KNeighborsRegressor(4))
    (found,) = identify_on_tables(learner, NUMBERS, n_tables=30, n_queries=8, seed=3, progress=False).matches
    tables = NUMBERS.replace(missing=0.0, n_queries=8).sample_tables(30, seed=4)
    prompts = tables.to(torch.float64).prompts()
    of_neighbours = learner.predict(prompts).numpy().reshape(30, 8)
    runs = [from_sklearn(RandomForestRegressor(5), seed=1001 + run).predict(prompts) for run in range(4)]
    of_runs = np.stack([run.numpy().reshape(30, 8) for run in runs])
    excess = (of_runs.mean(0) - of_neighbours) ** 2 - 1.25 * of_runs.var(0, ddof=1)
    means = tables.ys[:, :20, 0].double().numpy().mean(1, keepdims=True)
    sizes = (of_neighbours - means) ** 2
    np.testing.assert_allclose(found.changed_distances.mean(), excess.mean() / sizes.mean(), rtol=1e-6)


def test_errors():
    with pytest.raises(ValueError, match="families must be some of"):
        identify_on_tables(from_sklearn(Ridge()), NUMBERS, families=("rigde",))

    class Undefined:
        def predict(self, prompts: Any) -> torch.Tensor:
            return prompts.ys[:, -1] * torch.nan

    with pytest.raises(ValueError, match="finite numbers"):
        identify_on_tables(Undefined(), NUMBERS, **QUIET)
