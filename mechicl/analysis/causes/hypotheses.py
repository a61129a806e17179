"""Hypotheses ranked by the counterfactuals that they predict, with layers assigned to steps on other prompts."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import FitProblem, cards
from mechicl.algorithms.stepwise import AfterCopying, Hypothesis, ResidualDescent, Runs, StepwiseAlgorithm
from mechicl.algorithms.stepwise.hypothesis import Cell
from mechicl.analysis.behaviour import identify
from mechicl.analysis.causes.interchange import (
    Interchange,
    InterchangeKind,
    interchange_each,
    prompts_at_once,
    sample_sources,
)
from mechicl.base.arguments import checked
from mechicl.base.progress import progress_bar
from mechicl.checkpoints.study import takes_study
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.stream_runs import StreamRuns, has_attention, record_streams, tokens_per_point
from mechicl.prompts import Prompts
from mechicl.statistics import Result, interval
from mechicl.tasks import Task

N_FITTING = 256  # prompts on which layers are assigned to steps
INTERCHANGES: tuple[InterchangeKind, InterchangeKind] = ("exchange", "ablation")
LEAST = -9  # R² below which no digits are shown
HOLDS = 0.9  # R² of every counterfactual of a hypothesis that is supported
APART = 0.001  # difference of two hypotheses' R², below which fitted parameters may differ, and not steps


@dataclass(frozen=True, eq=False)
class HypothesisTest(Result):
    """Hypotheses ranked by how much they explain of the effects of interventions on a model; see `test_hypotheses`.

    Attributes:
        tests: one per hypothesis, on held-out prompts, the best first. They are ranked by the share of the effects that
            they explain (`Interchange.effects`), times the share of layers after which the schedule names a step.
        schedules: for each, pairs (number of layers, number of steps after them).
        likeness: the family that `identify` finds nearest by predictions and its distance, or "".
    """

    tests: list[Interchange]
    schedules: list[tuple[tuple[int, int], ...]]
    likeness: str = ""

    @property
    def best(self) -> Interchange:
        """The test of the hypothesis that explains most."""
        return self.tests[0]

    @property
    def supported(self) -> list[Interchange]:
        """The hypotheses that no intervention speaks against; most models have none.

        Every counterfactual has an R² of at least 0.9, and none sets the hypothesis apart (`set_apart`) from a nearer
        one. Several are supported if these interventions do not separate them, such as algorithms that contain the
        right one.

        A hypothesis whose schedule names no step between the first and the last layer is not among them, since none of
        its states has been exchanged. Models of one layer have no such place and are exempt.
        """
        return [test for test in self._passing if test.hypothesis not in self.set_apart]

    @property
    def _passing(self) -> list[Interchange]:
        pairs = zip(self.tests, self.schedules, strict=True)
        covering = [test for test, schedule in pairs if len(schedule) > 2 or max(schedule)[0] == 1]
        return [test for test in covering if test.score.mean >= HOLDS]

    @cached_property
    def set_apart(self) -> dict[str, Cell]:
        """The hypotheses whose every R² is at least 0.9 but that the model does not follow, each with an intervention.

        The model follows another hypothesis there, the one with the largest mean R²: its R² is higher by more than
        0.001, and it is nearer on more than half of the prompts (binomial 95% interval, corrected for the numbers of
        interventions and hypotheses); and there is no intervention of which the opposite is true. The one that is
        reported has the largest difference.
        """
        errors = {test.hypothesis: _relative_errors(test) for test in self._passing}
        found = {}
        if len(errors) > 1:
            nearest = min(errors, key=lambda name: torch.stack(list(errors[name].values())).mean().item())
            for name in errors.keys() - {nearest}:
                common = [cell for cell in errors[nearest] if cell in errors[name]]
                level = 1 - 0.05 / (len(common) * (len(errors) - 1))
                excess = {cell: errors[name][cell] - errors[nearest][cell] for cell in common}
                apart = [cell for cell in common if _is_more(excess[cell], level)]
                if apart and not any(_is_more(-excess[cell], level) for cell in common):
                    found[name] = max(apart, key=lambda cell: excess[cell].mean().item())
        return {name: found[name] for name in errors if name in found}

    def samples(self) -> dict[str, Tensor]:
        """Return the squared distances of each hypothesis's counterfactuals from the model's, `[prompt]`."""
        return {test.hypothesis: (test.predictions - test.expected).square().sum((0, 1)) for test in self.tests}

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row per hypothesis, the best first.

        `effects` (95% interval: `low`, `high`), `exchanges` and `ablations` are the shares of the effects of all
        interventions, and of these two kinds, that it explains, at most 1. `prediction`, `median_r2` and `weakest_r2`
        are interchange R². `supported` is True for the hypotheses that no intervention speaks against.
        """
        rows, supported = [], self.supported
        for test, schedule in zip(self.tests, self.schedules, strict=True):
            effects, score, by_kind = test.effects, test.score, [test.explained([kind]) for kind in INTERCHANGES]
            values = [r2.mean for r2 in test.r2]
            rows.append({
                "hypothesis": test.hypothesis, **effects.columns("effects"),
                "exchanges": by_kind[0].mean, "ablations": by_kind[1].mean,
                "layers_covered": _layers_covered(schedule),
                "prediction": values[0], "median_r2": float(pd.Series(values).median()),
                "weakest_r2": score.mean, "weakest": str(test.cells[test.weakest]), "supported": test in supported,
                "steps_after_layers": " ".join(str(step) for _, step in schedule),
            })  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        supported, apart = [test.hypothesis for test in self.supported], self.set_apart
        lines = [("hypothesis", f"{'effects explained':>20} {'prediction':>10} {'weakest R²':>11}  of")]
        for test in self.tests:
            effects = str(test.effects) if test.effects.mean > LEAST else f"below {LEAST}"
            weakest = f"{test.score.mean:.3f}" if test.score.mean > LEAST else f"below {LEAST}"
            lines.append((test.hypothesis, f"{effects:>20} {test.r2[0].mean:>10.4f} {weakest:>11}  "
                          f"{test.cells[test.weakest]}"))  # fmt: skip
        lines.append((f"supported (every R² at least {HOLDS})", "; ".join(supported) or "none of them"))
        if len(supported) > 1:
            lines.append(("", "these are not separable by these interventions"))
        lines += [("set apart", f"{name}, by: {cell}") for name, cell in apart.items()]
        return lines + ([("nearest by predictions", self.likeness)] if self.likeness else [])


@takes_study
@checked(locks=True)
def test_hypotheses(
    model: Any,
    task: Task,
    hypotheses: Sequence[Hypothesis] | Mapping[str, StepwiseAlgorithm] | None = None,
    *,
    n_prompts: int = 1024,
    seed: int = 0,
    with_likeness: bool = True,
    progress: bool | None = None,
) -> HypothesisTest:
    """Test which algorithm a model runs: rank hypotheses by the counterfactuals that they predict.

    All hypotheses that pass are reported, and not the best alone.

    A counterfactual is the prediction after an intervention (`interchange`), such as exchanging the query's state
    between two prompts after some step. Parameters are fitted to the model's predictions and layers are assigned to
    steps on other prompts than those of the results.

    Args:
        model: any model with hooks that reads prompts of points.
        task: distribution of prompts and sources (prompts that exchanged states come from).
        hypotheses: hypotheses with their schedules, or algorithms of `algorithms.stepwise` by name, for which schedules
            are fitted; by default the step forms of all algorithms of the library, fitted to the model
            (`fit_hypotheses`).
        seed: seed from which those of all prompts and sources are made.
        with_likeness: also find the family that is nearest by predictions alone (`identify`).

    Returns:
        A `HypothesisTest`: `tests`, one `Interchange` per hypothesis, the best first; `supported` and `set_apart`.

    Example:
        >>> model = constructions.gradient_descent(x_dim=5, n_context=20, step_size=0.14, steps=3)
        >>> test = test_hypotheses(model, LinearRegression(x_dim=5, n_context=20), n_prompts=64, progress=False)
        >>> test.best.hypothesis
        'gradient descent, 3 steps, residuals in the context'
    """
    if task.n_context == 0:
        raise ValueError("without a context there is nothing to learn from: n_context must be at least 1")
    seeds = _seeds(seed)
    if not isinstance(hypotheses, Sequence):
        hypotheses = fit_hypotheses(model, task, hypotheses, seed=seed, progress=progress)
    names = [hypothesis.name for hypothesis in hypotheses]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two hypotheses are called {twice[0]!r}: give each its own Hypothesis(name=...)")
    prompts = task.sample(n_prompts, seed=seeds[0], dtype=torch.float64)
    sources = sample_sources(task, prompts, seed=seeds[1])
    tests = interchange_each(model, hypotheses, prompts, sources, progress=progress)
    ranked = sorted(
        zip(tests, hypotheses, strict=True), key=lambda pair: -pair[0].effects.mean * _layers_covered(pair[1].schedule)
    )
    likeness = ""
    if with_likeness:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # controls are untrained on purpose
            nearest = identify(model, task, n_prompts=max(512, n_prompts), seed=seed, progress=progress)
        likeness = f"{nearest.best.name} (distance {nearest.distance(nearest.best)})"
    return HypothesisTest([test for test, _ in ranked], [tuple(h.schedule) for _, h in ranked], likeness)


test_hypotheses.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


@takes_study
@checked(locks=True)
def fit_hypotheses(
    model: Any,
    task: Task,
    algorithms: Mapping[str, StepwiseAlgorithm] | None = None,
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> list[Hypothesis]:
    """Fit the hypotheses that `test_hypotheses` ranks: algorithms with schedules.

    A schedule states how many steps of the algorithm are done after each layer. The schedule is taken whose
    interventions (see `interchange`) agree best with the model on some prompts.

    Args:
        model: any model with hooks that reads prompts of points.
        task: distribution of the prompts that are fitted on.
        algorithms: algorithms in step form by name, with their parameters; by default all of the library, with
            parameters fitted to the model's predictions. If context points read only earlier ones, so do those of the
            algorithms.
        seed: seed of the prompts; with the seed of `test_hypotheses` the hypotheses are the same.

    Returns:
        One `Hypothesis` per algorithm, with its `name`, `algorithm` and `schedule`, pairs (layers, steps).
    """
    seeds = _seeds(seed)
    adapter, per_point = ModelAdapter(model), tokens_per_point(model)
    if algorithms is None:
        fitting = task.sample(2048, seed=seeds[2], dtype=torch.float64)
        after_layers = _predictions_after_layers(adapter, fitting)
        causal = not reads_ahead(adapter, fitting[:8], per_point)
        clip = getattr(adapter.model.cfg, "token_clip", None)
        algorithms = candidate_algorithms(fitting, after_layers, tokens_per_point=per_point, causal=causal, clip=clip)
    prompts = task.sample(N_FITTING, seed=seeds[3], dtype=torch.float64)
    sources = sample_sources(task, prompts, seed=seeds[4])
    names = ["query exchanged", "context exchanged", "context frozen"]
    names += ["query stops reading"] if has_attention(model) else []
    layers = range(1, adapter.n_layers)
    batches = _stream_runs(adapter, prompts, sources)
    predicted = torch.cat([_intervene(runs, names, layers, adapter.n_layers) for runs in batches], dim=2)
    hypotheses = []
    for name, algorithm in progress_bar(algorithms.items(), unit="hypothesis", progress=progress, desc="schedules"):
        exact = Runs(algorithm, algorithm.states(prompts), algorithm.states(sources))
        expected = _intervene(exact, names, range(algorithm.n_steps + 1), algorithm.n_steps)
        steps = _rising_steps(predicted, expected) if layers else []
        schedule = ((0, 0), *zip(layers, steps, strict=True), (adapter.n_layers, algorithm.n_steps))
        hypotheses.append(Hypothesis(algorithm, schedule, name=name))
    return hypotheses


def candidate_algorithms(
    prompts: Prompts, after_layers: Float[Tensor, "layer prompt y"], *, tokens_per_point: int = 1,
    causal: bool = False, clip: float | None = None,
) -> dict[str, StepwiseAlgorithm]:  # fmt: skip
    """Fit the step forms of all algorithms (`algorithms.cards`) to a model's predictions; algorithms by name.

    Parameters of single steps are fitted to `after_layers`, the predictions where the query stops reading after 1, 2,
    ... layers (at least the last). With `tokens_per_point` 2 each algorithm begins with copying, in one layer; with
    `causal` context points read only those before them. `clip` bounds tokens after each layer.
    """
    after_layers = after_layers.detach().cpu().double()
    if not after_layers.isfinite().all():
        raise ValueError("the model's predictions after its layers are not finite: no algorithm can be fitted to them")
    after_steps = after_layers[1:] if tokens_per_point > 1 and len(after_layers) > 1 else after_layers
    problem = FitProblem(prompts.to(dtype=torch.float64), after_steps, len(after_steps), causal)
    algorithms: dict[str, StepwiseAlgorithm] = {}
    for card in cards():
        for algorithm in card.step_forms(problem) if card.step_forms is not None else ():
            if clip is not None and isinstance(algorithm, ResidualDescent):
                algorithm.clip = clip
            algorithm = AfterCopying(algorithm) if tokens_per_point > 1 else algorithm
            algorithms[algorithm.name] = algorithm
    return algorithms


def _seeds(seed: int) -> list[int]:
    """Seeds of the prompts, their sources, the prompts to fit parameters on, and those (two) to fit schedules on."""
    return np.random.SeedSequence(seed).generate_state(5).tolist()


def _predictions_after_layers(adapter: ModelAdapter, prompts: Prompts) -> Tensor:
    """Predictions where the query stops reading, or without hooks for that stays unchanged, after 1, 2, ... layers."""
    name = "query stops reading" if has_attention(adapter.model) else "query frozen"
    layers, last = range(1, adapter.n_layers + 1), adapter.n_layers
    return torch.cat([_intervene(runs, [name], layers, last)[:, 0] for runs in _stream_runs(adapter, prompts)], dim=1)


@torch.no_grad()
def reads_ahead(adapter: ModelAdapter, prompts: Prompts, per_point: int) -> bool:
    """True if the stream of the context's first point depends on the last point."""
    xs, ys = prompts.xs.clone(), prompts.ys.clone()
    xs[:, -2], ys[:, -2] = xs[:, -2] + 1.0, ys[:, -2] + 1.0
    both = prompts, Prompts(xs, ys)
    before, after = (record_streams(adapter, adapter.encode(each))[-1][:, :per_point] for each in both)
    return prompts.n_context > 1 and not before.equal(after)


def _stream_runs(adapter: ModelAdapter, *several: Prompts) -> Iterator[StreamRuns]:
    """Yield the model's runs on batches of prompts, and on their sources if these are given too."""
    rows = prompts_at_once(adapter, adapter.encode(several[0][:1]), (), several[0])
    for batch in zip(*(each.split(min(rows, N_FITTING)) for each in several), strict=True):
        tokens = [adapter.encode(each) for each in batch]
        streams = [record_streams(adapter, each) for each in tokens]
        yield StreamRuns(adapter, tokens[0], streams[0], streams[-1])


def _intervene(
    runs: Any, interventions: Sequence[str], afters: range, last: int
) -> Float[Tensor, "after intervention prompt y"]:
    def one(name: str, after: int) -> Tensor:
        if name == "query stops reading":
            return runs.stop_reading(range(after, last))
        place, what = name.split()
        return runs.exchange(after, place) if what == "exchanged" else runs.freeze(tuple(range(after, last + 1)), place)

    predicted = [torch.stack([one(name, after) for name in interventions]).double().cpu() for after in afters]
    return torch.stack(predicted) if predicted else torch.zeros(0, len(interventions), 0, 1, dtype=torch.float64)


def _rising_steps(
    predicted: Float[Tensor, "layer intervention prompt y"], expected: Float[Tensor, "after intervention prompt y"]
) -> list[int]:
    """The number of steps after each layer, never falling, with the least sum of distances over interventions.

    A distance is `E|model - algorithm|² / (E|model|² + E|algorithm|²)`, between 0 and 2, so that no explosion decides.
    """
    sizes = [part.square().mean((2, 3)) for part in (predicted, expected)]
    errors = torch.stack([(layer - expected).square().mean((2, 3)) for layer in predicted])
    either = (sizes[0][:, None] + sizes[1][None]).clamp(min=1e-300)
    distances = (errors / either).nan_to_num(2.0, 2.0).mean(-1)  # [layer after]
    total, chosen = distances[0], []
    for layer in distances[1:]:
        least, where = total.cummin(0)
        chosen.append(where)
        total = layer + least
    step = int(total.argmin())
    steps = [step]
    for where in reversed(chosen):
        step = int(where[step])
        steps.append(step)
    return steps[::-1]


def _relative_errors(test: Interchange) -> dict[Cell, Tensor]:
    """1 - R² of each prompt and intervention, `[prompt]` by cell without the steps, which hypotheses count differently.

    Its mean over prompts is 1 - R².
    """
    errors = (test.predictions - test.expected).square().mean(1)
    ends = (test.sources - test.base).square().mean((1, 2)).clamp(min=1e-150)
    return {replace(cell, step=0): error / end for cell, error, end in zip(test.cells, errors, ends, strict=True)}


def _is_more(excess: Float[Tensor, "prompt"], level: float) -> bool:
    return excess.mean().item() > APART and interval((excess > 0).double(), level).low > 0.5


def _layers_covered(schedule: Sequence[tuple[int, int]]) -> float:
    """The share of the layers' ends, the last one aside, that a schedule covers."""
    return (len(schedule) - 2) / (schedule[-1][0] - 1) if schedule[-1][0] > 1 else 1.0
