"""Checkpoints with one model, for measures of sweeps."""

import functools

import torch

from mechicl import constructions
from mechicl.algorithms import tuned_step_size
from mechicl.checkpoints import Checkpoint
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.sweeps.measures.general import HELD_OUT
from mechicl.tasks import LinearRegression, TaskPool
from mechicl.training import TrainingConfig

REGRESSION = LinearRegression(x_dim=3, n_context=6)
POOL = TaskPool(x_dim=2, n_context=4, n_tasks=5, noise_std=0.4)
N_TUNING = 2000
"""Prompts that tests tune on, in place of many more."""


def checkpoint(model, task, **more) -> Checkpoint:
    """One model, with a record of what it was trained on."""
    training = TrainingConfig(task=task, model=model.cfg, seeds=(0,)).to_dict()
    return Checkpoint("made", [model], {"training": training, **more.pop("record", {})}, **more)


def untrained(task, **sizes) -> HookedTransformer:
    config = TransformerConfig(x_dim=task.x_dim, n_context=task.n_context, initializer_range=0.4, **sizes)
    return HookedTransformer(config, seed=0).eval()


@functools.cache
def step() -> tuple[HookedTransformer, float]:
    """A step of gradient descent, tuned on the prompts that the measure tunes on, as a layer."""
    tuning = REGRESSION.sample(N_TUNING, seed=HELD_OUT + 1, dtype=torch.float64)
    size = tuned_step_size(tuning)
    return constructions.gradient_descent(x_dim=3, n_context=6, step_size=size).double().eval(), size
