"""Finite pools of tasks or prompts, for studying what a model learns from few tasks."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, Natural, NonNegative, check_fields
from mechicl.prompts import Prompts
from mechicl.tasks.function_classes import SineRegression
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.sampling import PromptDistribution, RandomTensors, Task, check_active_dims


@dataclass(frozen=True, repr=False)
class FixedTasks(PromptDistribution):
    """A finite set of prompts to train on, sampled once from another task: does a model memorise or generalise?

    `sample(n, seed=...)` draws `Prompts` from the set: without repeats up to `n_tasks` prompts (which are then the
    whole set), else with repeats. Source: von Oswald et al. 2023, A.12 and Fig. 16 (128 to 8192 tasks), and Fig. 15
    (grokking).

    Attributes:
        task: task that the prompts are sampled from.
        n_tasks: number of prompts in the set.
        seed: seed that they are sampled with.
    """

    task: LinearRegression | SineRegression | Any  # the command line offers these; any `Task` will do
    n_tasks: Count
    seed: Natural = 0

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.task, FixedTasks) or not isinstance(self.task, Task):
            raise ValueError(f"fixed tasks are sampled from a task of points, got {type(self.task).__name__}")

    x_dim = property(lambda self: self.task.x_dim)
    y_dim = property(lambda self: self.task.y_dim)
    n_context = property(lambda self: self.task.n_context)

    @cached_property
    def prompts(self) -> Prompts:
        """All prompts of the set, float64 on the CPU."""
        return self.task.sample(self.n_tasks, seed=self.seed, dtype=torch.float64)

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        if n_prompts <= self.n_tasks:
            index = torch.randperm(self.n_tasks, generator=random.generator, device=random.device)[:n_prompts]
        else:
            index = random.integers(0, self.n_tasks, n_prompts)
        return self.prompts[index.cpu()].to(random.device)


@dataclass(frozen=True, repr=False)
class TaskPool(PromptDistribution):
    """Linear functions `y = x w + noise` of Gaussian inputs, where `w` is one of a finite pool.

    Inputs and noise are new in every prompt; only the weights repeat. (`FixedTasks` repeats whole prompts.) The best
    predictor is `algorithms.dmmse` with this pool, and `algorithms.ridge` is its limit for many tasks. A model near the
    first has learned the pool, one near the second the distribution that the pool was drawn from. `sample(n, seed=...)`
    draws `Prompts`. Source: Raventós et al. 2023, section 2. Their prompts of K = 16 points have 15 points of context
    and the query.

    Attributes:
        x_dim: dimension of the inputs, which are standard normal.
        n_context: number of context points, without the query.
        n_tasks: size of the pool, M in the paper.
        noise_std: standard deviation of Gaussian noise on all targets, the query's too.
        seed: seed of the pool, which is drawn from N(0, I).
        active_dims: number of input coordinates that are not zero, the first ones; None for all (used by curricula).

    Example:
        >>> task = TaskPool(n_tasks=4)
        >>> task.weights.shape, task.sample(100, seed=0)
        (torch.Size([4, 8]), Prompts(n_prompts=100, n_context=15, x_dim=8, y_dim=1, dtype=torch.float32, device='cpu'))
    """

    x_dim: Count = 8
    n_context: Natural = 15
    n_tasks: Count = 8
    noise_std: NonNegative = 0.5
    seed: Natural = 0
    active_dims: Count | None = None
    y_dim = 1

    def __post_init__(self):
        check_fields(self)
        check_active_dims(self)

    @property
    def weights(self) -> Float[Tensor, "task x"]:
        """Weights of all tasks of the pool, float64 on the CPU."""
        return self._weights.clone()

    @property
    def new_tasks(self) -> LinearRegression:
        """The task whose weights are new in every prompt, from the distribution that the pool was drawn from."""
        return LinearRegression(
            x_dim=self.x_dim, n_context=self.n_context, inputs="gaussian", noise_std=self.noise_std,
            active_dims=self.active_dims,
        )  # fmt: skip

    @cached_property
    def _weights(self) -> Float[Tensor, "task x"]:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.n_tasks, self.x_dim, generator=generator, dtype=torch.float64)

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        xs = random.normal(n_prompts, self.n_context + 1, self.x_dim)
        if self.active_dims is not None:
            xs[..., self.active_dims :] = 0
        index = random.integers(0, self.n_tasks, n_prompts)
        ys = xs @ self._weights.to(xs)[index][..., None]
        return Prompts(xs, ys + self.noise_std * random.normal(*ys.shape))
