"""Estimators as learners, against plain loops of fits."""

import sys
import warnings

import joblib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso, LassoCV, LinearRegression, LogisticRegression, MultiTaskLasso, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR
from sklearn.tree import DecisionTreeRegressor

from mechicl import algorithms, analysis, tasks
from mechicl.interop import from_sklearn
from mechicl.learners import AlgorithmLearner, Learner
from mechicl.prompts import Prompts


def sampled(n: int = 4, n_context: int = 8, **kwargs) -> Prompts:
    return tasks.LinearRegression(x_dim=3, n_context=n_context, **kwargs).sample(n, seed=0)


def loop(make, prompts: Prompts, least: int) -> np.ndarray:
    """Fits to every prefix, one after the other; the mean of the targets where they are too few."""
    xs, ys = prompts.xs.double().numpy(), prompts.ys.double().numpy()
    predictions = np.zeros(ys.shape)
    for row in range(len(xs)):
        for t in range(1, xs.shape[1]):
            for target in range(ys.shape[2]):
                known = ys[row, :t, target]
                fits = t >= least
                predictions[row, t, target] = (
                    make().fit(xs[row, :t], known).predict(xs[row, t : t + 1])[0] if fits else known.mean()
                )
    return predictions


@pytest.mark.parametrize(("make", "least"), [
    (LinearRegression, 1),
    (lambda: DecisionTreeRegressor(max_features=1, random_state=0), 1),
    (lambda: KNeighborsRegressor(3), 3),
    (lambda: LassoCV(cv=4, alphas=5), 4),
    (lambda: make_pipeline(StandardScaler(), SVR()), 1),
    (lambda: GridSearchCV(Ridge(), {"alpha": [0.1, 10.0]}, cv=3, scoring="neg_mean_squared_error"), 3),
], ids=["linear", "tree", "neighbours", "lasso", "pipeline", "search"])  # fmt: skip
@pytest.mark.parametrize("y_dim", [1, 2])
def test_every_prefix_is_a_fit_of_its_own(make, least, y_dim):
    prompts = sampled(2, y_dim=y_dim)
    estimator = make()
    learner = from_sklearn(estimator)
    expected = loop(make, prompts, least)
    if isinstance(estimator, DecisionTreeRegressor) and y_dim == 2:
        expected = np.stack(  # one tree for both targets, as scikit-learn's own
            [make().fit(x[:8], y[:8]).predict(x[8:])[0] for x, y in zip(prompts.xs, prompts.ys, strict=True)]
        )
        np.testing.assert_allclose(learner.predict(prompts), expected, atol=1e-6)
    else:
        np.testing.assert_allclose(learner.predict_prefixes(prompts), expected, atol=1e-6)
        np.testing.assert_allclose(learner.predict(prompts), expected[:, -1], atol=1e-6)
    assert not hasattr(estimator, "n_features_in_")  # the user's own is left alone
    assert isinstance(learner, Learner)


@settings(max_examples=15)
@given(
    st.integers(0, 4), st.integers(0, 6), st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 3, 9]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)  # fmt: skip
def test_any_shape_of_prompts(n, n_context, x_dim, y_dim, neighbours, dtype):
    task = tasks.LinearRegression(x_dim=x_dim, n_context=n_context, y_dim=y_dim)
    prompts, learner = task.sample(n, seed=0, dtype=dtype), from_sklearn(KNeighborsRegressor(neighbours))
    predictions = learner.predict_prefixes(prompts)
    assert predictions.shape == prompts.ys.shape
    assert predictions.dtype == dtype
    torch.testing.assert_close(learner.predict(prompts), predictions[:, -1])
    assert not predictions[:, 0].any()
    for t in range(n_context):  # a shorter prompt is the prefix, whether or not it has enough points
        torch.testing.assert_close(learner.predict(prompts.prefix(t)), predictions[:, t])


def test_the_same_prompt_gets_the_same_prediction():
    prompts = sampled(6)
    learner = from_sklearn(DecisionTreeRegressor(splitter="random", max_features=1))
    together = learner.predict(prompts)
    assert torch.equal(together, torch.cat([learner.predict(prompts[i : i + 1]) for i in range(6)]))
    other = from_sklearn(DecisionTreeRegressor(splitter="random", max_features=1), seed=1)
    assert not torch.equal(together, other.predict(prompts))
    fixed = from_sklearn(DecisionTreeRegressor(splitter="random", max_features=1, random_state=1), seed=0)
    assert torch.equal(fixed.predict(prompts), other.predict(prompts))


def test_fits_side_by_side_change_nothing():
    prompts = sampled(40)
    alone = from_sklearn(KNeighborsRegressor(3)).predict_prefixes(prompts)
    with joblib.parallel_config(backend="threading"):  # new processes would take seconds to start
        assert torch.equal(alone, from_sklearn(KNeighborsRegressor(3), n_jobs=2).predict_prefixes(prompts))


def test_estimators_join_the_ranking():
    task = tasks.LinearRegression(x_dim=2, n_context=6)
    model = AlgorithmLearner(algorithms.ridge, {"penalty": 0.5})
    also = {"their ridge": from_sklearn(Ridge(0.5, fit_intercept=False)), "tree": from_sklearn(DecisionTreeRegressor())}
    result = analysis.identify(model, task, also=also, n_prompts=64, progress=False)
    distances = {match.name: result.distance(match).mean for match in result.matches}
    assert distances["their ridge"] < 1e-9 < distances["tree"]


def test_classes():
    prompts = sampled(5)
    prompts = Prompts(prompts.xs, prompts.ys.sign())
    predictions = from_sklearn(LogisticRegression()).predict_prefixes(prompts)
    for row in range(5):
        for t in range(1, 9):
            x, y = prompts.xs[row, :t].double().numpy(), prompts.ys[row, :t, 0].double().numpy()
            one = len(set(y)) == 1
            expected = y[0] if one else LogisticRegression().fit(x, y).predict(prompts.xs[row, t : t + 1])[0]
            assert predictions[row, t, 0] == expected


def test_classes_in_columns_of_which_a_context_lacks_one():
    """Each column is its own target; a constant one is predicted unchanged."""
    xs = torch.randn(1, 13, 2, generator=torch.Generator().manual_seed(0)).double()
    ys = torch.nn.functional.one_hot((xs[..., 0] > 0).long(), 3).double()
    predicted = from_sklearn(LogisticRegression()).predict(Prompts(xs, ys))[0]
    context = xs[0, :-1].numpy()
    for column in (0, 1):
        fitted = LogisticRegression().fit(context, ys[0, :-1, column].numpy())
        assert predicted[column] == fitted.predict(xs[0, -1:].numpy())[0]
    assert predicted[2] == 0


def test_one_that_takes_several_targets_only():
    prompts = sampled(1)
    x, y = prompts.xs[0].double().numpy(), prompts.ys[0].double().numpy()
    expected = MultiTaskLasso(0.1).fit(x[:-1], y[:-1]).predict(x[-1:])
    np.testing.assert_allclose(from_sklearn(MultiTaskLasso(0.1)).predict(prompts), expected, atol=1e-6)


class Centre:
    """An estimator without anything of scikit-learn."""

    n_fits = 0

    def fit(self, xs: np.ndarray, ys: np.ndarray) -> None:
        assert ys.ndim == 1
        Centre.n_fits += 1
        self.centre, self.mean = xs.mean(0), ys.mean()

    def predict(self, xs: np.ndarray) -> np.ndarray:
        return self.mean + (xs - self.centre).sum(1)


def test_rows_of_a_table_share_a_fit_of_any_object_with_fit_and_predict():
    tables = tasks.TableRegression(x_dim=3, n_context=8, n_queries=5).sample_tables(2, seed=0)
    prompts, learner = tables.prompts(), from_sklearn(Centre())
    predicted = learner.predict(prompts)
    Centre.n_fits = 0
    each = [learner.predict(prompts[[i]]) for i in range(10)]
    alone, Centre.n_fits = Centre.n_fits, 0
    torch.testing.assert_close(learner.predict(prompts), predicted)
    torch.testing.assert_close(torch.cat(each), predicted)
    xs, ys = prompts.xs.double().numpy(), prompts.ys.double().numpy()
    expected = [ys[row, :-1, 0].mean() + (xs[row, -1] - xs[row, :-1].mean(0)).sum() for row in range(10)]
    np.testing.assert_allclose(predicted[:, 0], expected, atol=1e-6)
    assert (alone, Centre.n_fits) == (20, 3)  # one fit of each call finds how many points it needs


def test_probabilities_of_classes():
    tables = tasks.TableClassification(x_dim=2, n_context=15, n_queries=3).sample_tables(6, seed=0)
    tables.ys[0, :15] = torch.tensor([0.0, 1.0, 0.0])  # a context with one class
    predicted = from_sklearn(LogisticRegression(), probabilities=True).predict(tables.prompts()).view(6, 3, 3)
    assert predicted[0].tolist() == [[0.0, 1.0, 0.0]] * 3
    for table in range(1, 6):
        xs, classes = tables.xs[table].double().numpy(), tables.ys[table].argmax(-1).numpy()
        fitted = LogisticRegression().fit(xs[:15], classes[:15])
        expected = np.zeros((3, 3))
        expected[:, fitted.classes_] = fitted.predict_proba(xs[15:])
        np.testing.assert_allclose(predicted[table], expected, atol=1e-6)
    with pytest.raises(ValueError, match="needs targets with a column for each class"):
        from_sklearn(LogisticRegression(), probabilities=True).predict(sampled())
    with pytest.raises(TypeError, match="fit and predict_proba"):
        from_sklearn(Ridge(), probabilities=True)


def test_warnings_of_many_fits_are_one():
    with pytest.warns(ConvergenceWarning, match=r"\d of 3 fits of Lasso") as caught:
        from_sklearn(Lasso(alpha=1e-6, max_iter=1, tol=1e-12)).predict(sampled(3))
    assert len(caught) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_sklearn(LinearRegression()).predict(sampled(3))
    assert not caught


@pytest.mark.parametrize("estimator", [Ridge, lambda prompts: prompts, "ridge"])
def test_other_objects_are_refused(estimator):
    with pytest.raises(TypeError, match="takes an estimator with fit and predict"):
        from_sklearn(estimator)


def test_an_estimator_that_can_never_be_fitted():
    with pytest.raises(ValueError, match=r"Ridge\(alpha=-1\) cannot be fitted: .*alpha"):
        from_sklearn(Ridge(-1)).predict(sampled())


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"mechicl\[sklearn\]"):
        from_sklearn(None)


def test_long_settings_are_not_part_of_a_name():
    long = Ridge(alpha=0.1, fit_intercept=False, max_iter=1000, positive=True, tol=0.01)
    assert from_sklearn(Ridge(alpha=0.1)).name == "Ridge(alpha=0.1)"
    assert from_sklearn(long).name == "Ridge"
    assert from_sklearn(make_pipeline(StandardScaler(), long)).name == "StandardScaler, Ridge"
