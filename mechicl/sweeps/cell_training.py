"""A cell's training, from its last save to its checkpoint."""

from pathlib import Path

from accelerate.state import PartialState

from mechicl.checkpoints import Snapshots, save
from mechicl.training import TrainingConfig, train


def train_and_save(config: TrainingConfig, folder: Path, name: str) -> None:
    """Train a cell's models, from the last save on, and write their checkpoint."""
    result = train(config, folder / "run", stop_diverged=True, progress=False)
    if PartialState().is_main_process:
        snapshots = Snapshots(result.snapshot_steps, result.snapshots) if result.snapshots else None
        save(folder / "checkpoint", result.models, {"name": name, **result.record}, snapshots)
