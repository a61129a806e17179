"""γ of GD++ in the weights of looped two-layer models, by number of points (von Oswald et al. 2023, A.10, Fig. 13)."""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.script import Option, regression_checkpoint, script
from mechicl import viz
from mechicl.analysis import fit_construction
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.weights.fits import ConstructionFit
from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.descent import published_gammas
from mechicl.statistics import crossed_interval, interval
from mechicl.tasks import LinearRegression


@script(
    checkpoints=("lsa-2l-looped", "lsa-2l-looped-n25", "lsa-2l-looped-n50", "lsa-2l-looped-n100"),
    n_prompts=Option(8192, "prompts that parameters are matched on, in each draw"),
    draws=Option(5, "independent draws of prompts that GD++ is matched and tuned on"),
    n_tuned=Option(50_000, "prompts in each draw that GD++ is tuned on"),
    seed=0,
)
def compare(args: Any) -> Comparison:
    """Published γ, γ in the weights, γ of the most similar predictions, and γ tuned on the task."""
    by_n = published_gammas()
    rows, lines = [], {"in the weights": [], "published": [], "best on the task": []}
    for name in args.checkpoints:
        checkpoint, task = regression_checkpoint(name)
        n = task.n_context
        seeds = [args.seed + 100 * draw for draw in range(args.draws)]
        fits = [fit_construction(checkpoint.models, "gd++", task, n_prompts=args.n_prompts, seed=s) for s in seeds]
        fit, over = fits[0], f"seeds and {args.draws} draws of {args.n_prompts:,} prompts"
        matched = {key: torch.stack([_matched(each, key) for each in fits], 1) for key in ("gamma", "step_size")}
        weights = {key: values[:, 0] for key, values in fit.projected.parameters.items()}
        a, found = interval(weights["step_size"]), crossed_interval(matched["step_size"])
        rows += [
            Row(f"γ in the weights, n = {n}", by_n.get(n), interval(weights["gamma"]), "seeds", f"step size a = {a}"),
            Row(f"γ matched to predictions, n = {n}", by_n.get(n), crossed_interval(matched["gamma"]), over,
                f"step size a = {found}"),
        ]  # fmt: skip
        best = torch.tensor(
            [_least_loss(task, args.n_tuned, args.seed + 2 + draw) for draw in range(args.draws)], dtype=torch.float64
        )
        rows.append(Row(f"γ with the least loss, n = {n}", None, interval(best), f"draws of {args.n_tuned:,} prompts"))
        median = weights["gamma"].median(), matched["gamma"].median(0).values  # one seed may be far from its optimum
        for kind, gamma in zip(("in the weights", "matched to predictions"), median, strict=True):
            rows.append(Row(f"γ {kind} (median seed) over that with the least loss, n = {n}", None,
                            interval(gamma / best), f"draws of {args.n_tuned:,} prompts"))  # fmt: skip
        lines["in the weights"].append(interval(fit.projected.parameters["gamma"][:, 0]))
        lines["published"].append(interval(fit.beta.new_tensor([by_n[n]])) if n in by_n else None)
        lines["best on the task"].append(interval(best))
    points = [load_checkpoint(name).task.n_context for name in args.checkpoints]
    complete = {name: values for name, values in lines.items() if None not in values}
    figure = viz.interval_lines("γ of GD++", "context points", "γ", points, complete, log_x=True, log_y=True)
    lead = (
        "Looped two-layer linear attention on x ~ U(-1/2, 1/2), d = 10. The weights are brought into the gauge where "
        "the mean diagonal of W_KQ is 1 and projected on GD++: γ is minus the mean diagonal of W_PV's x-block."
    )
    figures = [Section("γ by number of points", "Bands are 95% intervals over seeds.", figure)]
    return Comparison("γ of GD++ in trained weights (A.10)", lead, rows, figures)


def _matched(fit: ConstructionFit, name: str) -> Float[Tensor, "seed"]:
    """A parameter of the members of GD++ that predict most like the models, by seed."""
    assert fit.matched is not None
    return fit.matched.parameters[name][:, 0]


@cache
def _least_loss(task: LinearRegression, n_prompts: int, seed: int) -> float:
    """γ of two steps of GD++ with the least loss on one draw of prompts."""
    tuned = tuned_descent(task.sample(n_prompts, seed=seed, dtype=torch.float64), 2, gamma=True)
    return float(tuned.hyperparameters["gamma"])


if __name__ == "__main__":
    compare.run()
