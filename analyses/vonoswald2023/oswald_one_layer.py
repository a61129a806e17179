"""One layer of linear attention and one step of gradient descent (von Oswald et al. 2023, Figs. 1, 2, 6, 9 and 10)."""

from dataclasses import replace
from typing import Any

import torch

from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.seeds import descent_layers, in_float64, query_errors
from mechicl.analysis import interpolate
from mechicl.analysis.behaviour import tuned_descent
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import squared_errors
from mechicl.reports import Comparison, Row
from mechicl.reports.one_layer import OneLayer
from mechicl.reports.rows import over_seeds_and_prompts
from mechicl.statistics import interval

N_SIZES = 4096  # prompts at each number of points


@script(
    checkpoint="lsa-1l",
    sizes=Option(("lsa-1l-d5", "lsa-1l", "lsa-1l-d20", "lsa-1l-d40"), "models of as many points as dimensions"),
    n_prompts=10_000,
    quiet=False,
)
def compare(args: Any) -> Comparison:
    """Losses, alignment, weights, paths, shifted prompts and roll-outs."""
    kind = OneLayer(load_checkpoint(args.checkpoint), n_prompts=args.n_prompts, progress=not args.quiet)
    comparison = kind.measure(kind.compared)
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
    rows += [row for name in args.sizes for row in _size_rows(name)]
    return replace(
        comparison.with_more(rows), title="One layer and one step (section 3, Fig. 2)",
        data={"step_size": data["tuned_step_size"]},
    )  # fmt: skip


def _size_rows(name: str) -> list[Row]:
    """Losses of the trained layer and of what is half-way to gradient descent, over gradient descent's."""
    checkpoint, task = regression_checkpoint(name)
    prompts = task.sample(N_SIZES, seed=1_000_003, dtype=torch.float64)
    tuned = tuned_descent(task.sample(20_000, seed=2**31 + 1, dtype=torch.float64), 1)
    construction = descent_layers(tuned, 1, x_dim=task.x_dim, n_context=task.n_context)
    models = in_float64(checkpoint.models)
    halves = [interpolate(model, construction, prompts[:2]).model(0.5) for model in models]
    descent = squared_errors(construction, prompts)[:, 0]
    rows = [Row(f"{task.x_dim} points in as many dimensions: half-MSE of gradient descent", None, interval(descent / 2),
                "prompts")]  # fmt: skip
    for kind, learners in (("trained", models), ("half-way", halves)):
        rows.append(Row(f"{task.x_dim} points in as many dimensions: loss over gradient descent's, {kind}", "1",
                        *over_seeds_and_prompts(query_errors(learners, prompts), checkpoint, descent)))  # fmt: skip
    return rows


if __name__ == "__main__":
    compare.run()
