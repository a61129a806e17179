"""The baselines of Garg et al. 2022: averaging, nearest neighbours, the lasso and greedy regression trees."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import FILTER, KERNEL, FitProblem, FittedAlgorithm, new_card
from mechicl.algorithms.least_squares import EPSILON
from mechicl.algorithms.sizes import Sized
from mechicl.algorithms.spectra import (
    ConditioningWarning,
    context_moments,
    earlier_points,
    in_parts,
    linear_trajectory,
    n_before,
    one_step,
    selected,
)
from mechicl.algorithms.stepwise.descent import KernelReading, nearest
from mechicl.base.arguments import Count, Positive, checked
from mechicl.base.warning import warn
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.prompts.prompts import PointsAt

MOST_CHANGES = 20  # of the set of nonzero lasso weights, for each weight: far more than paths have
_ROUNDING = 1e-10


@checked
def averaging(prompts: Sized, *, at: PointsAt = "points", with_weights: bool = False) -> Trajectory:
    """Predict `x W` with the averaging estimator `W = (1/n) Σ_i x_iᵀ y_i` over the n earlier points.

    It is consistent for inputs of identity covariance. Source: Garg et al. 2022, section 3.
    """
    weights = context_moments(prompts, at)[1] / n_before(prompts, at).clamp(min=1)[:, None, None]
    return linear_trajectory(prompts, weights, "averaging", at, with_weights)


@checked
def nearest_neighbours(prompts: Sized, *, n_neighbours: Count = 3, at: PointsAt = "points") -> Trajectory:
    """Predict the mean target of the nearest earlier points by Euclidean distance; 0 before the first point.

    Args:
        n_neighbours: number of points to average, or all earlier points if there are fewer. Of equally near points the
            earlier ones are used.

    Source: Garg et al. 2022, section 3, with three neighbours.
    """
    n_points = prompts.n_context + 1

    def run(part: Prompts) -> Trajectory:
        xs, earlier = part.xs.double(), earlier_points(part, at)
        # [prompt point other], without the differences `[prompt point other x]`, nor the rounding of a matrix product
        distances = torch.cdist(selected(xs, at), xs, compute_mode="donot_use_mm_for_euclid_dist")
        distances = distances.masked_fill(~earlier, torch.inf)
        # the nearest are those below the distance of the last one that counts, and of those at it the earlier ones
        last = distances.topk(min(n_neighbours, n_points), dim=-1, largest=False).values[..., -1:]
        nearer, at_last = distances < last, distances == last
        missing = n_neighbours - nearer.sum(-1, keepdim=True)
        near = (earlier & (nearer | (at_last & (at_last.cumsum(-1) <= missing)))).double()
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
    yield NEIGHBOURS.fitted({"n_neighbours": best})


AVERAGING = new_card(
    name="averaging",
    holds=(*FILTER, "additive over points"),
    violates=("scale of the inputs", "shift of the targets"),
    trajectory=averaging,
    fit=lambda _: [AVERAGING.fitted({})],
)
NEIGHBOURS = new_card(
    name="nearest neighbours",
    holds=(*KERNEL, "shift of the targets", "scale of the inputs"),
    violates=("linear in the query", "moments", "additive over points", "function of S"),
    trajectory=nearest_neighbours,
    fit=_fit_neighbours,
    step_forms=lambda _: [KernelReading(nearest, name="nearest neighbour")],
    step_kinds={"nearest neighbour": ("nearest", "")},
)

# ---- the lasso ----


@checked
def lasso(prompts: Sized, *, penalty: Positive, at: PointsAt = "points", with_weights: bool = False) -> Trajectory:
    """Predict with the lasso: weights that minimise `Σ_i (x_i w - y_i)² / (2n) + penalty * Σ_j |w_j|`.

    Sums run over the n points before the predicted one. The minimum is exact: weights are piecewise linear in the
    penalty, and their path is followed from a penalty at which all are 0 down to the requested one. Gradients flow to
    the query's input, not to the context. Source: Tibshirani 1996; Efron et al. 2004, section 3, for the path; Garg et
    al. 2022, section 5, compare with it.

    Args:
        penalty: factor on the sum of absolute weights, > 0; scikit-learn calls it alpha. For no penalty use `ols`.

    Warns:
        ConditioningWarning: rounding keeps a path from ending; weights of that prefix are 0.
    """
    x_dim, y_dim = prompts.x_dim, prompts.y_dim

    def run(part: Prompts) -> Trajectory:
        second, cross = context_moments(Prompts(part.xs.detach(), part.ys.detach()), at)
        cross = cross.mT  # [prompt point y x]
        threshold = (penalty * n_before(part, at).double()[:, None]).expand(cross.shape[:-1])
        each = second[:, :, None].expand(*cross.shape, x_dim).flatten(0, 2)
        unit = each.diagonal(dim1=1, dim2=2).amax(1, keepdim=True).clamp(min=1e-300)  # for the limits on rounding
        followed = _follow(each / unit[..., None], cross.flatten(0, 2), threshold.flatten())
        weights = (followed / unit).view_as(cross).mT
        return linear_trajectory(part, weights, "lasso", at, with_weights)

    return in_parts(prompts, (prompts.n_context + 1) * x_dim * x_dim * y_dim, run)


def _follow(
    second: Float[Tensor, "row x x"], cross: Float[Tensor, "row x"], threshold: Float[Tensor, "row"]
) -> Float[Tensor, "row x"]:
    """Return the weights w of least `w S w / 2 - B w + threshold |w|₁`, following the threshold τ down from infinity.

    While the set of nonzero weights and their signs s do not change, these are `w = u - τ v` with `S u = B` and
    `S v = s` on the set; gradients `B - S w = p + τ q` are τ s there, and below τ elsewhere.
    """
    result = torch.zeros_like(cross)
    rows = torch.arange(len(cross), device=cross.device)
    signs = torch.zeros_like(cross)
    now = torch.full_like(threshold, torch.inf)
    for _ in range(MOST_CHANGES * cross.shape[1] + 1):
        on = signs != 0
        matrix = torch.where(on[:, :, None] & on[:, None, :], second, 0.0) + torch.diag_embed((~on).to(second))
        targets = torch.stack([torch.where(on, cross, 0.0), signs], -1)
        u, v = torch.linalg.solve_ex(matrix, targets)[0].unbind(-1)
        p, q = cross - (second @ u[..., None])[..., 0], (second @ v[..., None])[..., 0]
        # where, as τ falls, a gradient meets τ or -τ from below, or a weight falls to 0
        joins = [_ratio(sign * p, 1 - sign * q).masked_fill(on, 0.0) for sign in (1, -1)]
        leaves = _ratio(-signs * u, -signs * v).masked_fill(~on, 0.0)
        events = torch.stack([*joins, leaves], 1)  # [row kind x]
        events = torch.where(events <= now[:, None, None] * (1 + _ROUNDING), events, 0.0)
        following = events.flatten(1).amax(-1)
        done = following <= threshold
        result[rows[done]] = (u - threshold[:, None] * v)[done]
        # of changes at the same τ, the first weight's is made: other choices may cycle
        latest, kind = events.max(1)
        index = (latest >= following[:, None] * (1 - _ROUNDING)).double().argmax(-1, keepdim=True)
        kind = kind.gather(1, index)
        signs = signs.scatter(1, index, torch.where(kind == 2, 0.0, 1.0 - 2.0 * kind).to(signs))
        now = torch.minimum(now, following)
        rows, signs, now = rows[~done], signs[~done], now[~done]
        second, cross, threshold = second[~done], cross[~done], threshold[~done]
        if not len(rows):
            return result
    missed = f"the lasso's path has not reached the penalty for {len(rows)} prefixes: weights are 0"
    warn(missed, ConditioningWarning)
    return result


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    quotient = a / b.masked_fill(b < _ROUNDING, torch.inf)
    return quotient.nan_to_num(0.0, posinf=0.0, neginf=0.0).clamp(min=0)


# ---- greedy trees ----


@checked
def greedy_tree(prompts: Sized, *, depth: Count = 4, at: PointsAt = "points") -> Trajectory:
    """Predict the mean target of the earlier points in the same leaf of a greedily grown regression tree.

    Each node splits on the sign of the input coordinate that leaves the least squared error (the first if several do),
    as long as both signs occur among its points and the error falls. Source: Breiman et al. 1984; Garg et al. 2022,
    section 5, on the signs of the inputs.

    Args:
        depth: largest number of splits on the way to a leaf.
    """
    size, name = 4 * (prompts.n_context + 1) ** 2 * max(prompts.x_dim, prompts.y_dim), f"greedy tree of depth {depth}"
    return in_parts(prompts, size, lambda part: one_step(part, _grow(part, depth, at), name))


def _grow(prompts: Prompts, depth: int, at: PointsAt) -> Float[Tensor, "prompt point y"]:
    """Grow only the nodes on the query's path, from the points of each prefix that share it."""
    positive = (prompts.xs > 0).double()
    ys = prompts.ys.double()
    queries = selected(positive, at)
    with_it = earlier_points(prompts, at).double().expand(len(ys), -1, -1)
    growing = torch.ones_like(with_it[..., 0], dtype=torch.bool)
    for _ in range(depth):
        count, total = with_it.sum(-1, keepdim=True), with_it @ ys  # [prompt point 1], [prompt point y]
        above = with_it @ positive  # [prompt point x]: how many are on the positive side of each input
        below = count - above
        mean = total / count.clamp(min=1)
        residuals = with_it[..., None] * (ys[:, None] - mean[:, :, None])  # [prompt point other y]
        # the squared error falls by |sum|²/n of either side, of residuals whose sums are opposite
        sums = torch.einsum("npoy,nox->npxy", residuals, positive).square().sum(-1)
        gain = sums * count / (above * below).clamp(min=1)
        size = residuals.square().sum((-2, -1))[..., None]
        rounding = 4 * EPSILON * (size * (size + count * mean.square().sum(-1, keepdim=True))).sqrt()
        splits = (above > 0) & (below > 0) & (gain > 1e-12 * size + rounding)
        # of gains that are equal but for rounding the first counts
        best = gain.masked_fill(~splits, -torch.inf)
        best = (best >= best.amax(-1, keepdim=True) - 1e-10 * size - rounding).double().argmax(-1, keepdim=True)
        growing = growing & splits.any(-1)
        side = queries.gather(-1, best)  # [prompt point 1]
        chosen = positive.mT.gather(1, best.expand(-1, -1, positive.shape[1]))  # [prompt point other]
        with_it = torch.where(growing[..., None], with_it * (chosen == side), with_it)
    return (with_it @ ys) / with_it.sum(-1, keepdim=True).clamp(min=1)
