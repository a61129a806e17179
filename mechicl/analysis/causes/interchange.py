"""Interchange interventions: a model's counterfactual predictions compared with those of an algorithm."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise import Hypothesis, Runs, StepwiseAlgorithm, query_of
from mechicl.algorithms.stepwise.hypothesis import Cell, InterchangeKind, Key, plan_interventions, select_interventions
from mechicl.base.arguments import checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.stream_runs import StreamRuns, has_attention, has_scores, record_streams, tokens_per_point
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, ratio_interval
from mechicl.statistics.intervals import resample_counts
from mechicl.tasks import Task

N_RESAMPLES = 500
MOST = 1e150  # of a squared distance: beyond, and where it is not a number, it counts as this
INTERVENTIONS = {
    "prediction": "no intervention: the predictions of both",
    "query exchanged": "the query's state, or stream, comes from the source",
    "context exchanged": "the context's state comes from the source",
    "point exchanged": "the state of the middle context point comes from a run in which this point was the source's",
    "half exchanged": "the states of every other context point come from the source",
    "query skips": "the changes of these steps, or layers, at the query are undone after them",
    "context skips": "their changes in the context are undone",
    "query repeats": "the query takes these steps twice",
    "context repeats": "the context takes them twice",
    "query does not read": "in these steps, or layers, the query reads nothing of the context",
    "query stops reading": "from this step on it reads nothing",
    "context isolated": "from this step on each point of the context reads only itself",
    "context frozen": "from this step on the context stays unchanged",
}
"""The interventions on algorithm and model. If a hypothesis names the subspaces of its variables, "query's residual
exchanged" and the like are made too, and "query's rest exchanged" for all directions outside them."""


@dataclass(frozen=True, eq=False)
class Interchange(Result):
    """A model's counterfactual predictions compared with a hypothesis's; see `interchange`.

    A cell is one intervention at one place. The two ends of a cell are the model's predictions on the prompts (`base`)
    and on their sources (`sources`). Its **interchange R²** is `1 - E|model - hypothesis|² / E|source - base|²`: 1
    where the model does what the algorithm would, 0 where their distance is that of the two ends; always predicting 0
    reaches 0.5 on ends that are independent with mean 0.

    Attributes:
        cells: for each intervention, its name and the layers and steps before it.
        predictions: the model's predictions under each intervention, `[cell y prompt]`.
        expected: those of the algorithm under the same interventions, `[cell y prompt]`.
        base: the model's prediction without intervention, `[y prompt]`.
        sources: the model's prediction on the source prompts, `[cell y prompt]`; for an exchanged point on the prompts
            with that point.
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

    @cached_property
    def r2(self) -> list[Interval]:
        """The interchange R² of each cell, with 95% intervals over prompts."""
        return [1 - ratio for ratio in self._parts(self.predictions - self.expected)]

    @cached_property
    def effects(self) -> Interval:
        """The share of the effects of all interventions that the hypothesis explains (see `explained`)."""
        return self.explained()

    def explained(self, kinds: Collection[InterchangeKind] = ("exchange", "ablation")) -> Interval:
        """Return the explained share of the effects of interventions of these kinds, with a 95% interval over prompts.

        In each cell, with Δ the change from the prediction without intervention,
        `1 - E|Δmodel - Δhypothesis|² / (E|Δmodel|² + E|Δhypothesis|²)`: 1 where both change alike, 0 where one of them
        does not change or the changes are unrelated, -1 where they are opposite. Cells are averaged with weights: their
        changes relative to that between both ends (without intervention, and on the sources), at most 1, so that
        neither tiny nor exploding changes decide. Mixtures (`Cell.kind`) are left out by default: they make parts of
        the changes of exchanges again.
        """
        chosen = [i for i, cell in enumerate(self.cells) if cell.kind in kinds]
        if not chosen:
            return Interval(math.nan, math.nan, math.nan, self.base.shape[-1])
        moved, expected = (self.predictions - self.base)[chosen], (self.expected - self.expected_base)[chosen]
        ends = (self.sources - self.base)[chosen]
        parts = [part.square().sum(1) for part in (moved - expected, moved, expected, ends)]
        n = moved.shape[-1]
        counts = resample_counts(n, N_RESAMPLES)
        means = [part.double().nan_to_num(MOST, MOST) @ counts.T / n for part in parts]
        values = _explained(*means)
        centre = _explained(*(part.double().nan_to_num(MOST, MOST).mean(-1, keepdim=True) for part in parts))
        low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return Interval(centre.item(), low, high, n)

    @property
    def moved(self) -> list[Interval]:
        """Mean squared change of the model's prediction by each intervention, relative to the distance of both ends.

        The ends are the predictions on the prompts and on their sources: 1 if an intervention moves it as far as that.
        """
        return self._parts(self.predictions - self.base)

    @property
    def expected_moved(self) -> list[Interval]:
        """Mean squared change of the hypothesis's prediction by each intervention; see `moved`."""
        return self._parts(self.expected - self.expected_base)

    def _parts(self, distances: Tensor) -> list[Interval]:
        squared = distances.square().mean(1).nan_to_num(MOST, MOST)
        ends = (self.sources - self.base).square().mean(1).clamp(min=1 / MOST)
        return [ratio_interval(*pair) for pair in zip(squared, ends, strict=True)]

    @property
    def weakest(self) -> int:
        """Index of the cell with the least R², which limits the support for a hypothesis; NaN counts as the least."""
        means = [-math.inf if math.isnan(r2.mean) else r2.mean for r2 in self.r2]
        return min(range(len(means)), key=means.__getitem__)

    @property
    def score(self) -> Interval:
        """The R² of the weakest cell."""
        return self.r2[self.weakest]

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row per cell: R² with its 95% interval, and how far the prediction moved.

        `moved` (model) and `expected_moved` (hypothesis) are relative to the distance of prompts and sources.
        """
        rows = []
        for cell, r2, moved, expected in zip(self.cells, self.r2, self.moved, self.expected_moved, strict=True):
            places = {"layer": cell.layer, "to_layer": cell.to_layer, "step": cell.step}
            changes = {"moved": moved.mean, "expected_moved": expected.mean}
            rows.append({"intervention": cell.intervention, **places, **r2.columns("r2"), **changes})
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        lines = [("hypothesis", self.hypothesis), ("effects explained", str(self.effects))]
        for kind in ("exchange", "ablation"):
            if any(cell.kind == kind for cell in self.cells):
                lines.append((f"  of {kind}s", str(self.explained([kind]))))
        lines.append(("weakest", f"{self.score}, {self.cells[self.weakest]}"))
        by_intervention: dict[str, list[tuple[int, float]]] = {}
        for cell, r2 in zip(self.cells, self.r2, strict=True):
            by_intervention.setdefault(cell.intervention, []).append((cell.layer, r2.mean))
        for name, values in by_intervention.items():
            lines.append((name, "  ".join(f"{value:.4f}" for _, value in sorted(values))))
        return lines + ([("untried", ", ".join(self.untried))] if self.untried else [])


def _explained(distances: Tensor, moved: Tensor, expected: Tensor, ends: Tensor) -> Tensor:
    """The weighted average over cells, on the first axis, of the explained share of the changes."""
    changes = (moved + expected).clamp(min=1e-300)
    weights = (changes / (2 * ends).clamp(min=1e-300)).clamp(max=1.0)
    return 1 - (weights * distances / changes).sum(0) / weights.sum(0).clamp(min=1e-300)


@checked
def sample_sources(task: Task, prompts: Prompts, *, seed: int) -> Prompts:
    """Sample source prompts for `interchange`: new contexts, with the query inputs of given prompts.

    Args:
        task: distribution of the contexts.
        prompts: prompts with the queries.
        seed: a different seed from the prompts'.

    Returns:
        Prompts of the same shape. Their query targets belong to other inputs: do not use them.

    Example:
        >>> base = task.sample(64, seed=1)
        >>> sample_sources(task, base, seed=2).query.xs.equal(base.query.xs)
        True
    """
    return task.sample(len(prompts), seed=seed, dtype=prompts.dtype).to(prompts.device).with_query(prompts.query.xs)


@checked(locks=True)
def interchange(
    model: Any,
    hypothesis: Hypothesis,
    prompts: Prompts,
    sources: Prompts,
    *,
    interventions: Sequence[str] | None = None,
    progress: bool | None = None,
) -> Interchange:
    """Test whether a model's states act like an algorithm's: intervene on both, and compare the predictions.

    For instance, the query's state after one step is replaced by that on another prompt: exactly in the algorithm, and
    in the model by replacing the residual stream at the query's tokens after the layer of that step. Models that
    predict the same in different ways differ here. Source: Geiger et al. 2021, with targets that are numbers.

    Args:
        model: any model with hooks that reads prompts of points.
        hypothesis: the algorithm, and which layers are which steps: `Hypothesis(algorithm)` for one step a layer, such
            as `ResidualDescent(2, step_size=0.05)`, or with a schedule of (layers, steps taken by then): `((0, 0), (2,
            1), (4, 2))`.
        prompts: the prompts to intervene on, two or more.
        sources: the prompts that exchanged states come from: the same number, with the same queries and other contexts
            (`sample_sources`).
        interventions: names from the dictionary `INTERVENTIONS`, which explains each, such as "query exchanged", "query
            skips" (a step is undone at the query) or "context frozen" (from a step on); by default all that the hooks
            allow.

    Returns:
        An `Interchange`: `r2` of each intervention in `cells` (1: the same predictions), the smallest of them (`score`)
        and `effects`, which compares the changes that interventions make (1: equal, 0: unrelated, -1: opposite).

    Example:
        >>> known = constructions.known_models()[1]  # two steps of gradient descent
        >>> prompts = known.task.sample(64, seed=0)
        >>> sources = sample_sources(known.task, prompts, seed=1)
        >>> interchange(known.model, known.hypothesis, prompts, sources, progress=False).score.mean > 0.999
        True
    """
    return interchange_each(model, [hypothesis], prompts, sources, interventions=interventions, progress=progress)[0]


@torch.no_grad()
def interchange_each(
    model: Any,
    hypotheses: Sequence[Hypothesis],
    prompts: Prompts,
    sources: Prompts,
    *,
    interventions: Sequence[str] | None = None,
    progress: bool | None = None,
) -> list[Interchange]:
    """Run `interchange` for several hypotheses, which share the model's runs."""
    adapter = ModelAdapter(model)
    tokens_per_point(model)  # raises TypeError for models that do not read points
    if not hypotheses:
        raise ValueError("no hypotheses: give one or more")
    point = prompts.n_context // 2  # the one that "point exchanged" exchanges
    for hypothesis in hypotheses:
        check_inputs(adapter, hypothesis, prompts, sources)
    pairs = ((prompts.xs, sources.xs), (prompts.ys, sources.ys))
    changed = Prompts(*(values.select_scatter(others[:, point], 1, point) for values, others in pairs))
    reads, isolates = has_attention(model), has_scores(model)
    possible = [
        list(plan_interventions(each, point, prompts.n_context, stop_reading=reads, isolate=isolates))
        for each in hypotheses
    ]
    plans = [select_interventions(plan, interventions) for plan in possible]
    wanted = {call.key: call for plan in plans for _, _, call in plan}
    untried = () if reads or interventions else ("query does not read", "query stops reading")
    untried += () if isolates or interventions else ("context isolated",)
    trial = adapter.encode(prompts[:1])
    rows = prompts_at_once(adapter, trial, [hypothesis.algorithm for hypothesis in hypotheses], prompts)
    batches = list(zip(*(each.split(rows) for each in (prompts, sources, changed)), strict=True))
    parts: list[list[list[Tensor]]] = []
    with progress_bar(total=len(batches) * len(wanted), progress=progress, unit="run", desc="interchange") as bar:
        for three in batches:
            tokens = [adapter.encode(each) for each in three]
            ends = [adapter.run(each).double().cpu() for each in tokens]
            check_ends(*ends[:2])
            streams = [record_streams(adapter, each) for each in tokens]
            runs = [StreamRuns(adapter, tokens[0], streams[0], source) for source in streams[1:]]
            predicted: dict[Key, Tensor] = {}
            for key, call in wanted.items():
                predicted[key] = call.run(runs).double().cpu()
                bar.update(1)
            parts.append([])
            for hypothesis, plan in zip(hypotheses, plans, strict=True):
                states = [hypothesis.algorithm.states(each) for each in three]
                check_finite(hypothesis, states)
                expected_runs = [Runs(hypothesis.algorithm, states[0], source) for source in states[1:]]
                columns = [
                    (predicted[on_model.key], on_algorithm.run(expected_runs).cpu(), ends[1 + on_model.on_point])
                    for _, on_algorithm, on_model in plan
                ]
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


def prompts_at_once(
    adapter: ModelAdapter, tokens: Tensor, algorithms: Sequence[StepwiseAlgorithm], prompts: Prompts
) -> int:
    """Number of prompts whose streams, those of two sources, a run and the largest algorithm's states fit in memory."""
    states = [algorithm.states(prompts[:1]) for algorithm in algorithms]
    largest = max((sum(value.nbytes for state in each for value in state.values()) for each in states), default=0)
    streams = (adapter.n_layers + 2) * tokens.shape[1] * adapter.model.cfg.d_model * 8
    per_row = adapter.bytes_per_row(tokens) + 3 * (streams + largest)
    return Budget().holding(adapter.bytes_of_products).rows(per_row, at_most=512)


def check_inputs(adapter: ModelAdapter, hypothesis: Hypothesis, prompts: Prompts, sources: Prompts) -> None:
    """Raise ValueError for prompts and sources on which a hypothesis about a model cannot be tested."""
    if prompts.n_context == 0:
        raise ValueError("prompts without context points have nothing to exchange: n_context must be 1 or more")
    width, n_layers = adapter.model.cfg.d_model, adapter.n_layers
    for name, columns in hypothesis.subspaces.items():
        if len(columns) != width:
            raise ValueError(f"the subspace of {name!r} has {len(columns)} rows, and the stream {width} dimensions")
    if hypothesis.n_layers != n_layers:
        raise ValueError(
            f"the schedule of {hypothesis.name!r} ends after {hypothesis.n_layers} layers, and the model has "
            f"{n_layers}: pass Hypothesis(schedule=((0, 0), ..., ({n_layers}, {hypothesis.algorithm.n_steps})))"
        )
    check_shapes(prompts, sources)
    if not prompts.query.xs.equal(sources.query.xs.to(prompts.query.xs)):
        raise ValueError("sources must have the prompts' queries: take sample_sources(task, prompts, seed=...)")


def check_shapes(prompts: Prompts, sources: Prompts) -> None:
    """Raise ValueError for a single prompt, or sources of another shape."""
    if len(prompts) < 2 or prompts.xs.shape != sources.xs.shape or prompts.ys.shape != sources.ys.shape:
        raise ValueError(f"needs two or more prompts and sources of the same shape, got {prompts} and {sources}")


def check_ends(base: Tensor, source: Tensor) -> None:
    """Raise ValueError if predictions on prompts and on their sources are not finite, or all equal."""
    if not (base.isfinite().all() and source.isfinite().all()):
        raise ValueError("the model's predictions are not all finite on these prompts or sources")
    if len(base) > 1 and base.equal(source):
        raise ValueError("the model predicts the same for all prompts and their sources: does it ignore the context?")


def check_finite(hypothesis: Hypothesis, states: Sequence[Sequence[dict[str, Tensor]]]) -> None:
    """Raise ValueError if an algorithm's states are not finite."""
    for step, name, value in ((i, *each) for run in states for i, state in enumerate(run) for each in state.items()):
        if not value.isfinite().all():
            raise ValueError(
                f"{hypothesis.name}: {name!r} is not finite after {step} steps on these prompts: the iteration "
                f"diverges (take a smaller step size or alpha), or a context is singular"
            )
