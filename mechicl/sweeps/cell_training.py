"""A cell's training, from its last save to its checkpoint."""

import os
from pathlib import Path

from accelerate.state import PartialState

from mechicl.checkpoints import Snapshots, save
from mechicl.sweeps.devices import device_kind, note_device
from mechicl.training import TrainingConfig, train


def train_and_save(config: TrainingConfig, folder: Path, name: str) -> None:
    """Train a cell's models, from the last save on, and write their checkpoint."""
    if os.environ.get("RANK", "0") == "0":  # before accelerate has started the processes' group
        note_device(folder, device_kind(config.cpu))
    result = train(config, folder / "run", stop_diverged=True, progress=False)
    if PartialState().is_main_process:
        snapshots = Snapshots(result.snapshot_steps, result.snapshots) if result.snapshots else None
        save(folder / "checkpoint", result.models, {"name": name, **result.record}, snapshots)
