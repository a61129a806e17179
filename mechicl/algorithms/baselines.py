"""The baselines of Garg et al. 2022 that learn nothing iteratively: averaging and nearest neighbours."""

from collections.abc import Iterator

import torch

from mechicl.algorithms.card import Algorithm, FitProblem, FittedAlgorithm, register
from mechicl.algorithms.spectra import earlier_points, in_parts, linear_trajectory, one_step, selected, sums_before
from mechicl.algorithms.stepwise.descent import KernelReading, nearest
from mechicl.base.arguments import checked
from mechicl.base.checks import check_whole
from mechicl.learners import AlgorithmLearner, Trajectory
from mechicl.prompts import PointsAt, Prompts


@checked
def averaging(prompts: Prompts, *, at: PointsAt = "points", with_weights: bool = False) -> Trajectory:
    """The averaging estimator `x (1/n) Σ_i x_iᵀ y_i`, consistent for inputs with identity covariance.

    Source: Garg et al. 2022, section 3.
    """
    xs, ys = prompts.xs.double(), prompts.ys.double()
    n = torch.arange(xs.shape[1], device=xs.device).clamp(min=1)[:, None, None]
    weights = sums_before(xs[..., :, None] * ys[..., None, :]) / n
    return linear_trajectory(prompts, weights, "averaging", at, with_weights)


@checked
def nearest_neighbours(prompts: Prompts, *, n_neighbours: int = 3, at: PointsAt = "points") -> Trajectory:
    """The mean target of the nearest context points, by Euclidean distance; of all of them while they are fewer.

    Args:
        n_neighbours: how many; of equally near points the earlier ones count.

    Source: Garg et al. 2022, section 3, with three neighbours.
    """
    check_whole(1, n_neighbours=n_neighbours)
    n_points = prompts.n_context + 1

    def run(part: Prompts) -> Trajectory:
        xs, earlier = part.xs.double(), earlier_points(part, at)
        # [prompt point other], without the differences `[prompt point other x]`, nor the rounding of a matrix product
        distances = torch.cdist(selected(xs, at), xs, compute_mode="donot_use_mm_for_euclid_dist")
        distances = distances.masked_fill(~earlier, torch.inf)
        # the nearest are those below the distance of the last one that counts, and of those at it the earlier ones
        last = distances.topk(min(n_neighbours, n_points), dim=-1, largest=False).values[..., -1:]
        nearer, at_last = distances < last, distances == last
        room = n_neighbours - nearer.sum(-1, keepdim=True)
        near = (earlier & (nearer | (at_last & (at_last.cumsum(-1) <= room)))).double()
        means = (near @ part.ys.double()) / near.sum(-1, keepdim=True).clamp(min=1)
        return one_step(part, means, f"{n_neighbours} nearest neighbours")

    return in_parts(prompts, n_points * n_points * prompts.x_dim, run)


def _fit_neighbours(problem: FitProblem) -> Iterator[FittedAlgorithm]:
    prompts = problem.prompts
    distances = (prompts.context.xs - prompts.query.xs[:, None]).square().sum(-1)
    order = distances.sort(dim=1, stable=True).indices[..., None]
    sums = prompts.context.ys.take_along_dim(order, dim=1).cumsum(1)
    means = sums / torch.arange(1, prompts.n_context + 1)[:, None]  # of the nearest 1, 2, ... points
    best = int((means - problem.targets[:, None]).square().mean((0, 2)).argmin()) + 1
    learner = AlgorithmLearner(nearest_neighbours, {"n_neighbours": best})
    yield FittedAlgorithm("nearest neighbours", learner, {"n_neighbours": best}, 1)


AVERAGING = register(
    Algorithm(
        name="averaging",
        trajectory=averaging,
        fit=lambda _: [FittedAlgorithm("averaging", AlgorithmLearner(averaging))],
    )
)
NEIGHBOURS = register(
    Algorithm(
        name="nearest neighbours",
        trajectory=nearest_neighbours,
        fit=_fit_neighbours,
        step_forms=lambda _: [KernelReading(nearest, name="nearest neighbour")],
        step_kinds={"nearest neighbour": ("nearest", "")},
    )
)
