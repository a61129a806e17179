"""Tasks that reward forgetting or recall: weights that drift along the prompt, and inputs that come again."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, Natural, between
from mechicl.prompts import Prompts
from mechicl.tasks.function_classes import GaussianInputs, NoisyPoints
from mechicl.tasks.sampling import RandomTensors


@dataclass(frozen=True, repr=False)
class DriftingRegression(NoisyPoints):
    """Linear functions whose weights take a random walk along the prompt, so that old points mislead.

    `w_t = √(1 - ρ) w_{t-1} + √ρ e_t` with standard normal `w_0` and e, so the weights' variance stays 1. The query has
    the last weights. `sample(n, seed=...)` draws `Prompts`.

    Source: Haykin 2002, chapter 14 (tracking a random walk).

    Attributes:
        x_dim: dimension of the inputs, which are standard normal.
        n_context: number of context points, without the query.
        active_dims: number of input coordinates that are not zero, the first ones; None for all (used by curricula).
        noise_std: standard deviation of Gaussian noise on all targets, the query's too.
        renewed: ρ, the share of the weights' variance that is new at each point.

    Example:
        >>> DriftingRegression(x_dim=5, n_context=20, renewed=0.1).sample(3, seed=0).ys.shape
        torch.Size([3, 21, 1])
    """

    n_context: Natural = 20
    renewed: Annotated[float, between(0, 1)] = 0.05

    def _values(self, xs: Float[Tensor, "prompt point x"], random: RandomTensors) -> Float[Tensor, "prompt point"]:
        steps = random.normal(*xs.shape)
        weights = [steps[:, 0]]
        for t in range(1, xs.shape[1]):
            weights.append((1 - self.renewed) ** 0.5 * weights[-1] + self.renewed**0.5 * steps[:, t])
        return (xs * torch.stack(weights, dim=1)).sum(-1)


@dataclass(frozen=True, repr=False)
class AssociativeRecall(GaussianInputs):
    """Pairs of random inputs and unrelated targets that come again: the query is one of the context's inputs.

    Each prompt has `n_keys` standard normal inputs, each with a target from N(0, 1). Every point is one of these pairs,
    drawn with replacement, and the query is one that the context contains. `sample(n, seed=...)` draws `Prompts`.

    Source: Arora et al. 2023, whose keys and values are tokens.

    Attributes:
        x_dim: dimension of the inputs, which are standard normal.
        n_context: number of context points, without the query.
        active_dims: number of input coordinates that are not zero, the first ones; None for all (used by curricula).
        n_keys: number of pairs in a prompt.

    Example:
        >>> AssociativeRecall(x_dim=5, n_context=20, n_keys=8).sample(3, seed=0).xs.shape
        torch.Size([3, 21, 5])
    """

    n_context: Natural = 20
    n_keys: Count = 8

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        n = self.n_context
        keys, values = random.normal(n_prompts, self.n_keys, self.x_dim), random.normal(n_prompts, self.n_keys, 1)
        keys[..., self.n_active :] = 0
        chosen = random.integers(0, self.n_keys, n_prompts, n + 1)
        if n:  # the query's pair is that of a random point
            chosen[:, -1:] = chosen.gather(1, random.integers(0, n, n_prompts, 1))
        xs, ys = (pairs.gather(1, chosen[..., None].expand(-1, -1, pairs.shape[-1])) for pairs in (keys, values))
        return Prompts(xs, ys)
