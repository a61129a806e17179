"""Interchange: a model's counterfactual predictions beside those of an algorithm that it may run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise import Hypothesis, Runs, query_of, variables_of
from mechicl.analysis.causes.model_runs import ModelRuns, hears_attention, record_streams, tokens_per_point
from mechicl.memory import MEMORY, Budget
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.progress import progress_bar
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval, storable
from mechicl.tasks import Task

N_RESAMPLES = 500
MOST = 1e150  # of a squared distance: beyond, and where it is not a number, it counts as this
INTERVENTIONS = {
    "prediction": "no intervention: what both predict",
    "query exchanged": "the query's state, or stream, comes from the source",
    "context exchanged": "the context's comes from the source",
    "point exchanged": "that of one point of the context comes from a run in which this point was the source's",
    "query skips": "what these steps, or layers, do at the query is taken back after them",
    "context skips": "what they do in the context is",
    "query repeats": "the query takes these steps twice",
    "context repeats": "the context does",
    "query stops reading": "from here on the query reads nothing of the context",
    "context frozen": "from here on the context stays as it is",
}
"""What is done to the algorithm and to the model. Where a hypothesis says which subspaces carry its variables,
"query's residual exchanged" and the like are tried too, and "query's rest exchanged": what no variable lies in."""


@storable
@dataclass(frozen=True)
class Cell:
    """One intervention, and where: after so many layers and steps, or from so many on, up to so many.

    Attributes:
        intervention: its name.
        layer: number of layers before it.
        step: number of steps before it.
        to_layer: number of layers after it; the same as `layer` for what happens between two layers.
    """

    intervention: str
    layer: int
    step: int
    to_layer: int

    def __str__(self) -> str:
        if self.intervention == "prediction":
            return self.intervention
        word = "from" if self.intervention in ("query stops reading", "context frozen") else "after"
        if self.to_layer > self.layer and word == "after":
            layers = (
                f"layer {self.layer}" if self.to_layer == self.layer + 1 else f"layers {self.layer}-{self.to_layer - 1}"
            )
            return f"{self.intervention} {layers}"
        return f"{self.intervention} {word} {self.layer} layers"


@dataclass(frozen=True, eq=False)
class Interchange(Result):
    """A model's counterfactual predictions beside a hypothesis's.

    The **interchange R²** of a cell is `1 - E|model - hypothesis|² / E|source - base|²`: 1 where the model does what
    the algorithm would, 0 where it is as far from it as the two ends are from each other; and who says "0" to
    everything reaches 0.5 on ends that are independent with mean 0.

    Attributes:
        hypothesis: its name.
        cells: interventions and where.
        predictions: the model's, `[cell y prompt]`.
        expected: the hypothesis's, `[cell y prompt]`.
        base: the model's prediction without intervention, `[y prompt]`.
        sources: the model's prediction at the other end, `[cell y prompt]`: on the source prompts, and for an exchanged
            point on the prompts with that point.
        expected_base: the hypothesis's prediction without intervention, `[y prompt]`.
        untried: interventions that the model has no hooks for.
    """

    hypothesis: str
    cells: list[Cell]
    predictions: Float[Tensor, "cell y prompt"]
    expected: Float[Tensor, "cell y prompt"]
    base: Float[Tensor, "y prompt"]
    sources: Float[Tensor, "cell y prompt"]
    expected_base: Float[Tensor, "y prompt"]
    untried: tuple[str, ...] = ()

    @property
    def r2(self) -> list[Interval]:
        """The interchange R² of each cell."""
        distances = (self.predictions - self.expected).square().mean(1).nan_to_num(MOST, MOST)
        ends = (self.sources - self.base).square().mean(1)
        ratios = [ratio_interval(*pair) for pair in zip(distances, ends, strict=True)]
        return [Interval(1 - r.mean, 1 - r.high, 1 - r.low, r.n, r.level) for r in ratios]

    @property
    def effects(self) -> Interval:
        """How much of what the interventions do the hypothesis explains, with a bootstrap interval over prompts.

        In each cell, with Δ the change from the prediction without intervention,
        `1 - E|Δmodel - Δhypothesis|² / (E|Δmodel|² + E|Δhypothesis|²)`: 1 where both change alike, 0 where one of them
        does not change or the changes have nothing to do with each other, -1 where they are opposite. Cells are
        averaged with weights: their changes as a part of that between both ends, at most 1, so that neither what hardly
        matters nor what explodes decides.
        """
        moved, expected = self.predictions - self.base, self.expected - self.expected_base
        parts = [part.square().sum(1) for part in (moved - expected, moved, expected, self.sources - self.base)]
        n = moved.shape[-1]
        resamples = torch.randint(n, (N_RESAMPLES, n), generator=torch.Generator().manual_seed(0))
        counts = torch.stack([torch.bincount(row, minlength=n) for row in resamples]).double()
        means = [part.double().nan_to_num(MOST, MOST) @ counts.T / n for part in parts]
        values = _explained(*means)
        centre = _explained(*(part.double().nan_to_num(MOST, MOST).mean(-1, keepdim=True) for part in parts))
        low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return Interval(centre.item(), low, high, n)

    @property
    def weakest(self) -> int:
        """The number of the cell with the least R²: a hypothesis stands no firmer than there."""
        means = [r2.mean for r2 in self.r2]
        return min(range(len(means)), key=lambda i: _nan_first(means[i]))

    @property
    def score(self) -> Interval:
        """The R² of the weakest cell."""
        return self.r2[self.weakest]

    def to_dataframe(self) -> pd.DataFrame:
        """One row a cell: R² with its interval, and mean squared distances as parts of that between both ends.

        `moved` is how far the intervention moved the model's prediction, `to_source` how far it still is from the
        source's, and `expected_moved` how far the hypothesis says that it moves.
        """
        rows = []
        for i, (cell, r2) in enumerate(zip(self.cells, self.r2, strict=True)):
            ends = (self.sources[i] - self.base).square().mean()
            parts = {
                "moved": self.predictions[i] - self.base,
                "to_source": self.predictions[i] - self.sources[i],
                "expected_moved": self.expected[i] - self.expected_base,
            }
            measured = {name: (value.square().mean() / ends).item() for name, value in parts.items()}
            places = {"layer": cell.layer, "to_layer": cell.to_layer, "step": cell.step}
            rows.append({"intervention": cell.intervention, **places, "r2": r2.mean, "low": r2.low, "high": r2.high,
                         **measured})  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        weakest = f"{self.score}, {self.cells[self.weakest]}"
        lines = [("hypothesis", self.hypothesis), ("effects explained", str(self.effects)), ("weakest", weakest)]
        by_intervention: dict[str, list[float]] = {}
        for cell, r2 in zip(self.cells, self.r2, strict=True):
            by_intervention.setdefault(cell.intervention, []).append(r2.mean)
        for name, values in by_intervention.items():
            lines.append((name, "  ".join(f"{value:.4f}" for value in values)))
        return lines + ([("untried", ", ".join(self.untried))] if self.untried else [])


def sample_sources(task: Task, prompts: Prompts, *, seed: int) -> Prompts:
    """Prompts of the task with contexts of their own and the queries of others: what states are taken from.

    Args:
        task: that the contexts are drawn from.
        prompts: whose queries they get.
        seed: another one than the prompts'.

    Example:
        >>> base = task.sample(64, seed=1)
        >>> sample_sources(task, base, seed=2).query.xs.equal(base.query.xs)
        True
    """
    return task.sample(len(prompts), seed=seed, dtype=prompts.dtype).to(prompts.device).with_query(prompts.query.xs)


def interchange(
    model: Any,
    hypothesis: Hypothesis,
    prompts: Prompts,
    sources: Prompts,
    *,
    interventions: Sequence[str] | None = None,
    point: int | None = None,
    memory: float = MEMORY,
    progress: bool = True,
) -> Interchange:
    """Does a model do what an algorithm would, if its state were another after some step?

    Every intervention is made on the algorithm, where what follows is computed exactly, and on the model, where the
    hypothesis says that the same variables are. Two models that predict the same and compute in different ways differ
    here.

    Args:
        model: any model with hooks that reads prompts of points.
        hypothesis: the algorithm, and which layers are which steps.
        prompts: that are intervened in.
        sources: as many, with the same queries and other contexts (`sample_sources`).
        interventions: names from `INTERVENTIONS`; all by default, as far as the model has hooks for them.
        point: number of the context's point that is exchanged alone; the middle one by default.
        memory: bound in bytes on what is held at a time.
        progress: show a progress bar.

    Raises:
        TypeError: a model without hooks, or one that does not read prompts of points.
        ValueError: sources of another shape or with other queries; another number of layers than the schedule's; a
            point or an intervention that does not exist; or an algorithm whose state is not finite on these prompts.

    Source: Geiger et al. 2021 for interchange interventions, with targets that are numbers in place of classes.

    Example:
        >>> steps = algorithms.stepwise
        >>> hypothesis = steps.Hypothesis(steps.ResidualDescent(4, step_size=0.05))
        >>> model = constructions.gradient_descent(x_dim=5, n_context=20, step_size=0.05, steps=4)
        >>> task = LinearRegression(x_dim=5, n_context=20)
        >>> prompts = task.sample(64, seed=0)
        >>> sources = sample_sources(task, prompts, seed=1)
        >>> interchange(model, hypothesis, prompts, sources, progress=False).score.mean > 0.999
        True
    """
    return interchange_each(
        model,
        [hypothesis],
        prompts,
        sources,
        interventions=interventions,
        point=point,
        memory=memory,
        progress=progress,
    )[0]


@torch.no_grad()
def interchange_each(
    model: Any,
    hypotheses: Sequence[Hypothesis],
    prompts: Prompts,
    sources: Prompts,
    *,
    interventions: Sequence[str] | None = None,
    point: int | None = None,
    memory: float = MEMORY,
    progress: bool = True,
) -> list[Interchange]:
    """`interchange` for several hypotheses on one model, whose runs they share."""
    adapter = ModelAdapter(model)
    per_point = tokens_per_point(model)
    point = prompts.n_context // 2 if point is None else point
    for hypothesis in hypotheses:
        _check_inputs(adapter, hypothesis, prompts, sources)
    if not 0 <= point < max(1, prompts.n_context):
        raise ValueError(f"point must be one of the context's, 0 to {prompts.n_context - 1}; got {point}")
    changed = Prompts(_with_point(prompts.xs, sources.xs, point), _with_point(prompts.ys, sources.ys, point))
    hears = hears_attention(model)
    plans = [_chosen(list(_plan(hypothesis, hears, point)), interventions) for hypothesis in hypotheses]
    wanted = {ask.key: ask for plan in plans for _, _, ask in plan}
    untried = () if hears or interventions else ("query stops reading",)
    trial = adapter.encode(prompts[:1])
    # the streams of the prompts and of two sources, and a run; the algorithms' states are smaller
    per_row = adapter.bytes_per_row(trial) + 3 * (adapter.n_layers + 2) * 8 * trial.shape[1] * adapter.model.cfg.d_model
    rows = Budget(memory).holding(adapter.bytes_of_products).rows(per_row, at_most=512)
    n_batches = -(-len(prompts) // rows)
    parts: list[list[list[Tensor]]] = []
    with progress_bar(total=n_batches * len(wanted), progress=progress, unit="run", desc="interchange") as bar:
        for start in range(0, len(prompts), rows):
            three = [each[start : start + rows] for each in (prompts, sources, changed)]
            tokens = [adapter.encode(each) for each in three]
            ends = [adapter.run(each).double().cpu() for each in tokens]
            streams = [record_streams(adapter, each) for each in tokens]
            runs = [ModelRuns(adapter, tokens[0], streams[0], source, per_point) for source in streams[1:]]
            predicted: dict[Key, Tensor] = {}
            for key, ask in wanted.items():
                predicted[key] = ask.of(runs).double().cpu()
                bar.update(1)
            parts.append([])
            for hypothesis, plan in zip(hypotheses, plans, strict=True):
                states = [hypothesis.algorithm.states(each) for each in three]
                _check_finite(hypothesis, states)
                own = [Runs(hypothesis.algorithm, states[0], source) for source in states[1:]]
                columns = [(predicted[ask.key], told.of(own).cpu(), ends[1 + ask.on_point]) for _, told, ask in plan]
                stacked = [torch.stack(column) for column in zip(*columns, strict=True)]
                plain = hypothesis.algorithm.read(query_of(states[0][-1])).cpu()
                parts[-1].append([*stacked, ends[0], plain])
    results = []
    for i, (hypothesis, plan) in enumerate(zip(hypotheses, plans, strict=True)):
        predictions, expected, others = (torch.cat([part[i][j] for part in parts], dim=1).mT for j in range(3))
        base, expected_base = (torch.cat([part[i][j] for part in parts]).T for j in (3, 4))
        cells = [cell for cell, _, _ in plan]
        results.append(Interchange(hypothesis.name, cells, predictions, expected, base, others, expected_base, untried))
    return results


Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Ask:
    """One intervention to be made: the method of `Runs` or `ModelRuns`, and what it is called with."""

    method: str
    arguments: tuple[Any, ...]
    on_point: bool = False  # on the runs whose source is the prompts with one other point

    @property
    def key(self) -> Key:
        return (self.method, self.on_point, *(id(a) if isinstance(a, Tensor) else a for a in self.arguments))

    def of(self, runs: Sequence[Any]) -> Tensor:
        return getattr(runs[self.on_point], self.method)(*self.arguments)


Planned = tuple[Cell, _Ask, _Ask]


def _plan(hypothesis: Hypothesis, hears: bool, point: int) -> Iterator[Planned]:
    """All interventions that a hypothesis speaks of, each on the algorithm and on the model."""

    def twins(name: str, method: str, places: tuple[int, int, int], of_algorithm: tuple, of_model: tuple) -> Planned:
        alone = name == "point exchanged"
        return Cell(name, *places), _Ask(method, of_algorithm, alone), _Ask(method, of_model, alone)

    n_layers, n_steps = hypothesis.schedule[-1]
    yield twins("prediction", "freeze", (0, 0, 0), ((n_steps,), "query"), ((n_layers,), "query"))  # nothing is left
    for layer, step in hypothesis.between:
        places = (layer, step, layer)
        for place in ("query", "context"):
            at_step, at_layer = (step, place), (layer, place)
            yield twins(f"{place} exchanged", "exchange", places, at_step, at_layer)
            for name, basis in hypothesis.subspaces.items():
                told, asked = (*at_step, variables_of(name)), (*at_layer, basis)
                yield twins(f"{place}'s {name} exchanged", "exchange", places, told, asked)
            if hypothesis.rest is not None:
                told, asked = (*at_step, ()), (*at_layer, hypothesis.rest)
                yield twins(f"{place}'s rest exchanged", "exchange", places, told, asked)
        told, asked = (step, "context", None, point), (layer, "context", None, point)
        yield twins("point exchanged", "exchange", places, told, asked)
    for layers, steps in hypothesis.segments:
        places = (layers.start, steps.start, layers.stop)
        for place in ("query", "context"):
            for name, method in (("skips", "skip"), ("repeats", "repeat")):
                yield twins(f"{place} {name}", method, places, (steps, place), (layers, place))
    for i, (layer, step) in enumerate(hypothesis.schedule[:-1]):
        places = (layer, step, n_layers)
        at_layers, at_steps = (tuple(column) for column in zip(*hypothesis.schedule[i:], strict=True))
        yield twins("context frozen", "freeze", places, (at_steps, "context"), (at_layers, "context"))
        if hears:
            yield twins("query stops reading", "stop_reading", places, (step,), (layer,))


def _chosen(plan: Sequence[Planned], interventions: Sequence[str] | None) -> list[Planned]:
    known = {cell.intervention for cell, _, _ in plan}
    unknown = set(interventions or ()) - known
    if unknown:
        raise ValueError(f"{sorted(unknown)} are not among what this hypothesis can be asked: {sorted(known)}")
    return [each for each in plan if interventions is None or each[0].intervention in interventions]


def _explained(apart: Tensor, moved: Tensor, expected: Tensor, ends: Tensor) -> Tensor:
    """The average over cells, on the first axis, of the part of the changes that both share."""
    changes = (moved + expected).clamp(min=1e-300)
    weights = (changes / (2 * ends).clamp(min=1e-300)).clamp(max=1.0)
    return 1 - (weights * apart / changes).sum(0) / weights.sum(0).clamp(min=1e-300)


def _with_point(values: Tensor, others: Tensor, point: int) -> Tensor:
    changed = values.clone()
    if values.shape[1] > 1:
        changed[:, point] = others[:, point]
    return changed


def _check_inputs(adapter: ModelAdapter, hypothesis: Hypothesis, prompts: Prompts, sources: Prompts) -> None:
    if hypothesis.n_layers != adapter.n_layers:
        raise ValueError(
            f"the schedule of {hypothesis.name!r} ends after {hypothesis.n_layers} layers, and the model has "
            f"{adapter.n_layers}: give Hypothesis(schedule=((0, 0), ..., ({adapter.n_layers}, "
            f"{hypothesis.algorithm.n_steps})))"
        )
    if len(prompts) < 2 or prompts.xs.shape != sources.xs.shape or prompts.ys.shape != sources.ys.shape:
        raise ValueError(f"needs two or more prompts and as many sources of the same shape, got {prompts}, {sources}")
    if not prompts.query.xs.equal(sources.query.xs.to(prompts.query.xs)):
        raise ValueError(
            "the sources' queries differ from the prompts', so that no query's state can be exchanged: take "
            "sample_sources(task, prompts, seed=...) or sources.with_query(prompts.query.xs)"
        )


def _check_finite(hypothesis: Hypothesis, states: Sequence[Sequence[dict[str, Tensor]]]) -> None:
    for run in states:
        for step, state in enumerate(run):
            for name, value in state.items():
                if not value.isfinite().all():
                    raise ValueError(
                        f"{hypothesis.name}: {name!r} is not finite after {step} steps on these prompts: the iteration "
                        f"diverges (a smaller step size or alpha), or a context is singular"
                    )


def _nan_first(value: float) -> float:
    return value if value == value else -float("inf")
