"""One layer of linear attention and one step of gradient descent (von Oswald et al. 2023, Figs. 1, 2, 6, 9 and 10).

python analyses/oswald_one_layer.py
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mechicl.checkpoints import load_checkpoint
from mechicl.report import Comparison, Row
from mechicl.report.one_layer import compare_one_layer
from mechicl.report.script import run_script
from mechicl.statistics import interval


@dataclass(frozen=True)
class Args:
    """The table of `mechicl report`, and what happens when the layer is applied again and again."""

    checkpoint: str = "lsa-1l"
    """Name or folder of a model with one layer of linear attention and one head."""
    out: Path = Path("analyses/results")
    """Folder for oswald_one_layer_CHECKPOINT.json and .html."""
    n_prompts: int = 10_000
    """Held-out prompts."""
    quiet: bool = False
    """No progress bar."""


def compare(args: Args) -> Comparison:
    """Losses, alignment, weights, paths, shifted prompts and roll-outs."""
    comparison = compare_one_layer(load_checkpoint(args.checkpoint), n_prompts=args.n_prompts, progress=not args.quiet)
    data, rows = comparison.data, []
    for name, differences in data["largest_difference"].items():
        words = "equal (Fig. 6)" if name == "input scale" else None
        rows.append(Row(f"largest |trained / gradient descent - 1|, {name} 0.5 to 2", words,
                        interval(torch.tensor(differences, dtype=torch.float64)), "seeds"))  # fmt: skip
    for roll_out in data["roll_outs"]:
        known = "falls for 50 steps (Fig. 1)" if roll_out["damping"] == 0.75 else None
        words = f"loss after 50 repeats over after one, damping {roll_out['damping']:g}"
        trained, descent = torch.tensor(roll_out["trained"], dtype=torch.float64), roll_out["gradient_descent"]
        ratios, ratio = trained[50] / trained[1], descent[50] / descent[1]
        shown = interval(ratios) if ratios.max() < 1 else "diverges"
        rows.append(Row(f"{words}, trained", known, shown, "seeds"))
        rows.append(Row(f"{words}, gradient descent", known, ratio if ratio < 1 else "diverges", "2,000 prompts"))
    return replace(
        comparison.with_more(rows), title="One layer and one step (section 3, Fig. 2)",
        data={"step_size": data["tuned_step_size"]},
    )  # fmt: skip


if __name__ == "__main__":
    run_script(Args, compare, "oswald_one_layer")
