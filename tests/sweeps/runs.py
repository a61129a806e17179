"""Small sweeps that tests share."""

import time

from mechicl.checkpoints import Checkpoint
from mechicl.models import TransformerConfig
from mechicl.sweeps import Sweep
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig

BASE = TrainingConfig(
    task=LinearRegression(x_dim=3, n_context=4),
    model=TransformerConfig(x_dim=3, n_context=4),
    steps=6,
    batch_size=8,
    eval_every=3,
    eval_prompts=20,
    save_every=2,
    cpu=True,
)
MOST_LAYERS = 1
RATES = {"learning_rate": (1e-3, 1e-2), "model.n_layers": (1, 2), "seed": (0, 1)}


def sweep(**changes) -> Sweep:
    """Four cells of two models each, which take no time."""
    return Sweep(BASE.replace(**changes), RATES)


def doubled(checkpoint: Checkpoint) -> float:
    """A measure: twice the held-out loss."""
    return 2 * checkpoint.final_losses[0]


def failing(checkpoint: Checkpoint) -> float:
    """A measure that fails for models of two layers."""
    if checkpoint.models[0].cfg.n_layers > MOST_LAYERS:
        raise ArithmeticError("two layers are too many")
    return 1.0


def slow(checkpoint: Checkpoint) -> float:
    """A measure that takes a while."""
    time.sleep(0.3)
    return 1.0
