"""A cell's training, here or in several processes: `torchrun -m mechicl.sweeps.cell_training FOLDER NAME THREADS`."""

import sys
from pathlib import Path

import torch
from accelerate.state import PartialState

from mechicl.checkpoints import Snapshots, save
from mechicl.files import read_json
from mechicl.training import TrainingConfig, train

CONFIG = "config.json"


def train_and_save(config: TrainingConfig, folder: Path, name: str) -> None:
    """Train a cell's models, from the last save on, and write their checkpoint."""
    result = train(config, folder / "run", stop_diverged=True, progress=False)
    if PartialState().is_main_process:
        snapshots = Snapshots(result.snapshot_steps, result.snapshots) if result.snapshots else None
        save(folder / "checkpoint", result.models, {"name": name, **result.record}, snapshots)


def main() -> None:
    """Train what the cell's config.json says."""
    folder, name, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    train_and_save(TrainingConfig.from_dict(read_json(folder / CONFIG)), folder, name)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
