"""Measures of models of linear regression: comparison with the best learners of their depth, and target copying."""

from functools import lru_cache
from typing import Any

import torch

from mechicl.algorithms.card import FitProblem
from mechicl.analysis.behaviour import align, tuned_descent
from mechicl.analysis.behaviour.identification import limits
from mechicl.analysis.heads import measure_target_copying
from mechicl.checkpoints import Checkpoint
from mechicl.learners import Learner, squared_errors
from mechicl.sweeps.measures.general import HELD_OUT, ColumnValues, one_model, task_of, transition
from mechicl.tasks import LinearRegression

N_TUNING = 16_384
"""Prompts for tuning reference learners: rare contexts determine the losses of deep ones."""


def descent_limits(checkpoint: Checkpoint, *, n_prompts: int = 8192) -> ColumnValues:
    """Measure a model's loss on linear regression over those of the best learners of its depth, tuned on the task.

    Returns `model_loss` and the losses of `gd` (gradient descent, one step size), `gd_plus_plus` (a step size and a γ
    for each step) and `gd_plus_plus_shared` (one of each for all steps), `first_order` (any polynomial with one term
    per layer), `newton` (one iteration per layer, α tuned) and `ridge`; `over_first_order`, `over_gd_plus_plus` and
    `over_newton` are the model's loss over theirs. All are mean squared errors of the query; limits are `identify`'s.
    """
    task = task_of(checkpoint, LinearRegression, "descent_limits")
    model = one_model(checkpoint).double()
    prompts = task.sample(n_prompts, seed=HELD_OUT, dtype=torch.float64)
    losses = {"model_loss": squared_errors(model, prompts).mean().item()}
    losses |= dict(_limit_losses(task, model.cfg.n_layers, n_prompts))
    for name in ("first_order", "gd_plus_plus", "newton"):
        losses[f"over_{name}"] = losses["model_loss"] / losses[name]
    return losses


def gap_to_descent(checkpoint: Checkpoint, *, n_prompts: int = 8192) -> ColumnValues:
    """Measure a one-layer model's loss over that of a tuned step of gradient descent, and the cosine of sensitivities.

    Returns `gap`, the model's loss divided by gradient descent's, minus 1; `model_loss`, `gd_loss`, `zero_loss` (that
    of predicting 0) and `sensitivity_cosine`. Source: von Oswald et al. 2023, A.9 and Fig. 12.
    """
    task = task_of(checkpoint, LinearRegression, "gap_to_descent")
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


def target_copying(checkpoint: Checkpoint, *, n_prompts: int = 2000) -> ColumnValues:
    """Measure when the loss falls below that of predicting 0, and if the first layer copies targets to their inputs.

    Takes a model on interleaved prompts of linear regression, and a record with a curve. Returns the columns of
    `transition`, with the loss of predicting 0 as the plateau; `target_error` and `input_error`, the squared error of
    decoding, after the first layer, each target from its input's token, and each input from its target's, over the
    decoded values' mean square (0 if copied, 1 if not); and `paired`, 1 if either is below 1/2. Source: von Oswald et
    al. 2023, Proposition 3 and section 4.
    """
    prompts = task_of(checkpoint, LinearRegression, "target_copying").sample(n_prompts, seed=HELD_OUT)
    copied = measure_target_copying(one_model(checkpoint), prompts)
    errors = {
        "target_error": copied.decoding_errors.mean().item(),
        "input_error": copied.decoding_errors_of_inputs.mean().item(),
    }
    fell = transition(checkpoint, plateau=prompts.query.ys.square().mean().item())
    return {**fell, **errors, "paired": float(min(errors.values()) < 0.5)}


@lru_cache(maxsize=64)
def _tuned(task: LinearRegression, steps: int, *, gamma: bool, per_step: bool) -> Learner:
    prompts = task.sample(N_TUNING, seed=HELD_OUT + 1, dtype=torch.float64)
    return tuned_descent(prompts, steps, gamma=gamma, per_step=per_step)


@lru_cache(maxsize=64)
def _limit_losses(task: LinearRegression, steps: int, n_prompts: int) -> tuple[tuple[str, float], ...]:
    tuning = task.sample(N_TUNING, seed=HELD_OUT + 1, dtype=torch.float64)
    prompts = task.sample(n_prompts, seed=HELD_OUT, dtype=torch.float64)
    best = limits(FitProblem(tuning, tuning.query.ys[None], steps))
    learners: dict[str, Any] = dict(zip(("first_order", "newton", "ridge"), (fit.learner for fit in best), strict=True))
    learners["gd"] = _tuned(task, steps, gamma=False, per_step=False)
    learners["gd_plus_plus"] = _tuned(task, steps, gamma=True, per_step=True) if steps > 1 else learners["gd"]
    learners["gd_plus_plus_shared"] = _tuned(task, steps, gamma=True, per_step=False) if steps > 1 else learners["gd"]
    return tuple((name, squared_errors(each, prompts).mean().item()) for name, each in learners.items())
