"""Many ridge regressions at once, from running sums: memory does not grow with the number of samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import NonNegative, at_least

PENALTIES = tuple(10.0**e for e in range(-12, 3))  # the default, relative to the mean variance of the features
Folds = Annotated[int, at_least(2)]
WORK = 8  # matrices per site for solving: sums without a fold, covariances, eigenvectors and their work space


@dataclass(frozen=True, eq=False)
class LinearMaps:
    """Fitted maps `features @ weights + bias`, one per site (a layer, a position, ...).

    Attributes:
        penalties: the chosen penalties `[*site y]`, relative to the mean variance of the features.
        validation_errors: mean squared error of each candidate in cross-validation, `[penalty *site y]`.
    """

    weights: Float[Tensor, "*site feature y"]
    bias: Float[Tensor, "*site y"]
    penalties: Float[Tensor, "*site y"]
    validation_errors: Float[Tensor, "penalty *site y"]


class RidgeSums:
    """Running sums from which ridge regressions follow, one at each site (a layer, a position, ...).

    Samples fall into folds by the number of their prompt, so that all samples of a prompt are validated together.
    """

    def __init__(self, folds: Folds = 4):
        self.folds = folds
        self.n_prompts = 0

    def add(
        self, features: Float[Tensor, "*site prompt sample feature"], targets: Float[Tensor, "*#site prompt sample y"]
    ) -> None:
        """Add a batch of prompts, each with its samples at every site; targets may have sites of size 1."""
        features, targets = features.double(), targets.to(features.device).double()
        if self.n_prompts == 0:
            *site, _, _, n_features = features.shape
            size, n_targets = n_features + 1, targets.shape[-1]
            # about the first batch's means, so that large means cost no digits
            self.shift = features.mean((-3, -2), keepdim=True)
            self.target_shift = targets.mean((-3, -2), keepdim=True)
            self.second = features.new_zeros(self.folds, *site, size, size)
            self.cross = features.new_zeros(self.folds, *site, size, n_targets)
            self.targets = features.new_zeros(self.folds, *site, n_targets)
        targets = targets - self.target_shift
        ones = torch.ones_like(features[..., :1])
        extended = torch.cat([features - self.shift, ones], dim=-1)
        n = features.shape[-3]
        fold_of = (torch.arange(n, device=features.device) + self.n_prompts) % self.folds
        for fold in range(self.folds):
            inside = fold_of == fold
            x, y = extended[..., inside, :, :].flatten(-3, -2), targets[..., inside, :, :].flatten(-3, -2)
            self.second[fold] += x.mT @ x
            self.cross[fold] += x.mT @ y
            self.targets[fold] += y.square().sum(-2)
        self.n_prompts += n

    def solve(self, penalties: Sequence[NonNegative] = PENALTIES) -> LinearMaps:
        """Fit the maps at the penalties that are best in cross-validation, chosen for every site and target."""
        if not penalties:
            raise ValueError("penalties must be one or more numbers, got none")
        if self.n_prompts < self.folds:
            raise ValueError(f"{self.folds}-fold cross-validation of {self.n_prompts} prompts: give more prompts")
        if not all(sums.isfinite().all() for sums in (*self.second, *self.cross)):
            raise ValueError("features or targets have values that are not finite: has the model diverged?")
        if self.targets.ndim == 2:  # one site
            return LinearMaps(*self._solve_at((), penalties))
        columns = zip(*(self._solve_at((i,), penalties) for i in range(self.targets.shape[1])), strict=True)
        weights, bias, chosen, errors = map(list, columns)
        return LinearMaps(torch.stack(weights), torch.stack(bias), torch.stack(chosen), torch.stack(errors, dim=1))

    def _solve_at(self, place: tuple[int, ...], penalties: Sequence[float]) -> tuple[Tensor, ...]:
        """Fields of the maps at one entry of the first axis of sites, so that solving needs the memory of one."""
        folds = tuple(sums[(slice(None), *place)] for sums in (self.second, self.cross, self.targets))
        second, cross = folds[0].sum(0), folds[1].sum(0)
        errors = torch.zeros(len(penalties), *folds[2].shape[1:], dtype=torch.float64, device=second.device)
        for held_second, held_cross, held_targets in zip(*folds, strict=True):
            solver = _Solver(second - held_second, cross - held_cross)
            for i, penalty in enumerate(penalties):
                maps = solver.at(torch.full_like(errors[i], penalty))
                # Σ (y - xᵀw)² = Σ y² - 2 wᵀ Σ xy + wᵀ (Σ xxᵀ) w: the fold's error follows from its sums
                explained = 2 * (maps * held_cross).sum(-2) - (maps * (held_second @ maps)).sum(-2)
                errors[i] += held_targets - explained
        errors = errors / second[..., -1, -1:]
        chosen = torch.tensor(list(penalties), dtype=torch.float64, device=second.device)[errors.argmin(0)]
        maps = _Solver(second, cross).at(chosen)
        weights, bias = maps[..., :-1, :], maps[..., -1, :]
        target_shift = self.target_shift.expand(*self.shift.shape[:-1], -1)  # its sites may be of size 1
        bias = bias - (self.shift[place][..., 0, :, :] @ weights)[..., 0, :] + target_shift[place][..., 0, 0, :]
        return weights, bias, chosen, errors


def count_sums(sites: Sequence[int], n_features: int, n_targets: int, folds: int) -> float:
    """Bytes for `RidgeSums` at these sites, and for solving them."""
    n_sites, size = math.prod(sites), n_features + 1
    n_matrices = (folds + 1) * n_sites + WORK * n_sites / (sites[0] if sites else 1)
    return 8.0 * n_matrices * size * (size + n_targets)


class _Solver:
    """Ridge with an unpenalised bias: one eigendecomposition per site, any number of penalties."""

    def __init__(self, second: Float[Tensor, "*site size size"], cross: Float[Tensor, "*site size y"]):
        n = second[..., -1:, -1:]
        self.mean, self.target_mean = second[..., :-1, -1:] / n, cross[..., -1:, :] / n
        covariance = second[..., :-1, :-1] / n - self.mean @ self.mean.mT
        self.covariance_with_target = cross[..., :-1, :] / n - self.mean @ self.target_mean
        # with C = V diag(λ) Vᵀ, ridge is V diag(1 / (λ + penalty)) Vᵀ c: each further penalty costs two products
        self.eigenvalues, self.vectors = torch.linalg.eigh(covariance)
        self.eigenvalues = self.eigenvalues.clamp(min=0)
        self.rotated = self.vectors.mT @ self.covariance_with_target

    def at(self, penalties: Float[Tensor, "*site y"]) -> Float[Tensor, "*site size y"]:
        eigenvalues = self.eigenvalues[..., None]
        # directions without variance, or with so little that it is rounding noise, get no weight
        floor = 1e-14 * eigenvalues.shape[-2] * eigenvalues.amax(-2, keepdim=True)
        damped = eigenvalues + penalties[..., None, :] * eigenvalues.mean(-2, keepdim=True)
        weights = self.vectors @ (torch.where(eigenvalues > floor, self.rotated / damped, 0.0))
        bias = self.target_mean - einsum(self.mean, weights, "... f one, ... f y -> ... one y")
        return torch.cat([weights, bias], dim=-2)
