"""Training: the configuration of a run, the presets, and the loop."""

from typing import TYPE_CHECKING, Any

from mechicl.training.clamp import Clamp
from mechicl.training.config import TrainingConfig
from mechicl.training.curriculum import Curriculum, Ramp
from mechicl.training.interchange import train_interchange
from mechicl.training.loop import TrainingDivergedError, train
from mechicl.training.optimizers import SOAP
from mechicl.training.results import TrainingResult

if TYPE_CHECKING:
    from mechicl.training.presets import PRESETS

__all__ = [
    "PRESETS", "SOAP", "Clamp", "Curriculum", "Ramp", "TrainingConfig", "TrainingDivergedError", "TrainingResult",
    "train", "train_interchange",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The presets are made when they are first named: that takes 0.1 s, and analyses do not need them."""
    if name == "PRESETS":
        from mechicl.training.presets import PRESETS

        return PRESETS
    raise AttributeError(f"module 'mechicl.training' has no attribute {name!r}")
