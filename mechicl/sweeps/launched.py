"""One process of a training: `torchrun -m mechicl.sweeps.launched FOLDER NAME THREADS MACHINE PARENT`."""

import sys
from pathlib import Path

import torch
from accelerate.state import PartialState

from mechicl.base.files import machine_name, read_json
from mechicl.sweeps.work import end_with, train_and_save
from mechicl.training import TrainingConfig


def run() -> None:
    """Train by the cell's config.json, and stop early if the process that launched this one ends."""
    folder, name, threads, machine, parent = sys.argv[1:]
    if machine == machine_name():  # on another machine the launcher ends its processes
        end_with(int(parent))
    torch.set_num_threads(int(threads))
    train_and_save(TrainingConfig.from_dict(read_json(Path(folder) / "config.json")), Path(folder), name)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    run()
