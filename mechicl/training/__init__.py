"""Training: the configuration of a run, the presets, and the loop."""

from mechicl.training.config import TrainingConfig
from mechicl.training.curriculum import Curriculum, Ramp
from mechicl.training.interchange import train_interchange
from mechicl.training.loop import TrainingDivergedError, train
from mechicl.training.optimizers import SOAP
from mechicl.training.presets import PRESETS
from mechicl.training.results import TrainingResult

__all__ = [
    "PRESETS",
    "SOAP",
    "Curriculum",
    "Ramp",
    "TrainingConfig",
    "TrainingDivergedError",
    "TrainingResult",
    "train",
    "train_interchange",
]
