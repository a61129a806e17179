"""Measures of models of linear regression: beside a pool's Bayes learner, and beside the best learners of a depth."""

import math
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms import references
from mechicl.analysis.behaviour import align, tuned_descent
from mechicl.analysis.behaviour.algorithm_families import limits
from mechicl.analysis.behaviour.spectral import SpectralProblem
from mechicl.checkpoints import Checkpoint
from mechicl.learners import Learner, squared_errors
from mechicl.prompts import Prompts
from mechicl.sweeps.measures.one_model import HELD_OUT, Measured, one_model
from mechicl.tasks import LinearRegression, TaskPool

N_TUNING = 16_384
"""Prompts that reference learners are tuned on: rare contexts decide the losses of deep ones."""


def pool_distances(checkpoint: Checkpoint, *, n_prompts: int = 4000) -> Measured:
    """Is the model of a pool of tasks nearer to the Bayes learner of the pool, or to that of all tasks?

    Args:
        checkpoint: with one model, trained on a `TaskPool`.
        n_prompts: held-out prompts of the pool's tasks, and as many of new ones.

    Returns:
        For prompts of the `pool`'s tasks and of `new` ones: `to_dmmse` and `to_ridge`, mean squared differences of the
        query's predictions; `apart`, that between dMMSE and ridge; `position`, where the model's predictions stand on
        the way from dMMSE (0) to ridge (1), whatever else they differ by; `loss`, `dmmse_loss` and `ridge_loss`. And
        `log_ratio`, the decimal logarithm of `pool_to_dmmse` over `pool_to_ridge`: below 0 for a model that is nearer
        to dMMSE, which is where `pool_position` is below 1/2. Of a checkpoint with snapshots also `position_at_STEP`,
        the `pool_position` then.

    Raises:
        ValueError: another task.

    Source: Raventós et al. 2023, section 3 and Fig. 2.
    """
    task = checkpoint.task
    if not isinstance(task, TaskPool):
        raise ValueError(f"pool_distances is of models of a TaskPool; this one was trained on {type(task).__name__}")
    model, measured = one_model(checkpoint), {}
    for where, source in (("pool", task), ("new", task.new_tasks)):
        prompts = source.sample(n_prompts, seed=HELD_OUT)
        dmmse, ridge = _pool_predictions(task, where, n_prompts)
        predicted, targets = _predict(model, prompts), prompts.query.ys.double()
        measured |= {
            f"{where}_to_dmmse": _mean_square(predicted - dmmse),
            f"{where}_to_ridge": _mean_square(predicted - ridge),
            f"{where}_apart": _mean_square(dmmse - ridge),
            f"{where}_position": _share(predicted - dmmse, ridge - dmmse),
            f"{where}_loss": _mean_square(predicted - targets),
            f"{where}_dmmse_loss": _mean_square(dmmse - targets),
            f"{where}_ridge_loss": _mean_square(ridge - targets),
        }
    measured["log_ratio"] = _log_ratio(measured["pool_to_dmmse"], measured["pool_to_ridge"])
    prompts, (dmmse, ridge) = task.sample(n_prompts, seed=HELD_OUT), _pool_predictions(task, "pool", n_prompts)
    for index, step in enumerate(checkpoint.snapshots.steps if checkpoint.snapshots else ()):
        (then,) = checkpoint.models_at(index)
        measured[f"position_at_{step}"] = _share(_predict(then, prompts) - dmmse, ridge - dmmse)
    return measured


def descent_limits(checkpoint: Checkpoint, *, n_prompts: int = 8192) -> Measured:
    """Loss of a model of linear regression over those of the best learners of its depth, each tuned on the task.

    Args:
        checkpoint: with one model of several layers, or one.
        n_prompts: held-out prompts.

    Returns:
        `model_loss` and the losses of: `gd` (gradient descent, one step size), `gd_plus_plus` (a step size and a γ for
        each step; of one step gradient descent) and `gd_plus_plus_shared` (one of each for all steps), `first_order`
        (any polynomial with as many terms as layers), `newton` (as many iterations, α tuned) and `ridge`. In
        `over_first_order`, `over_gd_plus_plus` and `over_newton` the model's loss is over theirs. All are mean squared
        errors of the query.

    Raises:
        ValueError: another task.

    Source: the limits are those of `analysis.identify`.
    """
    task = _regression(checkpoint, "descent_limits")
    model = one_model(checkpoint).double()
    prompts = task.sample(n_prompts, seed=HELD_OUT, dtype=torch.float64)
    losses = {"model_loss": squared_errors(model, prompts).mean().item()}
    losses |= dict(_limit_losses(task, model.cfg.n_layers, n_prompts))
    for name in ("first_order", "gd_plus_plus", "newton"):
        losses[f"over_{name}"] = losses["model_loss"] / losses[name]
    return losses


def gap_to_descent(checkpoint: Checkpoint, *, n_prompts: int = 8192) -> Measured:
    """Loss of a one-layer model above that of one tuned step of gradient descent, and their cosine of sensitivities.

    Args:
        checkpoint: with one model.
        n_prompts: held-out prompts.

    Returns:
        `gap`, the model's loss over gradient descent's, minus 1; `model_loss`, `gd_loss`, `zero_loss` (that of
        predicting 0) and `sensitivity_cosine`.

    Raises:
        ValueError: another task than linear regression.

    Source: von Oswald et al. 2023, A.9 and Fig. 12.
    """
    task = _regression(checkpoint, "gap_to_descent")
    model = one_model(checkpoint).double()
    prompts = task.sample(n_prompts, seed=HELD_OUT, dtype=torch.float64)
    step = _tuned(task, 1, gamma=False, per_step=False)
    loss_, descent = (squared_errors(each, prompts).mean().item() for each in (model, step))
    return {
        "gap": loss_ / descent - 1,
        "model_loss": loss_,
        "gd_loss": descent,
        "zero_loss": prompts.query.ys.square().mean().item(),
        "sensitivity_cosine": align(model, step, prompts[:2048]).sensitivity_cosine.nanmean().item(),
    }


def _regression(checkpoint: Checkpoint, measure: str) -> LinearRegression:
    """The task, of a measure that is of linear regression only."""
    task = checkpoint.task
    if not isinstance(task, LinearRegression):
        raise ValueError(f"{measure} is of models of LinearRegression; this one was trained on {type(task).__name__}")
    return task


@torch.no_grad()
def _predict(learner: Learner, prompts: Prompts) -> Float[Tensor, "prompt y"]:
    return torch.cat([learner.predict(part).double() for part in prompts.split(500)])


@lru_cache(maxsize=64)
def _pool_predictions(task: TaskPool, where: str, n_prompts: int) -> tuple[Tensor, Tensor]:
    """Predictions of dMMSE and of ridge on the held-out prompts; seeds of a sweep share them."""
    prompts = (task if where == "pool" else task.new_tasks).sample(n_prompts, seed=HELD_OUT)
    known = references(task)
    return _predict(known["dmmse"], prompts), _predict(known["ridge"], prompts)


def _mean_square(values: Tensor) -> float:
    return values.square().mean().item()


def _share(values: Tensor, direction: Tensor) -> float:
    """How far the values go along a direction, in units of its length (least squares)."""
    length = direction.square().sum().item()
    return (values * direction).sum().item() / length if length > 0 else math.nan


def _log_ratio(a: float, b: float) -> float:
    return math.log10(a / b) if a > 0 and b > 0 else math.nan


@lru_cache(maxsize=64)
def _tuned(task: LinearRegression, steps: int, *, gamma: bool, per_step: bool) -> Learner:
    """Descent tuned on the task; models of one task share it."""
    prompts = task.sample(N_TUNING, seed=HELD_OUT + 1, dtype=torch.float64)
    return tuned_descent(prompts, steps, gamma=gamma, per_step=per_step)


@lru_cache(maxsize=64)
def _limit_losses(task: LinearRegression, steps: int, n_prompts: int) -> tuple[tuple[str, float], ...]:
    """Held-out losses of the best learners with so many steps."""
    tuning = task.sample(N_TUNING, seed=HELD_OUT + 1, dtype=torch.float64)
    prompts = task.sample(n_prompts, seed=HELD_OUT, dtype=torch.float64)
    problem = SpectralProblem.from_prompts(tuning, tuning.query.ys)
    best = limits(problem, steps, task)
    learners: dict[str, Any] = dict(zip(("first_order", "newton", "ridge"), (fit.learner for fit in best), strict=True))
    learners["gd"] = _tuned(task, steps, gamma=False, per_step=False)
    learners["gd_plus_plus"] = _tuned(task, steps, gamma=True, per_step=True) if steps > 1 else learners["gd"]
    learners["gd_plus_plus_shared"] = _tuned(task, steps, gamma=True, per_step=False) if steps > 1 else learners["gd"]
    return tuple((name, squared_errors(each, prompts).mean().item()) for name, each in learners.items())
