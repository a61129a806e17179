"""Tables of random functions: regression and classification as priors of tabular foundation models draw them."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from mechicl.base.arguments import Count, Fraction, at_least, check_fields, checked
from mechicl.prompts import Prompts
from mechicl.prompts.tables import Tables
from mechicl.tasks.sampling import PromptDistribution, RandomTensors, sampling_generator

HIDDEN, TREES, DEPTH, LEVELS, FEWEST_ROWS, UNSEEN = 12, 3, 3, 5, 8, 64
"""Sizes of random networks and forests, most levels of a categorical column, fewest rows of tables of drawn sizes, and
rows that only the scale of the labels is taken from."""


class TableTask(PromptDistribution):
    """Base of the tasks of tables: frozen dataclasses that draw `Tables` in `_draw`, and prompts of one query each.

    Attributes:
        has_classes: labels have a column for each class; else they are numbers.
    """

    has_classes: bool = False

    @checked
    def sample_tables(
        self,
        n_tables: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Tables:
        """Draw tables with `n_queries` rows to predict each; arguments are those of `sample`.

        Example:
            >>> TableRegression(n_queries=20, missing=0.1).sample_tables(3, seed=0)
            Tables(n_tables=3, n_context=50, n_queries=20, x_dim=4, y_dim=1, dtype=torch.float32, device='cpu')
        """
        random = RandomTensors(sampling_generator(n_tables, seed, generator, device))
        return self._sized(random)._draw(n_tables, random)

    @abstractmethod
    def whole(self, n_queries: Count) -> "TableTask":
        """Return the task with all its columns and rows and no missing cells, and with n rows to predict."""

    def _sized(self, random: RandomTensors) -> "TableTask":
        """Draw the sizes of a batch, where they vary."""
        return self

    @abstractmethod
    def _draw(self, n: int, random: RandomTensors) -> Tables: ...

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        one: Any = self.replace(n_queries=1)
        return one._draw(n_prompts, random).prompts()


@dataclass(frozen=True, repr=False)
class RandomTables(TableTask):
    """Base of the tasks of tables of random functions: cells, and the values of one function of each row.

    Attributes:
        x_dim: number of columns; with `varied` the most.
        n_context: number of rows with labels; with `varied` the most.
        n_queries: rows to predict of each table that `sample_tables` draws.
        varied: each call of `sample_tables` draws a number of columns from 1 to x_dim, and one of rows from 8 to
            n_context (both for the whole batch; rows with a uniform logarithm).
        relevant: probability that the function depends on a column; it depends on one at least.
        missing: share of the cells that are missing, in half of the tables.
    """

    x_dim: Count = 4
    n_context: Count = 50
    n_queries: Count = 1
    varied: bool = False
    relevant: Fraction = 0.7
    missing: Fraction = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def whole(self, n_queries: Count) -> "RandomTables":
        """Return the task with all its columns and rows and no missing cells, and with n rows to predict."""
        return self.replace(varied=False, missing=0.0, n_queries=n_queries)

    def _sized(self, random: RandomTensors) -> "RandomTables":
        if not self.varied:
            return self
        n_columns, longest = int(random.integers(1, self.x_dim + 1, 1)), self.n_context / FEWEST_ROWS
        n_rows = round(FEWEST_ROWS * longest ** float(random.uniform(1))) if longest > 1 else self.n_context
        return self.replace(x_dim=n_columns, n_context=n_rows, varied=False)

    def _draw(self, n: int, random: RandomTensors) -> Tables:
        # Scales and quantiles come from the context and rows that are then dropped, never from the rows to predict:
        # otherwise the labels of the context would determine theirs.
        n_context, n_columns = self.n_context, self.x_dim
        n_shown = n_context + self.n_queries
        read, shown = _columns(n, n_shown + UNSEEN, n_columns, random)
        used = random.uniform(n, n_columns) < self.relevant
        used |= random.uniform(n, n_columns).argsort(-1) == 0  # a random one of them
        known = torch.arange(n_shown + UNSEEN, device=read.device)
        known = (known < n_context) | (known >= n_shown)
        values = _standardized(_random_functions(read, used, random), known)
        noise = 0.02 * 30 ** random.uniform(n, 1) * random.normal(n, n_shown + UNSEEN)
        ys = self._labels(_standardized(values + noise, known), known, random)[:, :n_shown]
        hidden = self.missing * (random.uniform(n, 1, 1) < 0.5)
        shown = shown[:, :n_shown].masked_fill(random.uniform(n, n_shown, n_columns) < hidden, torch.nan)
        return Tables(shown, ys.to(shown), n_context)

    @abstractmethod
    def _labels(
        self, values: Float[Tensor, "table row"], known: Bool[Tensor, "row"], random: RandomTensors
    ) -> Float[Tensor, "table row y"]: ...


@dataclass(frozen=True, repr=False)
class TableRegression(RandomTables):
    """Tables with numeric labels: values of random functions with noise.

    Each table has its own function: linear, additive (waves, bends, steps), a small network or a few small trees. It
    depends on some of the columns. These are normal, correlated in half of the tables, and each may be categorical (in
    arbitrary codes), heavy-tailed or skewed. Labels have mean 0 and mean square 1 over the context and 64 unseen rows.
    `sample` draws `Prompts` (one query, missing cells filled), `sample_tables` draws `Tables`. After the priors of
    Müller et al. 2022 and Hollmann et al. 2023, 2025, with smaller functions.

    Example:
        >>> TableRegression(x_dim=3, n_context=20).sample(2, seed=0)
        Prompts(n_prompts=2, n_context=20, x_dim=3, y_dim=1, dtype=torch.float32, device='cpu')
    """

    y_dim = 1

    def _labels(
        self, values: Float[Tensor, "table row"], known: Bool[Tensor, "row"], random: RandomTensors
    ) -> Float[Tensor, "table row y"]:
        return values[..., None]


@dataclass(frozen=True, repr=False)
class TableClassification(RandomTables):
    """Tables with classes: intervals of the values of `TableRegression`, in a random order.

    Labels have a column for each class, with 1 for the row's and 0 elsewhere. Each table has two to `n_classes` of the
    classes, which are intervals between quantiles that are drawn for it.

    Attributes:
        n_classes: number of classes.

    Example:
        >>> TableClassification(x_dim=3, n_context=20).sample(2, seed=0).ys.sum(-1).unique()
        tensor([1.])
    """

    n_classes: Annotated[int, at_least(2)] = 3
    has_classes = True

    @property
    def y_dim(self) -> int:
        """Number of classes."""
        return self.n_classes

    def _labels(
        self, values: Float[Tensor, "table row"], known: Bool[Tensor, "row"], random: RandomTensors
    ) -> Float[Tensor, "table row y"]:
        n, most = len(values), self.n_classes
        reference = values[:, known].sort(-1).values
        ranks = torch.searchsorted(reference, values) / reference.shape[1]  # shares of rows with smaller values
        number = random.integers(min(2, most), most + 1, n, 1)  # of classes
        shares = random.exponential(n, most) + 0.3
        shares = shares * (torch.arange(most, device=shares.device) < number)
        bounds = (shares.cumsum(-1) / shares.sum(-1, keepdim=True))[:, :-1]
        interval = (ranks[..., None] > bounds[:, None]).sum(-1).minimum(number - 1)
        order = random.uniform(n, most).argsort(-1)
        return F.one_hot(order.gather(1, interval), most)


def _columns(n: int, n_rows: int, n_columns: int, random: RandomTensors) -> tuple[Tensor, Tensor]:
    """Draw the cells that the function reads and those that the learner sees, `[table row column]`."""
    own, shared = random.normal(n, n_rows, n_columns), random.normal(n, n_rows, 1)
    share = random.uniform(n, 1, n_columns) * (random.uniform(n, 1, 1) < 0.5)  # of a common factor
    normal = (1 - share**2).sqrt() * own + share * random.signs(n, 1, n_columns) * shared
    kind = random.uniform(n, 1, n_columns)
    # a category has a code that is seen, and a value that the function reads
    level = (torch.special.ndtr(normal) * (2 + (LEVELS - 1) * random.uniform(n, 1, n_columns)).floor()).long()
    values, codes = random.normal(n, LEVELS + 1, n_columns), random.uniform(n, LEVELS + 1, n_columns).argsort(1)
    categorical = kind < 0.2
    read = torch.where(categorical, values.gather(1, level), normal)
    heavy, skewed = (1.5 * normal).sinh(), normal.exp()
    shown = torch.where(kind < 0.35, heavy, torch.where(kind < 0.45, skewed, normal))
    return read, torch.where(categorical, codes.gather(1, level).to(normal), shown)


def _random_functions(
    xs: Float[Tensor, "table row column"], used: Bool[Tensor, "table column"], random: RandomTensors
) -> Float[Tensor, "table row"]:
    """Return the values of one random function for each table, of the columns that are used."""
    n, _, n_columns = xs.shape
    size = used[:, None] * 3 ** (random.uniform(n, 1, n_columns) - 0.5)  # of a column's effect
    linear = (xs * size * random.normal(n, 1, n_columns)).sum(-1)
    slope, phase, form = (random.uniform(n, 1, n_columns) for _ in range(3))
    wave = ((0.5 + 2 * slope) * xs + 6.3 * phase).sin()
    bend, step = (xs - 2 * phase + 1).abs(), (xs > 2 * phase - 1).to(xs)
    effects = torch.where(form < 0.4, wave, torch.where(form < 0.7, bend, step))
    additive = (effects * size * random.normal(n, 1, n_columns)).sum(-1)
    scale = 2 * used.sum(1)[:, None, None] ** -0.5
    first = (xs * size) @ (scale * random.normal(n, n_columns, HIDDEN)) + random.normal(n, 1, HIDDEN)
    hidden = torch.where(random.uniform(n, 1, 1) < 0.5, first.tanh(), first.relu())
    second = (hidden @ random.normal(n, HIDDEN, HIDDEN) / HIDDEN**0.5 + random.normal(n, 1, HIDDEN) / 2).tanh()
    hidden = torch.where(random.uniform(n, 1, 1) < 0.5, hidden, second)
    network = (hidden @ random.normal(n, HIDDEN, 1)).squeeze(-1)
    choice = (random.uniform(n, n_columns, TREES * DEPTH) + used[..., None]).argmax(1)  # a used column for each split
    split = xs.gather(2, choice[:, None].expand(-1, xs.shape[1], -1)) > random.normal(n, 1, TREES * DEPTH)
    leaf = (split.unflatten(2, (TREES, DEPTH)) * 2 ** torch.arange(DEPTH, device=xs.device)).sum(-1)  # [table row tree]
    depth_one = random.uniform(n, 1, TREES) < 0.2  # a single split
    trees = random.normal(n, 2**DEPTH, TREES).gather(1, torch.where(depth_one, leaf % 2, leaf)).sum(-1)
    functions = torch.stack([linear, additive, network, trees])
    kind = random.integers(0, len(functions), n)
    return functions[kind, torch.arange(n, device=xs.device)]


def _standardized(values: Float[Tensor, "table row"], known: Bool[Tensor, "row"]) -> Float[Tensor, "table row"]:
    """Return values with mean 0 and mean square 1 over the known rows; nearly constant ones stay small."""
    centred = values - values[:, known].mean(1, keepdim=True)
    return centred / centred[:, known].square().mean(1, keepdim=True).sqrt().clamp(min=0.05)
