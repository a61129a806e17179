"""Tasks as a user would write them."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from mechicl.prompts import Prompts
from mechicl.tasks import PromptDistribution, RandomTensors


@dataclass(frozen=True)
class SparseRegression(PromptDistribution):
    """`y = w.x` with few weights that are not zero."""

    x_dim: int = 4
    n_context: int = 5
    n_nonzero: int = 1
    scales: tuple[float, ...] = (1.0,)
    y_dim: int = 1

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        xs = random.normal(n_prompts, self.n_context + 1, self.x_dim)
        order = random.uniform(n_prompts, self.x_dim, 1).argsort(1)
        weights = random.normal(n_prompts, self.x_dim, self.y_dim) * (order < self.n_nonzero) * self.scales[0]
        return Prompts(xs, xs @ weights)


@dataclass(frozen=True)
class Plain:
    """The members of the protocol, and no base class."""

    x_dim: int = 2
    y_dim: int = 1
    n_context: int = 3

    def sample(self, n_prompts: int, *, seed=None, generator=None, device=None, dtype=torch.float32) -> Prompts:
        if generator is None:
            generator = torch.Generator(device=device or "cpu").manual_seed(seed or 0)
        xs = torch.randn(n_prompts, self.n_context + 1, self.x_dim, generator=generator, device=generator.device)
        return Prompts(xs, xs.sum(-1, keepdim=True)).to(dtype)

    def replace(self, **changes: Any) -> "Plain":
        return replace(self, **changes)


@dataclass(frozen=True)
class Mixture(PromptDistribution):
    """Prompts from one of two tasks each."""

    first: Any
    second: Any

    x_dim = property(lambda self: self.first.x_dim)
    y_dim = property(lambda self: self.first.y_dim)
    n_context = property(lambda self: self.first.n_context)

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        kwargs = {"generator": random.generator, "dtype": random.dtype}
        both = [task.sample(n_prompts, **kwargs) for task in (self.first, self.second)]
        return Prompts.concatenate(both)[random.integers(0, 2 * n_prompts, n_prompts)]


class NoData:
    """Not a dataclass."""

    x_dim, y_dim, n_context = 2, 1, 3
    sample, replace = Plain.sample, Plain.replace
