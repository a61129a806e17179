"""Train the models that are made to contain an algorithm, by interchange training, and save them as checkpoints.

python analyses/train_known.py known-gd-2l checkpoints/known-gd-2l
"""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tyro

from mechicl.checkpoints import save
from mechicl.constructions.trained import recipes
from mechicl.training import train_interchange


@dataclass(frozen=True)
class Args:
    """Train one model by its recipe; one to five minutes on a core."""

    name: tyro.conf.Positional[str]
    """One of `mechicl.constructions.trained.recipes()`."""
    folder: tyro.conf.Positional[Path]
    """Where its checkpoint goes."""
    quiet: bool = False
    """No progress bar."""


def main(args: Args) -> None:
    """Train, save, and print how well the hypothesis holds."""
    if args.name not in recipes():
        raise SystemExit(f"no recipe {args.name!r}: choose among {', '.join(recipes())}")
    recipe = recipes()[args.name]
    result = train_interchange(recipe.config, recipe.hypothesis, progress=not args.quiet)
    command = f"python analyses/train_known.py {args.name} {args.folder}"
    record = {"name": args.name, "command": command, **result.record}
    record["versions"] |= {name: version(name) for name in ("mechicl", "transformer-lens")}
    folder, r2 = save(args.folder, result.models, record), record["interchange"]["r2"][0]
    print(f"{folder}: {recipe.hypothesis.name}, weakest held-out R² {min(r2.values()):.4f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
