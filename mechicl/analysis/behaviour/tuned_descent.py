"""Gradient descent and GD++ tuned by search, as papers tune their baselines, also with clipped tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.descent_cards import fit_steps, parameter_labels, split_parameters
from mechicl.algorithms.spectral_fit import SCREENING, SpectralLearner, SpectralProblem
from mechicl.base.arguments import checked
from mechicl.prompts import Prompts

SMALL, LARGE = 1e-6, 1e6  # the search is over logarithms: no parameter is negative, the smallest value stands for 0


@checked
def tuned_descent(prompts: Prompts, steps: int, *, gamma: bool = False, per_step: bool = False) -> SpectralLearner:
    """Tune gradient descent or GD++ to the least squared error on prompts, as a baseline for a trained model.

    GD++ is gradient descent that also maps the inputs, `X ← X (I - γ XᵀX)`, after each step. Source: von Oswald et al.
    2023, section 3 and A.10.

    Args:
        prompts: prompts whose query targets are predicted. Deep GD++ needs many: rare contexts with large eigenvalues
            of XᵀX decide its loss.
        gamma: tune GD++ instead of gradient descent; needs more than one step.
        per_step: tune a step size (and γ) for each step instead of one for all; the last γ, which has no effect, is
            left out.

    Returns:
        A learner with `predict(prompts)`; `hyperparameters` has the tuned values by name. Step sizes and γ multiply
        sums over the context's points, not means.

    Example:
        >>> best = tuned_descent(LinearRegression().sample(8192, seed=0), 2, gamma=True)
        >>> sorted(best.hyperparameters)
        ['gamma', 'step_size']
    """
    _check_tuning(prompts, steps, gamma)
    problem = SpectralProblem.from_prompts(prompts, prompts.query.ys)
    learner = fit_steps(problem, steps, per_step=per_step, gamma=gamma).learner
    assert isinstance(learner, SpectralLearner)
    return learner


# ---- tokens that are clipped ----


@dataclass(frozen=True, eq=False)
class ClippedDescent:
    """GD++ in layers of linear attention whose tokens are clipped to [-clip, clip] after every step."""

    step_sizes: Sequence[float]
    gammas: Sequence[float]  # γ of each step; 0 for gradient descent
    clip: float
    hyperparameters: dict[str, float]

    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Return the query's prediction; differentiable with respect to the query."""
        sizes, gammas = (torch.tensor([*each], dtype=torch.float64) for each in (self.step_sizes, self.gammas))
        return _predicted(prompts, sizes, gammas, self.clip)

    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Return every point's prediction from the points before it."""
        return torch.stack([self.predict(prompts.prefix(n)) for n in range(prompts.xs.shape[1])], dim=1)


@checked
def tuned_clipped_descent(
    prompts: Prompts, steps: int, clip: float, *, gamma: bool = False, per_step: bool = False
) -> ClippedDescent:
    """Tune gradient descent or GD++ with clipped tokens to the least squared error on prompts.

    Use it as the baseline for a model with `token_clip`. The result of `tuned_descent` can be worthless with a clip:
    without one, the best ten steps of GD++ first let residuals grow 25-fold and shrink them later. Source: von Oswald
    et al. 2023, A.2 and A.12.

    Args:
        prompts: prompts whose query targets are predicted.
        clip: the entries of all tokens (x, y) are clipped to [-clip, clip] after every step.
        gamma: tune GD++, which also maps the inputs by `X ← X (I - γ XᵀX)`; needs more than one step.
        per_step: tune a step size (and γ) for each step instead of one for all.

    Returns:
        A learner with `predict(prompts)`; `hyperparameters` has the tuned values by name.
    """
    few = prompts[:SCREENING]
    _check_tuning(few, steps, gamma)
    size = 1 / torch.linalg.matrix_norm(few.context.xs, ord=2).square().mean().item()

    def best(starts: Sequence[list[float]], *, per_step: bool) -> list[float]:
        """Descend from the start that leads furthest on few prompts; the result of `tuned_descent` is a start too."""
        options = {"gamma": gamma, "per_step": per_step}
        unclipped = list(tuned_descent(few, steps, **options).hyperparameters.values())
        screened = [_descend(few, steps, clip, start, **options) for start in [*starts, unclipped]]
        return _descend(prompts, steps, clip, min(screened, key=lambda fit: fit[1])[0], **options)[0]

    shares = [(0.3, 0.1), (1.0, 0.1), (3.0, 0.4)] if gamma else [(0.3, 0.0), (1.0, 0.0)]
    values = best([[a * size] + [g * size] * gamma for a, g in shares], per_step=False)
    if per_step:
        even = [values[0]] * steps + [values[-1]] * ((steps - 1) * gamma)
        grown = [values[0] * 2.0 ** (i - 1) for i in range(steps)]
        grown += [values[-1] * 1.5**i for i in range((steps - 1) * gamma)]
        values = best([even, grown], per_step=True)
    sizes, gammas = split_parameters(torch.tensor(values), steps, gamma=gamma, per_step=per_step)
    labels = parameter_labels(steps, gamma=gamma, per_step=per_step)
    return ClippedDescent(sizes.tolist(), gammas.tolist(), clip, dict(zip(labels, values, strict=True)))


@torch.enable_grad()
def _descend(
    prompts: Prompts, steps: int, clip: float, start: Sequence[float], *, gamma: bool, per_step: bool
) -> tuple[list[float], float]:
    def error(logs: np.ndarray) -> tuple[float, np.ndarray]:
        values = torch.from_numpy(logs).requires_grad_()
        sizes, gammas = split_parameters(values.exp(), steps, gamma=gamma, per_step=per_step)
        loss = (_predicted(prompts, sizes, gammas, clip) - prompts.query.ys).square().mean()
        (slope,) = torch.autograd.grad(loss, values)
        return loss.item(), slope.nan_to_num(0.0).double().numpy()

    logs = np.log(np.clip(np.abs(np.array(start, dtype=np.float64)), SMALL, LARGE))
    bounds = [(math.log(SMALL), math.log(LARGE))] * len(logs)
    fit = scipy.optimize.minimize(error, logs, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 250})
    return np.exp(fit.x).tolist(), float(fit.fun)


def _predicted(prompts: Prompts, sizes: Tensor, gammas: Tensor, clip: float) -> Float[Tensor, "prompt y"]:
    """Proposition 1 on tokens (x, y): the query's y starts at 0 and ends as minus the prediction."""
    xs, ys = prompts.xs, torch.cat([prompts.context.ys, torch.zeros_like(prompts.query.ys)[:, None]], dim=1)
    for a, gamma in zip(sizes.to(xs), gammas.to(xs), strict=True):
        moments = xs[:, :-1].mT @ torch.cat([xs[:, :-1], ys[:, :-1]], dim=2)
        moved = xs @ moments
        ys = (ys - a * moved[:, :, xs.shape[2] :]).clamp(-clip, clip)
        xs = (xs - gamma * moved[:, :, : xs.shape[2]]).clamp(-clip, clip)
    return -ys[:, -1]


def _check_tuning(prompts: Prompts, steps: int, gamma: bool) -> None:
    if gamma and steps == 1:
        raise ValueError("gamma needs at least two steps: the last step's γ has no effect")
    if steps < 1 or len(prompts) == 0 or prompts.n_context == 0:
        raise ValueError(f"tuning needs prompts with context and at least one step, got {prompts} and steps={steps}")
    if not prompts.context.xs.any():
        raise ValueError("tuning needs prompts whose inputs are not all 0")
