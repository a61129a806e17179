"""Where in a model's stream a variable of an algorithm lies: a subspace learned by exchange interventions."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise import Hypothesis, Runs
from mechicl.algorithms.stepwise.counterfactuals import Place
from mechicl.algorithms.stepwise.hypothesis import variables_of
from mechicl.analysis.causes.interchange import check_finite, check_inputs, sample_sources
from mechicl.analysis.causes.subspace_search import (
    VariableExchange,
    find_readers,
    make_starts,
    search_columns,
    squared_distances,
)
from mechicl.base.arguments import Count, Natural, check_fields, checked
from mechicl.base.progress import progress_bar
from mechicl.checkpoints.study import takes_study
from mechicl.models import PromptedModel, build
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.stream_runs import record_streams, tokens_per_point
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval
from mechicl.statistics.results import index_of
from mechicl.tasks import Task

MODEL, RANDOM, UNTRAINED = "model", "random targets", "untrained model"


@dataclass(frozen=True, eq=False)
class SubspaceFit:
    """Settings of `fit_subspace`: how much is fitted and measured.

    Attributes:
        n_fitting: number of prompts to fit to.
        n_prompts: number of other prompts to measure on.
        iterations: number of optimizer iterations per start.
        restarts: number of random starts, in addition to directions found by regression; the best is taken.
        untrained: an untrained model of the same kind, for the control; by default a mechicl model gets new weights.
    """

    n_fitting: Count = 256
    n_prompts: Count = 256
    iterations: Count = 100
    restarts: Natural = 1
    untrained: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, eq=False)
class SubspaceSearch(Result):
    """Learned subspaces: their exchange compared with that of an algorithm's variable, on held-out prompts.

    With Δ the change from the prediction without intervention, the R² of a subspace is
    `1 - E|Δmodel - Δhypothesis|² / E|Δhypothesis|²`: 1 where its exchange does what exchanging the variable would, 0
    for a subspace without effect. The R² of its rest, all other directions of the same tokens' streams, compares with
    the exchange of all other variables; a variable lies in a subspace only if both are near 1. Controls have an
    advantage: their changes are multiplied by the best-fitting factor.

    Attributes:
        variables: the variables, exchanged together.
        place: "query" or "context": the tokens whose streams are exchanged.
        layers: numbers of layers before the exchange.
        steps: for each, the number of the algorithm's steps before it.
        searches: "model"; the controls "random targets" (each prompt's are those of another) and "untrained model".
        errors: `|Δmodel - Δhypothesis|²` of the subspaces, `[search layer dim prompt]`.
        rest_errors: the same for the rests.
        changes: `|Δhypothesis|²` of the variables, `[search layer prompt]`.
        fitted_r2: mean of both R² on the prompts that subspaces were fitted to, `[search layer dim]`.
        columns: the model's subspaces by layer, orthonormal columns of each number of dimensions concatenated.
    """

    hypothesis: str
    variables: tuple[str, ...]
    place: str
    layers: tuple[int, ...]
    steps: tuple[int, ...]
    dims: tuple[int, ...]
    searches: tuple[str, ...]
    errors: Float[Tensor, "search layer dim prompt"]
    rest_errors: Float[Tensor, "search layer dim prompt"]
    changes: Float[Tensor, "search layer prompt"]
    fitted_r2: Float[Tensor, "search layer dim"]
    columns: Float[Tensor, "layer d_model column"]

    def r2(self, layer: int, dim: int, search: str = MODEL) -> Interval:
        """Return the held-out R² of the subspace of `dim` dimensions after `layer` layers, with its 95% interval.

        1: exchanging it acts like exchanging the variable. `search` is "model" or one of the controls in `searches`.
        """
        s, i, j = self._place(layer, dim, search)
        return self.curves(s, i)[0][j]

    def rest_r2(self, layer: int, dim: int, search: str = MODEL) -> Interval:
        """Return the held-out R² of all directions outside the subspace, against all other variables; see `r2`."""
        s, i, j = self._place(layer, dim, search)
        return self.curves(s, i)[1][j]

    def subspace(self, layer: int, dim: int) -> Float[Tensor, "d_model dim"]:
        """Return the orthonormal columns learned after `layer` layers, e.g. for `Hypothesis(subspaces=)`."""
        _, i, j = self._place(layer, dim, MODEL)
        first = sum(self.dims[:j])
        return self.columns[i, :, first : first + dim]

    def curves(self, search: int, layer: int) -> tuple[list[Interval], list[Interval]]:
        """Return the held-out R² of subspaces and of their rests, by number of dimensions.

        `search` and `layer` are indices from 0 into `searches` and `layers`.
        """
        changes = self.changes[search, layer]
        subspaces, rests = (
            [1 - ratio_interval(errors, changes) for errors in table[search, layer]]
            for table in (self.errors, self.rest_errors)
        )
        return subspaces, rests

    def samples(self) -> dict[str, Tensor]:
        """Return the errors of subspaces and rests relative to the mean change: 1 minus R² on average."""
        scale = self.changes.mean(-1)[:, :, None, None].clamp(min=1e-300)
        return {"errors": self.errors / scale, "rest_errors": self.rest_errors / scale}

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row per search, layer and number of dimensions: both R² with 95% intervals.

        `fitted_r2` is their mean on the prompts of the fit.
        """
        rows = []
        for s, i in self._searched():
            for j, (r2, rest) in enumerate(zip(*self.curves(s, i), strict=True)):
                rows.append({
                    "search": self.searches[s], "layer": self.layers[i], "step": self.steps[i], "dim": self.dims[j],
                    **r2.columns("r2"), **rest.columns("rest_r2", "rest_"),
                    "fitted_r2": self.fitted_r2[s, i, j].item(),
                })  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        lines = [("hypothesis", self.hypothesis), ("variable", f"{self.place}'s {', '.join(self.variables)}")]
        lines.append(("held-out R²: of subspace, of rest", "  ".join(f"{f'{dim} dim':>14}" for dim in self.dims)))
        for s, i in self._searched():
            pairs = zip(*self.curves(s, i), strict=True)
            cells = (f"{_short(r2.mean)}, {_short(rest.mean)}" for r2, rest in pairs)
            name = f"{self.searches[s]}, after {self.layers[i]} layer{'' if self.layers[i] == 1 else 's'}"
            lines.append((name, "  ".join(f"{cell:>14}" for cell in cells)))
        return lines

    def _searched(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(len(self.searches)), range(len(self.layers)))

    def _place(self, layer: int, dim: int, search: str) -> tuple[int, int, int]:
        s = index_of("search", search, self.searches)
        return s, index_of("layer", layer, self.layers), index_of("dim", dim, self.dims)


@takes_study
@checked(locks=True)
def fit_subspace(
    model: Any,
    hypothesis: Hypothesis,
    variables: str | Sequence[str],
    task: Task,
    *,
    place: Place = "query",
    layers: int | Sequence[int] | None = None,
    dims: int | Sequence[int] = (1, 2, 4),
    fit: SubspaceFit = SubspaceFit(),
    progress: bool | None = None,
) -> SubspaceSearch:
    """Learn which subspace of a model's residual stream carries a variable of an algorithm.

    Orthonormal directions are learned with two aims: exchanging them between prompts should change the model's
    prediction as exchanging the variable changes the algorithm's, and exchanging all other directions as exchanging all
    other variables does. Results are from other prompts. Enough directions can fit anything, so there are results for
    several numbers of them, and two controls: the same search with random targets, and in an untrained model. Source:
    Geiger et al. 2024, distributed alignment search, with targets that are numbers in place of classes.

    Args:
        model: any model with hooks that reads prompts of points.
        hypothesis: the algorithm and which layers are which steps, as for `interchange`:
            `Hypothesis(algorithm, schedule)`.
        variables: one of `hypothesis.algorithm.variables`, or several to exchange together: a list, or one string with
            commas, such as "y, prediction".
        task: distribution of the prompts to fit to and to measure on.
        place: the tokens that carry the variable, "query" or "context".
        layers: numbers of layers after which to search, each from the hypothesis's schedule; by default all between the
            first and the last.
        dims: numbers of dimensions of the subspace, rising.
        fit: numbers of prompts and iterations, and the seed: `SubspaceFit(n_fitting, n_prompts, iterations, ...)`.

    Returns:
        A `SubspaceSearch`: `r2(layer, dim)` and `rest_r2(layer, dim)`, of the controls with `search="random targets"`
        or `"untrained model"`; `subspace(layer, dim)` has the columns.

    Example:
        >>> known = constructions.known_models(hidden=True)[1]  # two steps of gradient descent
        >>> few = SubspaceFit(n_fitting=32, n_prompts=32, iterations=20, restarts=0)
        >>> search = fit_subspace(known.model, known.hypothesis, "residual", known.task, dims=1, fit=few)
        >>> search.r2(layer=1, dim=1).mean > 0.99
        True
    """
    adapter = ModelAdapter(model)
    tokens_per_point(model)  # raises TypeError for models that do not read points
    names = variables_of(variables) if isinstance(variables, str) else tuple(variables)
    schedule = dict(hypothesis.schedule)
    if layers is None:
        layers = [layer for layer, _ in hypothesis.between]
    layers = (layers,) if isinstance(layers, int) else tuple(layers)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    seed, untrained, n_prompts = fit.seed, fit.untrained, fit.n_prompts
    one = task.sample(1, seed=seed, dtype=torch.float64)
    d_model = _width(adapter, one)
    _check_search(hypothesis, names, layers, dims, d_model)
    searched = {MODEL: adapter, RANDOM: adapter}
    if untrained is None and isinstance(model, PromptedModel):
        weight = next(model.parameters())
        untrained = build(model.cfg, seed + 1_000_003).to(weight.device, weight.dtype).eval()
    if untrained is not None:
        searched[UNTRAINED] = ModelAdapter(untrained)
        ours, its = ((each.n_layers, _width(each, one)) for each in (adapter, searched[UNTRAINED]))
        if ours != its:
            raise ValueError(f"the untrained model has (layers, d_model) = {its}, and the model {ours}")
    exchanges = []
    for i, n in enumerate((fit.n_fitting, n_prompts)):
        prompts = task.sample(n, seed=seed + 2 * i, dtype=torch.float64)
        sources = sample_sources(task, prompts, seed=seed + 2 * i + 1)
        check_inputs(adapter, hypothesis, prompts, sources)
        states = [hypothesis.algorithm.states(each) for each in (prompts, sources)]
        check_finite(hypothesis, states)
        runs = Runs(hypothesis.algorithm, *states)
        exchanges.append(VariableExchange(hypothesis, names, place, prompts, sources, runs))
    shape = (len(searched), len(layers), len(dims))
    errors, rest_errors = (torch.zeros(*shape, n_prompts, dtype=torch.float64) for _ in range(2))
    changes = torch.zeros(*shape[:2], n_prompts, dtype=torch.float64)
    fitted_r2 = torch.zeros(shape, dtype=torch.float64)
    columns = torch.zeros(len(layers), d_model, sum(dims), dtype=torch.float64)
    with progress_bar(total=len(searched) * len(layers) * len(dims), progress=progress, unit="search") as bar:
        for s, (search, opened) in enumerate(searched.items()):
            fitting, held_out = (each.run(opened, shuffled=search == RANDOM) for each in exchanges)
            for i, layer in enumerate(layers):
                parts, others = fitting(layer, schedule[layer]), held_out(layer, schedule[layer])
                changes[s, i] = torch.cat([part.targets[0] for part in others]).square().mean(1)
                scale = torch.cat([part.targets[0] for part in parts]).square().mean().item()
                readers = find_readers(parts, exchanges[0], schedule[layer])
                for j, dim in enumerate(dims):
                    starts = make_starts(readers, dim, fit.restarts, seed + 1009 * layer + dim)
                    loss, basis, factor = search_columns(parts, starts, fit.iterations, favoured=search != MODEL)
                    errors[s, i, j], rest_errors[s, i, j] = squared_distances(others, basis, factor)
                    fitted_r2[s, i, j] = 1 - loss / (2 * scale)
                    if search == MODEL:
                        columns[i, :, sum(dims[:j]) : sum(dims[: j + 1])] = basis
                    bar.update(1)
    return SubspaceSearch(
        hypothesis.name, names, place, layers, tuple(schedule[layer] for layer in layers), dims, tuple(searched),
        errors, rest_errors, changes, fitted_r2, columns,
    )  # fmt: skip


def _width(adapter: ModelAdapter, prompts: Prompts) -> int:
    """Dimensions of the stream, which a wrapped module's config lacks."""
    return record_streams(adapter, adapter.encode(prompts))[0].shape[-1]


def _check_search(
    hypothesis: Hypothesis, names: Sequence[str], layers: Sequence[int], dims: Sequence[int], d_model: int
) -> None:
    known, allowed = hypothesis.algorithm.variables, dict(hypothesis.schedule)
    if not names or not set(names) <= set(known):
        raise ValueError(f"{hypothesis.name!r} has the variables {known}, not {list(names)}")
    if not layers or not set(layers) <= set(allowed):
        raise ValueError(f"layers must be some of the schedule's, {sorted(allowed)}; got {list(layers)}")
    if not dims or list(dims) != sorted(set(dims)) or not 1 <= dims[0] <= dims[-1] <= d_model:
        raise ValueError(f"dims must rise, from 1 or more to at most the stream's width {d_model}; got {list(dims)}")


def _short(r2: float) -> str:
    return f"{r2:.3f}" if r2 > -9 else "< -9"
