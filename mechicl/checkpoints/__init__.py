"""Trained models on disk and on the hub: a folder with `weights.safetensors`, `config.json` and `record.json`.

A checkpoint may contain several seeds of one training: every tensor has a leading seed axis. `record.json` contains
the training's command, seeds, versions, curve, wall time and hardware, and the digests of the other files.

>>> model = load("lsa-1l")                     # the seed with the least held-out loss
>>> checkpoint = load_checkpoint("lsa-1l")     # all seeds, their record, their weights during training
"""

from mechicl.base.shipped import available
from mechicl.checkpoints.checkpoint import Checkpoint, CheckpointError, Snapshots, random_weights, untrained
from mechicl.checkpoints.checkpoint import UnknownSeedError as UnknownSeedError
from mechicl.checkpoints.checkpoint import are_weights_random as are_weights_random
from mechicl.checkpoints.checkpoint import stack_models as stack_models
from mechicl.checkpoints.folders import load, load_checkpoint, push, save
from mechicl.checkpoints.joining import join
from mechicl.checkpoints.study import Study

__all__ = [
    "Checkpoint", "CheckpointError", "Snapshots", "Study", "available", "join", "load", "load_checkpoint", "push",
    "random_weights", "save", "untrained",
]  # fmt: skip
