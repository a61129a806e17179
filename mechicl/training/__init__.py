"""Training: the configuration of a run, the presets, and the loop."""

from mechicl.training.config import Curriculum, Ramp, TrainingConfig
from mechicl.training.loop import TrainingDivergedError, TrainingResult, train
from mechicl.training.presets import PRESETS

__all__ = [
    "PRESETS",
    "Curriculum",
    "Ramp",
    "TrainingConfig",
    "TrainingDivergedError",
    "TrainingResult",
    "train",
]
