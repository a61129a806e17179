"""Kernel smoothing: the mean of the context's targets, weighted by how near their inputs are to the query's."""

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.algorithms.card import FitProblem, new_card
from mechicl.algorithms.descent_cards import FEW
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import earlier_points, in_parts, one_step, selected
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.algorithms.stepwise.descent import KernelReading
from mechicl.algorithms.tuning import geometric_grid, minimize_on_grid
from mechicl.base.arguments import Positive, checked
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

Kernel = Literal["gaussian", "exponential"]
POWERS = {"gaussian": 2, "exponential": 1}
"""How many times the log-kernel is divided by the bandwidth."""


def log_kernel(
    kernel: Kernel, points: Float[Tensor, "prompt point x"], others: Float[Tensor, "prompt other x"]
) -> Float[Tensor, "prompt point other"]:
    """Return the logarithm of the kernel of bandwidth 1; both kernels divide it by powers of theirs."""
    if kernel == "exponential":
        return points @ others.mT
    return -(points[:, :, None] - others[:, None]).square().sum(-1) / 2  # small distances stay exact


@checked
def kernel_smoothing(
    prompts: Sized, bandwidth: Positive, *, kernel: Kernel = "gaussian", at: PointsAt = "points"
) -> Trajectory:
    """Predict the Nadaraya-Watson estimate `Σ_i k(x_i, x) y_i / Σ_i k(x_i, x)` over the points before x.

    A wide kernel gives the mean target, a narrow one that of the nearest context point; the "exponential" kernel is
    softmax attention with scores `<x, x_i>/h` and values y_i. The first point's prediction is 0. Gradients flow to the
    query and to the context. Source: Nadaraya 1964; Watson 1964. Von Oswald et al. 2023, A.8, liken attention to it.

    Args:
        bandwidth: h, in units of x ("gaussian") or of x² ("exponential"); `tuned_bandwidth` finds one.
        kernel: "gaussian" is `exp(-|x - x'|²/(2h²))` and "exponential" is `exp(<x, x'>/h)`.

    Example:
        >>> prompts = SineRegression().sample(100, seed=0)
        >>> smoother = AlgorithmLearner(algorithms.kernel_smoothing, {"bandwidth": algorithms.tuned_bandwidth(prompts)})
        >>> smoother.predict(prompts).shape
        torch.Size([100, 1])
    """
    seen = earlier_points(prompts, at)

    def run(part: Prompts) -> Trajectory:
        xs = part.xs.double()
        weights = _weights(log_kernel(kernel, selected(xs, at), xs), seen, bandwidth, POWERS[kernel])
        return one_step(part, weights @ part.ys.double(), f"kernel smoothing ({kernel})")

    return in_parts(prompts, seen.numel() * prompts.x_dim, run)


@checked
def tuned_bandwidth(prompts: Sized, *, kernel: Kernel = "gaussian") -> float:
    """Return the bandwidth h of `kernel_smoothing` with the least mean squared error of the query's prediction.

    A geometric grid of bandwidths is searched, then Brent's method around the best one. The grid reaches from 1/1000 to
    100 times the largest spread of squared distances ("gaussian": its root) or of inner products on a context.

    Args:
        prompts: prompts to tune on; their query targets are used, so evaluate on others.
        kernel: "gaussian" or "exponential", as for `kernel_smoothing`.
    """
    if len(prompts) == 0 or prompts.n_context == 0:
        raise ValueError(f"tuning needs prompts with context, got {prompts}")
    prompts = prompts.to(torch.float64)
    with torch.no_grad():
        logs = log_kernel(kernel, prompts.xs[:, -1:], prompts.xs[:, :-1])
        spread = (logs.amax(-1, keepdim=True) - logs).max().item()
        if spread == 0:
            raise ValueError("every bandwidth predicts the mean on these prompts: there is nothing to tune")
        unit = spread ** (1 / POWERS[kernel])
        grid = [unit * 1e5 ** (i / 100) / 1000 for i in range(101)]
        targets = prompts.query.ys

        def error(bandwidth: float) -> float:
            predictions = kernel_smoothing(prompts, bandwidth, kernel=kernel, at="query").predictions[0, :, 0]
            return (predictions - targets).square().mean().item()

        return minimize_on_grid(error, grid)[0]


def _weights(
    logs: Float[Tensor, "prompt point other"], seen: Bool[Tensor, "point other"], bandwidth: float, power: int
) -> Float[Tensor, "prompt point other"]:
    """Return `k / Σ k` over the points that are seen; 0 where there are none."""
    alone = ~seen.any(-1, keepdim=True)
    logs = logs.masked_fill(~seen, -torch.inf).masked_fill(alone, 0.0)
    # the largest becomes 0 before the division, which overflows for very narrow kernels; twice, as h² may underflow
    logs = logs - logs.detach().amax(-1, keepdim=True)
    for _ in range(power):
        logs = logs / bandwidth
    return logs.softmax(-1).masked_fill(alone, 0.0)


def _smoothing_steps(problem: FitProblem) -> Iterator[StepwiseAlgorithm]:
    few = problem.first(FEW)
    size = problem.prompts.xs.square().sum(-1).mean().item()

    def smoother(bandwidth: float) -> KernelReading:
        def weights(readers: Tensor, points: Tensor) -> Tensor:
            return (readers @ points.mT / bandwidth).softmax(-1)

        return KernelReading(weights, name=f"softmax smoothing, bandwidth {bandwidth:.3g}")

    bandwidths = geometric_grid(0.01 * size, 10 * size, 16)
    yield smoother(min(bandwidths, key=lambda h: few.error(smoother(h).predict(few.prompts))))


SMOOTHING = new_card(
    name="softmax smoothing",
    holds=(
        "linear in the targets",
        "order of the points",
        "rotation of the inputs",
        "shift of the targets",
        "scale of the targets",
    ),
    violates=("linear in the query", "moments"),
    step_forms=_smoothing_steps,
)
