"""Fu et al. 2024, Figs. 2, 4, 5 and 7 (errors), 6 (weights), 10 to 13: which iteration does each layer match?

python analyses/fu2024/fu_matching.py                              # the small isotropic model
python analyses/fu2024/fu_matching.py --checkpoint gpt2-8l-1h      # one head (Figs. 12, 13)
python analyses/fu2024/fu_matching.py --checkpoint gpt2-8l-ill     # ill-conditioned (B.3)
"""

from typing import Any

import torch

from analyses.support.script import script
from mechicl.analysis import match
from mechicl.analysis.behaviour.matching import Similarity
from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Comparison, Row
from mechicl.reports.layer_matches import reference_families
from mechicl.reports.layers import Layers, match_layers
from mechicl.statistics import median_interval
from mechicl.tasks import LinearRegression

SIMILARITIES: tuple[Similarity, ...] = ("errors", "normalised errors", "weights")
RIVALS = ("gradient descent", "ridge path")
RESOLVED = 256  # prompts on which families are compared with each other


@script(checkpoint="gpt2-8l", n_prompts=1024, n_fitting=4096, seed=0)
def compare(args: Any) -> Comparison:
    """Match every layer by every similarity."""
    checkpoint = load_checkpoint(args.checkpoint)
    kind = Layers(checkpoint, n_prompts=args.n_prompts, seed=args.seed)
    sizes = {"n_prompts": args.n_prompts, "n_fitting": args.n_fitting, "seed": args.seed}
    rows, sections, data = match_layers(checkpoint, similarities=SIMILARITIES, **sizes)
    return Comparison(kind.title, kind.lead, [*rows, *_resolution(checkpoint.task)], sections, data)


def _resolution(task: LinearRegression) -> list[Row]:
    """Measure how similar the families are to each other on this task and on the paper's."""
    rows = []
    for n, (d, n_context) in enumerate(dict.fromkeys(((task.x_dim, task.n_context), (20, 40)))):
        size = task if n == 0 else LinearRegression(x_dim=d, n_context=n_context, inputs="gaussian")
        prompts, families = size.sample(RESOLVED, seed=1), reference_families(size)
        for similarity in SIMILARITIES:
            newton, *rivals = (
                families[name].trajectory(prompts, with_weights=similarity == "weights") for name in ("Newton", *RIVALS)
            )
            for name, rival in zip(RIVALS, rivals, strict=True):
                best = match(newton, rival, prompts, similarity=similarity).mean()
                quantity = f"{similarity}: least similarity of Newton iterations 3 to 20 to their best {name} steps"
                least = best.amax(1)[2:20].min().item()
                rows.append(Row(f"{quantity}, d = {d}, {n_context} points", None, least))
    return rows


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
