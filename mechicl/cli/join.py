"""`mechicl join`."""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Join:
    """Make one checkpoint of seeds that were trained in several runs of one config."""

    checkpoints: tyro.conf.Positional[tuple[str, ...]]
    """Names or folders of two checkpoints or more, in the order that their seeds shall have."""
    out: Path
    """Folder of the joined checkpoint; it may be one of those that are joined."""

    def execute(self, command: str) -> None:
        """Write the checkpoint."""
        from mechicl.checkpoints import join, load_checkpoint  # here: help must not wait for torch

        folder = join(self.checkpoints, self.out)
        print(f"{folder}: seeds {', '.join(map(str, load_checkpoint(folder).record['seeds']))}")
