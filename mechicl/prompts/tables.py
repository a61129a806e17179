"""Tables: rows with labels and rows to predict, as a user of scikit-learn has them; cells may be missing."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import ArgumentError, Natural, check_fields, checked
from mechicl.prompts.prompts import Prompts


@dataclass(frozen=True, eq=False)
class Tables:
    """A batch of tables of one size, each with rows whose labels a learner sees (the context), and rows to predict.

    Where `Prompts` have one query each, tables have many that share a context, and NaN marks a missing cell.

    Attributes:
        xs: cells `[table row column]`; NaN where one is missing.
        ys: labels `[table row y]`: numbers, or a column for each class (1 for the row's class, else 0).
        n_context: number of rows with labels, which come first.

    Raises:
        ArgumentError: xs or ys has another shape or dtype, a label is not finite, or a cell is infinite.

    Example:
        >>> tables = Tables(torch.randn(1, 60, 3), torch.randn(1, 60, 1), n_context=50)
        >>> tables.n_queries, tables.prompts()
        (10, Prompts(n_prompts=10, n_context=50, x_dim=3, y_dim=1, dtype=torch.float32, device='cpu'))
    """

    xs: Float[Tensor, "table row column"]
    ys: Float[Tensor, "table row y"]
    n_context: Natural

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)
        if self.xs.shape[:2] != self.ys.shape[:2] or 0 in (self.xs.shape[2], self.ys.shape[2]):
            raise ArgumentError(f"xs {[*self.xs.shape]} and ys {[*self.ys.shape]} must have the same tables and rows")
        if self.n_context >= self.xs.shape[1]:
            raise ArgumentError(f"n_context must leave a row to predict, got {self.n_context} of {self.xs.shape[1]}")
        if self.xs.isinf().any() or not self.ys.isfinite().all():
            raise ArgumentError("cells must be finite or NaN (missing), and labels finite")

    @classmethod
    @checked
    def from_arrays(cls, xs: Any, ys: Any, queries: Any) -> "Tables":
        """Make one table of arrays or data frames of numbers.

        Args:
            xs: cells of the rows with labels, `[row column]`; NaN where one is missing.
            ys: their labels `[row]` or `[row y]`.
            queries: cells of the rows to predict, `[query column]`; their labels are stored as 0. Columns of two data
                frames are matched by name.

        Example:
            >>> Tables.from_arrays(np.zeros((50, 3)), np.zeros(50), np.ones((10, 3))).n_queries
            10
        """
        if hasattr(xs, "columns") and hasattr(queries, "columns"):
            named = {str(name): name for name in queries.columns}
            if sorted(map(str, xs.columns)) != sorted(named):
                raise ArgumentError(f"queries must have the columns of xs, {[*xs.columns]}, got {[*queries.columns]}")
            queries = queries[[named[str(name)] for name in xs.columns]]
        xs, ys, queries = (_as_float64(part) for part in (xs, ys, queries))
        ys = ys[:, None] if ys.ndim == 1 else ys
        labels = torch.cat([ys, ys.new_zeros(len(queries), ys.shape[1])])
        return cls(torch.cat([xs, queries])[None], labels[None], len(xs))

    def __len__(self) -> int:
        return len(self.xs)

    def __repr__(self) -> str:
        n_columns, y_dim = self.xs.shape[2], self.ys.shape[2]
        sizes = f"n_context={self.n_context}, n_queries={self.n_queries}, x_dim={n_columns}, y_dim={y_dim}"
        return f"Tables(n_tables={len(self)}, {sizes}, dtype={self.xs.dtype}, device='{self.xs.device}')"

    @property
    def n_queries(self) -> int:
        """Number of rows to predict."""
        return self.xs.shape[1] - self.n_context

    @property
    def targets(self) -> Float[Tensor, "table query y"]:
        """Labels of the rows to predict, which learners do not see."""
        return self.ys[:, self.n_context :]

    def prompts(self) -> Prompts:
        """Return a prompt for each row to predict, `[table * query]` in order, for learners of prompts.

        They have no missing cells: those of the context become their column's median there, as do those of queries; 0
        without any.
        """
        context = self.xs[:, : self.n_context] if self.n_context else self.xs[:, :1] * 0
        # of an even number of cells torch returns the lower of the two in the middle
        median = (context.nanmedian(1, keepdim=True).values - (-context).nanmedian(1, keepdim=True).values) / 2
        filled = torch.where(self.xs.isnan(), median.nan_to_num(0.0), self.xs)

        def each(part: Tensor) -> Tensor:
            context, queries = part[:, : self.n_context], part[:, self.n_context :]
            copies = context[:, None].expand(-1, self.n_queries, -1, -1)
            return torch.cat([copies, queries[:, :, None]], dim=2).flatten(0, 1)

        return Prompts(each(filled), each(self.ys))

    @checked
    def means(self, values: Float[Tensor, "prompt *any"]) -> Float[Tensor, "table *any"]:
        """Average values of `prompts()` over the rows to predict of each table."""
        return values.unflatten(0, (-1, self.n_queries)).mean(1)

    def to(self, *args: Any, **kwargs: Any) -> "Tables":
        """Move to another device or dtype, with the arguments of `Tensor.to`."""
        return Tables(self.xs.to(*args, **kwargs), self.ys.to(*args, **kwargs), self.n_context)


def _as_float64(part: Any) -> Tensor:
    if hasattr(part, "isna"):  # of pandas, whose NA NumPy does not convert
        part = part.to_numpy(np.float64, na_value=np.nan)
    return torch.as_tensor(part if isinstance(part, Tensor) else np.array(part, np.float64), dtype=torch.float64)
