"""Does `identify_on_tables` name the right family of scikit-learn's estimators, and none where none is right?

python analyses/table_families.py
"""

import warnings
from typing import Any

from sklearn import (
    ensemble,
    gaussian_process,
    kernel_ridge,
    linear_model,
    naive_bayes,
    neighbors,
    neural_network,
    svm,
    tree,
)
from sklearn.gaussian_process.kernels import Matern, WhiteKernel
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import SplineTransformer, StandardScaler

from analyses.support.script import Option, script
from mechicl.analysis import identify_on_tables
from mechicl.analysis.behaviour.families import NONE
from mechicl.base.settings import settings
from mechicl.interop import from_sklearn
from mechicl.reports import Comparison, Row
from mechicl.tasks import TableClassification, TableRegression

NUMBERS = TableRegression(x_dim=3, n_context=32)
CLASSES = TableClassification(x_dim=3, n_context=32)
LITTLE: Any = 0.4  # for the stubs, a penalty is an int
LISTED: dict[str, tuple[Any, Any]] = {  # the right family: a task and an estimator of other settings than the searches'
    "ridge": (NUMBERS, linear_model.Ridge(0.7)),
    "lasso": (NUMBERS, linear_model.Lasso(0.05)),
    "kernel ridge": (NUMBERS, kernel_ridge.KernelRidge(kernel="rbf", gamma=0.3, alpha=LITTLE)),
    "Gaussian process with fitted lengths": (NUMBERS, gaussian_process.GaussianProcessRegressor(
        Matern(nu=1.5) + WhiteKernel())),
    "nearest neighbours": (NUMBERS, make_pipeline(StandardScaler(), neighbors.KNeighborsRegressor(4))),
    "tree": (NUMBERS, tree.DecisionTreeRegressor()),
    "forest": (NUMBERS, ensemble.RandomForestRegressor()),
    "boosting": (NUMBERS, ensemble.GradientBoostingRegressor()),
    "logistic regression": (CLASSES, linear_model.LogisticRegression(C=0.5, max_iter=1000)),
    "nearest centroid": (CLASSES, neighbors.NearestCentroid()),
}  # fmt: skip
UNLISTED: dict[str, tuple[Any, Any]] = {
    "support vectors": (NUMBERS, svm.SVR()),
    "a network": (NUMBERS, neural_network.MLPRegressor(max_iter=300)),
    "extremely random trees": (NUMBERS, ensemble.ExtraTreesRegressor()),
    "splines": (NUMBERS, make_pipeline(SplineTransformer(4), linear_model.Ridge(0.1))),
    "naive Bayes": (CLASSES, naive_bayes.GaussianNB()),
}


@script(n_tables=Option(16, "held-out tables"), seed=Option(0, "seed of the tables"))
def compare(args: Any) -> Comparison:
    """Ask for the family of ten estimators that are listed, and of five that are not."""
    rows = []
    for right, (task, estimator) in {**LISTED, **UNLISTED}.items():
        learner = from_sklearn(estimator, probabilities=task is CLASSES, seed=7)
        with warnings.catch_warnings(action="ignore"), settings(progress=False):
            found = identify_on_tables(learner, task, n_tables=args.n_tables, seed=args.seed, progress=False)
        expected = right if right in LISTED else NONE
        near = ", ".join(f"{m.name} {m.changed_distances.mean():.2g}" for m in found.matches[:2])
        note = f"{'right' if found.answer.name == expected else 'WRONG'}; distances: {near}"
        rows.append(Row(right, None, found.answer.name, "", note))
        print(rows[-1].cells(), flush=True)
    n_right = [sum("right;" in row.note for row in part) for part in (rows[: len(LISTED)], rows[len(LISTED) :])]
    rows.append(Row("right among the listed and the unlisted", None, f"{n_right[0]} of 10 and {n_right[1]} of 5"))
    lead = f"Tables with 3 columns and 32 rows with labels, {args.n_tables} tables."
    return Comparison("Families of estimators on tables", lead, rows)


if __name__ == "__main__":
    compare.run()
