"""Kernel smoothing: the mean of the context's targets, weighted by how near their inputs are to the query's."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import KERNEL, FitProblem, new_card
from mechicl.algorithms.descent_cards import FEW
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import earlier_points, in_parts, one_step, selected
from mechicl.algorithms.stepwise.base import StepwiseAlgorithm
from mechicl.algorithms.stepwise.descent import KernelReading
from mechicl.algorithms.tuning import geometric_grid
from mechicl.base.arguments import Positive, checked
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt


def log_kernel(
    points: Float[Tensor, "prompt point x"], others: Float[Tensor, "prompt other x"]
) -> Float[Tensor, "prompt point other"]:
    """Return the logarithm `-|x - x'|²/2` of the Gaussian kernel of bandwidth 1."""
    return -(points[:, :, None] - others[:, None]).square().sum(-1) / 2  # small distances stay exact


@checked
def kernel_smoothing(prompts: Sized, bandwidth: Positive, *, at: PointsAt = "points") -> Trajectory:
    """Predict the Nadaraya-Watson estimate `Σ_i k(x_i, x) y_i / Σ_i k(x_i, x)`, `k(x, x') = exp(-|x - x'|²/(2h²))`.

    Sums run over the points before x. A wide kernel gives the mean target, a narrow one that of the nearest context
    point. The first point's prediction is 0. Gradients flow to the query and to the context. Source: Nadaraya 1964;
    Watson 1964. Von Oswald et al. 2023, A.8, liken attention to it.

    Args:
        bandwidth: h, in units of x.

    Example:
        >>> prompts = SineRegression().sample(100, seed=0)
        >>> AlgorithmLearner(algorithms.kernel_smoothing, {"bandwidth": 0.5}).predict(prompts).shape
        torch.Size([100, 1])
    """
    seen = earlier_points(prompts, at)
    alone = ~seen.any(-1, keepdim=True)

    def run(part: Prompts) -> Trajectory:
        xs = part.xs.double()
        logs = log_kernel(selected(xs, at), xs).masked_fill(~seen, -torch.inf).masked_fill(alone, 0.0)
        # the largest becomes 0 before the division, which overflows for very narrow kernels; twice, as h² may underflow
        logs = (logs - logs.detach().amax(-1, keepdim=True)) / bandwidth / bandwidth
        weights = logs.softmax(-1).masked_fill(alone, 0.0)
        return one_step(part, weights @ part.ys.double(), "kernel smoothing")

    return in_parts(prompts, seen.numel() * prompts.x_dim, run)


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
    holds=(*KERNEL, "shift of the targets"),
    violates=("linear in the query", "moments"),
    step_forms=_smoothing_steps,
)
