"""One layer that is a step of preconditioned gradient descent, and the weights that are best for one layer."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.checks import check_whole
from mechicl.constructions.vocabulary import Head, Stream, assemble
from mechicl.models import HookedTransformer


def preconditioned_gd(
    *,
    x_dim: int,
    n_context: int,
    preconditioner: Float[Tensor, "x x"] | Sequence[Float[Tensor, "x x"]],
    y_dim: int = 1,
    steps: int = 1,
) -> HookedTransformer:
    """Preconditioned gradient descent `W ← W - A (S W - B) / n` from 0, one step a layer.

    Exact: equal to `algorithms.preconditioned_gd` up to rounding, for any number n of context points.

    Args:
        preconditioner: A `[x x]`, one for all steps or one a step.

    Returns:
        A float64 model with one head, width `x_dim + y_dim` and `steps` layers, looped if all steps are alike.

    Raises:
        ValueError: steps < 1, a preconditioner of another shape, with an entry that is not finite, or another number of
            them than of steps.

    Source: Nertinger 2025, Theorem 1, with the sign of section 2 corrected.
    """
    matrices = [preconditioner] * steps if isinstance(preconditioner, Tensor) else list(preconditioner)
    check_whole(1, steps=steps)
    if len(matrices) != steps or any(matrix.shape != (x_dim, x_dim) for matrix in matrices):
        raise ValueError(
            f"needs a preconditioner [x x] = {(x_dim, x_dim)}, one or {steps} of them; got shapes "
            f"{[tuple(matrix.shape) for matrix in matrices]}"
        )
    if not all(matrix.isfinite().all() for matrix in matrices):
        raise ValueError("a preconditioner has an entry that is not finite")
    stream = Stream(x=x_dim, y=y_dim)

    def layer(matrix: Tensor) -> list[Head]:
        return [
            Head(
                query=stream.read("x") @ matrix.double(),  # score x A x_j
                key=stream.read("x"),
                value=stream.read("y"),
                output=-stream.write("y"),
            )
        ]

    alike = all(torch.equal(matrix, matrices[0]) for matrix in matrices)
    layers = [layer(matrices[0])] * steps if alike else [layer(matrix) for matrix in matrices]
    return assemble(stream, layers, n_context=n_context, normalize_by_context=True)


def linear_optimum(
    *, covariance: Float[Tensor, "x x"], n_context: int, noise_variance: float = 0.0
) -> HookedTransformer:
    """The one layer of linear attention with the least loss on `x ~ N(0, Σ)`, `w ~ N(0, I)`.

    It is one step of preconditioned gradient descent with `A = ((n+1)/n Σ + (tr(Σ) + ν²)/n I)⁻¹`; its loss is
    `analysis.weights.linear_attention_optimum` of the eigenvalues of Σ, n and ν².

    Args:
        covariance: Σ `[x x]`, symmetric and positive semidefinite.
        noise_variance: ν² of the context's targets.

    Raises:
        ValueError: a covariance that is not symmetric and positive semidefinite, or 0; n_context < 1; or a negative
            noise variance.

    Source: Nertinger 2025, Theorem 2 (Ahn et al. 2023).

    Example:
        >>> linear_optimum(covariance=torch.eye(5), n_context=20).cfg.n_layers
        1
    """
    sigma = covariance.double()
    if not (noise_variance >= 0 and math.isfinite(noise_variance)):
        raise ValueError(f"noise_variance must be finite and not negative, got {noise_variance}")
    check_whole(1, n_context=n_context)
    if sigma.ndim != 2 or sigma.shape[0] != sigma.shape[1]:
        raise ValueError(f"covariance must be a square matrix, got shape {tuple(sigma.shape)}")
    if not sigma.any():
        raise ValueError("a covariance of 0 has no best step: every one predicts 0")
    symmetric = torch.allclose(sigma, sigma.T)  # nor is one with NaN
    if not symmetric or torch.linalg.eigvalsh(sigma)[0] < -1e-6 * sigma.abs().max():  # float32's rounding passes
        raise ValueError(f"covariance must be symmetric and positive semidefinite, got {covariance.tolist()}")
    # The loss E‖x - x A Ŝ‖² with Ŝ = S / n is quadratic in A. For Gaussian inputs E Ŝ = Σ, and by Isserlis' theorem
    # E ŜŜ = ((n+1) Σ² + tr(Σ) Σ) / n, plus ν² Σ / n from noise; the gradient is 0 at A = Σ (E ŜŜ)⁻¹ = this inverse.
    eye = torch.eye(len(sigma), dtype=torch.float64)
    spread = (sigma.trace() + noise_variance) / n_context
    inverse = torch.linalg.inv((n_context + 1) / n_context * sigma + spread * eye)
    return preconditioned_gd(x_dim=len(sigma), n_context=n_context, preconditioner=inverse)


def relu_optimum(*, x_dim: int, n_context: int) -> HookedTransformer:
    """The one layer of ReLU attention with the least loss on `x ~ N(0, I)`, `w ~ N(0, I)`, without noise.

    Its loss is `d - (d/2)² / ((d/2) (½ (n-1)/n + (d+2)/n))`: 1.970 for d = 5, n = 20.

    Raises:
        ValueError: n_context < 1.

    Source: Nertinger 2025, Theorem 4, whose Q_0 must be negative where the prediction is minus the query's y: with the
    printed sign the loss is 14.1. Here the minus stands in the output instead, so that a point counts if its
    score is positive; a negative Q_0 counts those with negative scores, which predicts minus what this predicts for
    the mirrored query, with the same loss.
    """
    check_whole(1, n_context=n_context)
    stream = Stream(x=x_dim, y=1)
    scale = 1 / (0.5 * (n_context - 1) / n_context + (x_dim + 2) / n_context)
    # relu(c s) = c relu(s) for c > 0, so the factor may follow the activation
    head = Head(stream.read("x"), stream.read("x"), stream.read("y"), -scale * stream.write("y"))
    return assemble(stream, [[head]], n_context=n_context, attention="relu", normalize_by_context=True)
