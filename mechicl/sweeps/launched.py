"""One process of a training that takes several: `accelerate launch -m mechicl.sweeps.launched FOLDER THREADS`."""

import sys
from pathlib import Path

import torch

from mechicl.files import read_json
from mechicl.training import TrainingConfig, train


def main() -> None:
    """Train what the cell's config.json says, in its run folder."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(int(sys.argv[2]))
    train(TrainingConfig.from_dict(read_json(folder / "config.json")), folder / "run", stop_diverged=True)


if __name__ == "__main__":
    main()
