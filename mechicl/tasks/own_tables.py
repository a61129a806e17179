"""A table of the user's own as a task: other rows are drawn as context and as rows to predict each time."""

import math
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.annotations import described
from mechicl.base.arguments import ArgumentError, Count, check_fields, checked
from mechicl.base.files import read_csv
from mechicl.prompts.tables import Tables
from mechicl.tasks.sampling import RandomTensors
from mechicl.tasks.tables import TableTask


@dataclass(frozen=True, repr=False, eq=False)
class OwnTable(TableTask):
    """Tables drawn from the rows of your own table, for a learner on your own data.

    Each table has other rows as context and as rows to predict, drawn without repeats. Numeric labels are scaled to
    mean 0 and standard deviation 1 over the context's rows, so that nothing of the rows to predict is known. Columns
    whose values are so large next to their spread that the dtype would merge them, such as times in seconds, are
    centred: their median is subtracted first.

    Attributes:
        cells: cells of all rows `[row column]`; NaN where one is missing.
        labels: labels of all rows `[row y]`: numbers, or a column for each class (1 for the row's class, else 0).
        n_context: number of rows with labels in each table.
        n_queries: rows to predict in each table that `sample_tables` draws.
        has_classes: the labels are classes.

    Raises:
        ArgumentError: shapes differ, a label is not finite, or there are too few rows.

    Example:
        >>> frame = pd.DataFrame({"a": range(80), "b": 40 * ["x", "y"], "label": range(80)})
        >>> OwnTable.from_frame(frame, "label", n_context=50).sample_tables(3, seed=0)
        Tables(n_tables=3, n_context=50, n_queries=1, x_dim=2, y_dim=1, dtype=torch.float32, device='cpu')
    """

    cells: Float[Tensor, "row column"]
    labels: Float[Tensor, "row y"]
    n_context: Count = 50
    n_queries: Count = 1
    has_classes: bool = False

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)
        n_rows = len(self.cells)
        if len(self.labels) != n_rows:
            raise ArgumentError(f"cells have {n_rows} rows and labels {len(self.labels)}: they must have the same rows")
        if self.cells.isinf().any() or not self.labels.isfinite().all():
            raise ArgumentError("cells must be finite or NaN (missing), and labels finite")
        if self.n_context + self.n_queries > n_rows:
            raise ArgumentError(f"n_context + n_queries must be at most the table's {n_rows} rows, got "
                                f"{self.n_context} + {self.n_queries}")  # fmt: skip

    @classmethod
    @checked
    def from_frame(
        cls, frame: Any, label: str, *, n_context: Count | None = None, classes: bool | None = None
    ) -> "OwnTable":
        """Make a task of a data frame, or of a CSV file.

        Columns of text become numbers in alphabetical order, ordered categories in their order, and columns of objects
        that are all numbers stay numbers.

        Args:
            frame: a data frame of pandas, or the path of a CSV file with a header.
            label: name of the column to predict; all others are read.
            n_context: number of rows with labels in each table; by default 50, or two thirds of a shorter table's.
            classes: the labels are classes, which numbers such as 0 and 1 may be too; by default text, categories and
                True or False are.

        Raises:
            ArgumentError: no such column, two of one name, a column that is neither numbers nor text, a missing label,
                labels that are all the same, or classes that all differ.
        """
        import pandas as pd  # takes half a second

        table = _read_table(frame) if isinstance(frame, str | Path) else frame
        if not isinstance(table, pd.DataFrame):
            raise ArgumentError(f"frame must be a pandas DataFrame or the path of a CSV file, got {described(table)}")
        if label not in table.columns or len(table.columns) < 2:
            raise ArgumentError(f"label must be one of several columns {[*table.columns]}, got {label!r}")
        if twice := [name for name, n in table.columns.value_counts().items() if n > 1]:
            raise ArgumentError(f"names of columns must differ, got several columns {twice[0]!r}")
        if times := [*table.select_dtypes(["datetime", "datetimetz", "timedelta"]).columns]:
            kind = table[times[0]].dtype
            raise ArgumentError(f"column {times[0]!r} has times ({kind}): convert it to numbers, or drop it")
        if n_missing := int(table[label].isna().sum()):
            raise ArgumentError(f"column {label!r} lacks {n_missing} of {len(table)} labels: drop these rows")
        n_values = table[label].nunique()
        if n_values < 2:
            raise ArgumentError(f"column {label!r} must have two different labels or more, in {len(table)} rows")
        has_categories = hasattr(table[label], "cat")
        table = pd.DataFrame({name: each if name == label and has_categories else _plain(each)
                              for name, each in table.items()})  # fmt: skip
        cells = torch.stack([_numbers(table[name]) for name in table.columns if name != label], dim=1)
        classes = (has_categories or not _is_numeric(table[label])) if classes is None else classes
        if classes:
            if n_values == len(table):
                raise ArgumentError(f"column {label!r} ({table[label].dtype}) must have classes, which several rows "
                                    f"share, got {n_values} values in {len(table)} rows")  # fmt: skip
            found = table[label].astype("category").cat.remove_unused_categories()
            codes = torch.tensor(found.cat.codes.to_numpy("int64"))
            ys = torch.nn.functional.one_hot(codes).double()
        elif _is_numeric(table[label]):
            ys = _numbers(table[label])[:, None]
        else:
            raise ArgumentError(f"column {label!r} is not numbers ({table[label].dtype}): classes must be True or None")
        return cls(cells, ys, n_context or min(50, 2 * len(table) // 3), 1, classes)

    @property
    def x_dim(self) -> int:
        """Number of columns."""
        return self.cells.shape[1]

    @property
    def y_dim(self) -> int:
        """Number of classes; 1 for numbers."""
        return self.labels.shape[1]

    @checked
    def whole(self, n_queries: Count) -> "OwnTable":
        """Return the task with n rows to predict, or those that the table has."""
        return self.replace(n_queries=min(n_queries, len(self.cells) - self.n_context))

    def _draw(self, n: int, random: RandomTensors) -> Tables:
        rows = random.uniform(n, len(self.cells)).argsort(-1)[:, : self.n_context + self.n_queries]
        xs, ys = (each.to(random.device)[rows] for each in (self._precise(random.dtype), self.labels))
        if not self.has_classes:
            context = ys[:, : self.n_context]
            scale = context.std(1, correction=0, keepdim=True)
            ys = (ys - context.mean(1, keepdim=True)) / torch.where(scale > 0, scale, 1.0)
        return Tables(xs.to(random.dtype), ys.to(random.dtype), self.n_context)

    @cached_property
    def _by_dtype(self) -> dict[torch.dtype, Float[Tensor, "row column"]]:
        return {}

    def _precise(self, dtype: torch.dtype) -> Float[Tensor, "row column"]:
        """Return the cells, in float64 minus the column's median where the dtype would lose its differences."""
        if dtype not in self._by_dtype:
            centred = self.cells.double() - self.cells.double().nanmedian(0).values
            spread = centred.square().nanmean(0).sqrt()
            lost = (self.cells - self.cells.to(dtype).double()).abs().nan_to_num(posinf=torch.inf).amax(0)
            limit = max(1e-3, 100 * torch.finfo(dtype).eps) * spread
            self._by_dtype[dtype] = torch.where((lost > limit) & (spread > 0), centred, self.cells)
        return self._by_dtype[dtype]

    def __repr__(self) -> str:
        kind = f"{self.y_dim} classes" if self.has_classes else "numbers"
        return f"OwnTable({len(self.cells)} rows, x_dim={self.x_dim}, n_context={self.n_context}, labels: {kind})"


def _read_table(path: str | Path) -> Any:
    try:
        return read_csv(path)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"{path} must be a CSV file with as many fields in each row as in its header "
                            f"({reason})") from error  # fmt: skip


def _is_numeric(column: Any) -> bool:
    import pandas as pd

    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def _plain(column: Any) -> Any:
    """Return numbers of dtype object or category with a dtype of numbers; ordered categories and text unchanged."""
    if hasattr(column, "cat") and not column.cat.ordered:
        column = column.astype(object)
    if column.dtype != object:
        return column
    values = column.dropna()
    if values.map(lambda value: isinstance(value, Real | Decimal) and not isinstance(value, bool)).all():
        return column.where(column.notna(), math.nan).map(float)
    for value in values:
        if not isinstance(value, str | bool | np.bool_):
            raise ArgumentError(f"column {column.name!r} must have numbers or text, got {described(value)} in it")
    return column


def _numbers(column: Any) -> Float[Tensor, "row"]:
    if hasattr(column, "cat"):  # ordered
        values = column.cat.codes.astype("float64").where(column.notna()).to_numpy()
    elif _is_numeric(column):
        values = column.to_numpy("float64", na_value=float("nan"))
    else:
        codes = column.astype(str).where(column.notna()).astype("category").cat.codes
        values = codes.astype("float64").where(codes >= 0).to_numpy()
    return torch.tensor(values, dtype=torch.float64)
