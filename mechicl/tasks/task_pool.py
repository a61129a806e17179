"""Linear regression whose weights come from a finite pool, for what a model learns from few tasks."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import check_fields
from mechicl.base.checks import require_active_dims, require_finite, require_whole
from mechicl.prompts import Prompts
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.sampling import PromptDistribution, RandomTensors


@dataclass(frozen=True)
class TaskPool(PromptDistribution):
    """Linear functions `y = x w + noise` of Gaussian inputs, whose `w` is one of a finite pool.

    Inputs and noise are new in every prompt; only the weights repeat. (`FixedTasks` repeats whole prompts.) The best
    predictor is `algorithms.dmmse` with this pool, and `algorithms.ridge` is its limit for many tasks: which of the two
    a model is nearer to says whether it has learned the pool, or the distribution that the pool was drawn from.

    Source: Raventós et al. 2023, section 2. Their prompts of K = 16 points have 15 points of context and the query.

    Attributes:
        x_dim: dimension of the inputs, standard normal.
        n_context: number of context points; the query comes on top.
        n_tasks: size of the pool, M in the paper.
        noise_std: standard deviation of Gaussian noise on the targets, the query's too; the paper's variance is 0.25.
        seed: that the pool is drawn with, from N(0, I).
        active_dims: all but the first so many input coordinates are zero, for curricula.

    Raises:
        ValueError: a field is out of range.

    Example:
        >>> task = TaskPool(n_tasks=4)
        >>> task.weights.shape, task.sample(100, seed=0)
        (torch.Size([4, 8]), Prompts(n_prompts=100, n_context=15, x_dim=8, y_dim=1, dtype=torch.float32, device='cpu'))
    """

    x_dim: int = 8
    n_context: int = 15
    n_tasks: int = 8
    noise_std: float = 0.5
    seed: int = 0
    active_dims: int | None = None

    def __post_init__(self):
        check_fields(self)
        require_whole(self, x_dim=1, n_context=0, n_tasks=1, seed=0)
        require_finite(self, "noise_std", least=0.0)
        require_active_dims(self)

    @property
    def y_dim(self) -> int:
        """One target."""
        return 1

    @property
    def weights(self) -> Float[Tensor, "task x"]:
        """The pool, float64 on the CPU."""
        return self._weights.clone()

    @property
    def new_tasks(self) -> LinearRegression:
        """The distribution that the pool was drawn from: the pool's limit for many tasks."""
        return LinearRegression(x_dim=self.x_dim, n_context=self.n_context, inputs="gaussian", noise_std=self.noise_std)

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
