"""Exact optima of one learning step, to compare measurements with."""

from typing import NamedTuple

import torch

from mechicl.base.arguments import Count, NonNegative, checked
from mechicl.tasks import LinearRegression


class OneStepOptimum(NamedTuple):
    """The best single step of gradient descent on a task: `step_size`, and its expected squared error `mse`."""

    step_size: float
    mse: float


# variance and fourth moment of one coordinate, for distributions with independent symmetric coordinates
_MOMENTS = {"uniform": (1 / 12, 1 / 80), "gaussian": (1.0, 3.0), "laplace": (2.0, 24.0)}


@checked
def one_step_optimum(task: LinearRegression) -> OneStepOptimum:
    """Compute the step size and the loss of the best single step of gradient descent from zero weights on a task.

    Args:
        task: noiseless, with independent symmetric coordinates: uniform, isotropic Gaussian or Laplace inputs.

    Returns:
        A `OneStepOptimum`: `step_size`, the factor on the gradient of the sum over the context of `(w·x - y)² / 2`, and
        `mse`, the expected squared error of the query over all prompts of the task. Both are exact.

    Example:
        >>> round(one_step_optimum(LinearRegression()).step_size, 3)
        0.606
    """
    special = (task.covariance, task.condition_number, task.eigenvalues, task.active_dims)
    special_labels = task.noise_std or task.n_distractors or task.normalize_inputs
    if task.inputs not in _MOMENTS or any(s is not None for s in special) or special_labels:
        raise ValueError(f"task must have independent, noiseless {sorted(_MOMENTS)} inputs, got {task}")
    variance, fourth = _MOMENTS[str(task.inputs)]
    variance, fourth = variance * task.input_scale**2, fourth * task.input_scale**4
    # For step size 1, variance v and fourth moment m of a coordinate: E[ŷ y] ∝ n d v², E[ŷ²] ∝ d v n ((n+d-2) v² + m).
    # The error E[(a ŷ - y)²] is least at a = E[ŷ y] / E[ŷ²].
    n, d = task.n_context, task.x_dim
    spread = (n + d - 2) * variance**2 + fourth
    signal = task.y_dim * task.weight_scale**2
    return OneStepOptimum(
        step_size=variance / spread, mse=signal * d * variance * (1 - n * variance**2 / spread) / task.y_dim
    )


@checked
def linear_attention_optimum(
    eigenvalues: list[NonNegative], n_context: Count, noise_variance: NonNegative = 0.0
) -> float:
    """Compute the loss of the best one-layer linear attention on linear regression, to compare a trained model's with.

    Inputs are Gaussian, weights `w ~ N(0, I)`, and the query's target has no noise. The result is the expected squared
    error `Σ_i λ_i (1 - λ_i / ((n+1)/n λ_i + (Σ_j λ_j + ν²)/n))`. Source: Nertinger 2025, Theorem 2.

    Args:
        eigenvalues: eigenvalues λ of the inputs' covariance, one for each dimension.
        n_context: number n of context points.
        noise_variance: variance ν² of the noise on the context's targets.
    """
    if not sum(eigenvalues) > 0:
        raise ValueError(f"eigenvalues must not all be 0, got {eigenvalues}")
    spectrum = torch.tensor(eigenvalues, dtype=torch.float64)
    n = n_context
    inverse = (n + 1) / n * spectrum + (spectrum.sum() + noise_variance) / n
    return (spectrum * (1 - spectrum / inverse)).sum().item()
