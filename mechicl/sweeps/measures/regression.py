"""Measures of models of linear regression: against the best learners of their depth, against gradient descent, and
whether targets are copied to their inputs' tokens."""

from functools import lru_cache
from typing import Any

import torch

from mechicl.algorithms.card import FitProblem
from mechicl.analysis.behaviour import align, tuned_descent
from mechicl.analysis.behaviour.identification import limits
from mechicl.analysis.heads import measure_target_copying
from mechicl.checkpoints import Checkpoint
from mechicl.learners import Learner, squared_errors
from mechicl.sweeps.measures.general import HELD_OUT, Measured, one_model, transition
from mechicl.tasks import LinearRegression

N_TUNING = 16_384
"""Prompts that reference learners are tuned on: rare contexts decide the losses of deep ones."""


def descent_limits(checkpoint: Checkpoint, *, n_prompts: int = 8192) -> Measured:
    """Loss of a model of linear regression over the losses of the best learners of its depth, each tuned on the task.

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


def target_copying(checkpoint: Checkpoint, *, n_prompts: int = 2000) -> Measured:
    """When the loss leaves that of predicting 0, and whether the first layer copies targets to their inputs' tokens.

    Args:
        checkpoint: with one model on interleaved prompts of linear regression, and a record with a curve.
        n_prompts: held-out prompts.

    Returns:
        The columns of `transition`, with the loss of predicting 0 as the plateau. `target_error` and `input_error`:
        the squared error of reading, after the first layer, each target off its input's token, and each input off its
        target's, over the mean square of what is read; 0 if it is there, 1 if not. `paired`: 1 if either is below 1/2.

    Raises:
        CheckpointError: a record without a curve.
        ValueError: another task, or another prompt format.

    Source: von Oswald et al. 2023, Proposition 3 and section 4.
    """
    prompts = _regression(checkpoint, "target_copying").sample(n_prompts, seed=HELD_OUT)
    copied = measure_target_copying(one_model(checkpoint), prompts)
    errors = {
        "target_error": copied.decoding_errors.mean().item(),
        "input_error": copied.decoding_errors_of_inputs.mean().item(),
    }
    fell = transition(checkpoint, plateau=prompts.query.ys.square().mean().item())
    return {**fell, **errors, "paired": float(min(errors.values()) < 0.5)}


def _regression(checkpoint: Checkpoint, measure: str) -> LinearRegression:
    """The task, of a measure that is of linear regression only."""
    task = checkpoint.task
    if not isinstance(task, LinearRegression):
        raise ValueError(f"{measure} is of models of LinearRegression; this one was trained on {type(task).__name__}")
    return task


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
    best = limits(FitProblem(tuning, tuning.query.ys[None], steps))
    learners: dict[str, Any] = dict(zip(("first_order", "newton", "ridge"), (fit.learner for fit in best), strict=True))
    learners["gd"] = _tuned(task, steps, gamma=False, per_step=False)
    learners["gd_plus_plus"] = _tuned(task, steps, gamma=True, per_step=True) if steps > 1 else learners["gd"]
    learners["gd_plus_plus_shared"] = _tuned(task, steps, gamma=True, per_step=False) if steps > 1 else learners["gd"]
    return tuple((name, squared_errors(each, prompts).mean().item()) for name, each in learners.items())
