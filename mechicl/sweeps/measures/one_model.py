"""What measures of sweeps share: held-out prompts, and the one model of a checkpoint."""

import copy
from typing import Any

from mechicl.checkpoints import Checkpoint

HELD_OUT = 1_000_003
"""Seed of the held-out prompts."""
Measured = dict[str, float]


def one_model(checkpoint: Checkpoint) -> Any:
    """A copy of the one model of a checkpoint, which a measure may change."""
    if len(checkpoint.models) != 1:
        raise ValueError(f"a measure takes a checkpoint with one model; {checkpoint.name} has {len(checkpoint.models)}")
    return copy.deepcopy(checkpoint.models[0])
