"""One process of a training that takes several.

`torchrun -m mechicl.sweeps.launched FOLDER NAME THREADS MACHINE PARENT`
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from accelerate.state import PartialState

from mechicl.base.files import is_running, machine_name, read_json
from mechicl.sweeps.cell_training import train_and_save
from mechicl.training import TrainingConfig


def main() -> None:
    """Train what the cell's config.json says, until it is done or the process that asked for it is gone."""
    folder, name, threads, machine, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:6]
    if machine == machine_name():  # on another one the number means nothing; there the launcher ends its processes
        threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    torch.set_num_threads(threads)
    train_and_save(TrainingConfig.from_dict(read_json(folder / "config.json")), folder, name)
    PartialState().destroy_process_group()


def _end_with(process: int) -> None:
    """Launchers close what they inherit, so that a pipe would not tell."""
    while is_running(process):
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
