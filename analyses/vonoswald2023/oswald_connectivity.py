"""Paths between ends that were found apart: seeds, and GD++ tuned on the task, where von Oswald et al. 2023 (section 3,
A.3) left mode connectivity of deep models open."""

import itertools
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.resamples import crossed_median_interval, resampled_means
from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.seeds import descent_layers
from mechicl import viz
from mechicl.analysis import connect_modes
from mechicl.analysis.weights import LossPath
from mechicl.analysis.weights.paths import PathKind
from mechicl.models import HookedTransformer
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.descent import TRIM, TRIMMED, tuned_references
from mechicl.reports.rows import as_text, over_seeds_and_prompts
from mechicl.tasks import LinearRegression


@script(
    checkpoint="lsa-5l",
    n_prompts=10_000,
    bending_steps=Option(1500, "optimisation steps for a curve"),
    seed=Option(0, "seed of the prompts that curves are bent on; the held-out ones have the next"),
)
def compare(args: Any) -> Comparison:
    """Straight and curved paths between all pairs of seeds, and from each seed to GD++ tuned on the task."""
    checkpoint, task = regression_checkpoint(args.checkpoint)
    models = checkpoint.models
    pairs = list(itertools.combinations(range(len(models)), 2))
    if not pairs:
        raise ValueError(f"{checkpoint.name} has one seed only: a path between seeds needs two")
    steps, clip = models[0].cfg.n_layers, models[0].cfg.token_clip
    learner = tuned_references(task, steps, False, clip)[f"GD++, {steps} steps, each its own"]
    tuned = descent_layers(learner, steps, clip, x_dim=task.x_dim, n_context=task.n_context)
    by_end: dict[str, list[dict[str, LossPath]]] = {
        "between seeds": [_connect(models[i], models[j], task, args, curved=False) for i, j in pairs],
        "to tuned GD++": [_connect(model, tuned, task, args, curved=True) for model in models],
    }
    ends = by_end["to tuned GD++"]
    errors, of_tuned = (torch.stack([path["raw"].squared_errors[end] for path in ends]) for end in (0, -1))
    over = partial(over_seeds_and_prompts, errors, checkpoint, of_tuned)
    rows = [
        Row(f"loss, trained end over tuned GD++, {TRIMMED}", None, *over(trim=TRIM)),
        Row("loss, trained end over tuned GD++", None, *over()[:2], "all prompts; ends that were found apart: GD++ is "
            "tuned on the task, with a step size and γ for each step, and knows nothing of the model"),
    ]  # fmt: skip
    for where, of_pairs in by_end.items():
        paired = where == "between seeds"
        over = f"{f'pairs of {len(models)} ' if paired else ''}seeds and {args.n_prompts:,} prompts"
        for kind in of_pairs[0]:
            values = torch.stack([_barriers(paths[kind]) for paths in of_pairs], 1)
            median, mean = crossed_median_interval(values, args.n_prompts, pairs if paired else None)
            largest = max((paths[kind].barrier() for paths in of_pairs), key=lambda barrier: barrier.mean)
            note = f"median; mean {as_text(mean)}, largest {largest} over prompts"
            claim = "a barrier for most seeds (A.4)" if (where, kind) == ("between seeds", "rescaled") else None
            rows.append(Row(f"barrier {where}, {kind}", claim, median, over, note))
    figures = [
        Section("Seeds 0 and 1", "Loss on held-out prompts.", viz.connectivity_paths(by_end["between seeds"][0])),
        Section("From seed 0 to tuned GD++", "Loss on held-out prompts.", viz.connectivity_paths(ends[0])),
    ]
    lead = (
        f"{checkpoint.name}: {len(pairs)} pairs of seeds, and GD++ tuned on the task; {args.n_prompts:,} held-out "
        f"prompts. A barrier is the largest excess of the loss over the line between the ends, relative to the ends' "
        f"mean loss; intervals are over seeds and prompts. Lifted models have the heads of both ends; all others "
        f"keep the architecture. Curves have three control points and are bent on other prompts."
    )
    return Comparison(f"Paths between ends found apart ({checkpoint.name})", lead, rows, figures)


def _barriers(path: LossPath) -> Float[Tensor, "resample"]:
    """The barrier on the prompts, and on resamples of them."""
    losses, alphas = resampled_means(path.squared_errors), torch.tensor(path.alphas, dtype=torch.float64)
    line = (1 - alphas) * losses[:, :1] + alphas * losses[:, -1:]
    return (losses - line).amax(1) / losses[:, [0, -1]].mean(1)


def _connect(
    a: HookedTransformer, b: HookedTransformer, task: LinearRegression, args: Any, *, curved: bool
) -> dict[str, LossPath]:
    kinds: tuple[PathKind, ...] = ("raw", "rescaled", "aligned", "lifted")
    kinds += ("curved",) if curved else ()
    options = {"n_prompts": args.n_prompts, "bending_steps": args.bending_steps, "seed": args.seed}
    return connect_modes(a, b, task, kinds=kinds, **options).paths


if __name__ == "__main__":
    compare.run()
