"""Fingerprints of learners of tables: estimators with known properties, and plain loops."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.tree import DecisionTreeRegressor

from mechicl.analysis import fingerprint_on_tables
from mechicl.interop import from_sklearn
from mechicl.learners import AlgorithmLearner
from mechicl.statistics import interval
from mechicl.tasks import OwnTable, TableClassification, TableRegression

TASK = TableRegression(x_dim=3, n_context=12)
OPTIONS = {"n_tables": 4, "n_queries": 4, "progress": False}


@pytest.mark.parametrize(("estimator", "exact", "violated"), [
    (LinearRegression(), ("order of the rows", "order of the columns", "units of the columns", "additive over columns",
                          "linear in the labels"), ("monotone transformations", "a column of noise")),
    (KNeighborsRegressor(3), ("order of the rows", "order of the columns", "linear in the labels"),
     ("units of the columns", "monotone transformations", "additive over columns")),
    (DecisionTreeRegressor(max_features=None, random_state=0), ("units of the columns",),
     ("additive over columns", "linear in the labels")),
])  # fmt: skip
def test_estimators_have_the_properties_that_they_must(estimator, exact, violated):
    found = fingerprint_on_tables(from_sklearn(estimator), TASK, **OPTIONS)
    assert {name: found.standing[name] for name in (*exact, *violated)} == {
        **dict.fromkeys(exact, "exact"), **dict.fromkeys(violated, "violated")
    }  # fmt: skip


def test_labels_of_rows_that_are_no_neighbours_have_no_influence():
    found = fingerprint_on_tables(
        from_sklearn(KNeighborsRegressor(1)), TableRegression(x_dim=1, n_context=16), **OPTIONS
    )
    assert found.influence[1:].abs().max() == 0
    assert found.influence[0].max() > 0
    assert "labels of the rows farthest away have no influence" in found.description


def test_influence_against_a_loop():
    def weighted(prompts):  # the label of row i counts (i + 1) / 100 times
        return prompts.ys[:, :-1].mul((torch.arange(prompts.n_context) + 1)[:, None] / 100).sum(1)

    task = TASK.replace(n_context=8)
    found = fingerprint_on_tables(AlgorithmLearner(weighted), task, seed=3, **OPTIONS)
    tables = task.whole(4).sample_tables(4, seed=3).to(torch.float64)
    for table, xs in enumerate(tables.xs.numpy()):
        scale = xs[:8].std(0, ddof=1)
        groups = [[] for _ in range(4)]
        for query in xs[8:]:
            nearest = np.argsort((((xs[:8] - query) / scale) ** 2).sum(1))
            for rank, row in enumerate(nearest):
                groups[rank // 2].append(((row + 1) / 100) ** 2)
        expected = torch.tensor([np.mean(group) for group in groups])
        torch.testing.assert_close(found.influence[:, table], expected, rtol=1e-6, atol=1e-12)


def test_overconfidence_is_confidence_minus_accuracy():
    task = TableClassification(n_classes=2, n_context=12)
    sure = from_sklearn(KNeighborsClassifier(1), probabilities=True)  # always certain
    found = fingerprint_on_tables(sure, task, seed=1, **OPTIONS)
    tables = task.whole(4).sample_tables(4, seed=1).to(torch.float64)
    for table in range(4):
        xs, classes = tables.xs[table].numpy(), tables.ys[table].argmax(-1).numpy()
        fitted = KNeighborsClassifier(1).fit(xs[:12], classes[:12])
        assert found.overconfidence[table].item() == pytest.approx(1 - fitted.score(xs[12:], classes[12:]))
    assert "confident by" in found.description or 0 in interval(found.overconfidence)
    assert "linear in the labels" not in found.violations


def test_a_table_of_the_users_own_with_one_column_and_missing_cells():
    cells = torch.arange(20.0, dtype=torch.float64)[:, None].clone()
    cells[::5] = torch.nan
    task = OwnTable(cells, torch.arange(20.0, dtype=torch.float64)[:, None], n_context=15)
    found = fingerprint_on_tables(from_sklearn(KNeighborsRegressor(2)), task, **OPTIONS)
    assert "order of the columns" not in found.violations
    logistic = from_sklearn(LogisticRegression(), probabilities=True)
    with pytest.raises(ValueError, match="column for each class"):
        fingerprint_on_tables(logistic, task, **OPTIONS)
