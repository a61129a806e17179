"""Least squares with a penalty on the weights' absolute values."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import in_parts, linear_trajectory, second_moments, selected
from mechicl.base.arguments import checked
from mechicl.learners import Trajectory
from mechicl.prompts import PointsAt, Prompts

MOST_CHANGES = 20  # of the set of weights that are not 0, for each weight: far more than paths have
ROUNDING = 1e-10


@checked
def lasso(prompts: Prompts, *, penalty: float, at: PointsAt = "points", with_weights: bool = False) -> Trajectory:
    """The minimiser of `Σ_i (x_i w - y_i)² / (2n) + penalty * Σ_j |w_j|`, exactly.

    From a penalty that leaves no weight, weights are linear in the penalty until one more joins or one becomes 0. This
    path is followed down to the penalty that is asked for, for all prefixes at once: unlike scikit-learn's coordinate
    descent it needs no number of iterations, which short prefixes would need very many of. Gradients flow to the query,
    not to the context.

    Args:
        prompts: the empty prefix predicts 0.
        penalty: > 0, in units of x y; for no penalty use `ols`. scikit-learn calls it alpha.

    Source: Tibshirani 1996; Efron et al. 2004, section 3, for the path; Garg et al. 2022, section 5, compare with it.

    Example:
        >>> prompts = SparseLinearRegression(x_dim=5, n_context=20, sparsity=1).sample(1, seed=0)
        >>> algorithms.lasso(prompts, penalty=0.1, with_weights=True).weights[0, 0, -1, :, 0].count_nonzero()
        tensor(1)
    """
    if not (penalty > 0 and math.isfinite(penalty)):
        raise ValueError(f"penalty must be positive and finite, got {penalty}; for no penalty use ols()")
    n_points, x_dim, y_dim = prompts.n_context + 1, prompts.x_dim, prompts.y_dim

    def run(part: Prompts) -> Trajectory:
        second, cross = second_moments(Prompts(part.xs.detach(), part.ys.detach()), at)
        cross = cross.mT  # [prompt point y x]
        numbers = selected(torch.arange(n_points, device=part.device)[None], at)[0].double()
        threshold = (penalty * numbers[:, None]).expand(cross.shape[:-1])
        each = second[:, :, None].expand(*cross.shape, x_dim).flatten(0, 2)
        weights = _follow(each, cross.flatten(0, 2), threshold.flatten()).view_as(cross).mT
        return linear_trajectory(part, weights, "lasso", at, with_weights)

    return in_parts(prompts, n_points * x_dim * x_dim * y_dim, run)


def _follow(
    second: Float[Tensor, "row x x"], cross: Float[Tensor, "row x"], threshold: Float[Tensor, "row"]
) -> Float[Tensor, "row x"]:
    """Weights w of least `w S w / 2 - B w + threshold |w|₁`, by following the threshold τ down from infinity.

    While the weights that are not 0 and their signs s stay, these are `w = u - τ v` with `S u = B` and `S v = s` on
    them; gradients `B - S w = p + τ q` are τ s there, and below τ elsewhere.
    """
    result = torch.zeros_like(cross)
    rows = torch.arange(len(cross), device=cross.device)
    signs = torch.zeros_like(cross)
    now = torch.full_like(threshold, torch.inf)
    changed = torch.zeros_like(cross)  # of the last change: the sign of the weight that joined or left
    for _ in range(MOST_CHANGES * cross.shape[1] + 1):
        on = signs != 0
        matrix = torch.where(on[:, :, None] & on[:, None, :], second, 0.0) + torch.diag_embed((~on).to(second))
        targets = torch.stack([torch.where(on, cross, 0.0), signs], -1)
        u, v = torch.linalg.solve_ex(matrix, targets)[0].unbind(-1)
        p, q = cross - (second @ u[..., None])[..., 0], (second @ v[..., None])[..., 0]
        # where a gradient meets τ or -τ, or a weight meets 0; not the one that has just done so
        meets = [_ratio(p, 1 - q), _ratio(-p, 1 + q)]
        joins = [m.masked_fill(on | (changed == sign), 0.0) for m, sign in zip(meets, (1, -1), strict=True)]
        leaves = _ratio(u, v).masked_fill(~on | (changed != 0), 0.0)
        events = torch.stack([*joins, leaves], 1)  # [row kind x]
        events = torch.where(events <= now[:, None, None] * (1 + ROUNDING), events, 0.0)
        following, event = events.flatten(1).max(-1)
        done = following <= threshold
        result[rows[done]] = (u - threshold[:, None] * v)[done]
        kind, index = event // cross.shape[1], (event % cross.shape[1])[:, None]
        sign = torch.where(kind == 2, signs.gather(1, index)[:, 0], 1.0 - 2.0 * kind)
        changed = torch.zeros_like(signs).scatter_(1, index, sign[:, None])
        signs = signs.scatter(1, index, torch.where(kind == 2, 0.0, sign)[:, None])
        now = torch.minimum(now, following)
        rows, signs, now, changed = rows[~done], signs[~done], now[~done], changed[~done]
        second, cross, threshold = second[~done], cross[~done], threshold[~done]
        if not len(rows):
            break
    return result


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b where that is a number above 0; else 0, which no path comes to."""
    quotient = a / b.masked_fill(b.abs() < ROUNDING, torch.inf)
    return quotient.nan_to_num(0.0, posinf=0.0, neginf=0.0).clamp(min=0)
