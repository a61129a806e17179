"""Models trained by interchange to contain an algorithm (`python analyses/train_known.py NAME FOLDER`)."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from mechicl.algorithms.stepwise import Hypothesis, KernelReading, QueryDescent, ResidualDescent
from mechicl.models import TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.tasks.sampling import InputDistribution
from mechicl.training import TrainingConfig

X_DIM, N_CONTEXT, D_MODEL = 3, 10, 16


@dataclass(frozen=True, eq=False)
class Recipe:
    """The title of a known model, its hypothesis, and its task, model and training."""

    title: str
    hypothesis: Hypothesis
    config: TrainingConfig


def gaussian_weights(readers: Tensor, points: Tensor) -> Tensor:
    """Return the weights of a Gaussian kernel: `exp(-2 |x - x_i|²)`."""
    return (-2 * torch.cdist(readers, points).square()).exp()


def _subspaces(**sizes: int) -> dict[str, Tensor]:
    """Draw orthogonal subspaces of the stream; in their names "_" stands for a space, "__" for ", "."""
    generator = torch.Generator().manual_seed(7)
    columns = torch.linalg.qr(torch.randn(D_MODEL, D_MODEL, generator=generator, dtype=torch.float64)).Q
    parts = columns[:, : sum(sizes.values())].split(list(sizes.values()), dim=1)
    return {name.replace("__", ", ").replace("_", " "): part for name, part in zip(sizes, parts, strict=True)}


def _config(inputs: InputDistribution = "uniform", attention: str = "linear") -> TrainingConfig:
    return TrainingConfig(
        LinearRegression(x_dim=X_DIM, n_context=N_CONTEXT, inputs=inputs),
        TransformerConfig(
            x_dim=X_DIM, n_context=N_CONTEXT, n_layers=2, n_heads=2, d_model=D_MODEL, d_head=8, attention=attention,
            read_in="linear", read_out="linear", initializer_range=0.15,
        ),
        steps=1500, batch_size=128, optimizer="soap", learning_rate=1e-2, schedule="cosine", warmup_steps=100,
        gradient_clip=1.0, eval_every=100, eval_prompts=500, compile=False,
    )  # fmt: skip


@functools.cache
def recipes() -> dict[str, Recipe]:
    """Return the recipe of each checkpoint, by name."""
    points = _subspaces(x=8, residual=4)
    return {
        "known-gd-2l": Recipe(
            "trained: gradient descent, 2 steps",
            Hypothesis(ResidualDescent(2, step_size=0.6), subspaces=points),
            _config(),
        ),
        "known-gd-plus-plus-2l": Recipe(
            "trained: GD++, 2 steps",
            Hypothesis(ResidualDescent(2, step_size=(0.5, 0.8), gamma=(0.25, 0.0)), subspaces=points),
            _config(),
        ),
        "known-query-gd-2l": Recipe(
            "trained: gradient descent by the query alone, 2 steps",
            Hypothesis(QueryDescent(2, step_size=0.6), subspaces=_subspaces(x=5, transformed_x=5, y__prediction=4)),
            _config(),
        ),
        "known-kernel-2l": Recipe(
            "trained: kernel smoothing of residuals, 2 steps",
            Hypothesis(
                KernelReading(gaussian_weights, 2, normalized=True, name="kernel smoothing of residuals, 2 steps"),
                subspaces=points,
            ),
            _config("sphere", attention="softmax"),
        ),
    }
