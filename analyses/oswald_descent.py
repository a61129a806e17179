"""A trained model against as many steps of gradient descent and GD++ (von Oswald et al. 2023, Figs. 3, 7, 8 and 14).

python analyses/oswald_descent.py --checkpoint lsa-5l
"""

from dataclasses import dataclass
from pathlib import Path

from mechicl.checkpoints import load_checkpoint
from mechicl.report import Comparison
from mechicl.report.descent import compare_with_descent
from mechicl.report.script import run_script


@dataclass(frozen=True)
class Args:
    """Losses, alignment, weights, paths, and the nearest algorithm."""

    checkpoint: str = "lsa-5l"
    """Name or folder: lsa-2l-looped and lsa-5l (Fig. 3), lsa-10l-looped (Fig. 7), lsa-12l-mlp (Fig. 8), lsa-1l-ln and
    lsa-2l-ln (Fig. 14)."""
    out: Path = Path("analyses/results")
    """Folder for oswald_descent_CHECKPOINT.json and .html."""
    n_prompts: int = 10_000
    """Held-out prompts."""
    seed: int = 1_000_003
    """Of the held-out prompts."""


def compare(args: Args) -> Comparison:
    """One checkpoint, all its seeds."""
    checkpoint = load_checkpoint(args.checkpoint)
    return compare_with_descent(checkpoint, n_prompts=args.n_prompts, seed=args.seed)


if __name__ == "__main__":
    run_script(Args, compare, "oswald_descent")
