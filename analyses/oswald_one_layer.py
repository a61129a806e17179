"""One layer of linear attention and one step of gradient descent (von Oswald et al. 2023, Figs. 1, 2, 6, 9 and 10).

python analyses/oswald_one_layer.py
"""

import copy
from dataclasses import dataclass, replace

import torch

from mechicl.analysis import interpolate
from mechicl.analysis.behaviour import tuned_descent
from mechicl.checkpoints import load_checkpoint
from mechicl.constructions import gradient_descent
from mechicl.learners import squared_errors
from mechicl.reports import Comparison, Row
from mechicl.reports.one_layer import OneLayer
from mechicl.reports.rows import over_seeds_and_prompts
from mechicl.statistics import interval
from support.checks import below, equal, every, near, reads, together
from support.claims import Claim, Claims
from support.script import ScriptArgs, regression_checkpoint, run_script

N_SIZES = 4096  # prompts at each number of points


@dataclass(frozen=True)
class Args(ScriptArgs):
    """The table of `mechicl report`, and what happens when the layer is applied again and again."""

    checkpoint: str = "lsa-1l"
    """Name or folder of a model with one layer of linear attention and one head."""
    sizes: tuple[str, ...] = ("lsa-1l-d5", "lsa-1l", "lsa-1l-d20", "lsa-1l-d40")
    """The same with other numbers of points, as many as dimensions."""
    n_prompts: int = 10_000
    """Held-out prompts."""
    quiet: bool = False
    """No progress bar."""


def compare(args: Args) -> Comparison:
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
    step = float(
        tuned_descent(task.sample(20_000, seed=2**31 + 1, dtype=torch.float64), 1).hyperparameters["step_size"]
    )
    construction = gradient_descent(x_dim=task.x_dim, n_context=task.n_context, step_size=step)
    models = [copy.deepcopy(model).double() for model in checkpoint.models]
    halves = [interpolate(model, construction, prompts[:2]).model(0.5) for model in models]
    descent = squared_errors(construction, prompts)[:, 0]
    rows = [Row(f"{task.x_dim} points in as many dimensions: half-MSE of gradient descent", None, interval(descent / 2),
                "prompts")]  # fmt: skip
    for kind, learners in (("trained", models), ("half-way", halves)):
        errors = torch.stack([squared_errors(learner, prompts)[:, 0] for learner in learners])
        rows.append(Row(f"{task.x_dim} points in as many dimensions: loss over gradient descent's, {kind}", "1",
                        *over_seeds_and_prompts(errors, checkpoint, descent)))  # fmt: skip
    return rows


def claims(comparison: Comparison) -> list[Claim]:
    """State the paper's claims on one layer."""
    paper = Claims("vonoswald2023", comparison.rows)
    repeated = {
        kind: [f"loss after 50 repeats over after one, damping {damping}, {kind}" for damping in ("0.5", "0.75", "1")]
        for kind in ("trained", "gradient descent")
    }
    paper.add(
        "Fig. 1", "one layer repeated 50 times, damping 0.75: loss after 50 over loss after one",
        lines={kind: [quantities[1]] for kind, quantities in repeated.items()}, check=every(below, 1),
    )  # fmt: skip
    paper.add(
        "Fig. 2, left", "half-MSE of one step and of one trained layer",
        lines={"gradient descent": ["half-MSE, tuned gradient descent"],
               "trained": ["half-MSE, trained, mean of the seeds"]},
        why="half the squared error of x ~ U(-1/2, 1/2); the printed U(-1, 1) would give four times this",
    )  # fmt: skip
    paper.add("Fig. 2, left", "loss, trained over gradient descent", "loss, trained over tuned gradient descent",
              check=every(equal, 1))  # fmt: skip
    paper.add("Fig. 2, centre left", "cosine of sensitivities, trained and gradient descent",
              "sensitivity cosine, trained against gradient descent", check=every(near, 1),
              why="the same linear model in every prompt")  # fmt: skip
    paper.add("Fig. 2, centre left", "distance of predictions, of sensitivities",
              "prediction distance, trained against gradient descent",
              "sensitivity distance, trained against gradient descent",
              check=every(near, 0), published="almost 0")  # fmt: skip
    paper.add("Fig. 2, centre right", "excess loss half-way between trained and constructed weights, rescaled",
              "excess loss at the middle of the rescaled path", check=every(near, 0),
              why=f"without rescaling {paper['excess loss at the middle of the path without rescaling']}")  # fmt: skip
    paper.add(
        "Fig. 2, centre right", "as many points as dimensions, 5, 10, 20, 40: loss over gradient descent's",
        lines={kind: [f"* points in as many dimensions: loss over gradient descent's, {kind}"]
               for kind in ("trained", "half-way")},
        check=every(equal, 1), published="identical for all",
    )  # fmt: skip
    paper.add(
        "Figs. 2, right, and 6a", "largest |trained / gradient descent - 1| of the loss at scales 0.5 to 2 of inputs "
        "and of weights, the task's inputs and unseen ones",
        "largest |trained / gradient descent - 1|, * 0.5 to 2", check=every(near, 0), published="equal",
    )  # fmt: skip
    paper.add("Fig. 9, left", "one layer: step size read from the weights over the tuned one",
              "η read from the weights over tuned η", check=every(equal, 1),
              published="the construction, after a scalar correction")  # fmt: skip
    paper.add("Fig. 10", "one layer repeated 50 times: loss after 50 over after one, damping 0.5, 0.75, 1",
              lines=repeated,
              check=together(lambda a, b, c, d, e, f: below(b, 1) and below(e, 1)
                             and reads(c, "diverges") and reads(f, "diverges")),
              published="falls at 0.75, diverges undamped; both alike")  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "oswald_one_layer", claims)
