"""Estimators of scikit-learn as learners, fitted to the context of each prompt; and others with `fit` and `predict`."""

import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.base.progress import progress_bar
from mechicl.base.warning import warn
from mechicl.prompts import Prompts

NO_SKLEARN = "estimators of scikit-learn need it: pip install 'mechicl[sklearn]'"
FITS_AT_A_TIME = 64  # for one worker process
LONG_CONTEXT = 100  # points that suffice for any estimator
LONGEST_NAME = 50  # letters
Answers = tuple[list[np.ndarray], list[tuple[type[Warning], str]]]


@checked
def from_sklearn(estimator: Any, *, probabilities: bool = False, n_jobs: int = 1, seed: int = 0) -> "SklearnLearner":
    """Make a learner from a scikit-learn estimator, which is fitted to each prompt's context and predicts the query.

    Any object with `fit(xs, ys)` and `predict(xs)` will do, so also those of TabPFN and TabICL. Consecutive prompts
    with the same context, as those of `Tables.prompts`, share one fit.

    If the context is too short for the estimator (found by trying on the first prompt), the learner predicts the mean
    of the context's targets, or 0 without any. A classifier whose context has one class predicts it. Warnings of many
    fits become one, with their number.

    Args:
        estimator: a regressor, classifier, pipeline or search; it is copied for each fit, and for each of several
            targets.
        probabilities: for targets with a column for each class (1 for the point's, else 0): fit a classifier to the
            classes and return its `predict_proba`, `[prompt class]`; 0 for classes that the context lacks.
        n_jobs: number of processes (joblib's); -1 for one per core.
        seed: value for every `random_state` that is None, so that predictions are reproducible.

    Returns:
        A learner with `predict(prompts)` `[prompt y]` (the query) and `predict_prefixes(prompts)` `[prompt point y]`
        (each point from those before it). It has no gradients: `match` and `identify` take it, `align` does not.

    Raises:
        ImportError: scikit-learn is not installed.
        TypeError: estimator is a class, or has no `fit` and `predict` (or `predict_proba`).
        ValueError: when it predicts, if the estimator cannot be fitted to any number of points, or with `probabilities`
            the targets are not classes.

    Example:
        >>> from sklearn.linear_model import LassoCV
        >>> lasso = from_sklearn(LassoCV(cv=3))
        >>> lasso.predict(LinearRegression(x_dim=3, n_context=8).sample(4, seed=0)).shape
        torch.Size([4, 1])
    """
    _import_sklearn()
    method = "predict_proba" if probabilities else "predict"
    if isinstance(estimator, type) or not all(hasattr(estimator, name) for name in ("fit", method)):
        hint = f": give {estimator.__name__}(...), with its settings" if isinstance(estimator, type) else ""
        raise TypeError(f"from_sklearn() takes an estimator with fit and {method}, got {estimator!r}{hint}")
    return SklearnLearner(estimator, n_jobs, seed, probabilities)


@dataclass(frozen=True, eq=False)
class SklearnLearner:
    """An estimator that is fitted to each prompt, made by `from_sklearn`."""

    estimator: Any
    n_jobs: int
    seed: int
    probabilities: bool = False

    @property
    def name(self) -> str:
        """The estimator as text, for tables and figures: with its settings if they are short."""
        name = " ".join(str(self.estimator).split())
        steps = getattr(self.estimator, "steps", [("", self.estimator)])  # of a pipeline
        return name if len(name) <= LONGEST_NAME else ", ".join(type(step).__name__ for _, step in steps)

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Predict the query from a fit to the context."""
        return self._predictions(prompts, range(prompts.n_context, prompts.n_context + 1))[:, 0]

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Predict each point from a fit to the points before it."""
        return self._predictions(prompts, range(prompts.n_context + 1))

    def bytes_per_prompt(self, prompts: Prompts) -> float:
        """Estimate the memory of a prompt's points and predictions in float64; only one fit exists at a time."""
        return 8 * (prompts.n_context + 1) * (prompts.x_dim + 3 * prompts.y_dim)

    def _predictions(self, prompts: Prompts, points: range) -> Tensor:
        xs, ys = (part.detach().cpu().double().numpy() for part in (prompts.xs, prompts.ys))
        if self.probabilities and ((ys.sum(-1) != 1) | (ys.max(-1) != 1)).any():
            raise ValueError("probabilities=True needs targets with a column for each class: 1 for the point's, else 0")
        predictions = np.zeros((len(prompts), len(points), prompts.y_dim))
        if len(prompts) == 0:
            return prompts.ys.new_zeros(predictions.shape)
        estimator = self._for_targets(prompts.y_dim)
        least = self._fewest_points(estimator, xs[0], ys[0])
        fits = []
        for row, t in itertools.product(range(len(prompts)), points):
            if t >= least:
                fits.append((row, t))
            elif t:
                predictions[row, t - points[0]] = ys[row, :t].mean(0)
        parts = [fits[i : i + FITS_AT_A_TIME] for i in range(0, len(fits), FITS_AT_A_TIME)]
        jobs = ((estimator, [(xs[row, :t], ys[row, :t], xs[row, t : t + 1]) for row, t in part]) for part in parts)
        seen: dict[type[Warning], list[str]] = {}
        with progress_bar(unit="fit", total=len(fits)) as bar:
            for part, (values, caught) in zip(parts, self._run(jobs), strict=True):
                for (row, t), value in zip(part, values, strict=True):
                    predictions[row, t - points[0]] = value
                for category, message in caught:
                    seen.setdefault(category, []).append(message)
                bar.update(len(part))
        for category, messages in seen.items():
            warn(f"{len(messages)} of {len(fits)} fits of {self.name}, the first: {messages[0]}", category)
        return torch.from_numpy(predictions).to(prompts.ys)

    def _run(self, jobs: Iterable[tuple[Any, list[Any]]]) -> Iterator[Answers]:
        from joblib import Parallel, delayed  # comes with scikit-learn

        if self.n_jobs == 1:
            return (_fit_several(*job) for job in jobs)
        parallel = Parallel(n_jobs=self.n_jobs, return_as="generator")
        return iter(parallel(delayed(_fit_several)(*job) for job in jobs))  # type: ignore[arg-type]

    def _fewest_points(self, estimator: Any, xs: np.ndarray, ys: np.ndarray) -> int:
        """Return the smallest number of points that the estimator can be fitted to without a ValueError."""
        n_context = len(xs) - 1
        if n_context == 0:
            return 1
        repeated = np.arange(1, max(n_context, LONG_CONTEXT) + 1) % n_context  # it may need more than there are
        refusal = None
        for some in [*(np.arange(t) for t in range(1, n_context + 1)), repeated]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    _fit_and_predict(estimator, xs[some], ys[some], xs[-1:])
                except ValueError as error:
                    refusal = error
                else:
                    return len(some) if len(some) <= n_context else n_context + 1
        raise ValueError(f"{self.name} cannot be fitted: {refusal}") from refusal

    def _for_targets(self, y_dim: int) -> Any:
        """Return a copy with its seeds set; with one copy per target if the estimator takes only one."""
        from sklearn.multioutput import MultiOutputClassifier, MultiOutputRegressor

        estimator, sklearn = self._alone, _import_sklearn()
        if self.probabilities:
            return _ClassProbabilities(estimator)
        if y_dim == 1 or (_has_tags(estimator) and sklearn.utils.get_tags(estimator).target_tags.multi_output):
            return estimator
        return (MultiOutputClassifier if sklearn.base.is_classifier(estimator) else MultiOutputRegressor)(estimator)

    @cached_property
    def _alone(self) -> Any:
        estimator = _copied(self.estimator)
        if not hasattr(estimator, "get_params"):
            return estimator
        parameters = estimator.get_params(deep=True)
        unseeded = [name for name in parameters if name.split("__")[-1] == "random_state" and parameters[name] is None]
        return estimator.set_params(**dict.fromkeys(unseeded, self.seed))


def _import_sklearn() -> Any:
    try:
        import sklearn
        import sklearn.base
        import sklearn.utils
    except ImportError as error:
        raise ImportError(NO_SKLEARN) from error
    return sklearn


def _has_tags(estimator: Any) -> bool:
    return hasattr(estimator, "__sklearn_tags__")


def _copied(estimator: Any) -> Any:
    """Return an estimator that is not fitted: scikit-learn's clone, or a copy of an object of another kind."""
    return _import_sklearn().base.clone(estimator) if hasattr(estimator, "get_params") else copy.deepcopy(estimator)


class _ClassProbabilities:
    """A classifier fitted to targets with a column for each class, whose predictions are probabilities of them."""

    def __init__(self, classifier: Any):
        self.classifier = classifier

    def fit(self, xs: np.ndarray, ys: np.ndarray) -> "_ClassProbabilities":
        self.width, self.present = ys.shape[1], np.flatnonzero(ys.any(0))
        if len(self.present) > 1:
            self.fitted = _copied(self.classifier).fit(xs, ys.argmax(1))
        return self

    def predict(self, xs: np.ndarray) -> np.ndarray:
        shares = np.zeros((len(xs), self.width))
        shares[:, self.present] = self.fitted.predict_proba(xs) if len(self.present) > 1 else 1.0
        return shares


def _fit_several(estimator: Any, fits: list[Any]) -> Answers:
    """Return the predictions of several fits, and each fit's first warning of each category."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    values, seen = [], []
    with threadpool_limits(1):  # several threads take longer for a small context
        for xs, ys, queries in _sharing_contexts(fits):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                values += [*_fit_and_predict(estimator, xs, ys, queries)]
            first = {each.category: str(each.message).splitlines()[0] for each in reversed(caught)}
            seen += [*first.items()] * len(queries)
    return values, seen


def _sharing_contexts(fits: list[Any]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield contexts, each with the queries of consecutive fits that have it."""
    start = 0
    for i, (xs, ys, _) in enumerate(fits):
        following = fits[i + 1][:2] if i + 1 < len(fits) else None
        if following is None or not (np.array_equal(xs, following[0]) and np.array_equal(ys, following[1])):
            yield xs, ys, np.concatenate([query for *_, query in fits[start : i + 1]])
            start = i + 1


def _fit_and_predict(estimator: Any, xs: np.ndarray, ys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    sklearn = _import_sklearn()
    if _has_tags(estimator) and sklearn.base.is_classifier(estimator) and (same := (ys == ys[0]).all(0)).any():
        predicted = ys[:1].repeat(len(queries), axis=0)  # a target with one class is predicted as that class
        if not same.all():
            predicted[:, ~same] = _fit_and_predict(estimator, xs, ys[:, ~same], queries)
        return predicted
    one = ys.shape[1] == 1 and (not _has_tags(estimator) or sklearn.utils.get_tags(estimator).target_tags.single_output)
    unfitted = _copied(estimator)
    fitted = unfitted.fit(xs, ys[:, 0] if one else ys)
    predicted = (unfitted if fitted is None else fitted).predict(queries)
    return np.asarray(predicted, dtype=np.float64).reshape(len(queries), ys.shape[1])
