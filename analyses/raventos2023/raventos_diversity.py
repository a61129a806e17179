"""How many tasks teach regression instead of the tasks themselves (Raventós et al. 2023, Figs. 1 and 2)."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.resamples import over_seeds
from analyses.support.script import Option, script
from mechicl import algorithms
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import squared_errors
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import interval
from mechicl.tasks import TaskPool
from mechicl.viz.elements import add_intervals, figure

OVER = "seeds, one draw of tasks"
RATIO = "distance to dMMSE over that to ridge, each over that of predicting 0"
"""1 for a model that predicts nothing, which is farther from dMMSE's larger predictions than from ridge's."""
REFERENCES = ("dmmse", "ridge")
COLORS = {"dmmse": "#d55e00", "ridge": "#0072b2"}


@script(
    checkpoints=("pool-8", "pool-8192"),
    n_prompts=Option(2000, "prompts of the pool's tasks, and as many of new ones"),
    seed=1_000_003,
)
def compare(args: Any) -> Comparison:
    """Squared distances of predictions to dMMSE's and to ridge regression's, on the pool's tasks and on new ones."""
    rows: list[Row] = []
    sections = []
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        task = checkpoint.task
        if not isinstance(task, TaskPool):
            raise ValueError(f"{name} was trained on {type(task).__name__}, not on a pool of tasks")
        learners = {known: algorithms.references(task)[known] for known in REFERENCES}
        for where, source in (("the pool's tasks", task), ("new tasks", task.new_tasks)):
            prompts = source.sample(args.n_prompts, seed=args.seed)
            label = f"M = {task.n_tasks}, {where}"
            predicted = {
                known: torch.cat([each.predict_prefixes(part) for part in prompts.split(200)])
                for known, each in learners.items()
            }
            distances = {known: _distances(checkpoint, each, prompts) for known, each in predicted.items()}
            rows += _rows(label, checkpoint, predicted, distances, prompts)
            sections.append(_section(label, distances))
    lead = (
        f"Small transformers (3 layers, width 48) trained on y = x w + noise, d = 8, noise variance 0.25, 16 points, "
        f"where w is one of a pool of M draws from N(0, I). dMMSE is the Bayes learner of the pool, ridge regression "
        f"that of all tasks. Distances are mean squared differences of predictions, over all 16 points of "
        f"{args.n_prompts:,} prompts (seed {args.seed}): medians with bootstrap intervals over seeds of weights and of "
        f"the training prompts, which share one pool."
    )
    return Comparison("Task diversity: the pool or all tasks", lead, rows, sections)


@torch.no_grad()
def _distances(
    checkpoint: Checkpoint, expected: Float[Tensor, "prompt point y"], prompts: Prompts
) -> Float[Tensor, "point seed"]:
    """Mean squared difference from a reference's predictions at each point, for each seed's model."""
    each = [(model.predict_prefixes(prompts) - expected).square().mean((0, 2)) for model in checkpoint.models]
    return torch.stack(each, -1).double()


def _rows(
    label: str, checkpoint: Checkpoint, predicted: Mapping[str, Float[Tensor, "prompt point y"]],
    distances: Mapping[str, Float[Tensor, "point seed"]], prompts: Prompts,
) -> list[Row]:  # fmt: skip
    to = {known: values.mean(0) for known, values in distances.items()}
    nothing = {known: each.square().mean().double() for known, each in predicted.items()}
    losses = torch.stack([squared_errors(model, prompts, at="points").mean() for model in checkpoint.models])
    quantities = {
        "distance to dMMSE": to["dmmse"],
        "distance to ridge": to["ridge"],
        "distance to dMMSE over that to ridge": to["dmmse"] / to["ridge"],  # seed by seed
        RATIO: to["dmmse"] / nothing["dmmse"] / (to["ridge"] / nothing["ridge"]),
        "loss of the model": losses,
    }
    rows = []
    for quantity, values in quantities.items():
        measured, _, note = over_seeds(values, checkpoint, median=True)
        rows.append(Row(f"{label}: {quantity}", None, measured, OVER, note))
    for known, name in (("dmmse", "dMMSE"), ("ridge", "ridge")):
        reference = (predicted[known].double() - prompts.ys.double()).square().mean((1, 2))
        rows.append(Row(f"{label}: loss of {name}", None, interval(reference), "prompts"))
    return rows


def _section(label: str, distances: Mapping[str, Float[Tensor, "point seed"]]) -> Section:
    """Distances by the number of points before."""
    fig = figure(label, "points before", "squared difference")
    for known, values in distances.items():
        name = "to dMMSE" if known == "dmmse" else "to ridge"
        add_intervals(fig, list(range(len(values))), [interval(each) for each in values], name, COLORS[known])
    return Section(label, "Mean squared difference of predictions, mean over seeds with 95% intervals.", fig)


if __name__ == "__main__":
    compare.run()
