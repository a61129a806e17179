"""The fingerprint of a learner: properties that are measured on its predictions alone, without a list of algorithms."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import ROUNDING
from mechicl.analysis.behaviour.losses import are_classes
from mechicl.base.arguments import at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.checkpoints.study import takes_study
from mechicl.learners import Learner, prompt_batches
from mechicl.learners.learners import predictions_at
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, interval, ratio_interval
from mechicl.statistics.results import index_of
from mechicl.tasks import Task
from mechicl.tasks.sampling import TokenDistribution

NEARLY = 0.01
"""Relative squared violation up to which a property nearly holds."""
N_DIRECTIONS = 4  # eigenvectors of each context that the filter is measured along
OUTLIER = 30.0  # the change of one target, in units of the targets' root mean square


@dataclass(frozen=True, eq=False)
class Fingerprint(Result):
    """What kind of learner it is: how far it violates each property, and how a point of the context acts.

    Attributes:
        violations: for each property, squared differences `[prompt]` between predictions that are equal if it holds,
            averaged over the target's dimensions. `violation(name)` divides by `squared_predictions`.
        squared_predictions: the learner's squared predictions on the task's own prompts, `[prompt]`.
        eigenvalues: eigenvalues λ of the contexts' `S = XᵀX`, `[direction prompt]`; empty where targets are classes.
        responses: what the learner predicts along these eigenvectors if the targets are those of a unit weight along
            them: the filter λ f(λ), 1 for least squares, `[direction prompt]`.
        influence: squared change of the prediction by a change of one point's target, `[point prompt]`, relative to the
            size of that change; the last point is the nearest in time.
        distances: distance of each point from the query, `[point prompt]`.
        robustness: how much less a large change of one target moves the prediction than a small one, in proportion,
            `[prompt]`: 1 for a linear learner, 0 where one point's influence is bounded.
        not_tested: properties that have no meaning on this task, with the reason.
    """

    violations: dict[str, Float[Tensor, "prompt"]]
    squared_predictions: Float[Tensor, "prompt"]
    eigenvalues: Float[Tensor, "direction prompt"]
    responses: Float[Tensor, "direction prompt"]
    influence: Float[Tensor, "point prompt"]
    distances: Float[Tensor, "point prompt"]
    robustness: Float[Tensor, "prompt"]
    not_tested: dict[str, str] = field(default_factory=dict)

    @checked
    def violation(self, name: str, level: float = 0.95) -> Interval:
        """Return E|difference|² / E|prediction|² for a property, with an interval over prompts; 0 if it holds."""
        index_of("name", name, self.violations)
        return ratio_interval(self.violations[name], self.squared_predictions, level)

    @property
    def exact(self) -> list[str]:
        """The properties that hold up to rounding."""
        return [name for name in self.violations if self.violation(name).mean <= ROUNDING]

    @property
    def near(self) -> list[str]:
        """The properties that nearly hold: violations are not rounding, and at most 1% of the squared predictions."""
        return [name for name in self.violations if ROUNDING < self.violation(name).mean <= NEARLY]

    @property
    def violated(self) -> list[str]:
        """The properties that do not hold."""
        return [name for name in self.violations if not self.violation(name).mean <= NEARLY]

    @property
    def is_filter(self) -> bool:
        """True if the learner is linear in the targets and in the query, and one function of S up to 1%."""
        return not {"linear in the targets", "linear in the query", "function of S", "one filter"} & set(self.violated)

    def filter(self, n_bins: int = 12) -> tuple[list[float], list[Interval]]:
        """Return the measured filter: means of λ in bins with equally many directions, and of λ f(λ) in them.

        Raises:
            ValueError: it was not measured on this task.
        """
        if self.eigenvalues.numel() == 0:
            raise ValueError(f"the filter was not measured: {self.not_tested['function of S']}")
        order = self.eigenvalues.flatten().argsort()
        bins = order.tensor_split(n_bins)
        at = [self.eigenvalues.flatten()[each].mean().item() for each in bins]
        return at, [interval(self.responses.flatten()[each]) for each in bins]

    @property
    def description(self) -> str:
        """One sentence on the kind of learner, without the name of an algorithm."""
        violated = set(self.violated)
        if self.is_filter:
            kind = "a linear learner that applies one function to XᵀX (a spectral filter)"
        elif "linear in the targets" not in violated:
            kind = "linear in the targets" + ("" if "linear in the query" in violated else " and in the query")
        elif "linear in the targets" in self.not_tested:
            kind = "a learner of classes"
        else:
            kind = "not linear in the targets"
        words = [WORDS[name][name in violated] for name in WORDS if name in self.violations]
        return f"{kind}; {', '.join(filter(None, words))}"

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per property: its relative squared violation with a 95% interval, and whether it holds."""
        rows = []
        for name in self.violations:
            value = self.violation(name)
            holds = "exact" if name in self.exact else "nearly" if name in self.near else "violated"
            rows.append(
                {"property": name, "violation": value.mean, "low": value.low, "high": value.high, "holds": holds}
            )
        return pd.DataFrame(rows)

    def _lines(self) -> list[tuple[str, str]]:
        table = self.to_dataframe()
        lines = [(row.property, f"{row.violation:10.2g}  {row.holds}") for row in table.itertuples()]
        lines += [(name, f"{'—':>10}  {why}") for name, why in self.not_tested.items()]
        return [("property", "violation"), *lines, ("kind", self.description)]


# property: (words if it holds, words if not); empty where the first part of the sentence has them
WORDS = {
    "order of the points": ("the order of the points does not matter", "it depends on the order of the points"),
    "rotation of the inputs": ("rotations of the inputs do not matter", "it depends on the axes of the inputs"),
    "additive over points": ("every point adds its own part", ""),
    "moments": ("the points count only through XᵀX and Xᵀy", "it reads more of the points than XᵀX and Xᵀy"),
    "scale of the inputs": ("the unit of the inputs does not matter", "its steps have a scale of their own"),
    "scale of the targets": ("", "predictions are not proportional to the targets"),
    "shift of the targets": ("it fits an intercept", ""),
}


class _Probe:
    """A learner, prompts, and its predictions on changed prompts; properties compare them."""

    def __init__(self, learner: Learner, prompts: Prompts, seed: int):
        self.learner, self.prompts = learner, prompts
        self.generator = torch.Generator().manual_seed(seed)
        self.xs, self.ys = prompts.xs.double(), prompts.ys.double()
        self.size = self.ys[:, :-1].square().mean().sqrt()  # of a target

    @torch.no_grad()
    def predict(self, xs: Tensor, ys: Tensor) -> Float[Tensor, "prompt y"]:
        prompts = Prompts(xs, ys)
        parts = [predictions_at(self.learner, part)[:, 0] for part in prompt_batches(self.learner, prompts)]
        return torch.cat(parts).cpu().double()

    @cached_property
    def plain(self) -> Float[Tensor, "prompt y"]:
        return self.predict(self.xs, self.ys)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def orthogonal(self, n: int) -> Float[Tensor, "prompt n n"]:
        """Random rotations and reflections, one for each prompt."""
        q, r = torch.linalg.qr(self.normal(len(self.xs), n, n))
        return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]

    def linear_targets(self) -> Float[Tensor, "prompt point y"]:
        """Targets of other weights, linear in the same inputs, of the same size as the task's."""
        ys = self.xs @ self.normal(len(self.xs), self.xs.shape[2], self.ys.shape[2])
        return ys * self.size / ys.square().mean().sqrt().clamp(min=1e-300)

    def with_query(self, query: Float[Tensor, "prompt x"]) -> Tensor:
        return torch.cat([self.xs[:, :-1], query[:, None]], dim=1)

    def context(self, xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor]:
        """Whole prompts with another context `[prompt point x]`, `[prompt point y]`, and the same query."""
        return torch.cat([xs, self.xs[:, -1:]], 1), torch.cat([ys, self.ys[:, -1:]], 1)


def _linear_in_targets(probe: _Probe) -> Tensor:
    other = probe.linear_targets()
    mixed = probe.predict(probe.xs, 0.6 * probe.ys + 0.8 * other)
    return mixed - 0.6 * probe.plain - 0.8 * probe.predict(probe.xs, other)


def _linear_in_query(probe: _Probe) -> Tensor:
    query, other = probe.xs[:, -1], probe.xs.roll(1, 0)[:, -1]  # of the next prompt
    mixed = probe.predict(probe.with_query(0.6 * query + 0.8 * other), probe.ys)
    return mixed - 0.6 * probe.plain - 0.8 * probe.predict(probe.with_query(other), probe.ys)


def _order(probe: _Probe) -> Tensor:
    order = torch.rand(probe.ys.shape[:2], generator=probe.generator, dtype=torch.float64)
    order[:, -1] = 2.0  # the query stays last
    order = order.argsort(1)[..., None]
    xs, ys = (values.gather(1, order.expand_as(values)) for values in (probe.xs, probe.ys))
    return probe.predict(xs, ys) - probe.plain


def _rotation(probe: _Probe) -> Tensor:
    return probe.predict(probe.xs @ probe.orthogonal(probe.xs.shape[2]), probe.ys) - probe.plain


def _moments(probe: _Probe) -> Tensor:
    turn = probe.orthogonal(probe.prompts.n_context)
    return probe.predict(*probe.context(turn @ probe.xs[:, :-1], turn @ probe.ys[:, :-1])) - probe.plain


def _scale_of_inputs(probe: _Probe) -> Tensor:
    return probe.predict(2 * probe.xs, probe.ys) - probe.plain


def _scale_of_targets(probe: _Probe) -> Tensor:
    return (probe.predict(probe.xs, 2 * probe.ys) - 2 * probe.plain) / 2


def _shift_of_targets(probe: _Probe) -> Tensor:
    shift = probe.size
    return probe.predict(probe.xs, probe.ys + shift) - shift - probe.plain


def _additive(probe: _Probe) -> Tensor:
    """The mixed difference of two halves of the points, each exchanged with another prompt's."""
    half = probe.prompts.n_context // 2
    first = torch.arange(probe.xs.shape[1])[:, None] < half
    context = (torch.arange(probe.xs.shape[1]) < probe.prompts.n_context)[:, None]

    def exchanged(which: Tensor) -> Tensor:
        xs, ys = (torch.where(which, values.roll(1, 0), values) for values in (probe.xs, probe.ys))
        return probe.predict(xs, ys)

    return probe.plain - exchanged(first) - exchanged(~first & context) + exchanged(context)


PROPERTIES: dict[str, Callable[[_Probe], Tensor]] = {
    "linear in the targets": _linear_in_targets,
    "linear in the query": _linear_in_query,
    "order of the points": _order,
    "rotation of the inputs": _rotation,
    "moments": _moments,
    "additive over points": _additive,
    "scale of the inputs": _scale_of_inputs,
    "scale of the targets": _scale_of_targets,
    "shift of the targets": _shift_of_targets,
}
"""Functions that return differences of predictions, `[prompt y]`, which are 0 if the property holds."""
OF_TARGETS = ("linear in the targets", "scale of the targets", "shift of the targets", "moments")
FILTER = ("function of S", "one filter")


@takes_study
@checked
def fingerprint(
    learner: Learner, task: Task, *, n_prompts: Annotated[int, at_least(8)] = 512, seed: int = 0, progress: bool = True
) -> Fingerprint:
    """Measure what kind of learner it is, on its predictions alone: no algorithm is fitted, and no list is needed.

    Each property is an equality of predictions on changed prompts. A violation is the mean squared difference, divided
    by the mean squared prediction: rounding (below 1e-20 for algorithms in float64) if the property holds.

    - linear in the targets; linear in the query; the order of the points does not matter; rotations and reflections of
      all inputs do not matter; doubling the inputs (with the query) does not matter; doubling the targets doubles the
      prediction; a constant added to the targets is added to the prediction ("shift of the targets");
    - "additive over points": every context point adds its own part; tested on halves of the context that are exchanged
      with another prompt's;
    - "moments": the points count only through XᵀX and Xᵀy, so that orthogonal mixtures of points do not matter;
    - "function of S": targets along one eigenvector of `S = XᵀX` give no prediction along another one; and "one
      filter": what they give along their own depends on the eigenvalue alone, by the same curve in all prompts.

    Args:
        learner: anything with `predict(prompts)`.
        task: distribution of the prompts. Where targets are classes, properties of targets have no meaning.
        n_prompts: number of prompts; each property takes one to three predictions of them.
        seed: seed of the prompts and of the changes.

    Returns:
        A `Fingerprint`: `violation(name)` with an interval, `description` in a sentence, the measured `filter()`,
        `influence` of points by age, `robustness`; `viz.plot` draws it.

    Example:
        >>> print(fingerprint(AlgorithmLearner(algorithms.ols), LinearRegression()).description)
        a linear learner that applies one function to XᵀX (a spectral filter); ...
    """
    if isinstance(task, TokenDistribution):
        raise TypeError(f"{type(task).__name__} is a task of tokens: a fingerprint needs points")
    if task.n_context < 2:
        raise ValueError(f"properties of a context need two points or more, n_context is {task.n_context}")
    probe = _Probe(learner, task.sample(n_prompts, seed=seed, dtype=torch.float64), seed)
    if not probe.plain.isfinite().all():
        raise ValueError(f"{type(learner).__name__} does not predict finite numbers on this task")
    classes = are_classes(probe.ys)
    missing = dict.fromkeys((*OF_TARGETS, *FILTER), "targets are classes") if classes else {}
    names = [name for name in PROPERTIES if name not in missing]
    bar = progress_bar(names, unit="property", progress=progress, desc="fingerprint")
    violations = {name: PROPERTIES[name](probe).square().mean(-1) for name in bar}
    eigenvalues = responses = probe.xs.new_zeros(0, n_prompts)
    if not classes:
        eigenvalues, responses, leaked = _filter(probe)
        scale = probe.plain.square().mean() / responses.square().mean().clamp(min=1e-300)
        violations["function of S"] = leaked * scale
        violations["one filter"] = _scatter(eigenvalues, responses) * scale
    influence, robustness = _influence(probe, classes)
    distances = (probe.xs[:, :-1] - probe.xs[:, -1:]).norm(dim=-1).T
    squared = probe.plain.square().mean(-1)
    return Fingerprint(violations, squared, eigenvalues, responses, influence, distances, robustness, missing)


def _filter(probe: _Probe) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and responses `[direction prompt]`, and squared responses along other eigenvectors `[prompt]`.

    Targets `X u` have the weight u, an eigenvector of S. A function of S predicts λ f(λ) along u, and 0 along others.
    """
    xs = probe.xs[:, :-1]
    n, d = len(xs), xs.shape[2]
    _, values, vectors = torch.linalg.svd(xs)
    eigenvalues = torch.zeros(n, d, dtype=torch.float64)
    eigenvalues[:, : values.shape[1]] = values.square()
    vectors = vectors.transpose(1, 2)  # [prompt x direction]
    length = probe.xs[:, -1].norm(dim=1)
    found, leaked = [], []
    rank = min(values.shape[1], d)
    for k in range(min(N_DIRECTIONS, rank)):
        own = torch.randint(rank, (n,), generator=probe.generator) if rank > N_DIRECTIONS else torch.full((n,), k)
        other = (own + torch.randint(1, max(d, 2), (n,), generator=probe.generator)) % d
        u, v = (vectors.gather(2, each[:, None, None].expand(n, d, 1))[..., 0] for each in (own, other))
        ys = probe.xs @ u[:, :, None]
        size = probe.size / ys[:, :-1].square().mean((1, 2)).sqrt().clamp(min=1e-300)
        ys = (ys * size[:, None, None]).expand(-1, -1, probe.ys.shape[2])
        unit = (length * size)[:, None]
        along, across = (probe.predict(probe.with_query(length[:, None] * each), ys) / unit for each in (u, v))
        found.append((eigenvalues.gather(1, own[:, None])[:, 0], along.mean(-1)))
        leaked.append(across.square().mean(-1) if d > 1 else torch.zeros(n, dtype=torch.float64))
    every, along = (torch.stack(column) for column in zip(*found, strict=True))
    return every, along, torch.stack(leaked).mean(0)


def _scatter(eigenvalues: Tensor, responses: Tensor) -> Tensor:
    """Squared scatter of responses about one smooth curve of the eigenvalue, `[prompt]`.

    A response is compared with the line through its neighbours by eigenvalue, whose own scatter is taken off.
    """
    order = eigenvalues.flatten().argsort()
    at, values = eigenvalues.flatten()[order], responses.flatten()[order]
    weight = ((at[1:-1] - at[:-2]) / (at[2:] - at[:-2]).clamp(min=1e-300)).clamp(0, 1)
    rest = (values[1:-1] - (1 - weight) * values[:-2] - weight * values[2:]).square()
    rest = rest / (1 + weight.square() + (1 - weight).square())
    squares = torch.zeros_like(values)
    squares[order[1:-1]] = rest
    return squares.reshape(eigenvalues.shape).mean(0)


def _influence(probe: _Probe, classes: bool) -> tuple[Tensor, Tensor]:
    """Squared changes of the prediction per squared change of each point's target `[point prompt]`; robustness."""
    n_context, rows = probe.prompts.n_context, []
    for point in range(n_context):
        ys = probe.ys.clone()
        ys[:, point] = ys.roll(1, 0)[:, point] if classes else ys[:, point] + probe.size
        change = (ys - probe.ys)[:, point].square().mean(-1).clamp(min=1e-300)
        rows.append((probe.predict(probe.xs, ys) - probe.plain).square().mean(-1) / change)
    if classes:
        return torch.stack(rows), torch.full_like(rows[0], torch.nan)
    ys = probe.ys.clone()
    ys[:, 0] += OUTLIER * probe.size
    small, large = rows[0] * probe.size**2, (probe.predict(probe.xs, ys) - probe.plain).square().mean(-1) / OUTLIER**2
    return torch.stack(rows), large.mean() / small.mean().clamp(min=1e-300) * torch.ones_like(small)
