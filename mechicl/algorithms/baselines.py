"""The baselines of Garg et al. 2022 that learn nothing iteratively: averaging and nearest neighbours."""

import torch

from mechicl.algorithms.spectra import linear_trajectory, selected, sums_before
from mechicl.base.checks import check_whole
from mechicl.learners import Trajectory
from mechicl.prompts import PointsAt, Prompts

MAX_DISTANCES = 2**24


def averaging(prompts: Prompts, *, at: PointsAt = "points", with_weights: bool = False) -> Trajectory:
    """The averaging estimator `x (1/n) Σ_i x_iᵀ y_i`, consistent for inputs with identity covariance.

    Args:
        prompts: each prefix is a context of its own; the empty one predicts 0.
        at: predict all "points", each from those before it, or the "query" alone.
        with_weights: also return the weights `[step prompt point x y]` that predictions come from.

    Source: Garg et al. 2022, section 3.
    """
    xs, ys = prompts.xs.double(), prompts.ys.double()
    n = torch.arange(xs.shape[1], device=xs.device).clamp(min=1)[:, None, None]
    weights = sums_before(xs[..., :, None] * ys[..., None, :]) / n
    return linear_trajectory(prompts, weights, "averaging", at, with_weights)


def nearest_neighbours(prompts: Prompts, *, n_neighbours: int = 3, at: PointsAt = "points") -> Trajectory:
    """The mean target of the nearest context points, by Euclidean distance; of all of them while they are fewer.

    Args:
        prompts: each prefix is a context of its own; the empty one predicts 0.
        n_neighbours: how many; of equally near points the earlier ones count.
        at: predict all "points", each from those before it, or the "query" alone.

    Raises:
        ValueError: n_neighbours < 1.

    Source: Garg et al. 2022, section 3, with three neighbours.
    """
    check_whole(1, n_neighbours=n_neighbours)
    n_points = prompts.n_context + 1
    parts = []
    for part in prompts.split(max(1, MAX_DISTANCES // (n_points * n_points * prompts.x_dim))):
        xs, ys = part.xs.double(), part.ys.double()
        targets = selected(xs, at)
        # [prompt point other], without the differences `[prompt point other x]`, nor the rounding of a matrix product
        distances = torch.cdist(targets, xs, compute_mode="donot_use_mm_for_euclid_dist")
        position = torch.arange(n_points, device=xs.device)
        earlier = position < selected(position[None, :, None], at)[0]
        distances = distances.masked_fill(~earlier, torch.inf)
        # the nearest are those below the distance of the last one that counts, and of those at it the earlier ones
        last = distances.topk(min(n_neighbours, n_points), dim=-1, largest=False).values[..., -1:]
        nearer, at_last = distances < last, distances == last
        room = n_neighbours - nearer.sum(-1, keepdim=True)
        near = (earlier & (nearer | (at_last & (at_last.cumsum(-1) <= room)))).double()
        parts.append(((near @ ys) / near.sum(-1, keepdim=True).clamp(min=1)).to(prompts.dtype))
    return Trajectory((1,), torch.cat(parts)[None], f"{n_neighbours} nearest neighbours")
