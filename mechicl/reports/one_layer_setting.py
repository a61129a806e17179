"""What the comparisons of one layer with one step of gradient descent share: both, and held-out prompts."""

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import algorithms, constructions
from mechicl.analysis import fit_construction
from mechicl.analysis.weights import linear_attention_optimum, one_step_optimum
from mechicl.analysis.weights.fits import ConstructionFit
from mechicl.analysis.weights.products import read_weight_products, replace_products
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports.kind import Kind
from mechicl.statistics import Interval, interval
from mechicl.tasks import LinearRegression

N_TUNING = 100_000  # prompts that the step size is tuned on


class OneLayerSetting(Kind):
    """Trained layers, the tuned step of gradient descent that they are compared with, and held-out prompts.

    `models` are the layers as their weight products alone, in float64, one a seed; `construction` is gradient descent
    with the tuned `step_size` as a layer (the paper's η is n_context times as much).

    Raises:
        CheckpointError: a checkpoint of another kind of model or task.
    """

    def __init__(self, checkpoint: Checkpoint, **options: Any):
        super().__init__(checkpoint, **options)
        cfg, self.task = checkpoint.models[0].cfg, checkpoint.task
        one = (cfg.n_layers, cfg.n_heads, cfg.attention, cfg.prompt_format) == (1, 1, "linear", "paired")
        if not one or not isinstance(self.task, LinearRegression):
            raise CheckpointError(
                f"this comparison is for linear attention with one layer and one head on paired prompts of "
                f"LinearRegression; {checkpoint.name} has {cfg.n_layers} layers, {cfg.n_heads} {cfg.attention} heads, "
                f"{cfg.prompt_format} prompts of {type(self.task).__name__}"
            )
        self.seeds = tuple(self.study.seeds)

    @cached_property
    def models(self) -> list[HookedTransformer]:
        """The layers as their weight products."""
        return [replace_products(model, read_weight_products(model)) for model in self.study.models]

    @cached_property
    def prompts(self) -> Prompts:
        """Held-out prompts."""
        return self.task.sample(self.n_prompts, seed=self.seed, dtype=torch.float64)

    @cached_property
    def step_size(self) -> float:
        """Tuned on other prompts."""
        return algorithms.tuned_step_size(self.task.sample(N_TUNING, seed=self.seed + 1))

    @cached_property
    def construction(self) -> HookedTransformer:
        """The tuned step as a layer."""
        task = self.task
        return constructions.gradient_descent(
            x_dim=task.x_dim, y_dim=task.y_dim, n_context=task.n_context, step_size=self.step_size
        )

    @cached_property
    def squared_errors(self) -> Float[Tensor, "seed prompt"]:
        """Of the layers."""
        return torch.stack([squared_errors(model, self.prompts)[:, 0] for model in self.models])

    @cached_property
    def descent_errors(self) -> Float[Tensor, "prompt"]:
        """Squared errors of the tuned step."""
        return squared_errors(self.construction, self.prompts)[:, 0]

    @cached_property
    def fit(self) -> ConstructionFit:
        """The step of gradient descent nearest to each seed's weights."""
        return fit_construction(self.models, "gd", self.task, refine=False)

    @property
    def standard(self) -> bool:
        """Whether the task is the one of the paper's figures."""
        return self.task == LinearRegression()

    @property
    def loss_ratio(self) -> Interval:
        """Loss over gradient descent's, over seeds."""
        return interval(self.squared_errors.mean(-1) / self.descent_errors.mean())


def exact_optimum(task: LinearRegression) -> float | None:
    """The exact MSE of the best single step on a task, where there is a closed form."""
    if task.inputs == "gaussian" and task.y_dim == 1 and task.weight_scale == 1 and task.input_scale == 1:
        plain = task.covariance is None and task.condition_number is None and task.eigenvalues is None
        plain = plain and not task.normalize_inputs
        if plain and not task.noise_std and not task.n_distractors and task.active_dims is None:
            return linear_attention_optimum([1.0] * task.x_dim, task.n_context)
    try:
        return one_step_optimum(task).mse
    except ValueError:
        return None
