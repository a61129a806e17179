"""Fu et al. 2024, Figs. 2, 4, 5 and 7 (errors), 6 (weights), 10 to 13: which iteration does each layer match?

python analyses/fu_matching.py                              # the small isotropic model
python analyses/fu_matching.py --checkpoint gpt2-8l-1h      # one head (Figs. 12, 13)
python analyses/fu_matching.py --checkpoint gpt2-8l-ill     # ill-conditioned (B.3)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mechicl.checkpoints import load_checkpoint
from mechicl.report import Comparison
from mechicl.report.layers import compare_layers
from mechicl.report.script import run_script


@dataclass(frozen=True)
class Args:
    """Which layer of a model matches which iteration of Newton's method and of gradient descent."""

    checkpoint: str = "gpt2-8l"
    """Name or folder of an interleaved model."""
    similarities: tuple[Literal["errors", "weights"], ...] = ("errors", "weights")
    """What to compare."""
    out: Path = Path("analyses/results")
    """Folder for NAME.json and NAME.html."""
    n_prompts: int = 1024
    """Held-out prompts to compare on."""
    n_fitting: int = 8192
    """Prompts to fit readouts on."""
    seed: int = 0
    """Of the prompts."""


def compare(args: Args) -> Comparison:
    """Match every layer by every similarity."""
    return compare_layers(
        load_checkpoint(args.checkpoint),
        similarities=args.similarities,
        n_prompts=args.n_prompts,
        n_fitting=args.n_fitting,
        seed=args.seed,
    )


if __name__ == "__main__":
    run_script(Args, compare, "fu_matching")
