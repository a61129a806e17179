"""Which step of one learner is most like each step of another: best matches, and how they grow with the layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.optimize import least_squares
from torch import Tensor

from mechicl.analysis.similarity import similarity_of_errors, similarity_of_weights
from mechicl.learners import Interval, IterativeLearner, Trajectory, interval, student_t_quantile
from mechicl.prompts import Prompts

Similarity = Literal["errors", "weights"]


@dataclass(frozen=True)
class BestMatch:
    """The step of one learner that is most like a step of another.

    Attributes:
        row: the step that was to be matched.
        column: the step that matches it best.
        similarity: how alike they are, with an interval over prompts.
        low: lower end of the best step's 95% interval, from resampled prompts.
        high: upper end.
        at_edge: whether the best step is the first or the last that was tried, so that a better one may lie beyond.
    """

    row: int
    column: int
    similarity: Interval
    low: int
    high: int
    at_edge: bool


@dataclass(frozen=True)
class Growth:
    """How the best-matching step grows with the layer: linearly or exponentially.

    Both curves have two parameters and errors that are normal in log k, so that Akaike's criterion compares their
    residuals alone.

    Attributes:
        rows: the layers that the curves were fitted to.
        columns: the best-matching steps there.
        slope: steps a layer of the linear fit `k = a + slope * layer`, with a 95% interval.
        doubling: doublings a layer of the exponential fit `k = 2^(a + doubling * layer)`, with a 95% interval.
        linear_aic: corrected Akaike criterion of the linear fit.
        exponential_aic: of the exponential fit.
        linear_fit: the linear curve at `rows`.
        exponential_fit: the exponential curve at `rows`.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    slope: Interval
    doubling: Interval
    linear_aic: float
    exponential_aic: float
    linear_fit: tuple[float, ...]
    exponential_fit: tuple[float, ...]

    @property
    def better(self) -> Literal["linear", "exponential", "undecided"]:
        """The curve with the lower criterion; undecided where they differ by less than 2."""
        difference = self.linear_aic - self.exponential_aic
        if not abs(difference) >= 2:
            return "undecided"
        return "linear" if difference < 0 else "exponential"


@dataclass(frozen=True, eq=False)
class Match:
    """Similarities between all steps of two learners.

    Attributes:
        row_name: the learner whose steps are matched (a model's layers).
        column_name: the learner whose steps match them (an algorithm's iterations).
        rows: its steps.
        columns: its steps.
        similarities: `[row column prompt]`; of weights, averaged over the numbers of points.
        similarity: what was compared, "errors" or "weights".
    """

    row_name: str
    column_name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    similarities: Float[Tensor, "row column prompt"]
    similarity: Similarity

    def mean(self) -> Float[Tensor, "row column"]:
        """Mean over prompts; a prompt for which a similarity is not defined (a zero vector) does not count there."""
        return self.similarities.nanmean(-1)

    def best_columns(self) -> list[int]:
        """Index of each row's best column: the largest mean similarity (the paper prints arg min)."""
        return self.mean().nan_to_num(-math.inf).argmax(1).tolist()

    def best(self, *, resamples: int = 1000, seed: int = 0) -> list[BestMatch]:
        """The best match of each row, with intervals over prompts.

        Args:
            resamples: of the prompts, for the interval of the best step (bootstrap).
            seed: of the resampling.

        Source: Fu et al. 2024, Definition 4, which prints arg min for arg max.
        """
        n = self.similarities.shape[-1]
        generator = torch.Generator().manual_seed(seed)
        counts = torch.zeros(resamples, n, dtype=torch.float64)
        drawn = torch.randint(n, (resamples, n), generator=generator)
        counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
        matches = []
        for i, column in enumerate(self.best_columns()):
            values = self.similarities[i].cpu().double()
            defined = values.isfinite()
            means = (counts @ values.nan_to_num(0.0).T) / (counts @ defined.double().T)
            picked = torch.tensor(self.columns)[means.nan_to_num(-math.inf).argmax(1)].double()
            low, high = (int(picked.quantile(q, interpolation="nearest")) for q in (0.025, 0.975))
            at_edge = len(self.columns) > 1 and column in (0, len(self.columns) - 1)
            alike = interval(values[column][defined[column]])
            matches.append(BestMatch(self.rows[i], self.columns[column], alike, low, high, at_edge))
        return matches

    def growth_rows(self) -> list[int]:
        """The rows whose best match is neither the first nor the last step that was tried, and at least 1."""
        inner = range(1, len(self.columns) - 1)
        best = zip(self.rows, self.best_columns(), strict=True)
        return [row for row, column in best if column in inner and self.columns[column] >= 1]

    def growth(self, rows: Sequence[int] | None = None) -> Growth:
        """Fit the best-matching step as a linear and as an exponential function of the layer.

        Args:
            rows: steps to fit (layers); by default `growth_rows()`.

        Raises:
            ValueError: a row that does not exist, a best match of 0 steps, or fewer than 4 rows: with two parameters
                the corrected criterion needs that many.
        """
        best = dict(zip(self.rows, self.best_columns(), strict=True))
        rows = self.growth_rows() if rows is None else rows
        unknown = [row for row in rows if row not in best]
        if unknown:
            raise ValueError(f"no rows {unknown}; there are {list(self.rows)}")
        columns = [self.columns[best[row]] for row in rows]
        if len(rows) < 4 or min(columns) < 1:
            raise ValueError(
                f"growth needs at least 4 rows whose best match is at least one step, got rows {list(rows)} with best "
                f"matches {columns}"
            )
        return fit_growth(rows, columns)

    def to_dataframe(self) -> pd.DataFrame:
        """One row a pair of steps: mean similarity and its interval, and whether the pair is a best match."""
        table, best = [], self.best_columns()
        for i, row in enumerate(self.rows):
            for j, column in enumerate(self.columns):
                values = self.similarities[i, j]
                alike = interval(values[values.isfinite()])
                table.append(
                    {self.row_name: row, self.column_name: column, "similarity": alike.mean, "low": alike.low,
                     "high": alike.high, "best": j == best[i]}
                )  # fmt: skip
        return pd.DataFrame(table)


def match(
    a: IterativeLearner | Trajectory,
    b: IterativeLearner | Trajectory,
    prompts: Prompts,
    *,
    similarity: Similarity = "errors",
) -> Match:
    """Compare every step of one learner with every step of another.

    Args:
        a: the learner whose steps are to be matched, e.g. a model's `fit_readouts`, or its trajectory on the prompts.
        b: the learner whose steps may match, e.g. `AlgorithmLearner(newton, dict(steps=range(24)))`.
        prompts: to compare on.
        similarity: of "errors" along the prompt, or of induced "weights".

    Raises:
        ValueError: another similarity, no prompts, trajectories of other prompts, or without weights where they are
            compared.

    Source: Fu et al. 2024, A.3.

    Example:
        >>> newton = AlgorithmLearner(algorithms.newton, dict(steps=list(range(1, 24))))
        >>> match(fit_readouts(model, fitting), newton, prompts).best()
    """
    if similarity not in ("errors", "weights"):
        raise ValueError(f"similarity must be 'errors' or 'weights', got {similarity!r}")
    if len(prompts) == 0:
        raise ValueError("match() needs at least one prompt")
    of_a, of_b = (_trajectory(learner, prompts, with_weights=similarity == "weights") for learner in (a, b))
    if similarity == "errors":
        values = similarity_of_errors(of_a, of_b, prompts)
    else:
        values = similarity_of_weights(of_a, of_b).nanmean(-1)
    return Match(of_a.name or "a", of_b.name or "b", of_a.steps, of_b.steps, values, similarity)


def _trajectory(learner: IterativeLearner | Trajectory, prompts: Prompts, *, with_weights: bool) -> Trajectory:
    if isinstance(learner, Trajectory):
        return learner
    with torch.no_grad():
        return learner.trajectory(prompts, with_weights=with_weights)


def fit_growth(rows: Sequence[int], columns: Sequence[int]) -> Growth:
    """Linear and exponential curves through (layer, best step); see `Growth` and `Match.growth`.

    Raises:
        ValueError: fewer than 4 points, or a step below 1.
    """
    if len(rows) < 4 or min(columns) < 1:
        raise ValueError(f"growth needs at least 4 layers and steps >= 1, got {list(rows)} and {list(columns)}")
    x, log_k = np.asarray(rows, dtype=float), np.log(np.asarray(columns, dtype=float))

    def linear(p: np.ndarray) -> np.ndarray:  # through its ends, which keeps it positive between them
        first, last = np.exp(p)
        return first + (last - first) * (x - x[0]) / (x[-1] - x[0])

    straight = least_squares(lambda p: np.log(linear(p)) - log_k, x0=log_k[[0, -1]])
    first, last = np.exp(straight.x)
    gradient = np.array([-first, last]) / (x[-1] - x[0])
    slope = _parameter((last - first) / (x[-1] - x[0]), gradient, np.asarray(straight.jac), straight.fun)
    design = np.stack([np.ones_like(x), x], axis=1)
    coefficients = np.linalg.lstsq(design, log_k, rcond=None)[0]
    residuals = design @ coefficients - log_k
    doubling = _parameter(coefficients[1] / math.log(2), np.array([0, 1 / math.log(2)]), design, residuals)
    return Growth(
        tuple(rows),
        tuple(columns),
        slope,
        doubling,
        _corrected_aic(straight.fun),
        _corrected_aic(residuals),
        tuple(linear(straight.x).tolist()),
        tuple(np.exp(design @ coefficients).tolist()),
    )


def _parameter(value: float, gradient: np.ndarray, jacobian: np.ndarray, residuals: np.ndarray) -> Interval:
    """A function of two fitted parameters with its interval (delta method)."""
    free = len(residuals) - 2
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * (residuals @ residuals) / free
    half = student_t_quantile(0.975, free) * math.sqrt(max(gradient @ covariance @ gradient, 0.0))
    return Interval(float(value), float(value) - half, float(value) + half, len(residuals))


def _corrected_aic(residuals: np.ndarray) -> float:
    """Akaike's criterion for two parameters and a variance, corrected for few points (Hurvich & Tsai 1989)."""
    n, k = len(residuals), 3
    variance = max(float(residuals @ residuals) / n, 1e-24)
    correction = 2 * k * (k + 1) / (n - k - 1) if n > k + 1 else 0.0
    return n * math.log(variance) + 2 * k + correction
