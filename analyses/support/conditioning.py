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
from mechicl.base.arguments import Count, Fraction, NonNegative, Positive, check_fields, checked
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, interval
from mechicl.statistics.intervals import ConfidenceLevel

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

    smallest: Positive  # λ_min > 0
    largest: Positive  # λ_max >= λ_min

    def __post_init__(self):
        check_fields(self)
        if self.smallest > self.largest:
            raise ValueError(f"smallest must not exceed largest, got {self.smallest} and {self.largest}")

    @checked
    def condition_numbers(self, gammas: Sequence[NonNegative]) -> Float[Tensor, "gamma"]:
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
class Conditioning(Result):
    """Condition numbers of the contexts' second moments `S = XᵀX`, before and after one data transformation of GD++.

    Attributes:
        gammas: γ of the transformations.
        floor: smaller eigenvalues, before or after, are raised to this.
        eigenvalues: eigenvalues of S, at least `floor`, `[x prompt]`, ascending.
        before: condition number of each prompt's S.
        after: condition number of each prompt's mapped eigenvalues, `[gamma prompt]`.
    """

    gammas: tuple[float, ...]
    floor: float
    eigenvalues: Float[Tensor, "x prompt"]
    before: Float[Tensor, "prompt"]
    after: Float[Tensor, "gamma prompt"]

    @property
    def smallest(self) -> Float[Tensor, "prompt"]:
        """Each prompt's smallest eigenvalue."""
        return self.eigenvalues[0]

    @property
    def largest(self) -> Float[Tensor, "prompt"]:
        """Each prompt's largest eigenvalue."""
        return self.eigenvalues[-1]

    @property
    def extremes(self) -> EigenvalueRange:
        """The smallest and the largest eigenvalue of all prompts: the more prompts, the further apart."""
        return EigenvalueRange(self.smallest.min().item(), self.largest.max().item())

    @checked
    def quantiles(self, probabilities: Sequence[Fraction]) -> Float[Tensor, "quantile gamma"]:
        """Compute quantiles over prompts of the condition number after the map with each γ."""
        return torch.quantile(self.after, self.after.new_tensor(list(probabilities)), dim=-1)

    def median_before(self, level: ConfidenceLevel = 0.95) -> Interval:
        """Compute the median condition number of S, with an interval over prompts from order statistics."""
        return _median(self.before, level)

    def medians(self, level: ConfidenceLevel = 0.95) -> list[Interval]:
        """Compute the median condition number after the map with each γ, like `median_before`."""
        return [_median(values, level) for values in self.after]

    def improved(self, level: ConfidenceLevel = 0.95) -> list[Interval]:
        """Measure the share of prompts whose condition number is smaller after the map with each γ."""
        return [interval((values < self.before), level) for values in self.after]

    def beyond_root(self, level: ConfidenceLevel = 0.95) -> list[Interval]:
        """Measure the share of prompts with an eigenvalue above 1/γ, the map's root, for each γ."""
        return [interval((gamma * self.largest > 1), level) for gamma in self.gammas]

    @checked
    def best_gamma(self, *, resamples: Count = 200, seed: int = 0, level: ConfidenceLevel = 0.95) -> Interval:
        """Find the γ with the least mean logarithm of the condition number; it is the interval's `mean`.

        Found on a grid and refined between the best value's neighbours; the interval is from resampled prompts, on the
        grid. (The paper takes the extreme eigenvalues of all tasks instead: `extremes.heuristic_gamma`.)
        """

        def error(gamma: float) -> float:
            return _condition_numbers(self.eigenvalues, gamma, self.floor).log().mean().item()

        typical = 1 / self.largest.median().item()
        coarse = (typical * torch.logspace(-2, 0.6, 120, dtype=torch.float64)).tolist()
        best, _ = minimize_on_grid(error, coarse, tolerance=1e-5)
        around = best * (1 + 0.25 * torch.linspace(-1, 1, 121, dtype=torch.float64) ** 3)  # the denser, the nearer
        grid = sorted({*coarse, *around.tolist()})
        logs = torch.stack([_condition_numbers(self.eigenvalues, gamma, self.floor).log() for gamma in grid])
        n = logs.shape[1]
        generator = torch.Generator().manual_seed(seed)
        # a resample is a count of each prompt, so that all sums over the grid are one product of matrices
        drawn = [torch.randint(n, (n,), generator=generator).bincount(minlength=n) for _ in range(resamples)]
        picked = (logs @ torch.stack(drawn).to(logs).T).argmin(0).cpu()  # the least sum of each resample
        gammas = torch.tensor(grid, dtype=torch.float64)[picked]
        low, high = (gammas.quantile(q).item() for q in ((1 - level) / 2, (1 + level) / 2))
        return Interval(best, low, high, n, level)

    @checked
    def at(self, gammas: Sequence[NonNegative]) -> "Conditioning":
        """Compute the condition numbers of these prompts after the map with other γ."""
        if not gammas:
            raise ValueError("gammas must not be empty")
        after = torch.stack([_condition_numbers(self.eigenvalues, gamma, self.floor) for gamma in gammas])
        return dataclasses.replace(self, gammas=tuple(map(float, gammas)), after=after)


@checked
def measure_conditioning(prompts: Prompts, gammas: Sequence[NonNegative], *, floor: Positive = FLOOR) -> Conditioning:
    """Measure the condition numbers of `S = XᵀX` of each context, before and after GD++ maps the inputs once.

    Args:
        prompts: prompts whose contexts are measured, in float64; X has the inputs of the context points.
        gammas: values of γ to try in the map `X ← X (I - γS)`, each >= 0; S is a sum over the points, not a mean.
        floor: smaller eigenvalues are raised to this number, such as the zeros of S with fewer points than dimensions.

    Returns:
        A `Conditioning`: condition numbers (largest over smallest eigenvalue) `before` `[prompt]` and `after`
        `[gamma prompt]`. `median_before()` and `medians()` (one entry per γ) are medians with 95% intervals over
        prompts; `improved()` is the share of prompts with a smaller condition number after the map; `best_gamma()`
        finds the best γ.

    Source: von Oswald et al. 2023, A.10 and Fig. 13.
    """
    if len(prompts) == 0 or prompts.n_context == 0:
        raise ValueError(f"prompts must have context points, got {prompts}")
    xs = prompts.context.xs.detach().double()
    eigenvalues = torch.linalg.eigvalsh(xs.mT @ xs).clamp(min=floor).T.contiguous()
    before = eigenvalues[-1] / eigenvalues[0]
    return Conditioning((), floor, eigenvalues, before, before.new_zeros(0, len(before))).at(gammas)


def _condition_numbers(eigenvalues: Float[Tensor, "x prompt"], gamma: float, floor: float) -> Float[Tensor, "prompt"]:
    mapped = transformed_eigenvalues(eigenvalues, gamma).clamp(min=floor)
    return mapped.amax(0) / mapped.amin(0)


def _median(values: Float[Tensor, "prompt"], level: float) -> Interval:
    ordered, n = values.double().sort().values, len(values)
    middle = ordered.quantile(0.5).item()
    rank = math.floor(scipy.special.bdtrik((1 - level) / 2, n, 0.5))  # quantile of the number of heads of n fair coins
    if rank < 1:
        return Interval(middle, math.nan, math.nan, n, level)
    return Interval(middle, ordered[rank - 1].item(), ordered[n - rank].item(), n, level)
