"""Train the models that are made to contain an algorithm, by interchange training, and save them as checkpoints.

python analyses/train_known.py known-gd-2l checkpoints/known-gd-2l
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from mechicl.constructions.trained import RECIPES, train_known


@dataclass(frozen=True)
class Args:
    """Train one model by its recipe; one to five minutes on a core."""

    name: tyro.conf.Positional[str]
    """One of `mechicl.constructions.trained.RECIPES`."""
    folder: tyro.conf.Positional[Path]
    """Where its checkpoint goes."""
    quiet: bool = False
    """No progress bar."""


def main(args: Args) -> None:
    """Train, save, and say how well the hypothesis holds."""
    folder, r2 = train_known(args.name, args.folder, progress=not args.quiet)
    print(f"{folder}: {RECIPES[args.name].hypothesis.name}, weakest held-out R² {min(r2.values()):.4f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
