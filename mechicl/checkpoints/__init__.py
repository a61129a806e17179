"""Trained models on disk and on the hub: a folder with `weights.safetensors`, `config.json` and `record.json`.

A checkpoint may hold several seeds of one training: every tensor has a leading seed axis. `record.json` says how it was
made (command, seeds, versions, curve, wall time, hardware) and holds the digests of the other files.

>>> model = load("lsa-1l")                     # the seed with the least held-out loss
>>> checkpoint = load_checkpoint("lsa-1l")     # all seeds, their record, their weights on the way
"""

from mechicl.base.arguments import check_arguments
from mechicl.base.shipped import available
from mechicl.checkpoints.checkpoint import STUCK, Checkpoint, CheckpointError, Snapshots, UnknownSeedError
from mechicl.checkpoints.folders import load, load_checkpoint, push, save
from mechicl.checkpoints.joining import join
from mechicl.checkpoints.random_weights import are_weights_random, random_weights, untrained
from mechicl.checkpoints.stacks import models_from_stack, stack_models
from mechicl.checkpoints.thinning import thin_snapshots

__all__ = [
    "STUCK",
    "Checkpoint",
    "CheckpointError",
    "Snapshots",
    "UnknownSeedError",
    "are_weights_random",
    "available",
    "join",
    "load",
    "load_checkpoint",
    "models_from_stack",
    "push",
    "random_weights",
    "save",
    "stack_models",
    "thin_snapshots",
    "untrained",
]

check_arguments(__name__)
