"""Reference learners, compared with scikit-learn's solvers and the field's loops over prompts and prefixes.

Each runs in its own process. Every solver predicts each point of each prompt from the points before it: d = 20, 40
points, as in Garg et al. 2022.
"""

import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.linear_model import Lasso, LinearRegression, Ridge
from torch import Tensor

from benchmarks.apart import Apart, peers
from benchmarks.rows import Row, Settings, alternate, ratios, row, seconds
from mechicl import algorithms, tasks
from mechicl.prompts import Prompts

PENALTY, N_PROMPTS = 0.1, 512


def by_prompt_and_prefix(estimator: Any, prompts: Prompts) -> Tensor:
    """A fit for each prefix of each prompt, as `[prompt point]`: the empty one predicts 0."""
    xs, ys = prompts.xs.numpy(), prompts.ys[..., 0].numpy()
    predictions = np.zeros_like(ys)
    # without this, every fit checks its data and options
    with warnings.catch_warnings(), sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        warnings.simplefilter("ignore")  # iterations that ran out
        for prompt in range(len(xs)):
            for point in range(1, xs.shape[1]):
                estimator.fit(xs[prompt, :point], ys[prompt, :point])
                predictions[prompt, point] = estimator.predict(xs[prompt, point : point + 1])[0]
    return torch.from_numpy(predictions)


def by_cholesky(xs: Tensor, ys: Tensor) -> Tensor:
    """The shortest weights of least squares by the normal equations, of points or of inputs, whichever are fewer."""
    if xs.shape[1] > xs.shape[2]:
        return torch.cholesky_solve(xs.mT @ ys, torch.linalg.cholesky(xs.mT @ xs))
    return xs.mT @ torch.cholesky_solve(ys, torch.linalg.cholesky(xs @ xs.mT))


def by_driver(driver: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda xs, ys: torch.linalg.lstsq(xs, ys, driver=driver).solution


def least_squares_by_prefix(solve: Callable[[Tensor, Tensor], Tensor], prompts: Prompts) -> Tensor:
    """One batched least-squares problem a prefix."""
    predictions = torch.zeros(prompts.ys.shape[:2], dtype=prompts.xs.dtype)
    for point in range(1, predictions.shape[1]):
        weights = solve(prompts.xs[:, :point], prompts.ys[:, :point])
        predictions[:, point] = (prompts.xs[:, point, None] @ weights)[:, 0, 0]
    return predictions


def nearest_neighbours_by_prefix(prompts: Prompts, k: int = 3) -> Tensor:
    """The mean label of the k nearest points, prefix by prefix."""
    predictions = torch.zeros(prompts.ys.shape[:2], dtype=prompts.xs.dtype)
    for point in range(1, predictions.shape[1]):
        distances = (prompts.xs[:, :point] - prompts.xs[:, point, None]).square().sum(2)
        nearest = distances.topk(min(k, point), dim=1, largest=False).indices
        predictions[:, point] = prompts.ys[:, :point, 0].gather(1, nearest).mean(1)
    return predictions


THEIRS: dict[str, Callable[[Prompts], Tensor]] = {
    "LinearRegression": partial(by_prompt_and_prefix, LinearRegression(fit_intercept=False)),
    "Ridge": partial(by_prompt_and_prefix, Ridge(PENALTY, fit_intercept=False)),
    "Lasso": partial(by_prompt_and_prefix, Lasso(PENALTY, fit_intercept=False)),
    "gelsd": partial(least_squares_by_prefix, by_driver("gelsd")),
    "gelsy": partial(least_squares_by_prefix, by_driver("gelsy")),
    "Cholesky": partial(least_squares_by_prefix, by_cholesky),
    "neighbours": nearest_neighbours_by_prefix,
}
OURS: dict[str, Callable[[Prompts], Any]] = {
    "our ols": algorithms.ols,
    "our ridge": partial(algorithms.ridge, penalty=PENALTY),
    "our lasso": partial(algorithms.lasso, penalty=PENALTY),
    "our neighbours": partial(algorithms.nearest_neighbours, n_neighbours=3),
}


class Solver:
    """One of `THEIRS` or `OURS` on the first of 512 prompts."""

    def __init__(self, name: str, n_prompts: int):
        task = tasks.LinearRegression(x_dim=20, n_context=40, inputs="gaussian")
        self.prompts = task.sample(N_PROMPTS, seed=0, dtype=torch.float64)[:n_prompts]
        self.solve = (THEIRS | OURS)[name]

    def seconds(self) -> float:
        return seconds(lambda: self.solve(self.prompts))

    def predictions(self, n_prompts: int) -> list[list[float]]:
        """Return the predictions for the first prompts, at each point."""
        predictions = self.solve(self.prompts[:n_prompts])
        last = predictions if isinstance(predictions, Tensor) else predictions.predictions[-1, ..., 0]
        return last.tolist()


def compare(words: str, theirs: str, ours: str, n_theirs: int, rounds: int) -> list[Row]:
    """Seconds a prompt of theirs over ours, and how far predictions differ, relative to theirs."""
    solvers = {
        "ours": lambda: Apart("learners:Solver", ours=True, name=f"our {ours}", n_prompts=N_PROMPTS),
        "theirs": lambda: Apart("learners:Solver", name=theirs, n_prompts=n_theirs),
    }
    with peers(solvers) as both:
        times = alternate({name: partial(one.call, "seconds") for name, one in both.items()}, rounds)
        mine, others = (
            torch.tensor(both[name].call("predictions", n_theirs), dtype=torch.float64) for name in ("ours", "theirs")
        )
    share = N_PROMPTS / n_theirs
    difference = ((mine - others).norm() / others.norm()).item()
    detail = f"{median(times['theirs']) / n_theirs * 1e3:.3g} against {median(times['ours']) / N_PROMPTS * 1e3:.3g}"
    timed = f"; theirs timed on {n_theirs}" if share > 1 else ""
    return [
        row(f"{words} over ours", [ratio * share for ratio in ratios(times["theirs"], times["ours"])], "shown",
            f"{detail} ms a prompt of 41 points, {N_PROMPTS} prompts{timed}; predictions differ by {difference:.1e}")
    ]  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    few = min(settings.rounds, 3)
    at_once = "of all prompts at once, prefix by prefix,"
    return [
        *compare("scikit-learn's LinearRegression a prefix", "LinearRegression", "ols", 8, few),
        *compare("scikit-learn's Ridge a prefix", "Ridge", "ridge", 8, few),
        *compare("scikit-learn's Lasso a prefix", "Lasso", "lasso", 8, few),
        *(
            compared
            for name in ("gelsd", "gelsy", "Cholesky")
            for compared in compare(f"least squares by {name} {at_once}", name, "ols", N_PROMPTS, few)
        ),
        *compare(f"three nearest neighbours {at_once}", "neighbours", "neighbours", N_PROMPTS, few),
    ]
