"""Reference learners beside scikit-learn's solvers and the loops over prompts and prefixes of the field's repositories.

Every solver predicts each point of each prompt from the points before it: d = 20, 40 points, as in Garg et al. 2022.
"""

import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import Lasso, LinearRegression, Ridge
from torch import Tensor

from benchmarks.rows import Row, alternate, ratios, row, seconds
from benchmarks.settings import Settings
from mechicl import algorithms, tasks
from mechicl.prompts import Prompts

PENALTY = 0.1


def by_prompt_and_prefix(estimator: Any, prompts: Prompts) -> Tensor:
    """A fit for each prefix of each prompt, as `[prompt point]`: the empty one predicts 0."""
    xs, ys = prompts.xs.numpy(), prompts.ys[..., 0].numpy()
    predictions = np.zeros_like(ys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # iterations that ran out
        for prompt in range(len(xs)):
            for point in range(1, xs.shape[1]):
                estimator.fit(xs[prompt, :point], ys[prompt, :point])
                predictions[prompt, point] = estimator.predict(xs[prompt, point : point + 1])[0]
    return torch.from_numpy(predictions)


def least_squares_by_prefix(prompts: Prompts) -> Tensor:
    """One batched least-squares problem a prefix."""
    predictions = torch.zeros(prompts.ys.shape[:2], dtype=prompts.xs.dtype)
    for point in range(1, predictions.shape[1]):
        weights = torch.linalg.lstsq(prompts.xs[:, :point], prompts.ys[:, :point], driver="gelsd").solution
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


def compare(
    words: str, theirs: Callable[[Prompts], Tensor], ours: Callable[[Prompts], Any], n_theirs: int, rounds: int
) -> list[Row]:
    """Seconds a prompt of theirs over ours, and how far predictions differ, relative to the targets."""
    prompts = tasks.LinearRegression(x_dim=20, n_context=40, inputs="gaussian").sample(512, seed=0, dtype=torch.float64)
    few = prompts[:n_theirs]
    times = alternate(
        {"ours": lambda: seconds(lambda: ours(prompts)), "theirs": lambda: seconds(lambda: theirs(few))}, rounds
    )
    share = len(prompts) / len(few)
    difference = (ours(few).predictions[-1, ..., 0] - theirs(few)).norm() / few.ys.norm()
    detail = f"{median(times['theirs']) / len(few) * 1e3:.3g} against {median(times['ours']) / len(prompts) * 1e3:.3g}"
    timed = f"; theirs timed on {len(few)}" if share > 1 else ""
    return [
        row(f"{words} over ours", [ratio * share for ratio in ratios(times["theirs"], times["ours"])], "shown",
            f"{detail} ms a prompt of 41 points, {len(prompts)} prompts{timed}; predictions differ by {difference:.1e}")
    ]  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    """Everything that this part measures."""
    few = min(settings.rounds, 3)

    def fitted(estimator: Any) -> Callable[[Prompts], Tensor]:
        return lambda prompts: by_prompt_and_prefix(estimator, prompts)

    return [
        *compare("scikit-learn's LinearRegression a prefix", fitted(LinearRegression(fit_intercept=False)),
                 algorithms.ols, 8, few),
        *compare("scikit-learn's Ridge a prefix", fitted(Ridge(PENALTY, fit_intercept=False)),
                 lambda prompts: algorithms.ridge(prompts, penalty=PENALTY), 8, few),
        *compare("scikit-learn's Lasso a prefix", fitted(Lasso(PENALTY, fit_intercept=False)),
                 lambda prompts: algorithms.lasso(prompts, penalty=PENALTY), 8, few),
        *compare("least squares of all prompts at once, prefix by prefix,", least_squares_by_prefix, algorithms.ols,
                 512, few),
        *compare("three nearest neighbours of all prompts at once, prefix by prefix,", nearest_neighbours_by_prefix,
                 lambda prompts: algorithms.nearest_neighbours(prompts, n_neighbours=3), 512, few),
    ]  # fmt: skip
