"""Hyperparameters tuned on prompts, as the papers tune the algorithms that they compare with."""

import math

import torch

from mechicl.algorithms.gradient_descent import gradient_descent_filter
from mechicl.algorithms.search import minimize_on_grid
from mechicl.algorithms.spectra import PrefixSpectra, checked_steps
from mechicl.base.arguments import checked
from mechicl.prompts import Prompts


@checked
def tuned_step_size(prompts: Prompts, steps: int = 1) -> float:
    """The step size of `gradient_descent` with the least mean squared error of the query's prediction.

    One step has a closed form, `Σ ŷ·y / Σ ŷ²` with ŷ the prediction for step size 1. More steps are searched: a
    geometric grid up to `4 / mean λ_max`, which starts low enough for early stopping on noisy targets, then Brent's
    method around the best point.

    Args:
        prompts: the tasks to tune on, the query's targets included; the papers use 10,000.
        steps: number of steps, at least 1.

    Returns:
        a, the factor on the summed gradient. Von Oswald et al.'s η is `a * n_context`.

    Source: von Oswald et al. 2023, section 3.
    """
    (steps,) = checked_steps([steps])
    if steps < 1 or len(prompts) == 0 or prompts.n_context == 0:
        raise ValueError(
            f"tuning needs prompts with context and at least one step, got {len(prompts)} prompts, "
            f"n_context={prompts.n_context}, steps={steps}"
        )
    prompts = prompts.to(torch.float64)
    targets = prompts.query.ys
    spectra = PrefixSpectra.decompose(prompts.xs, prompts.ys, at="query")
    # one step from 0 predicts a ŷ, linear in a, so that the least squared error is a regression of y on ŷ
    unit = spectra.predict(torch.ones_like(spectra.eigenvalues)[None])[0, :, -1]
    if not unit.any():
        raise ValueError("every step size predicts 0 from these contexts: there is nothing to tune")
    if steps == 1:
        return ((unit * targets).sum() / unit.square().sum()).item()

    def error(step_size: float) -> float:
        predictions = spectra.predict(gradient_descent_filter(spectra.eigenvalues, steps, step_size)[None])
        return (predictions[0, :, -1] - targets).square().mean().item()

    limit = 4 / spectra.eigenvalues.amax(-1).mean().item()
    n_grid = 80 + 10 * math.ceil(math.log2(steps))  # neighbours differ by 10% or less
    grid = [limit * (1000 * steps) ** (i / n_grid - 1) for i in range(n_grid + 1)]
    return minimize_on_grid(error, [0.0, *grid])[0]


@checked
def stable_step_size(prompts: Prompts) -> float:
    """The step size `1 / λ_max` with which `gradient_descent` converges on every prefix of the prompts.

    λ_max is the largest eigenvalue of S over all contexts; prefixes have smaller ones.
    """
    context = prompts.context.xs.double()
    largest = torch.linalg.matrix_norm(context, ord=2).square().max().item() if context.numel() else 0.0
    if largest == 0:
        raise ValueError(f"every step size is stable on contexts without a point other than 0: {prompts}")
    return 1 / largest
