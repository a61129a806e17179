"""One process of a training that takes several: `torchrun -m mechicl.sweeps.launched FOLDER NAME THREADS PARENT`."""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from accelerate.state import PartialState

from mechicl.files import read_json
from mechicl.sweeps.cell_training import train_and_save
from mechicl.training import TrainingConfig


def main() -> None:
    """Train what the cell's config.json says, until it is done or the process that asked for it is gone."""
    folder, name, threads, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    train_and_save(TrainingConfig.from_dict(read_json(folder / "config.json")), folder, name)
    PartialState().destroy_process_group()


def _end_with(process: int) -> None:
    """Launchers close what they inherit, so that a pipe would not tell."""
    while True:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
