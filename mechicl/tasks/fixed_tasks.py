"""A finite pool of prompts, for what a model learns from few tasks."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mechicl.base.arguments import check_fields
from mechicl.base.checks import require_whole
from mechicl.prompts import Prompts
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.protocol import Task
from mechicl.tasks.sampling import PromptDistribution, RandomTensors
from mechicl.tasks.sine_regression import SineRegression


@dataclass(frozen=True)
class FixedTasks(PromptDistribution):
    """A finite set of prompts to train on, sampled once from another task.

    `sample` gives a minibatch: without repeats while it can be (so `n_tasks` of them are the whole set), else with.

    Source: von Oswald et al. 2023, A.12 and Fig. 16 (128 to 8192 tasks), and Fig. 15 (grokking).

    Attributes:
        task: where the prompts come from.
        n_tasks: how many there are.
        seed: that they are sampled with.
    """

    task: LinearRegression | SineRegression | Any  # the command line offers these; any `Task` will do
    n_tasks: int
    seed: int = 0

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.task, FixedTasks) or not isinstance(self.task, Task):
            raise ValueError(f"fixed tasks are sampled from a task of points, got {type(self.task).__name__}")
        require_whole(self, n_tasks=1, seed=0)

    @property
    def x_dim(self) -> int:
        """Dimension of the inputs."""
        return self.task.x_dim

    @property
    def y_dim(self) -> int:
        """Dimension of the targets."""
        return self.task.y_dim

    @property
    def n_context(self) -> int:
        """Number of context points."""
        return self.task.n_context

    @cached_property
    def prompts(self) -> Prompts:
        """All of them, float64 on the CPU."""
        return self.task.sample(self.n_tasks, seed=self.seed, dtype=torch.float64)

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        if n_prompts <= self.n_tasks:
            index = torch.randperm(self.n_tasks, generator=random.generator, device=random.device)[:n_prompts]
        else:
            index = random.integers(0, self.n_tasks, n_prompts)
        return self.prompts[index.cpu()].to(random.device)
