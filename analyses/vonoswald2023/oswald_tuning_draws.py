"""Compare a model with GD++ that is tuned on several draws of prompts (von Oswald et al. 2023, Fig. 3).

python analyses/vonoswald2023/oswald_tuning_draws.py
"""

from typing import Any

import torch

from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.seeds import in_float64, query_errors
from mechicl.reports import Comparison, Row
from mechicl.reports.descent import N_TUNING, TRIM, TRIMMED, TUNING_SEED, tune
from mechicl.statistics import crossed_interval, interval


@script(
    checkpoint="lsa-5l",
    n_prompts=10_000,
    draws=Option(6, "of the prompts that GD++ is tuned on, each with other held-out prompts"),
    seed=Option(1_000_004, "seed of the first held-out prompts"),
)
def compare(args: Any) -> Comparison:
    """Compare all seeds with the GD++ of each draw; the first draw is that of oswald_descent.py."""
    checkpoint, task = regression_checkpoint(args.checkpoint)
    models = in_float64(checkpoint.models)
    ratios: dict[str, list[float]] = {TRIMMED: [], "all prompts": []}
    largest = []
    for draw in range(args.draws):
        tuning = task.sample(N_TUNING, seed=TUNING_SEED + draw, dtype=torch.float64)
        learner = tune(tuning, models[0].cfg.n_layers, models[0].cfg.token_clip, gamma=True, per_step=True)
        held_out = task.sample(args.n_prompts, seed=args.seed + draw, dtype=torch.float64)
        errors, reference = query_errors(models, held_out), query_errors([learner], held_out)
        ratios[TRIMMED].append(crossed_interval(errors, reference, trim=TRIM).mean)
        ratios["all prompts"].append(crossed_interval(errors, reference).mean)
        largest.append(max(learner.hyperparameters.values()))
        print(draw, {name: round(values[-1], 3) for name, values in ratios.items()}, flush=True)
    rows = []
    for name, values in ratios.items():
        note = (
            f"{min(values):.3g} to {max(values):.3g}; above 1 for {sum(value > 1 for value in values)} of {args.draws}"
        )
        over = "draws of tuning and held-out prompts"
        rows.append(Row(f"loss, trained over tuned GD++, {name}", None, interval(torch.tensor(values)), over, note))
    rows.append(Row("largest step size of GD++", None, interval(torch.tensor(largest)), "draws"))
    lead = (
        f"{args.checkpoint}: losses averaged over {len(models)} seeds, divided by that of GD++ with parameters for "
        f"each step, tuned on {N_TUNING:,} prompts; each draw of these is measured on {args.n_prompts:,} other prompts."
    )
    return Comparison(f"{args.checkpoint} over GD++, by the draw that it is tuned on", lead, rows)


if __name__ == "__main__":
    compare.run()
