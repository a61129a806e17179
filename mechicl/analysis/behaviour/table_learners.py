"""Which learner of tables is it? Families of scikit-learn's estimators fitted to a learner's predictions."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.families import FamilyMatch, Identification
from mechicl.analysis.behaviour.table_fingerprints import OnTables, fingerprint_on_tables
from mechicl.base.arguments import Count, at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.base.settings import settings
from mechicl.checkpoints.study import takes_study
from mechicl.interop import from_sklearn
from mechicl.learners import Learner
from mechicl.learners.learners import query_predictions
from mechicl.tasks.tables import TableTask

N_FITTED, N_RUNS, TRIES, SEARCHED = 8, 4, 25, 2
"""Tables that hyperparameters are fitted to, runs of random estimators that are averaged, tries of a search for each
number, and choices from which one starts."""


@dataclass(frozen=True)
class TableFamily:
    """A family of estimators: every choice, each with the numbers (as powers of ten) that a search starts from.

    `make(*choice, *numbers)` returns an estimator; `random` tells that two fits differ by their seed.
    """

    name: str
    make: Callable[..., Any]
    choices: Sequence[tuple[Any, ...]] = ((),)
    starts: Sequence[tuple[float, ...]] = ((),)
    random: bool = False


def table_families(classes: bool) -> list[TableFamily]:
    """Return the families that `identify_on_tables` compares with, for numbers or for classes as labels."""
    from sklearn import ensemble, gaussian_process, linear_model, neighbors, tree
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def scaled(scales: bool, estimator: Any) -> Any:
        return make_pipeline(StandardScaler(), estimator) if scales else estimator

    def near(scales: bool, n: int, weights: str) -> Any:
        kind = neighbors.KNeighborsClassifier if classes else neighbors.KNeighborsRegressor
        return scaled(scales, kind(n, weights=weights))

    def kernel(kind: float, length: float = 1.0, bounds: Any = "fixed") -> Any:
        return RBF(length, bounds) if kind == float("inf") else Matern(length, bounds, nu=kind)

    def process(scales: bool, centred: bool, kind: float, penalty: float, length: float) -> Any:
        fixed: Any = {"kernel": kernel(kind, 10**length), "alpha": max(10**penalty, 1e-10), "optimizer": None}
        return scaled(scales, gaussian_process.GaussianProcessRegressor(**fixed, normalize_y=centred))

    def fitted_process(scaled_kernel: bool, noisy: bool, kind: float) -> Any:
        whole = kernel(kind, 1.0, (1e-5, 1e5))
        whole = ConstantKernel() * whole if scaled_kernel else whole
        return gaussian_process.GaussianProcessRegressor(whole + WhiteKernel() if noisy else whole)

    both, penalties = [(False,), (True,)], [(power / 2,) for power in range(-6, 7)]
    ending = "Classifier" if classes else "Regressor"
    trees, forests, boosting = (
        getattr(module, f"{name}{ending}")
        for module, name in ((tree, "DecisionTree"), (ensemble, "RandomForest"), (ensemble, "GradientBoosting"))
    )
    every = [
        TableFamily("nearest neighbours", near,
                    [*itertools.product((False, True), range(1, 11), ("uniform", "distance"))]),
        TableFamily("tree", lambda depth, leaf: trees(max_depth=depth, min_samples_leaf=leaf),
                    [*itertools.product((None, 3), (1, 5))], random=True),
        TableFamily("forest", lambda share: forests(max_features=share), [("sqrt",), (1.0,)], random=True),
        TableFamily("boosting", lambda depth: boosting(max_depth=depth), [(3,), (2,)], random=True),
    ]  # fmt: skip
    if classes:
        logistic = TableFamily("logistic regression", lambda scales, c: scaled(
            scales, linear_model.LogisticRegression(C=10**c, max_iter=1000)), both, penalties)  # fmt: skip
        return [
            logistic,
            TableFamily("nearest centroid", lambda scales: scaled(scales, neighbors.NearestCentroid()), both),
            *every,
        ]
    kinds = (0.5, 1.5, 2.5, float("inf"))
    return [
        TableFamily("ridge", lambda scales, a: scaled(scales, linear_model.Ridge(10**a)), both, penalties),
        TableFamily("lasso", lambda scales, a: scaled(scales, linear_model.Lasso(10**a)), both, penalties[:8]),
        TableFamily("kernel ridge", process, [*itertools.product((False, True), (False, True), kinds)], [(-0.5, 0.0)]),
        TableFamily(
            "Gaussian process with fitted lengths",
            fitted_process,
            [*itertools.product((False, True), (False, True), kinds[1:])],
        ),
        *every,
    ]


@takes_study
@checked
def identify_on_tables(
    learner: Learner,
    task: TableTask,
    *,
    n_tables: Annotated[int, at_least(2)] = 24,
    n_queries: Count = 16,
    families: Sequence[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Identification:
    """Rank families of scikit-learn's estimators by how well they predict a learner's predictions on tables.

    Each family's choices and numbers are fitted to the learner's predictions on 8 tables, and compared on others.
    Families: ridge, lasso, kernel ridge (the mean of a Gaussian process with a fixed kernel: RBF or Matérn), Gaussian
    processes with fitted lengths, nearest neighbours, trees, forests and boosting; for classes logistic regression and
    nearest centroids in place of the first four. Columns are read unchanged or standardized.

    The distance is the mean squared difference of predictions over their squared distance from the mean label of the
    context. Of estimators whose fits differ by their seeds, four runs are averaged, and what two runs differ by is
    taken off; the rest counts if it is more than twice its standard error.

    Args:
        learner: anything with `predict(prompts)`: a `TableTransformer`, or `from_sklearn` of a fitted TabPFN; for
            classes it returns probabilities.
        task: distribution of the tables, such as `OwnTable.from_frame("own.csv", "label")`; missing cells are filled.
        n_tables: number of held-out tables.
        n_queries: rows to predict of each table.
        families: names of the families to compare with; by default all.
        seed: seed of the tables to fit on; the held-out ones have `seed + 1`.

    Returns:
        An `Identification` whose `fingerprint` is that of `fingerprint_on_tables`, and whose `confidence` is NaN: none
        is calibrated for tables.

    Raises:
        ValueError: `families` has an unknown name, or the learner does not predict finite numbers.

    Example:
        >>> from sklearn.neighbors import KNeighborsRegressor
        >>> from mechicl.interop import from_sklearn
        >>> from mechicl.tasks import TableRegression
        >>> neighbours = from_sklearn(KNeighborsRegressor(3))
        >>> names = ("ridge", "nearest neighbours")
        >>> identify_on_tables(neighbours, TableRegression(n_context=20), families=names).answer.name
        'nearest neighbours'
    """
    known = table_families(task.has_classes)
    names = [each.name for each in known]
    if wrong := [name for name in families or () if name not in names]:
        raise ValueError(f"families must be some of {names}, got {wrong[0]!r}")
    fitting, held_out = (
        OnTables.drawn(learner, task, n, n_queries, seed + i) for i, n in enumerate((N_FITTED, n_tables))
    )
    kept = [each for each in known if families is None or each.name in families]
    bar = progress_bar(kept, unit="family", progress=progress, desc="identify")
    matches = sorted((_match(each, fitting, held_out) for each in bar), key=lambda m: m.changed_distances.mean().item())
    errors = held_out.squares(held_out.predicted - held_out.prompts.query.ys)
    empty = torch.zeros(0, n_tables, dtype=torch.float64)
    found = fingerprint_on_tables(learner, task, n_tables=n_tables, seed=seed + 1, progress=progress)
    return Identification(matches, [], held_out.size, errors, empty, found, calibrated=False)


def _runs(estimator: Any, on_tables: OnTables, n_runs: int) -> Float[Tensor, "run prompt y"]:
    seeded = (from_sklearn(estimator, probabilities=on_tables.has_classes, seed=1001 + run) for run in range(n_runs))
    # a bar for every try would flicker, and many tries converge badly
    with settings(progress=False), warnings.catch_warnings(action="ignore"):
        return torch.stack([query_predictions(each, on_tables.prompts) for each in seeded])


def _match(family: TableFamily, fitting: OnTables, held_out: OnTables) -> FamilyMatch:
    from scipy import optimize

    minimize: Any = optimize.minimize

    def distance(numbers: Any, choice: tuple[Any, ...]) -> float:
        predicted = _runs(family.make(*choice, *numbers), fitting, 1)[0]
        return (fitting.squares(predicted - fitting.predicted).mean() / fitting.size.mean()).item()

    def searched(start: tuple[float, ...], choice: tuple[Any, ...]) -> tuple[float, tuple[float, ...], tuple[Any, ...]]:
        options: Any = {"maxfev": TRIES * len(start), "xatol": 1e-4, "fatol": 0}
        found = minimize(distance, start, (choice,), method="Nelder-Mead", options=options)
        return found.fun, tuple(found.x), choice

    tried = [
        min(((distance(start, choice), start, choice) for start in family.starts), key=lambda each: each[0])
        for choice in family.choices
    ]
    nearest = sorted(tried, key=lambda each: each[0])[:SEARCHED]
    if nearest[0][1]:
        nearest = [searched(start, choice) for _, start, choice in nearest]
    _, numbers, choice = min(nearest, key=lambda each: each[0])
    best = family.make(*choice, *numbers)
    runs = _runs(best, held_out, N_RUNS if family.random else 1)
    squares = held_out.squares(runs.mean(0) - held_out.predicted)
    if family.random:  # the learner's own run, and a quarter of that for the mean of four
        excess = squares - held_out.squares(runs.std(0)) * (1 + 1 / N_RUNS)
        is_more = excess.mean() > 2 * excess.std() / len(excess) ** 0.5
        squares = squares * is_more * (excess.mean() / squares.mean().clamp(min=1e-300))
    nan = torch.full_like(squares, torch.nan)
    hyperparameters = {f"number {i}": float(10**value) for i, value in enumerate(numbers)}
    errors = held_out.squares(runs.mean(0) - held_out.prompts.query.ys)
    n_fitted = len(numbers) + (len(family.choices) > 1)
    member = from_sklearn(best, probabilities=held_out.has_classes)
    return FamilyMatch(
        family.name, member, hyperparameters, n_fitted, squares, nan, errors, squares / held_out.size.mean()
    )
