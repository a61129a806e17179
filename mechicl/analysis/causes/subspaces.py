"""Where in a model's stream a variable of an algorithm lies: the subspace is learned, by exchanging what lies in it."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise import Hypothesis, Place, Runs, variables_of
from mechicl.analysis.causes.interchange import _check_finite, sample_sources
from mechicl.analysis.causes.model_runs import ModelRuns, record_streams, tokens_per_point
from mechicl.analysis.causes.results import MOST
from mechicl.memory import MEMORY, Budget
from mechicl.models import PromptedModel, build
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.progress import progress_bar
from mechicl.statistics import Interval, Result, ratio_interval
from mechicl.tasks import Task

MODEL, RANDOM, UNTRAINED = "model", "random targets", "untrained model"
BATCH = 256  # prompts a run
PENALTY = 1e-6  # of a ridge regression, as a part of the mean variance
NOTHING = 1e-9  # of the hypothesis's change by all its variables: a variable that changes less changes nothing


@dataclass(frozen=True, eq=False)
class SubspaceSearch(Result):
    """What learned subspaces carry: their exchange beside that of an algorithm's variable, on held-out prompts.

    With Δ the change from the prediction without intervention, the R² of a subspace is
    `1 - E|Δmodel - Δhypothesis|² / E|Δhypothesis|²`: 1 where its exchange does what exchanging the variable would, 0
    for what changes nothing. The R² of its rest, all other directions of the same tokens' streams, compares with the
    exchange of all other variables, and has the same denominator. A variable lies in a subspace only if both
    are near 1.

    Controls are searched in the same way, and are favoured: their changes are multiplied by the factor that fits best.

    Attributes:
        hypothesis: its name.
        variables: that are searched for, together.
        place: "query" or "context": whose streams are exchanged.
        layers: numbers of layers before the exchange.
        steps: for each, the number of the algorithm's steps before it.
        dims: numbers of dimensions.
        searches: "model"; the controls "random targets" (each prompt's are those of another) and "untrained model".
        errors: `|Δmodel - Δhypothesis|²` of the subspaces, `[search layer dim prompt]`.
        rest_errors: the same of the rests.
        changes: `|Δhypothesis|²` of the variables, `[search layer prompt]`.
        fitted_r2: mean of both R² on the prompts that subspaces were fitted to, `[search layer dim]`.
        columns: the model's subspaces by layer, orthonormal columns `[d_model dim]` beside each other, the first
            number of dimensions first.
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
        """Held-out R² of a subspace.

        Raises:
            ValueError: a layer, a number of dimensions or a search that is not here.
        """
        s, i, j = self._place(layer, dim, search)
        return self.curves(s, i)[0][j]

    def rest_r2(self, layer: int, dim: int, search: str = MODEL) -> Interval:
        """Held-out R² of its rest."""
        s, i, j = self._place(layer, dim, search)
        return self.curves(s, i)[1][j]

    def subspace(self, layer: int, dim: int) -> Float[Tensor, "d_model dim"]:
        """The orthonormal columns that were learned in the model, for `Hypothesis(subspaces=)` for instance."""
        _, i, j = self._place(layer, dim, MODEL)
        first = sum(self.dims[:j])
        return self.columns[i, :, first : first + dim]

    def curves(self, search: int, layer: int) -> tuple[list[Interval], list[Interval]]:
        """Held-out R² of subspaces and of their rests, by number of dimensions; both arguments count from 0."""
        subspaces, rests = (
            [ratio_interval(errors, self.changes[search, layer]) for errors in table[search, layer]]
            for table in (self.errors, self.rest_errors)
        )
        return [_one_minus(ratio) for ratio in subspaces], [_one_minus(ratio) for ratio in rests]

    def samples(self) -> dict[str, Tensor]:
        """The errors of subspaces and of rests, as parts of the mean change: 1 minus an R² on average."""
        scale = self.changes.mean(-1)[:, :, None, None].clamp(min=1e-300)
        return {"errors": self.errors / scale, "rest_errors": self.rest_errors / scale}

    def to_dataframe(self) -> pd.DataFrame:
        """One row a search, layer and number of dimensions: both R² with 95% intervals, and what was fitted."""
        rows = []
        for s, i in self._searched():
            for j, (r2, rest) in enumerate(zip(*self.curves(s, i), strict=True)):
                rows.append({
                    "search": self.searches[s], "layer": self.layers[i], "step": self.steps[i], "dim": self.dims[j],
                    "r2": r2.mean, "low": r2.low, "high": r2.high,
                    "rest_r2": rest.mean, "rest_low": rest.low, "rest_high": rest.high,
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
        asked = {"search": (search, self.searches), "layer": (layer, self.layers), "dim": (dim, self.dims)}
        for name, (value, values) in asked.items():
            if value not in values:
                raise ValueError(f"{name}={value!r} was not searched, only {values}")
        return self.searches.index(search), self.layers.index(layer), self.dims.index(dim)


def fit_subspace(
    model: Any,
    hypothesis: Hypothesis,
    variables: str | Sequence[str],
    task: Task,
    *,
    place: Place = "query",
    layers: int | Sequence[int] | None = None,
    dims: int | Sequence[int] = (1, 2, 4),
    untrained: Any = None,
    n_fitting: int = 256,
    n_prompts: int = 256,
    iterations: int = 100,
    restarts: int = 1,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> SubspaceSearch:
    """Which subspace of a model's stream carries a variable of an algorithm?

    Orthonormal columns are learned such that what exchanging them between prompts changes in the model's prediction is
    what exchanging the variable changes in the algorithm's, and at the same time that exchanging all other directions
    changes what exchanging all other variables does. What is shown is measured on other prompts. Enough directions fit
    much: so there is a curve over their number, beside the same search with random targets and in an untrained model.

    Args:
        model: any model with hooks that reads prompts of points.
        hypothesis: the algorithm, and which layers are which steps.
        variables: one of the algorithm's, or several that are exchanged together; "y, prediction" is two too.
        task: that prompts are drawn from, those to fit to and those to measure on.
        place: whose tokens carry it, "query" or "context".
        layers: numbers of layers after which to search, each from the hypothesis's schedule; by default all that lie
            between the first and the last.
        dims: numbers of dimensions of the subspace, rising.
        untrained: an untrained model of the same kind; by default ours get new initial weights, and other models none.
        n_fitting: prompts to fit to, each with a source.
        n_prompts: to measure on.
        iterations: of L-BFGS.
        restarts: number of random first columns; others read the variables off by regression. The best on the
            fitting prompts is taken.
        seed: of prompts, columns and the untrained model.
        memory: bound in bytes on what a run holds at a time.
        progress: show a progress bar.

    Raises:
        TypeError: a model without hooks, or one that does not read prompts of points.
        ValueError: a variable that the algorithm does not have, or one whose exchange changes nothing; a layer that is
            not in the schedule; more dimensions than the stream has; another number of layers than the schedule's; or
            an algorithm whose state is not finite on these prompts.

    Source: Geiger et al. 2024, distributed alignment search, with targets that are numbers in place of classes.

    Example:
        >>> known = constructions.known_models(hidden=True)[1]  # two steps of gradient descent
        >>> few = {"n_fitting": 32, "n_prompts": 32, "iterations": 20, "restarts": 0}
        >>> search = fit_subspace(known.model, known.hypothesis, "residual", known.task, dims=1, **few, progress=False)
        >>> search.r2(layer=1, dim=1).mean > 0.99
        True
    """
    adapter, per_point = ModelAdapter(model), tokens_per_point(model)
    names = variables_of(variables) if isinstance(variables, str) else tuple(variables)
    schedule = dict(hypothesis.schedule)
    if layers is None:
        layers = [layer for layer, _ in hypothesis.between]
    layers, dims = ((each,) if isinstance(each, int) else tuple(each) for each in (layers, dims))
    _check_asked(adapter, hypothesis, names, place, layers, dims)
    searched = {MODEL: adapter, RANDOM: adapter}
    if untrained is None and isinstance(model, PromptedModel):
        weight = next(model.parameters())
        untrained = build(model.cfg, seed + 1_000_003).to(weight.device, weight.dtype).eval()
    if untrained is not None:
        searched[UNTRAINED] = ModelAdapter(untrained)
        _check_same_kind(adapter, searched[UNTRAINED])
    told = [
        _Told(hypothesis, names, place, task, n, seed + 2 * i, per_point) for i, n in enumerate((n_fitting, n_prompts))
    ]
    d_model = adapter.model.cfg.d_model
    shape = (len(searched), len(layers), len(dims))
    errors, rest_errors = (torch.zeros(*shape, n_prompts, dtype=torch.float64) for _ in range(2))
    changes = torch.zeros(*shape[:2], n_prompts, dtype=torch.float64)
    fitted_r2 = torch.zeros(shape, dtype=torch.float64)
    columns = torch.zeros(len(layers), d_model, sum(dims), dtype=torch.float64)
    with progress_bar(total=len(searched) * len(layers) * len(dims), progress=progress, unit="search") as bar:
        for s, (search, opened) in enumerate(searched.items()):
            fitting, held_out = (each.on(opened, memory, shuffled=search == RANDOM) for each in told)
            for i, layer in enumerate(layers):
                parts, others = fitting(layer, schedule[layer]), held_out(layer, schedule[layer])
                changes[s, i] = torch.cat([part.targets[0] for part in others]).square().mean(1)
                scale = torch.cat([part.targets[0] for part in parts]).square().mean().item()
                directions = _readers(parts, told[0], schedule[layer])
                for j, dim in enumerate(dims):
                    starts = _starts(directions, dim, restarts, seed + 1009 * layer + dim)
                    fit = _search(parts, starts, iterations, favoured=search != MODEL)
                    errors[s, i, j], rest_errors[s, i, j] = _distances(others, fit.basis, fit.factor)
                    fitted_r2[s, i, j] = 1 - fit.loss / (2 * scale)
                    if search == MODEL:
                        columns[i, :, sum(dims[:j]) : sum(dims[: j + 1])] = fit.basis
                    bar.update(1)
    return SubspaceSearch(
        hypothesis.name, names, place, layers, tuple(schedule[layer] for layer in layers), dims, tuple(searched),
        errors, rest_errors, changes, fitted_r2, columns,
    )  # fmt: skip


# ---- runs and what the hypothesis foretells of them ----


@dataclass(frozen=True, eq=False)
class _Part:
    """Runs on some prompts after some layer, and the changes that are foretold: by the variables, by all others."""

    runs: ModelRuns
    layer: int
    place: Place
    unchanged: Float[Tensor, "prompt y"]
    targets: tuple[Float[Tensor, "prompt y"], Float[Tensor, "prompt y"]]

    def changes(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Of the model's prediction, by exchanging what lies in the basis, and by exchanging the rest."""
        exchanged = (self.runs.exchange(self.layer, self.place, basis, rest=rest).double() for rest in (False, True))
        inside, rest = (each - self.unchanged for each in exchanged)
        return inside, rest

    def apart(self, basis: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        """These changes, times a factor, less what is foretold."""
        inside, rest = self.changes(basis)
        return factor * inside - self.targets[0], factor * rest - self.targets[1]


class _Told:
    """Prompts and sources, and what exchanging variables on them changes after any step of the algorithm."""

    def __init__(
        self, hypothesis: Hypothesis, names: Sequence[str], place: Place, task: Task, n: int, seed: int, per_point: int
    ):
        self.prompts = task.sample(n, seed=seed, dtype=torch.float64)
        self.sources = sample_sources(task, self.prompts, seed=seed + 1)
        algorithm = hypothesis.algorithm
        states = [algorithm.states(each) for each in (self.prompts, self.sources)]
        _check_finite(hypothesis, states)
        self.hypothesis, self.names, self.place, self.per_point, self.seed = hypothesis, names, place, per_point, seed
        self.runs = Runs(algorithm, *states)
        self.unchanged = self.runs.exchange(0, place, ())

    def targets(self, step: int) -> tuple[Tensor, Tensor]:
        """Changes of the algorithm's prediction by the variables, and by all others.

        Raises:
            ValueError: the variables change nothing.
        """
        others = [name for name in self.hypothesis.algorithm.variables if name not in self.names]
        changed, by_others, by_all = (
            self.runs.exchange(step, self.place, names) - self.unchanged for names in (self.names, others, None)
        )
        if not changed.square().mean() > NOTHING * by_all.square().mean():
            raise ValueError(
                f"{self.hypothesis.name}: exchanging {', '.join(self.names)} of the {self.place} after {step} steps "
                f"changes nothing that is predicted, so that no subspace is better than another: take another "
                f"variable, place or layer"
            )
        return changed, by_others

    def on(self, adapter: ModelAdapter, memory: float, *, shuffled: bool) -> Callable[[int, int], list[_Part]]:
        """The parts of these prompts after some layer and step, run by a model.

        Args:
            adapter: of the model.
            memory: bound on what a run holds.
            shuffled: each prompt gets another's targets.
        """
        tokens = [adapter.encode(each) for each in (self.prompts, self.sources)]
        rows = Budget(memory).holding(adapter.bytes_of_products).rows(
            4 * adapter.n_layers * adapter.bytes_per_row(tokens[0][:1]), at_most=BATCH  # kept for derivatives
        )  # fmt: skip
        batches = []
        for each in zip(*(t.split(rows) for t in tokens), strict=True):
            base, source = (record_streams(adapter, part) for part in each)
            runs = ModelRuns(adapter, each[0], base, source, self.per_point)
            with torch.no_grad():
                batches.append((runs, adapter.run(each[0]).double()))
        order = torch.arange(len(self.prompts))
        if shuffled:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed))

        def parts(layer: int, step: int) -> list[_Part]:
            device = batches[0][1].device
            halves = [target[order].to(device).split(rows) for target in self.targets(step)]
            return [
                _Part(runs, layer, self.place, unchanged, targets)
                for (runs, unchanged), *targets in zip(batches, *halves, strict=True)
            ]

        return parts


# ---- the search ----


def _readers(parts: Sequence[_Part], told: _Told, step: int) -> Float[Tensor, "d_model direction"]:
    """Directions that read the variables off the streams, by ridge regression of their differences between prompts and
    sources; those that read most come first."""
    layer, where = parts[0].layer, slice(-1, None) if parts[0].place == "query" else slice(0, -1)
    pairs = [(part.runs.base[layer], part.runs.source[layer]) for part in parts]
    streams = torch.cat([source[:, where] - base[:, where] for base, source in pairs]).double().cpu()
    base, source = told.runs.base[step], told.runs.source[step]
    carried = torch.cat([(source[name] - base[name])[:, where].flatten(0, 1) for name in told.names], dim=1)
    d_model, by_point = streams.shape[-1], streams.reshape(len(carried), -1)  # a point's tokens beside each other
    gram = by_point.mT @ by_point
    ridge = PENALTY * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    slopes = torch.linalg.solve(gram + ridge, by_point.mT @ carried)  # [token * d_model, variable]
    readers = torch.cat(slopes.split(d_model), dim=1)
    left, values, _ = torch.linalg.svd(readers, full_matrices=False)
    return left[:, values > 1e-6 * values[0]]


def _starts(directions: Tensor, dim: int, restarts: int, seed: int) -> list[Float[Tensor, "d_model dim"]]:
    """Columns to search from: the directions, made up or cut down to their number, and random ones."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(len(directions), dim, dtype=torch.float64, generator=generator) for _ in range(1 + restarts)]
    return [torch.cat([directions, drawn[0]], dim=1)[:, :dim], *drawn[1:]]


def _search(
    parts: Sequence[_Part], starts: Sequence[Float[Tensor, "d_model dim"]], iterations: int, *, favoured: bool
) -> "_Fit":
    """The orthonormal columns with the least loss that L-BFGS reaches from some starts."""
    fits = []
    for start in starts:
        basis = torch.linalg.qr(start).Q
        factor = _best_factor(parts, basis) if favoured else 1.0
        free = basis.clone().requires_grad_(), torch.tensor(factor, dtype=torch.float64, requires_grad=favoured)
        if basis.shape[0] > basis.shape[1]:  # else there is nothing to choose
            _descend(parts, *free, iterations)
        basis, factor = torch.linalg.qr(free[0].detach()).Q, free[1].item()
        fits.append(_Fit(basis, _best_factor(parts, basis) if favoured else 1.0, *_distances(parts, basis, factor)))
    return min(fits, key=lambda fit: fit.loss)


def _descend(parts: Sequence[_Part], free: Tensor, factor: Tensor, iterations: int) -> None:
    """Move the columns, and the factor where it is free, to where the logarithms of 1 + each distance are least.

    Exchanging what does not belong together can make an iteration explode: a logarithm keeps that from deciding.
    """
    moved = [each for each in (free, factor) if each.requires_grad]
    optimizer = torch.optim.LBFGS(moved, max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")
    n = sum(len(part.unchanged) for part in parts)
    scale = sum(part.targets[0].square().mean(1).sum() for part in parts) / n

    def closure() -> Tensor:
        basis = torch.linalg.qr(free).Q
        leaf, loss = basis.detach().requires_grad_(), torch.zeros((), dtype=torch.float64)
        slopes = [torch.zeros_like(leaf), torch.zeros_like(factor)]
        for part in parts:
            distances = sum(each.square().mean(1) for each in part.apart(leaf, factor)) / (2 * scale)
            logarithms = distances.log1p().sum() / n
            slope = torch.autograd.grad(logarithms, [leaf, *moved[1:]])
            slopes = [a + b.nan_to_num(0.0, 0.0, 0.0) for a, b in zip(slopes, slope, strict=False)]
            loss = loss + logarithms.detach().cpu().nan_to_num(MOST, MOST)
        (free.grad,) = torch.autograd.grad(basis, free, slopes[0])
        free.grad = free.grad.contiguous()
        factor.grad = slopes[1] if factor.requires_grad else None
        return loss

    optimizer.step(closure)


@dataclass(frozen=True, eq=False)
class _Fit:
    """A subspace, the factor on what it changes, and squared distances of its and the rest's changes `[prompt]`."""

    basis: Tensor
    factor: float
    inside: Tensor
    rest: Tensor

    @property
    def loss(self) -> float:
        return (self.inside + self.rest).mean().nan_to_num(torch.inf, torch.inf).item()


@torch.no_grad()
def _best_factor(parts: Sequence[_Part], basis: Tensor) -> float:
    """By which the model's changes come nearest to the targets; 0 where it changes nothing."""
    products = squares = 0.0
    for part in parts:
        for change, target in zip(part.changes(basis), part.targets, strict=True):
            products, squares = products + (change * target).sum(), squares + change.square().sum()
    factor = float(products / squares) if squares > 0 else 0.0
    return factor if math.isfinite(factor) else 0.0


@torch.no_grad()
def _distances(parts: Sequence[_Part], basis: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Squared distances `[prompt]` of the changes by the subspace and of those by the rest."""
    pairs = zip(*(part.apart(basis, factor) for part in parts), strict=True)
    inside, rest = (torch.cat(each).square().mean(1).cpu().nan_to_num(MOST, MOST) for each in pairs)
    return inside, rest


# ---- what is asked ----


def _check_asked(
    adapter: ModelAdapter, hypothesis: Hypothesis, names: Sequence[str], place: str, layers: Sequence[int],
    dims: Sequence[int],
) -> None:  # fmt: skip
    known, allowed, d_model = hypothesis.algorithm.variables, dict(hypothesis.schedule), adapter.model.cfg.d_model
    if hypothesis.n_layers != adapter.n_layers:
        raise ValueError(
            f"the schedule of {hypothesis.name!r} ends after {hypothesis.n_layers} layers, and the model has "
            f"{adapter.n_layers}"
        )
    if not names or not set(names) <= set(known):
        raise ValueError(f"{hypothesis.name!r} has the variables {known}, not {list(names)}")
    if place not in ("query", "context"):
        raise ValueError(f"place must be 'query' or 'context', got {place!r}")
    if not layers or not set(layers) <= set(allowed):
        raise ValueError(f"layers must be some of the schedule's, {sorted(allowed)}; got {list(layers)}")
    if not dims or list(dims) != sorted(set(dims)) or not 1 <= dims[0] <= dims[-1] <= d_model:
        raise ValueError(f"dims must rise, from 1 or more to at most the stream's width {d_model}; got {list(dims)}")


def _check_same_kind(adapter: ModelAdapter, other: ModelAdapter) -> None:
    widths = [(each.n_layers, each.model.cfg.d_model) for each in (adapter, other)]
    if widths[0] != widths[1]:
        raise ValueError(f"the untrained model has (layers, d_model) = {widths[1]}, and the model {widths[0]}")


def _one_minus(ratio: Interval) -> Interval:
    return Interval(1 - ratio.mean, 1 - ratio.high, 1 - ratio.low, ratio.n, ratio.level)


def _short(r2: float) -> str:
    return f"{r2:.3f}" if r2 > -9 else "< -9"
