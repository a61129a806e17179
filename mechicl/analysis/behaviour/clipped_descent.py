"""Gradient descent and GD++ on tokens that are clipped after every step, tuned with the clip in place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor

from mechicl.analysis.behaviour.algorithm_families import tuned_descent
from mechicl.prompts import Prompts

SCREENING = 512  # prompts on which starts are compared, before the best is followed on all
SMALL, LARGE = 1e-6, 1e6  # parameters are sought by their logarithms: one that is to be 0 comes as near as this


@dataclass(frozen=True, eq=False)
class ClippedDescent:
    """GD++ as layers of linear attention do it whose tokens are cut to [-clip, clip] after every step.

    Attributes:
        step_sizes: one a step.
        gammas: γ, one a step; 0 for gradient descent.
        clip: the largest absolute value in a token.
        hyperparameters: what was tuned.

    Example:
        >>> ClippedDescent([0.5, 0.5], [0.1, 0.0], clip=10.0, hyperparameters={}).predict(prompts)
    """

    step_sizes: Sequence[float]
    gammas: Sequence[float]
    clip: float
    hyperparameters: dict[str, float]

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction; differentiable with respect to the query."""
        sizes, gammas = (torch.tensor([*each], dtype=torch.float64) for each in (self.step_sizes, self.gammas))
        return _predicted(prompts, sizes, gammas, self.clip)

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Every point's prediction from the points before it."""
        return torch.stack([self.predict(prompts.prefix(n)) for n in range(prompts.xs.shape[1])], dim=1)


def tuned_clipped_descent(
    prompts: Prompts, steps: int, clip: float, *, gamma: bool = False, per_step: bool = False
) -> ClippedDescent:
    """Gradient descent or GD++ with the least squared error among those whose tokens are clipped.

    What `tuned_descent` finds without a clip can be worth nothing with one: ten steps of GD++ do best with a step size
    that first makes targets 25 times as large, in directions with large eigenvalues, and later small.

    Args:
        prompts: the tasks to tune on.
        steps: number of steps.
        clip: tokens are cut to [-clip, clip] after every step.
        gamma: GD++ instead of gradient descent; more than one step.
        per_step: a step size (and γ) for each step instead of one for all; the last γ, which does nothing, is left out.

    Raises:
        ValueError: no prompts, fewer than one step, or GD++ of one step.

    Source: von Oswald et al. 2023, A.2 and A.12: "for the trained TF and GD".

    Example:
        >>> best = tuned_clipped_descent(LinearRegression().sample(8192, seed=0), 10, 10.0, gamma=True)
        >>> sorted(best.hyperparameters)
        ['gamma', 'step_size']
    """
    if steps < 1 or len(prompts) == 0 or (gamma and steps == 1):
        raise ValueError(f"tuning needs prompts, a step, and two for a γ: got {prompts} and steps={steps}")
    few, size = prompts[:SCREENING], 1 / _largest_eigenvalues(prompts[:SCREENING]).mean().item()
    shares = [(0.3, 0.1), (1.0, 0.1), (3.0, 0.4)] if gamma else [(0.3, 0.0), (1.0, 0.0)]
    starts = [[a * size] + [g * size] * gamma for a, g in shares]
    starts.append(_without_clip(few, steps, gamma=gamma, per_step=False))
    values = _best(prompts, steps, clip, starts, per_step=False)
    if per_step:
        even = [values[0]] * steps + [values[-1]] * ((steps - 1) * gamma)
        grown = [values[0] * 2.0 ** (i - 1) for i in range(steps)]
        grown += [values[-1] * 1.5**i for i in range((steps - 1) * gamma)]
        starts = [even, grown, _without_clip(few, steps, gamma=gamma, per_step=True)]
        values = _best(prompts, steps, clip, starts, per_step=True)
    sizes, gammas = _spread(torch.tensor(values), steps, per_step=per_step)
    numbered = [f"_{i + 1}" for i in range(steps)] if per_step else [""]
    labels = [f"step_size{end}" for end in numbered] + [f"gamma{end}" for end in numbered]
    return ClippedDescent(sizes.tolist(), gammas.tolist(), clip, dict(zip(labels, values, strict=False)))


def _without_clip(prompts: Prompts, steps: int, *, gamma: bool, per_step: bool) -> list[float]:
    return list(tuned_descent(prompts, steps, gamma=gamma, per_step=per_step).hyperparameters.values())


def _best(prompts: Prompts, steps: int, clip: float, starts: Sequence[list[float]], *, per_step: bool) -> list[float]:
    """Downhill from the start that leads furthest on few prompts."""
    screened = [_descend(prompts[:SCREENING], steps, clip, start, per_step=per_step) for start in starts]
    return _descend(prompts, steps, clip, min(screened, key=lambda fit: fit[1])[0], per_step=per_step)[0]


def _descend(
    prompts: Prompts, steps: int, clip: float, start: Sequence[float], *, per_step: bool
) -> tuple[list[float], float]:
    """Parameters downhill from a start, by their logarithms, and their error."""

    def error(logs: np.ndarray) -> tuple[float, np.ndarray]:
        values = torch.from_numpy(logs).requires_grad_()
        sizes, gammas = _spread(values.exp(), steps, per_step=per_step)
        loss = (_predicted(prompts, sizes, gammas, clip) - prompts.query.ys).square().mean()
        (slope,) = torch.autograd.grad(loss, values)
        return loss.item(), slope.nan_to_num(0.0).double().numpy()

    logs = np.log(np.clip(np.array(start, dtype=np.float64), SMALL, LARGE))
    bounds = [(math.log(SMALL), math.log(LARGE))] * len(logs)
    fit = minimize(error, logs, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 20 + 4 * len(logs)})
    return np.exp(fit.x).tolist(), float(fit.fun)


def _spread(values: Tensor, steps: int, *, per_step: bool) -> tuple[Tensor, Tensor]:
    """A step size and a γ for each step; a γ that was not tuned is 0."""
    count = steps if per_step else 1
    sizes, gammas = values[:count].expand(steps), values[count:]
    if len(gammas) == 0:
        return sizes, torch.zeros_like(sizes)
    return sizes, torch.cat([gammas, gammas.new_zeros(1)]) if per_step else gammas.expand(steps)


def _predicted(prompts: Prompts, sizes: Tensor, gammas: Tensor, clip: float) -> Float[Tensor, "prompt y"]:
    """Prop. 1 on tokens (x, y), the query's y starting at 0, where it ends as minus the prediction."""
    xs, ys = prompts.xs, torch.cat([prompts.context.ys, torch.zeros_like(prompts.query.ys)[:, None]], dim=1)
    for a, gamma in zip(sizes.to(xs), gammas.to(xs), strict=True):
        moments = xs[:, :-1].mT @ torch.cat([xs[:, :-1], ys[:, :-1]], dim=2)
        moved = xs @ moments
        ys = (ys - a * moved[:, :, xs.shape[2] :]).clamp(-clip, clip)
        xs = (xs - gamma * moved[:, :, : xs.shape[2]]).clamp(-clip, clip)
    return -ys[:, -1]


def _largest_eigenvalues(prompts: Prompts) -> Float[Tensor, "prompt"]:
    xs = prompts.context.xs
    return torch.linalg.matrix_norm(xs, ord=2).square()
