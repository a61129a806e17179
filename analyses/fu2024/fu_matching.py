"""Fu et al. 2024, Figs. 2, 4, 5 and 7 (errors), 6 (weights), 10 to 13: which iteration does each layer match?

python analyses/fu2024/fu_matching.py                              # the small isotropic model
python analyses/fu2024/fu_matching.py --checkpoint gpt2-8l-1h      # one head (Figs. 12, 13)
python analyses/fu2024/fu_matching.py --checkpoint gpt2-8l-ill     # ill-conditioned (B.3)
"""

from typing import Any

import torch

from analyses.support.script import script
from mechicl.analysis.behaviour.matching import Similarity
from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Comparison, Row
from mechicl.reports.layers import Layers, match_layers
from mechicl.statistics import median_interval

SIMILARITIES: tuple[Similarity, ...] = ("errors", "normalised errors", "weights")


@script(checkpoint="gpt2-8l", n_prompts=1024, n_fitting=4096, seed=0)
def compare(args: Any) -> Comparison:
    """Match every layer by every similarity."""
    checkpoint = load_checkpoint(args.checkpoint)
    kind = Layers(checkpoint, n_prompts=args.n_prompts, seed=args.seed)
    sizes = {"n_prompts": args.n_prompts, "n_fitting": args.n_fitting, "seed": args.seed}
    measured = match_layers(checkpoint, similarities=SIMILARITIES, **sizes)
    return Comparison(kind.title, kind.lead, *measured)


@compare.derive
def derived_rows(comparison: Comparison) -> list[Row]:
    """Return the steps that match the last layer best, over seeds where there are several."""
    rows = []
    for algorithm in ("Newton", "gradient descent"):
        steps = torch.tensor([one["errors"][algorithm][-1] for one in comparison.data["by_seed"]], dtype=torch.float64)
        measured = median_interval(steps) if len(steps) > 1 else steps.item()
        quantity = f"errors: best number of {algorithm} steps, last layer"
        rows.append(Row(quantity, None, measured, "seeds" * (len(steps) > 1)))
    return rows


if __name__ == "__main__":
    compare.run()
