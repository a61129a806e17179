"""What measures of sweeps share: held-out prompts, and the one model of a checkpoint."""

from typing import Any

from mechicl.checkpoints import Checkpoint

HELD_OUT = 1_000_003
"""Seed of the held-out prompts."""
Measured = dict[str, float]


def one_model(checkpoint: Checkpoint) -> Any:
    """The one model of a checkpoint."""
    if len(checkpoint.models) != 1:
        raise ValueError(f"a measure takes a checkpoint with one model; {checkpoint.name} has {len(checkpoint.models)}")
    return checkpoint.models[0]
