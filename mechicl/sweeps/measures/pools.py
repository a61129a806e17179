"""Measures of models of a pool of tasks: are they near the pool's Bayes learner, that of all tasks, or neither?"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms import references
from mechicl.checkpoints import Checkpoint
from mechicl.learners import Learner
from mechicl.prompts import Prompts
from mechicl.statistics.intervals import student_t_quantile
from mechicl.sweeps.measures.general import HELD_OUT, ColumnValues, one_model, task_of
from mechicl.tasks import TaskPool


def pool_distances(checkpoint: Checkpoint, *, n_prompts: int = 4000) -> ColumnValues:
    """Measure if a model of a pool of tasks is near the Bayes learner of the pool, that of all tasks, or neither.

    Returns the numbers of `compare_on_pool` and, at each snapshot on the pool's tasks, `position_at_STEP`,
    `scale_at_STEP` and `residual_at_STEP`. Source: Raventós et al. 2023, section 3 and Fig. 2.
    """
    task = task_of(checkpoint, TaskPool, "pool_distances")
    measured = compare_on_pool(one_model(checkpoint), task, n_prompts=n_prompts)
    prompts, (dmmse, ridge) = task.sample(n_prompts, seed=HELD_OUT), _pool_predictions(task, "pool", n_prompts)
    for index, step in enumerate(checkpoint.snapshots.steps if checkpoint.snapshots else ()):
        (then,) = checkpoint.models_at(index)
        fit = fit_mixture(_predict(then, prompts), dmmse, ridge)
        measured |= {f"{name}_at_{step}": fit[name] for name in ("position", "scale", "residual")}
    return measured


def compare_on_pool(learner: Learner, task: TaskPool, *, n_prompts: int = 4000) -> ColumnValues:
    """Compare a learner (a model or a control) with dMMSE, the Bayes learner of a pool, and ridge, that of all tasks.

    Returns for prompts of the `pool`'s tasks and of `new` ones: `to_dmmse` and `to_ridge`, mean squared differences of
    the query's predictions; `apart`, that between dMMSE and ridge; `loss`, `dmmse_loss` and `ridge_loss`; and the
    numbers of `fit_mixture`. And `log_ratio`, the decimal logarithm of `pool_to_dmmse` over `pool_to_ridge`: negative
    if nearer to dMMSE.
    """
    measured: ColumnValues = {}
    for where, source in (("pool", task), ("new", task.new_tasks)):
        prompts = source.sample(n_prompts, seed=HELD_OUT)
        dmmse, ridge = _pool_predictions(task, where, n_prompts)
        predicted, targets = _predict(learner, prompts), prompts.query.ys.double()
        numbers = {
            "to_dmmse": _mean_square(predicted - dmmse),
            "to_ridge": _mean_square(predicted - ridge),
            "apart": _mean_square(dmmse - ridge),
            **fit_mixture(predicted, dmmse, ridge),
            "loss": _mean_square(predicted - targets),
            "dmmse_loss": _mean_square(dmmse - targets),
            "ridge_loss": _mean_square(ridge - targets),
        }
        measured |= {f"{where}_{name}": number for name, number in numbers.items()}
    a, b = measured["pool_to_dmmse"], measured["pool_to_ridge"]
    return measured | {"log_ratio": math.log10(a / b) if a > 0 and b > 0 else math.nan}


def fit_mixture(
    predictions: Float[Tensor, "prompt y"], first: Float[Tensor, "prompt y"], second: Float[Tensor, "prompt y"]
) -> ColumnValues:
    """Fit predictions as a · first + b · second, by least squares without a constant.

    A position between two learners cannot distinguish a mixture of them from other predictions, such as 0, so it comes
    with the scale and the residual. Returns `position`, b / (a + b), NaN if one learner is a multiple of the other or
    the predictions are 0; `position_low` and `position_high`, its 95% interval over prompts (Fieller 1954, with
    robust variances), infinite if a + b does not differ significantly from 0; `scale`, a + b, 1 for a mixture;
    `residual`, the unexplained share of the mean square; and `energy`, the mean square.

    Example:
        >>> ridge, dmmse = torch.tensor([[1.0], [2.0], [0.5]]), torch.tensor([[0.0], [3.0], [1.0]])
        >>> fit = fit_mixture(0.5 * (0.25 * dmmse + 0.75 * ridge), dmmse, ridge)
        >>> round(fit["position"], 3), round(fit["scale"], 3), round(fit["residual"], 3)
        (0.75, 0.5, 0.0)
    """
    names = ("position", "position_low", "position_high", "scale", "residual", "energy")
    p, one, two = (each.detach().cpu().double() for each in (predictions, first, second))
    # a · first + b · second = (a + b) · first + b · (second - first): well conditioned where the two are nearly alike
    parts = torch.stack([one, two - one], dim=-1)  # [prompt y part]
    energy = _mean_square(p)
    if not energy or torch.linalg.matrix_rank(parts.flatten(0, 1)) < 2:  # one is a multiple of the other
        either = one if one.any() else two
        scale = (p * either).sum().item() / either.square().sum().item() if either.any() else math.nan
        left = _mean_square(p - scale * either) / energy if energy else math.nan
        scale = scale if one.equal(two) or not energy else math.nan
        return dict(zip(names, (math.nan, math.nan, math.nan, scale, left, energy), strict=True))
    flat = parts.flatten(0, 1)
    inverse = torch.linalg.inv(flat.T @ flat)
    weights = inverse @ (flat.T @ p.flatten())
    left = p - parts @ weights
    scores = (parts * left[..., None]).sum(1)  # one prompt's numbers are not independent
    covariance = inverse @ (scores.T @ scores) @ inverse
    scale, b = weights.tolist()
    quantile = student_t_quantile(0.975, max(1, len(p) - 2))
    low, high = _ratio_ends(b, scale, covariance.flip(0, 1), quantile)
    position = b / scale if scale else math.nan
    return dict(zip(names, (position, low, high, scale, _mean_square(left) / energy, energy), strict=True))


def _ratio_ends(above: float, below: float, covariance: Float[Tensor, "2 2"], quantile: float) -> tuple[float, float]:
    """Fieller's interval of a ratio: a t² - 2 b t + c <= 0; unbounded if `below` does not differ from 0."""
    (v_above, v_both), (_, v_below) = (quantile**2 * covariance).tolist()
    a, b, c = below**2 - v_below, above * below - v_both, above**2 - v_above
    if a <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(b**2 - a * c, 0.0))
    return (b - root) / a, (b + root) / a


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
