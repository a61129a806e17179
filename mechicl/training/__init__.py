"""Training: the configuration of a run, the presets, and the loop."""

from mechicl.training.config import Curriculum, Ramp, TrainingConfig, spread_steps
from mechicl.training.loop import TrainingDivergedError, TrainingResult, train
from mechicl.training.presets import PRESETS

__all__ = [
    "PRESETS",
    "Curriculum",
    "Ramp",
    "TrainingConfig",
    "TrainingDivergedError",
    "TrainingResult",
    "spread_steps",
    "train",
]
