"""Kinds of learners of tables: which changes of a table they ignore, and how local and calibrated they are.

python analyses/table_kinds.py
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from analyses.support.script import Option, script
from analyses.table_models import rivals
from mechicl.checkpoints import load_checkpoint, random_weights
from mechicl.learners.learners import query_predictions
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.statistics import Interval, interval, ratio_interval

N_CONTEXT, N_QUERIES, N_MOVED = 50, 8, 6
SEED = 3_000_017


@script(
    checkpoints=Option(("table-regression", "table-classification"), "models of tables"),
    n_tables=Option(24, "tables, each with 8 rows to predict"),
)
def compare(args: Any) -> Comparison:
    """Measure each property of the trained models, of the same models untrained, and of three estimators."""
    rows = []
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        with random_weights():
            untrained = load_checkpoint(name).models[0]
        task: Any = checkpoint.task
        drawn = task.replace(n_context=N_CONTEXT, n_queries=N_QUERIES, missing=0.0, varied=False)
        prompts = drawn.sample_tables(args.n_tables, seed=SEED).prompts()
        classes = prompts.y_dim > 1
        learners = {name: checkpoint.best, f"{name}, untrained": untrained, **rivals(classes)}
        for label, learner in learners.items():
            for quantity, value in properties(learner, prompts, classes):
                rows.append(Row(f"{label}: {quantity}" if label.startswith(name) else f"{name}, {label}: {quantity}",
                                None, value, "tables"))  # fmt: skip
    lead = (
        f"{args.n_tables} tables of 4 columns, {N_CONTEXT} rows with labels and {N_QUERIES} to predict. Violations are "
        "mean squared differences of predictions, relative to their squared distance from the mean label."
    )
    return Comparison("Kinds of learners of tables", lead, rows)


def properties(learner: Any, prompts: Prompts, classes: bool) -> Iterator[tuple[str, Interval | float]]:
    """Yield each property's name and its value."""
    generator = torch.Generator().manual_seed(SEED)
    xs, ys, n_columns = prompts.xs, prompts.ys, prompts.x_dim
    plain = query_predictions(learner, prompts)
    size = by_table((plain - ys[:, :-1].mean(1).to(plain)).square())

    def violation(*parts: Tensor) -> Interval:
        return ratio_interval(by_table(sum(parts[1:], parts[0]).square()), size)

    def predicted(xs: Tensor, ys: Tensor = ys) -> Tensor:
        return query_predictions(learner, Prompts(xs, ys))

    rows = [*torch.randperm(prompts.n_context, generator=generator).tolist(), prompts.n_context]  # the query is last
    yield "order of rows", violation(predicted(xs[:, rows], ys[:, rows]), -plain)
    yield "order of columns", violation(predicted(xs[..., torch.randperm(n_columns, generator=generator)]), -plain)
    yield "units of columns", violation(predicted(xs * (1 + torch.arange(n_columns)) - 3), -plain)
    yield "monotone transformation of columns", violation(predicted(xs + xs * xs.abs()), -plain)
    noise = torch.randn(len(xs) // N_QUERIES, xs.shape[1], 1, generator=generator).repeat_interleave(N_QUERIES, 0)
    yield "a column of noise", violation(predicted(torch.cat([xs, noise], -1)), -plain)
    other = xs[:, -1].unflatten(0, (-1, N_QUERIES)).roll(1, 1).flatten(0, 1)  # another row to predict of the table
    first = torch.arange(n_columns) < n_columns // 2
    mixed = [torch.where(which, other, xs[:, -1]) for which in (first, ~first, torch.ones_like(first))]
    parts = [predicted(torch.cat([xs[:, :-1], query[:, None]], 1)) for query in mixed]
    yield "additive over halves of the columns", violation(plain, -parts[0], -parts[1], parts[2])
    yield "influence of labels of near rows over others", _locality(learner, prompts, plain, classes)
    if classes:
        yield "calibration error", _calibration_error(plain, ys[:, -1])


def by_table(squares: Tensor) -> Tensor:
    return squares.mean(-1).unflatten(0, (-1, N_QUERIES)).mean(1)


def _locality(learner: Any, prompts: Prompts, plain: Tensor, classes: bool) -> Interval:
    """Squared changes of predictions by the label of a row of the nearest quarter, over that of one of the others."""
    scale = prompts.xs[:, :-1].std(1, keepdim=True).clamp(min=1e-6)
    ranks = ((prompts.xs[:, :-1] - prompts.xs[:, -1:]) / scale).square().sum(-1).argsort(1).argsort(1)
    is_near = ranks < prompts.n_context // 4
    near, far, counts = torch.zeros(len(plain)), torch.zeros(len(plain)), torch.zeros(2, len(plain))
    for row in range(0, prompts.n_context, prompts.n_context // N_MOVED):
        ys = prompts.ys.clone()
        ys[:, row] = ys[:, row].roll(1, -1) if classes else ys[:, row] + 0.5
        moved = (query_predictions(learner, Prompts(prompts.xs, ys)) - plain).square().mean(-1)
        near += moved * is_near[:, row]
        far += moved * ~is_near[:, row]
        counts += torch.stack([is_near[:, row], ~is_near[:, row]])
    grouped = [each.unflatten(0, (-1, N_QUERIES)).sum(1) for each in (near, far, *counts)]
    shares = grouped[2].sum() / grouped[3].sum()
    return ratio_interval(grouped[0], grouped[1] * shares)


def _calibration_error(predicted: Tensor, targets: Tensor) -> Interval:
    """Mean distance of the likeliest class's probability from the share of right ones, in five bins of equal size."""
    sure, guess = predicted.max(-1)
    right = (guess == targets.argmax(-1)).double()
    bins = sure.argsort().tensor_split(5)
    return interval(torch.stack([(sure[each].double().mean() - right[each].mean()).abs() for each in bins]))


if __name__ == "__main__":
    compare.run()
