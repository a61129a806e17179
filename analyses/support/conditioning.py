"""Condition numbers of the context's second moments under the data transformation of GD++."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.tuning import minimize_on_grid
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, interval

FLOOR = 1e-10
"""Smaller eigenvalues are raised to this, where von Oswald et al. 2023, A.10, cut the smallest one."""


def transformed_eigenvalues(eigenvalues: Float[Tensor, "*any"], gamma: float | Tensor) -> Float[Tensor, "*any"]:
    """Compute the eigenvalues of XᵀX after `X ← X (I - γ XᵀX)`: each λ becomes `λ (1 - γλ)²`, in the same order.

    With γ > 0 the map rises to `4 / 27γ` at `λ = 1 / 3γ`, falls to 0 at `1 / γ`, and is `4 / 27γ` again at `4 / 3γ`.
    Source: von Oswald et al. 2023, A.10, eq. 25.
    """
    return eigenvalues * (1 - gamma * eigenvalues).square()


@dataclass(frozen=True)
class EigenvalueRange:
    """An interval that contains all eigenvalues."""

    smallest: float  # λ_min > 0
    largest: float  # λ_max >= λ_min

    def condition_numbers(self, gammas: Sequence[float]) -> Float[Tensor, "gamma"]:
        """Compute the largest over the smallest value of `λ (1 - γλ)²` on the interval; infinite if 1/γ lies in it."""
        # The extremes of the smooth map on the interval are at the ends, at the local maximum 1/3γ if that lies inside,
        # or at the double root 1/γ, where it is 0.
        gamma = torch.tensor(gammas, dtype=torch.float64)

        def contains(values: Tensor) -> Tensor:
            return (self.smallest <= values) & (values <= self.largest)

        low, high = (transformed_eigenvalues(torch.full_like(gamma, end), gamma) for end in dataclasses.astuple(self))
        peak = torch.where(contains(1 / (3 * gamma)), 4 / (27 * gamma), -math.inf)  # the local maximum
        ratio = torch.stack([low, high, peak]).amax(0) / torch.minimum(low, high)
        return ratio.masked_fill(contains(1 / gamma), math.inf)

    @property
    def heuristic_gamma(self) -> float:
        """The γ up to 1/λ_max with the least condition number, `1 / (λ_max + √(λ_max λ_min) + λ_min)`.

        There both ends have the same value. Von Oswald et al. 2023, A.10, minimise numerically; the closed form is
        ours.
        """
        return 1 / (self.largest + math.sqrt(self.largest * self.smallest) + self.smallest)


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Condition numbers of the contexts' second moments `S = XᵀX`, before and after one data transformation of GD++."""

    gammas: tuple[float, ...]  # γ of the transformations
    eigenvalues: Float[Tensor, "x prompt"]  # of S, ascending, at least `FLOOR`
    before: Float[Tensor, "prompt"]  # condition number of each prompt's S
    after: Float[Tensor, "gamma prompt"]  # of its mapped eigenvalues

    @property
    def extremes(self) -> EigenvalueRange:
        """The smallest and the largest eigenvalue of all prompts: the more prompts, the further apart."""
        return EigenvalueRange(self.eigenvalues[0].min().item(), self.eigenvalues[-1].max().item())

    def quantiles(self, probabilities: Sequence[float]) -> Float[Tensor, "quantile gamma"]:
        """Compute quantiles over prompts of the condition number after the map with each γ."""
        return torch.quantile(self.after, self.after.new_tensor(list(probabilities)), dim=-1)

    def median_before(self) -> Interval:
        """Compute the median condition number of S, with an interval over prompts from order statistics."""
        return _median(self.before)

    def medians(self) -> list[Interval]:
        """Compute the median condition number after the map with each γ, like `median_before`."""
        return [_median(values) for values in self.after]

    def improved(self) -> list[Interval]:
        """Measure the share of prompts whose condition number is smaller after the map with each γ."""
        return [interval(values < self.before) for values in self.after]

    def beyond_root(self) -> list[Interval]:
        """Measure the share of prompts with an eigenvalue above 1/γ, the map's root, for each γ."""
        return [interval(gamma * self.eigenvalues[-1] > 1) for gamma in self.gammas]

    def best_gamma(self, *, resamples: int = 200, seed: int = 0) -> Interval:
        """Find the γ with the least mean logarithm of the condition number; it is the interval's `mean`.

        Found on a grid and refined between the best value's neighbours; the interval is from resampled prompts, on the
        grid. (The paper takes the extreme eigenvalues of all tasks instead: `extremes.heuristic_gamma`.)
        """

        def error(gamma: float) -> float:
            return _condition_numbers(self.eigenvalues, gamma).log().mean().item()

        typical = 1 / self.eigenvalues[-1].median().item()
        coarse = (typical * torch.logspace(-2, 0.6, 120, dtype=torch.float64)).tolist()
        best, _ = minimize_on_grid(error, coarse, tolerance=1e-5)
        around = best * (1 + 0.25 * torch.linspace(-1, 1, 121, dtype=torch.float64) ** 3)  # the denser, the nearer
        grid = sorted({*coarse, *around.tolist()})
        logs = torch.stack([_condition_numbers(self.eigenvalues, gamma).log() for gamma in grid])
        n = logs.shape[1]
        generator = torch.Generator().manual_seed(seed)
        # a resample is a count of each prompt, so that all sums over the grid are one product of matrices
        drawn = [torch.randint(n, (n,), generator=generator).bincount(minlength=n) for _ in range(resamples)]
        picked = (logs @ torch.stack(drawn).to(logs).T).argmin(0).cpu()  # the least sum of each resample
        gammas = torch.tensor(grid, dtype=torch.float64)[picked]
        return Interval(best, gammas.quantile(0.025).item(), gammas.quantile(0.975).item(), n)

    def at(self, gammas: Sequence[float]) -> "Conditioning":
        """Compute the condition numbers of these prompts after the map with other γ."""
        after = torch.stack([_condition_numbers(self.eigenvalues, gamma) for gamma in gammas])
        return dataclasses.replace(self, gammas=tuple(map(float, gammas)), after=after)


def measure_conditioning(prompts: Prompts, gammas: Sequence[float]) -> Conditioning:
    """Measure the condition numbers of `S = XᵀX` of each context, before and after GD++ maps the inputs once.

    Args:
        prompts: prompts whose contexts are measured, in float64; X has the inputs of the context points.
        gammas: values of γ >= 0 to try in the map `X ← X (I - γS)`; S is a sum over the points, not a mean.

    Source: von Oswald et al. 2023, A.10 and Fig. 13.
    """
    xs = prompts.context.xs.detach().double()
    eigenvalues = torch.linalg.eigvalsh(xs.mT @ xs).clamp(min=FLOOR).T.contiguous()
    before = eigenvalues[-1] / eigenvalues[0]
    return Conditioning((), eigenvalues, before, before.new_zeros(0, len(before))).at(gammas)


def _condition_numbers(eigenvalues: Float[Tensor, "x prompt"], gamma: float) -> Float[Tensor, "prompt"]:
    mapped = transformed_eigenvalues(eigenvalues, gamma).clamp(min=FLOOR)
    return mapped.amax(0) / mapped.amin(0)


def _median(values: Float[Tensor, "prompt"]) -> Interval:
    ordered, n = values.double().sort().values, len(values)
    middle = ordered.quantile(0.5).item()
    rank = math.floor(scipy.special.bdtrik(0.025, n, 0.5))  # quantile of the number of heads of n fair coins
    if rank < 1:
        return Interval(middle, math.nan, math.nan, n)
    return Interval(middle, ordered[rank - 1].item(), ordered[n - rank].item(), n)
