"""Layers that are steps of gradient descent: plain, GD++, preconditioned, on features, nearly so with softmax."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.gradient_descent import per_step
from mechicl.base.arguments import Count, NonNegative, Positive, checked
from mechicl.constructions.vocabulary import Head, Hidden, Stream, assemble
from mechicl.models import HookedTransformer

SINK_SCORE = 30.0  # the sink's normaliser outweighs n keys by n e^-30, below 1e-10 up to n = 1000


@checked
def gradient_descent(
    *,
    x_dim: Count,
    n_context: int,
    step_size: float,
    y_dim: Count = 1,
    steps: Count = 1,
    initial_weights: Float[Tensor, "x y"] | None = None,
) -> HookedTransformer:
    """Build a linear-attention model that runs gradient descent on the context's squared error, one step per layer.

    Exact: `model.predict(prompts)` equals `algorithms.gradient_descent` up to rounding, for every prompt. The model has
    one head, width `x_dim + y_dim` and `steps` looped layers (with shared weights). Source: von Oswald et al. 2023,
    Proposition 1 and appendix A.1.

    Args:
        step_size: a, the factor on the gradient of `Σ_i (x_i W - y_i)² / 2`.
        initial_weights: W_0 `[x y]`, 0 by default.

    Example:
        >>> model = gradient_descent(x_dim=10, n_context=10, step_size=0.6, steps=5)
        >>> model.predict(LinearRegression().sample(4, seed=0)).shape
        torch.Size([4, 1])
    """
    (step_size,) = per_step("step_size", step_size, 1)
    if initial_weights is None:
        initial_weights = torch.zeros(x_dim, y_dim, dtype=torch.float64)
    elif initial_weights.shape != (x_dim, y_dim):
        raise ValueError(f"initial_weights must be [x y] = {(x_dim, y_dim)}, got {tuple(initial_weights.shape)}")
    stream = Stream(x=x_dim, y=y_dim)
    x, y = stream.read("x"), stream.read("y")
    # the scores are <x_i, x_j>, the values the residuals x W_0 - y
    step = Head(query=x, key=x, value=x @ initial_weights.double() - y, output=step_size * stream.write("y"))
    return assemble(stream, [[step]] * steps, n_context=n_context, initial_weights=initial_weights)


@checked
def gd_plus_plus(
    *,
    x_dim: Count,
    n_context: int,
    step_size: float | Sequence[float],
    gamma: float | Sequence[float],
    y_dim: Count = 1,
    steps: Count = 1,
) -> HookedTransformer:
    """Build a linear-attention model of GD++: gradient descent whose layers also transform inputs by `x ← x - γ x S`.

    S = XᵀX of the context's current inputs. Exact: `model.predict(prompts)` equals `algorithms.gd_plus_plus` up to
    rounding. The model has one head, width `x_dim + y_dim` and `steps` layers, with shared weights if all steps are
    equal. Source: von Oswald et al. 2023, appendix A.10, eq. 23.

    Args:
        step_size: a, the factor on the summed gradient, one for all steps or one per step.
        gamma: γ, acting on the summed S, one for all steps or one per step.
    """
    step_sizes, gammas = per_step("step_size", step_size, steps), per_step("gamma", gamma, steps)
    stream = Stream(x=x_dim, y=y_dim)
    x, y = stream.read("x"), stream.read("y")
    value, to_x, to_y = torch.cat([x, -y], dim=1), stream.write("x"), stream.write("y")
    pairs = list(zip(step_sizes, gammas, strict=True))
    layers = {(a, g): [Head(query=x, key=x, value=value, output=torch.cat([-g * to_x, a * to_y]))] for a, g in pairs}
    return assemble(stream, [layers[pair] for pair in pairs], n_context=n_context)


@checked
def preconditioned_gd(
    *,
    x_dim: Count,
    n_context: int,
    preconditioner: Float[Tensor, "x x"] | Sequence[Float[Tensor, "x x"]],
    y_dim: Count = 1,
    steps: Count = 1,
) -> HookedTransformer:
    """Build preconditioned gradient descent `W ← W - A (S W - B) / n` from 0 by linear attention, one step per layer.

    S = XᵀX and B = XᵀY of the n context points. Exact: `model.predict(prompts)` equals `algorithms.preconditioned_gd`
    up to rounding, for any n. The model has one head, width `x_dim + y_dim` and `steps` layers, with shared weights if
    all matrices are equal. Source: Nertinger 2025, Theorem 1, with the sign of section 2 corrected.

    Args:
        preconditioner: A `[x x]`, one for all steps or one per step.
    """
    matrices = [preconditioner] * steps if isinstance(preconditioner, Tensor) else list(preconditioner)
    if len(matrices) != steps or any(matrix.shape != (x_dim, x_dim) for matrix in matrices):
        shapes = [tuple(matrix.shape) for matrix in matrices]
        raise ValueError(f"preconditioner must be one or {steps} matrices [x x] = {(x_dim, x_dim)}, got {shapes}")
    stream = Stream(x=x_dim, y=y_dim)
    x, y, write = stream.read("x"), stream.read("y"), -stream.write("y")

    def layer(matrix: Tensor) -> list[Head]:
        return [Head(query=x @ matrix.double(), key=x, value=y, output=write)]  # score x A x_j

    alike = all(torch.equal(matrix, matrices[0]) for matrix in matrices)
    layers = [layer(matrices[0])] * steps if alike else [layer(matrix) for matrix in matrices]
    return assemble(stream, layers, n_context=n_context, normalize_by_context=True)


@checked
def kernel_gradient_descent(
    *,
    weights: Float[Tensor, "x feature"],
    n_context: int,
    step_size: float,
    bias: Float[Tensor, "feature"] | None = None,
    act_fn: str = "relu",
    y_dim: Count = 1,
    steps: Count = 1,
) -> HookedTransformer:
    """Build gradient descent from 0 on the features `m(x) = act(x weights + bias)`, one step per layer.

    Exact: `model.predict(prompts)` equals `algorithms.gradient_descent` on prompts whose inputs are replaced by their
    features, up to rounding. In the limit of many steps it is kernel regression with `k(x, x') = m(x)·m(x')`. The model
    has one head, width `x_dim + y_dim + feature`, an MLP on the input, and `steps` looped layers. Source: von Oswald et
    al. 2023, Proposition 2.

    Args:
        weights: weights of the features `[x feature]`.
        step_size: a, the factor on the gradient of `Σ_i (m(x_i) W - y_i)² / 2`.
        bias: biases of the features, 0 by default.
        act_fn: activation of the features, such as "relu", "gelu", "square" or "cos".
    """
    (step_size,) = per_step("step_size", step_size, 1)
    x_dim, n_features = weights.shape
    stream = Stream(x=x_dim, y=y_dim, feature=n_features)
    bias = None if bias is None else bias.double()
    features = Hidden(read=stream.read("x") @ weights.double(), write=stream.write("feature"), bias=bias)
    phi = stream.read("feature")
    step = [Head(query=phi, key=phi, value=stream.read("y"), output=-step_size * stream.write("y"))]
    return assemble(stream, [step] * steps, n_context=n_context, input_mlp=features, act_fn=act_fn)


@checked
def softmax_gradient_descent(
    *, x_dim: Count, n_context: Count, step_size: float, score_scale: Positive, y_dim: Count = 1, sink: bool = True
) -> HookedTransformer:
    """Build a layer of two softmax heads that makes nearly one step of gradient descent from 0.

    The heads have opposite scores, so their difference is odd in the scores `s_i = score_scale <x_i, x>` and its
    leading term is linear. With the sink (a key with score `SINK_SCORE = 30` and value 0) the normaliser is the sink's
    and the limit of small scores is gradient descent: its relative error is `O(score_scale²)`, plus at most about `n
    e^(-SINK_SCORE)` because the keys still contribute to the normaliser. Without it the normaliser follows the scores,
    and the limit is the *centred* sum `Σ y_i (s_i - mean s)` instead of `Σ y_i s_i`. Source: von Oswald et al. 2023,
    A.9, eq. 16 to 21, which drop the normaliser.

    Args:
        n_context: number of context points; without a sink the step size holds for exactly this number.
        step_size: a, the factor on the gradient of `Σ_i (x_i W - y_i)² / 2`.
        score_scale: factor on the scores, small against `1 / max |<x_i, x>|`; rounding grows as it shrinks.
        sink: add the sink; the paper's heads have none.
    """
    (step_size,) = per_step("step_size", step_size, 1)
    stream = Stream(x=x_dim, y=y_dim)
    x, y = stream.read("x"), stream.read("y")
    # exp(s) - exp(-s) = 2 s + O(s³): the difference of the heads is linear in the scores once their normaliser is a
    # constant, which the output multiplies back. With a sink it is e^SINK_SCORE; without one it is Σ exp(±s_i), near n
    # but not constant, and its own first-order term takes the mean of the scores away.
    normalizer = math.exp(SINK_SCORE) if sink else n_context
    output = -step_size * normalizer / (2 * score_scale) * stream.write("y")
    heads = [Head(x, x, y, output), Head(-x, x, y, -output)]
    options: dict[str, Any] = {"sink": "fixed" if sink else "none", "sink_score": SINK_SCORE}
    return assemble(stream, [heads], n_context=n_context, attention="softmax", score_scale=score_scale, **options)


@checked
def linear_optimum(
    *, covariance: Float[Tensor, "x x"], n_context: Count, noise_variance: NonNegative = 0.0
) -> HookedTransformer:
    """Build the layer of linear attention with the least expected squared error on `x ~ N(0, Σ)`, `w ~ N(0, I)`.

    It is one step of preconditioned gradient descent with `A = ((n+1)/n Σ + (tr(Σ) + ν²)/n I)⁻¹`; its loss is
    `analysis.weights.linear_attention_optimum` of the eigenvalues of Σ, n and ν². Compare a trained layer with it.
    Source: Nertinger 2025, Theorem 2 (Ahn et al. 2023).

    Args:
        covariance: Σ `[x x]`, symmetric and positive semidefinite.
        n_context: number n of context points that it is optimal for.
        noise_variance: variance ν² of the label noise in the context; the query's target has none.

    Example:
        >>> linear_optimum(covariance=torch.eye(5), n_context=20).cfg.n_layers
        1
    """
    sigma = covariance.double()
    if not sigma.any():
        raise ValueError("covariance must not be 0: every step would predict 0")
    rounding = 1e-6 * sigma.abs().max()  # of float32
    if not torch.allclose(sigma, sigma.T) or torch.linalg.eigvalsh(sigma)[0] < -rounding:
        raise ValueError(f"covariance must be symmetric and positive semidefinite, got {covariance.tolist()}")
    # The loss E‖x - x A Ŝ‖² with Ŝ = S / n is quadratic in A. For Gaussian inputs E Ŝ = Σ, and by Isserlis' theorem
    # E ŜŜ = ((n+1) Σ² + tr(Σ) Σ) / n, plus ν² Σ / n from noise; the gradient is 0 at A = Σ (E ŜŜ)⁻¹ = this inverse.
    eye = torch.eye(len(sigma), dtype=torch.float64)
    spread = (sigma.trace() + noise_variance) / n_context
    inverse = torch.linalg.inv((n_context + 1) / n_context * sigma + spread * eye)
    return preconditioned_gd(x_dim=len(sigma), n_context=n_context, preconditioner=inverse)


@checked
def relu_optimum(*, x_dim: Count, n_context: Count) -> HookedTransformer:
    """Build the layer of ReLU attention with the least expected squared error on `x, w ~ N(0, I)` without noise.

    Compare a trained layer with it, by `model.predict(prompts)`. Its loss is `d - (d/2)² / ((d/2) (½ (n-1)/n +
    (d+2)/n))`: 1.970 for d = 5 and n = 20. Source: Nertinger 2025, Theorem 4, with a sign corrected: here a point
    counts if its score is positive.

    Args:
        x_dim: dimension d of the inputs; there is one target.
        n_context: number n of context points that it is optimal for.
    """
    stream = Stream(x=x_dim, y=1)
    scale = 1 / (0.5 * (n_context - 1) / n_context + (x_dim + 2) / n_context)
    # relu(c s) = c relu(s) for c > 0, so the factor may follow the activation
    head = Head(stream.read("x"), stream.read("x"), stream.read("y"), -scale * stream.write("y"))
    return assemble(stream, [[head]], n_context=n_context, attention="relu", normalize_by_context=True)
