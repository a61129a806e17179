"""A regression tree that splits greedily at the signs of inputs."""

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import earlier_points, in_parts, one_step, selected
from mechicl.base.arguments import checked
from mechicl.base.checks import check_whole
from mechicl.learners import Trajectory
from mechicl.prompts import PointsAt, Prompts


@checked
def greedy_tree(prompts: Prompts, *, depth: int = 4, at: PointsAt = "points") -> Trajectory:
    """The mean target of the context points in the query's leaf, of a tree that is grown greedily.

    Every node splits at the sign of the input that leaves the least squared error (the first of equally good ones), as
    long as points of both signs are there and the error falls; after `depth` splits, or else, it is a leaf.

    Args:
        depth: largest number of splits on the way to a leaf.

    Source: Breiman et al. 1984; Garg et al. 2022, section 5, on the signs of the inputs.

    Example:
        >>> prompts = DecisionTrees(x_dim=5, n_context=60, depth=2).sample(100, seed=0)
        >>> algorithms.greedy_tree(prompts, depth=2).predictions.shape
        torch.Size([1, 100, 61, 1])
    """
    check_whole(1, depth=depth)
    n_points, wide = prompts.n_context + 1, max(prompts.x_dim, prompts.y_dim)
    return in_parts(
        prompts,
        4 * n_points * n_points * wide,
        lambda part: one_step(part, _grow(part, depth, at), f"greedy tree of depth {depth}"),
    )


def _grow(prompts: Prompts, depth: int, at: PointsAt) -> Float[Tensor, "prompt point y"]:
    """Only the nodes on the query's way down are ever needed: of each prefix, the points that are still with it."""
    positive = (prompts.xs > 0).double()
    ys = prompts.ys.double()
    queries = selected(positive, at)
    with_it = earlier_points(prompts, at).double().expand(len(ys), -1, -1)
    growing = torch.ones_like(with_it[..., 0], dtype=torch.bool)
    for _ in range(depth):
        count, total = with_it.sum(-1, keepdim=True), with_it @ ys  # [prompt point 1], [prompt point y]
        above = with_it @ positive  # [prompt point x]: how many are on the positive side of each input
        sums = torch.einsum("npo,nox,noy->npxy", with_it, positive, ys)
        below = count - above
        # the squared error falls by |sum|²/n of either side less that of both
        gain = sums.square().sum(-1) / above.clamp(min=1)
        gain = gain + (total[:, :, None] - sums).square().sum(-1) / below.clamp(min=1)
        gain = gain - total.square().sum(-1, keepdim=True) / count.clamp(min=1)
        size = torch.einsum("npo,no->np", with_it, ys.square().sum(-1))[..., None]
        splits = (above > 0) & (below > 0) & (gain > 1e-12 * size)
        # of gains that are equal but for rounding the first counts
        best = gain.masked_fill(~splits, -torch.inf)
        best = (best >= best.amax(-1, keepdim=True) - 1e-10 * size).double().argmax(-1, keepdim=True)
        growing = growing & splits.any(-1)
        side = queries.gather(-1, best)  # [prompt point 1]
        chosen = positive.mT.gather(1, best.expand(-1, -1, positive.shape[1]))  # [prompt point other]
        with_it = torch.where(growing[..., None], with_it * (chosen == side), with_it)
    return (with_it @ ys) / with_it.sum(-1, keepdim=True).clamp(min=1)
