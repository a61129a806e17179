"""One layer that is a step of preconditioned gradient descent, and the weights that are best for one layer."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

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
        x_dim: dimension of the inputs.
        n_context: number of context points that the model is meant for.
        preconditioner: A `[x x]`, one for all steps or one a step.
        y_dim: dimension of the targets.
        steps: number of steps, each a layer.

    Returns:
        A float64 model with one head, width `x_dim + y_dim` and `steps` layers, looped if all steps are alike.

    Raises:
        ValueError: steps < 1, or a preconditioner of another shape or another number of them than of steps.

    Source: Nertinger, Theorem 1, with the sign of section 2 corrected (erratum 9).
    """
    matrices = [preconditioner] * steps if isinstance(preconditioner, Tensor) else list(preconditioner)
    if steps < 1 or len(matrices) != steps or any(matrix.shape != (x_dim, x_dim) for matrix in matrices):
        raise ValueError(
            f"needs steps >= 1 and a preconditioner [x x] = {(x_dim, x_dim)}, one or {steps} of them; got "
            f"steps={steps} and shapes {[tuple(matrix.shape) for matrix in matrices]}"
        )
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

    alike = all(matrix is matrices[0] for matrix in matrices)
    layers = [layer(matrices[0])] * steps if alike else [layer(matrix) for matrix in matrices]
    return assemble(stream, layers, n_context=n_context, normalize_by_context=True)


def linear_optimum(*, covariance: Float[Tensor, "x x"], n_context: int) -> HookedTransformer:
    """The one layer of linear attention with the least loss on `x ~ N(0, Σ)`, `w ~ N(0, I)`, without noise.

    It is one step of preconditioned gradient descent with `A = ((n+1)/n Σ + tr(Σ)/n I)⁻¹`; its loss is
    `analysis.linear_attention_optimum` of the eigenvalues of Σ and n.

    Args:
        covariance: Σ `[x x]`, symmetric and positive semidefinite.
        n_context: n, the number of context points.

    Raises:
        ValueError: a covariance that is not symmetric and positive semidefinite, or 0; or n_context < 1.

    Source: Nertinger, Theorem 2 (Ahn et al. 2023).

    Example:
        >>> linear_optimum(covariance=torch.eye(5), n_context=20).cfg.n_layers
        1
    """
    sigma = covariance.double()
    square = sigma.ndim == 2 and sigma.shape[0] == sigma.shape[1]
    if n_context < 1 or not square or not torch.allclose(sigma, sigma.T) or torch.linalg.eigvalsh(sigma)[0] < -1e-9:
        raise ValueError(
            f"covariance must be a symmetric positive semidefinite matrix and n_context >= 1, got "
            f"n_context={n_context} and {covariance.tolist()}"
        )
    if not sigma.any():
        raise ValueError("a covariance of 0 has no best step: every one predicts 0")
    eye = torch.eye(len(sigma), dtype=torch.float64)
    inverse = torch.linalg.inv((n_context + 1) / n_context * sigma + sigma.trace() / n_context * eye)
    return preconditioned_gd(x_dim=len(sigma), n_context=n_context, preconditioner=inverse)


def relu_optimum(*, x_dim: int, n_context: int) -> HookedTransformer:
    """The one layer of ReLU attention with the least loss on `x ~ N(0, I)`, `w ~ N(0, I)`, without noise.

    Its loss is `d - (d/2)² / ((d/2) (½ (n-1)/n + (d+2)/n))`: 1.970 for d = 5, n = 20.

    Args:
        x_dim: d.
        n_context: n, the number of context points.

    Raises:
        ValueError: n_context < 1.

    Source: Nertinger, Theorem 4, whose Q_0 must be negative where the prediction is minus the query's y (erratum 6):
    with the printed sign the loss is 14.1.
    """
    if n_context < 1:
        raise ValueError(f"n_context must be at least 1, got {n_context}")
    stream = Stream(x=x_dim, y=1)
    scale = 1 / (0.5 * (n_context - 1) / n_context + (x_dim + 2) / n_context)
    # relu is homogeneous, so the factor may stand behind it, with the sign that a score could not carry there
    head = Head(stream.read("x"), stream.read("x"), stream.read("y"), -scale * stream.write("y"))
    return assemble(stream, [[head]], n_context=n_context, attention="relu", normalize_by_context=True)
