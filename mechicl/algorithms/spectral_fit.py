"""Learners that apply a function to the context's second moments, fitted to any targets in one eigenbasis."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.spectra import PrefixSpectra, spectral_trajectory
from mechicl.algorithms.tuning import geometric_grid, minimize_on_grid
from mechicl.base.arguments import check_fields, checked
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts

Filter = Callable[[Float[Tensor, "*any"]], Float[Tensor, "*any"]]
SCREENING = 512  # prompts on which step numbers and starts are chosen, before the fit on all
N_GUARDS = 64
MOST_GROWTH, MARGIN = 100, 1.25  # of residuals on contexts whose eigenvalues exceed all those seen by this factor


@dataclass(frozen=True, eq=False)
class SpectralLearner:
    """A learner that predicts `x U f(λ) Uᵀ B`, with `S = U diag(λ) Uᵀ`: gradient descent, Newton, ridge and more.

    S = XᵀX and B = XᵀY sum over the points before the predicted one.

    Attributes:
        filter: f, from eigenvalues (x on the last axis) to values of the same shape.
        name: name in tables and pictures.
        hyperparameters: the fitted values.
        elementwise: True if f of one eigenvalue does not depend on the context's others.
    """

    filter: Filter
    name: str
    hyperparameters: dict[str, float] = field(default_factory=dict)
    elementwise: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    @checked(undefined=True)
    def trajectory(self, prompts: Prompts, *, with_weights: bool = False) -> Trajectory:
        """Return one step for all prefixes."""
        return spectral_trajectory(prompts, self._filters, name=self.name, with_weights=with_weights)

    @checked(undefined=True)
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Return the query's prediction; differentiable with respect to the query."""
        return spectral_trajectory(prompts, self._filters, name=self.name, at="query").predictions[0, :, -1]

    @checked(undefined=True)
    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Return every point's prediction."""
        return self.trajectory(prompts).predictions[0]

    def _filters(self, eigenvalues: Tensor) -> Tensor:
        return self.filter(eigenvalues)[None]


@dataclass(frozen=True, eq=False)
class SpectralProblem:
    """Prompts in their contexts' eigenbases, and the predictions of their queries that a learner is fitted to.

    Every algorithm that applies a function f to `S = XᵀX = U diag(λ) Uᵀ` predicts `Σ_i f(λ_i) (xU)_i (UᵀB)_i`. The
    products `(xU)_i (UᵀB)_i` depend on the prompts alone: with them the prediction is linear in the numbers f(λ_i).
    """

    eigenvalues: Float[Tensor, "prompt x"]  # λ
    contributions: Float[Tensor, "prompt x y"]  # each eigendirection's part of the prediction with f = 1
    targets: Float[Tensor, "prompt y"]

    @classmethod
    def from_prompts(cls, prompts: Prompts, targets: Float[Tensor, "prompt y"]) -> "SpectralProblem":
        """Decompose prompts, in float64 and without gradients."""
        xs, ys, targets = (values.detach().double() for values in (prompts.xs, prompts.ys, targets))
        spectra = PrefixSpectra.decompose(xs, ys, at="query")
        contributions = spectra.point_coordinates[:, 0, :, None] * spectra.target_coordinates[:, 0]
        return cls(spectra.eigenvalues[:, 0], contributions, targets)

    def guarded(self) -> "SpectralProblem":
        """Return the problem with a weak preference for filters that do not explode on larger eigenvalues.

        Adds rows whose target is `λ f(λ) = 1` up to `MARGIN` times the largest eigenvalue, each with 1/10,000 of the
        weight of a prompt: too little to move a fit, unless a residual there is hundreds of times the target.
        """
        # a guard is a prompt with one eigendirection λ, whose contribution w λ makes its prediction w λ f(λ), target w
        guards = torch.linspace(0, MARGIN * self.eigenvalues.max().item(), N_GUARDS + 1, dtype=torch.float64)[1:]
        weight = 1e-2 * self.targets.square().mean().sqrt()
        every = (self.eigenvalues, self.contributions, self.targets)
        rows = [each.new_zeros(N_GUARDS, *each.shape[1:]) for each in every]
        rows[0][:, 0], rows[1][:, 0, 0], rows[2][:, 0] = guards, weight * guards, weight
        return SpectralProblem(*map(torch.cat, zip(every, rows, strict=True)))

    def explodes(self, filtered: Filter) -> bool:
        """Return whether a residual, up to `MARGIN` times the largest eigenvalue, exceeds `MOST_GROWTH`."""
        beyond = torch.linspace(0, MARGIN, 400, dtype=torch.float64)[1:, None] * self.eigenvalues.max()
        return not bool(((1 - beyond * filtered(beyond)).abs() <= MOST_GROWTH).all())

    def error(self, filtered: Float[Tensor, "prompt x"]) -> Tensor:
        """Return the mean squared distance of the predictions with these filter values from the targets."""
        return ((filtered[..., None] * self.contributions).sum(1) - self.targets).square().mean()

    def errors(self, filtered: Float[Tensor, "value prompt x"]) -> Float[Tensor, "value"]:
        """Return the same for several filters at once; infinite if not finite."""
        predicted = torch.einsum("vpx,pxy->vpy", filtered, self.contributions)
        return (predicted - self.targets).square().mean((1, 2)).nan_to_num(math.inf)

    def first(self, n_prompts: int) -> "SpectralProblem":
        """Return the problem on the first prompts only."""
        return SpectralProblem(self.eigenvalues[:n_prompts], self.contributions[:n_prompts], self.targets[:n_prompts])

    def least(self, family: Callable[[float], Tensor], grid: Sequence[float]) -> tuple[float, float]:
        """Return the value of one hyperparameter with the least error (`minimize_on_grid`), and that error."""
        return minimize_on_grid(lambda value: self.error(family(value)).item(), grid)

    def least_steps(
        self,
        family: Callable[[Tensor, int, float | Tensor], Tensor],
        numbers: Sequence[int],
        grid: Callable[[int], list[float]],
    ) -> tuple[int, float, float]:
        """Return number of steps (fewest among equals), value and error of the nearest member."""
        few, screened = self.first(SCREENING), {}

        def screen(k: int) -> None:
            # A grid in the best valley of the last grid, seven times over: unlike Brent's method it evaluates many
            # values at once, and there are dozens of step numbers to screen.
            values = torch.tensor(grid(k), dtype=torch.float64)
            for _ in range(7):
                errors = few.errors(family(few.eigenvalues, k, values[:, None, None]))
                i = int(errors.argmin())
                screened[k] = (errors[i].item(), values[i].item())
                ends = values[max(i - 1, 0)].item(), values[min(i + 1, len(values) - 1)].item()
                values = torch.linspace(*ends, 13, dtype=torch.float64)

        for k in numbers:
            screen(k)
        while True:  # bisect between the best number and its neighbours
            best = min(screened, key=screened.__getitem__)
            below = max((k for k in screened if k < best), default=best)
            above = min((k for k in screened if k > best), default=best)
            between = {(below + best) // 2, (best + above + 1) // 2} - screened.keys()
            if not between:
                break
            for k in between:
                screen(k)
        fits = []
        for k in sorted(screened, key=screened.__getitem__)[:3]:
            value = screened[k][1]
            near = geometric_grid(0.6 * value, min(1.5 * value, grid(k)[-1]), 5)
            fits.append((k, *self.least(lambda value, k=k: family(self.eigenvalues, k, value), near)))
        least_error = min(error for _, _, error in fits)
        return min(fit for fit in fits if fit[2] <= 1.001 * least_error)

    def descend(
        self, family: Callable[[Tensor], Tensor], start: Float[Tensor, "parameter"], *, evaluations: int = 80
    ) -> tuple[Float[Tensor, "parameter"], float]:
        """Return the hyperparameters of least error from a start (Levenberg-Marquardt), and that error."""
        # Levenberg-Marquardt needs the slope of every residual with respect to every parameter. Each eigenvalue gets
        # its own copy of the parameters: one backward pass from the sum of all filter values then gives
        # d f(λ_i) / d parameter for all eigenvalues at once, and the contributions add them up to residuals.
        scale = math.sqrt(self.targets.numel() * max(self.targets.square().mean().item(), 1e-300))
        limit = 1e12  # of a residual and of its slopes: far beyond, a step is refused anyway

        def expanded(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values)[:, None, None].expand(-1, *self.eigenvalues.shape)

        def residuals(values: np.ndarray) -> np.ndarray:
            predicted = (family(expanded(values))[..., None] * self.contributions).sum(1)
            return ((predicted - self.targets).flatten() / scale).nan_to_num(limit).clamp(-limit, limit).numpy()

        @torch.enable_grad()
        def slopes(values: np.ndarray) -> np.ndarray:
            each = expanded(values).clone().requires_grad_()
            (slope,) = torch.autograd.grad(family(each).sum(), each)
            design = torch.einsum("kpx,pxy->pyk", slope, self.contributions).flatten(0, 1) / scale
            return design.nan_to_num(0.0).clamp(-limit, limit).numpy()

        fit = scipy.optimize.least_squares(
            residuals, start.double().numpy(), jac=slopes, x_scale="jac", max_nfev=evaluations,
            ftol=1e-10, xtol=1e-12, gtol=1e-14,
        )  # fmt: skip
        error = self.error(family(expanded(fit.x))).item()
        return torch.from_numpy(fit.x), error if math.isfinite(error) else math.inf

    def linear(self, basis: Callable[[Tensor], Tensor]) -> Float[Tensor, "parameter"]:
        """Return the coefficients of basis filters `[prompt x parameter]` with the least error, in closed form."""
        design = torch.einsum("pxk,pxy->pyk", basis(self.eigenvalues), self.contributions).flatten(0, 1)
        return torch.linalg.lstsq(design, self.targets.flatten()[:, None], driver="gelsd").solution[:, 0]


# Bounds of the searches. A filter f leaves the share 1 - λ f(λ) of the target along an eigendirection: (1 - aλ)^k for k
# steps of gradient descent, (1 - αλ²)^(2^k) for k iterations of Newton's method. Each is a power of 1 - s, which must
# not explode on contexts whose eigenvalues are somewhat larger than those seen: |1 - s|^power <= MOST_GROWTH bounds s
# at MARGIN times the largest eigenvalue, and with it the value that is searched. At the lower end of the grids a whole
# run does less than 1% of the way along the typical largest eigendirection.


def largest_stable(power: int) -> float:
    """Return the largest s with `|1 - s|^power <= MOST_GROWTH`."""
    return 1 + MOST_GROWTH ** (1 / power)


def polynomials(degree: int, largest: float) -> Callable[[Tensor], Tensor]:
    """Return the first Chebyshev polynomials on `[0, largest]` as filters: better conditioned than powers of λ."""

    def basis(eigenvalues: Tensor) -> Tensor:
        z = 2 * eigenvalues / largest - 1
        values = [torch.ones_like(z), z]
        while len(values) < degree:
            values.append(2 * z * values[-1] - values[-2])
        return torch.stack(values[:degree], dim=-1)

    return basis


def hats(knots: Float[Tensor, "knot"]) -> Callable[[Tensor], Tensor]:
    """Return piecewise linear functions that are 1 at one knot, 0 at the others, constant outside: `[... knot]`."""

    def basis(eigenvalues: Tensor) -> Tensor:
        if len(knots) == 1:
            return torch.ones_like(eigenvalues)[..., None]
        inside = eigenvalues.clamp(knots[0].item(), knots[-1].item()).contiguous()
        right = torch.searchsorted(knots, inside).clamp(1, len(knots) - 1)
        share = (inside - knots[right - 1]) / (knots[right] - knots[right - 1])
        left = torch.nn.functional.one_hot(right - 1, len(knots)) * (1 - share)[..., None]
        return left + torch.nn.functional.one_hot(right, len(knots)) * share[..., None]

    return basis
