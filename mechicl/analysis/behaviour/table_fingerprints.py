"""The fingerprint of a learner of tables: which changes of a table it ignores, how local and how sure it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.behaviour.fingerprints import Violations, check_answers
from mechicl.base.arguments import Count, at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.base.settings import settings
from mechicl.checkpoints.study import takes_study
from mechicl.learners import Learner
from mechicl.learners.learners import query_predictions
from mechicl.prompts import Prompts, Tables
from mechicl.statistics import Interval, interval, ratio_interval
from mechicl.tasks.tables import TableTask

N_MOVED, QUARTERS = 8, 4
"""Rows of a table whose labels are changed, one at a time, and groups of rows by their distance from the query."""

# property: (words if it holds, words if not)
TABLE_WORDS = {
    "order of the rows": ("", "it depends on the order of the rows"),
    "order of the columns": ("", "it depends on the order of the columns"),
    "units of the columns": ("units of columns do not matter", "units of columns matter"),
    "monotone transformations": ("it reads only the order of a column's values", ""),
    "a column of noise": ("it ignores columns of noise", ""),
    "additive over columns": ("columns add up", "columns interact"),
    "linear in the labels": ("it is linear in the labels", "it is not linear in the labels"),
}


@dataclass(frozen=True, eq=False)
class TableFingerprint(Violations):
    """Properties of a learner of tables; see `fingerprint_on_tables`. Samples are tables.

    `squared_predictions` are squared distances of predictions from the mean label of the context.

    Attributes:
        influence: squared change of a prediction by the label of one row, relative to the size of that change,
            `[quarter table]`: of the quarter of rows that is nearest to the row to predict, and of those farther away.
        overconfidence: mean probability of the likeliest class, minus the share of rows of which it is the class,
            `[table]`; NaN for numbers as labels.
    """

    influence: Float[Tensor, "quarter prompt"]
    overconfidence: Float[Tensor, "prompt"]

    @property
    def locality(self) -> Interval:
        """The influence of labels of the nearest quarter of rows, over that of the farthest quarter."""
        return ratio_interval(self.influence[0], self.influence[-1])

    @property
    def description(self) -> str:
        """One sentence on the kind of learner, without the name of a family."""
        violated, near = set(self.violated), self.locality
        words = [TABLE_WORDS[name][name in violated] for name in self.violations]
        if self.influence[-1].max() == 0 < self.influence[0].max():
            words.append("labels of the rows farthest away have no influence")
        elif near.low > 1:
            words.append(f"labels of near rows count {near.mean:.2g} times as much as those of far ones")
        sure = interval(self.overconfidence) if not self.overconfidence.isnan().any() else None
        if sure and 0 not in sure:
            words.append(f"it is {'over' if sure.mean > 0 else 'under'}confident by {abs(sure.mean):.0%}")
        return ", ".join(filter(None, words)) or "a learner that ignores the order of rows and columns"


@takes_study
@checked
def fingerprint_on_tables(
    learner: Learner,
    task: TableTask,
    *,
    n_tables: Annotated[int, at_least(2)] = 24,
    n_queries: Count = 8,
    seed: int = 0,
    progress: bool | None = None,
) -> TableFingerprint:
    """Measure what kind of learner of tables it is, on its predictions alone: no family is fitted.

    A violation is the mean squared difference of two predictions that are equal if the property holds, over the squared
    distance of predictions from the mean label of the context. Learners whose fits differ by their seeds, such as
    forests, violate every property by that difference.

    - order of the rows; order of the columns; units of the columns: each is multiplied by a number and shifted;
    - monotone transformations: x + x|x| in place of x; a column of noise: it is added to the others;
    - additive over columns: changes of the query in two halves of the columns add up (with two columns or more);
    - linear in the labels: the mean of two sets of labels gives the mean prediction (for numbers).

    Args:
        learner: anything with `predict(prompts)`; for classes it returns probabilities.
        task: distribution of the tables; missing cells are filled.
        n_tables: number of tables; each property takes one to three predictions of their rows.

    Raises:
        ValueError: predictions are not finite, or depend on the label of the row to predict.

    Example:
        >>> from sklearn.linear_model import LinearRegression as LeastSquares
        >>> from mechicl.interop import from_sklearn
        >>> from mechicl.tasks import TableRegression
        >>> fitted = fingerprint_on_tables(from_sklearn(LeastSquares()), TableRegression(n_context=20))
        >>> fitted.standing["additive over columns"]
        'exact'
    """
    on_tables = OnTables.drawn(learner, task, n_tables, n_queries, seed)
    tables, plain = on_tables.tables, on_tables.predicted
    changes = list(_changes(on_tables, task.has_classes, torch.Generator().manual_seed(seed)))
    violations = {}
    bar = progress_bar(changes, unit="property", progress=progress, desc="fingerprint")
    with settings(progress=False):  # a bar for every change would flicker
        for name, parts in bar:
            predicted = (factor * query_predictions(learner, changed) for factor, changed in parts)
            violations[name] = on_tables.squares(sum(predicted, plain))
        influence = _influence(learner, on_tables, task.has_classes)
    overconfidence = torch.full_like(on_tables.size, torch.nan)
    if task.has_classes:
        sure, guess = plain.max(-1)
        overconfidence = tables.means(sure - (guess == on_tables.prompts.query.ys.argmax(-1)).double())
    return TableFingerprint(violations, on_tables.size, influence, overconfidence)


@dataclass(frozen=True)
class OnTables:
    """Tables, a prompt for each of their rows to predict, and a learner's predictions of these."""

    tables: Tables
    prompts: Prompts
    predicted: Float[Tensor, "prompt y"]
    has_classes: bool

    @classmethod
    def drawn(cls, learner: Learner, task: TableTask, n_tables: int, n_queries: int, seed: int) -> "OnTables":
        """Draw tables and predict them; a ValueError for predictions that are not finite."""
        tables = task.whole(n_queries).sample_tables(n_tables, seed=seed).to(torch.float64)
        prompts = tables.prompts()
        predicted = query_predictions(learner, prompts)
        if not predicted.isfinite().all():
            raise ValueError(f"{type(learner).__name__} does not predict finite numbers on this task")
        check_answers(learner, prompts, predicted, fixed=False)
        return cls(tables, prompts, predicted, task.has_classes)

    def squares(self, differences: Float[Tensor, "prompt y"]) -> Float[Tensor, "table"]:
        """Return mean squares of differences of predictions."""
        return self.tables.means(differences.square().mean(-1))

    @cached_property
    def size(self) -> Float[Tensor, "table"]:
        """Mean squared distance of the predictions from the mean label of the context."""
        return self.squares(self.predicted - self.prompts.ys[:, :-1].mean(1)).clamp(min=1e-12)


def _changes(
    on_tables: OnTables, classes: bool, generator: torch.Generator
) -> Iterator[tuple[str, list[tuple[float, Prompts]]]]:
    """Yield the name of each property, and changed prompts whose weighted predictions add up to minus the plain.

    Prompts of one table are changed alike.
    """
    prompts, n_queries = on_tables.prompts, on_tables.tables.n_queries
    xs, ys, n_columns = prompts.xs, prompts.ys, prompts.x_dim

    def changed(xs: Tensor, ys: Tensor = ys) -> list[tuple[float, Prompts]]:
        return [(-1.0, Prompts(xs, ys))]

    order = torch.randperm(prompts.n_context, generator=generator)
    rows = torch.cat([order, torch.tensor([prompts.n_context])])  # the query is last
    yield "order of the rows", changed(xs[:, rows], ys[:, rows])
    if n_columns > 1:
        yield "order of the columns", changed(xs.roll(1, -1))
    yield "units of the columns", changed(xs * (1 + torch.arange(n_columns)) - 3)
    yield "monotone transformations", changed(xs + xs * xs.abs())
    noise = torch.randn(len(on_tables.tables), xs.shape[1], 1, generator=generator, dtype=xs.dtype)
    yield "a column of noise", changed(torch.cat([xs, noise.repeat_interleave(n_queries, 0)], -1))
    if n_columns > 1 and n_queries > 1:
        query = xs[:, -1:]
        other = query.unflatten(0, (-1, n_queries)).roll(1, 1).flatten(0, 1)  # another row of the table
        first = torch.arange(n_columns) < n_columns // 2
        mixed = (torch.where(which, other, query) for which in (first, ~first, torch.ones_like(first)))
        queries = [Prompts(torch.cat([xs[:, :-1], each], 1), ys) for each in mixed]
        yield "additive over columns", list(zip((-1.0, -1.0, 1.0), queries, strict=True))
    if not classes:
        other = ys[:, rows]
        yield "linear in the labels", [(1.0, Prompts(xs, other)), (-2.0, Prompts(xs, (ys + other) / 2))]


def _influence(learner: Learner, on_tables: OnTables, classes: bool) -> Float[Tensor, "quarter table"]:
    """Return squared changes of predictions per squared change of a row's label, by quarters of distance."""
    prompts, plain = on_tables.prompts, on_tables.predicted
    xs, n = prompts.xs, prompts.n_context
    scale = xs[:, :-1].std(1, keepdim=True)
    scaled = (xs - xs[:, -1:]) / torch.where(scale > 0, scale, 1.0)
    quarter = scaled[:, :-1].square().sum(-1).argsort(1).argsort(1) * QUARTERS // n
    moved, counts = torch.zeros(2, QUARTERS, len(plain), dtype=plain.dtype)
    for row in torch.linspace(0, n - 1, min(N_MOVED, n)).long().tolist():
        ys = prompts.ys.clone()
        ys[:, row] = ys[:, row].roll(1, -1) if classes else ys[:, row] + 0.5
        change = (ys - prompts.ys)[:, row].square().mean(-1).clamp(min=1e-300)
        squares = (query_predictions(learner, Prompts(xs, ys)) - plain).square().mean(-1) / change
        inside = quarter[:, row] == torch.arange(QUARTERS)[:, None]
        moved, counts = moved + squares * inside, counts + inside
    of_tables, in_tables = (on_tables.tables.means(each.T).T for each in (moved, counts))
    return of_tables / in_tables.clamp(min=1e-300)
