"""The fingerprint of a learner: properties that are measured on its predictions alone, without a list of algorithms."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import ROUNDING
from mechicl.analysis.behaviour.losses import are_classes
from mechicl.base.arguments import ArgumentError, at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.checkpoints.study import takes_study
from mechicl.learners import Learner
from mechicl.learners.learners import name_of, query_predictions
from mechicl.prompts import Prompts
from mechicl.statistics import Interval, Result, interval, ratio_interval
from mechicl.statistics.results import index_of
from mechicl.tasks import Task

NEARLY = 0.01
"""Relative squared violation up to which a property nearly holds."""
N_DIRECTIONS = 4  # eigenvectors of each context that the filter is measured along
CLUSTERED = 0.01  # squared distance of neighbouring weights, relative to a Gaussian's, of a set of tasks
N_QUERIES = 8  # directions of the query that imply weights


@dataclass(frozen=True, eq=False)
class Violations(Result):
    """How far a learner violates properties: equalities of predictions on changed prompts.

    Attributes:
        violations: for each property, squared differences `[prompt]` between predictions that are equal if it holds,
            averaged over the target's dimensions. `violation(name)` divides by `squared_predictions`.
        squared_predictions: the learner's squared predictions on the task's own prompts, `[prompt]`.
    """

    violations: dict[str, Float[Tensor, "prompt"]]
    squared_predictions: Float[Tensor, "prompt"]

    @checked
    def violation(self, name: str, level: float = 0.95) -> Interval:
        """Return E|difference|² / E|prediction|² for a property, with an interval over prompts; 0 if it holds."""
        index_of("name", name, self.violations)
        if not self.violations[name].any():  # of predictions of 0 too
            return Interval(0.0, 0.0, 0.0, len(self.squared_predictions), level)
        return ratio_interval(self.violations[name], self.squared_predictions, level)

    @cached_property
    def standing(self) -> dict[str, str]:
        """How far each property holds: "exact" up to rounding, "nearly" up to 1% of the squared predictions, or
        "violated"."""
        means = {name: self.violation(name).mean for name in self.violations}
        return {
            name: "exact" if mean <= ROUNDING else "nearly" if mean <= NEARLY else "violated"
            for name, mean in means.items()
        }

    @property
    def exact(self) -> list[str]:
        """The properties that hold up to rounding."""
        return [name for name, how in self.standing.items() if how == "exact"]

    @property
    def near(self) -> list[str]:
        """The properties that nearly hold."""
        return [name for name, how in self.standing.items() if how == "nearly"]

    @property
    def violated(self) -> list[str]:
        """The properties that do not hold."""
        return [name for name, how in self.standing.items() if how == "violated"]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per property: its relative squared violation with a 95% interval, and whether it holds."""
        return pd.DataFrame([
            {"property": name, **self.violation(name).columns("violation"), "holds": self.standing[name]}
            for name in self.violations
        ])  # fmt: skip


@dataclass(frozen=True, eq=False)
class Fingerprint(Violations):
    """Properties of a learner: how far it violates each, and how a point of the context acts; see `fingerprint`.

    Attributes:
        eigenvalues: eigenvalues λ of the contexts' `S = XᵀX`, `[direction prompt]`; empty where targets are classes.
        responses: what the learner predicts along these eigenvectors if the targets are those of a unit weight along
            them: the filter λ f(λ), 1 for least squares, `[direction prompt]`.
        influence: squared change of the prediction by a change of one point's target, `[point prompt]`, relative to the
            size of that change; the last point is the nearest in time.
        clustering: how near the weights that a prompt's predictions imply are to those of the most similar other one,
            `[prompt]`: squared distances relative to the mean of Gaussian weights of the same covariance; about 1 for a
            learner of any task, 0 for one that chooses from a set of tasks; NaN where targets are classes.
        not_tested: properties that have no meaning on this task, with the reason.
    """

    eigenvalues: Float[Tensor, "direction prompt"]
    responses: Float[Tensor, "direction prompt"]
    influence: Float[Tensor, "point prompt"]
    clustering: Float[Tensor, "prompt"]
    not_tested: dict[str, str] = field(default_factory=dict)

    @property
    def is_filter(self) -> bool:
        """True if the learner is linear in the targets and in the query, and one function of S up to 1%."""
        return not self.not_tested and not {*OF_A_FILTER} & {*self.violated}

    def filter(self) -> tuple[list[float], list[Interval]]:
        """Return the measured filter: means of λ in 12 bins with equally many directions, and of λ f(λ) in them.

        Raises:
            ValueError: it was not measured on this task.
        """
        if self.eigenvalues.numel() == 0:
            raise ValueError(f"the filter was not measured: {self.not_tested['function of S']}")
        order = self.eigenvalues.flatten().argsort()
        bins = order.tensor_split(12)
        at = [self.eigenvalues.flatten()[each].mean().item() for each in bins]
        return at, [interval(self.responses.flatten()[each]) for each in bins]

    @property
    def description(self) -> str:
        """One sentence on the kind of learner, without the name of an algorithm."""
        if not self.squared_predictions.any():
            return "it predicts 0 on all prompts"
        violated, near = set(self.violated), self.near
        if self.is_filter:
            kind, needed = "a linear learner that applies one function to XᵀX (a spectral filter)", {*OF_A_FILTER}
        elif "linear in the targets" in self.not_tested:
            kind, needed = "a learner of classes", set()
        elif "linear in the targets" not in violated:
            also = "linear in the query" not in violated
            kind, needed = "linear in the targets" + (" and in the query" if also else ""), {*OF_A_FILTER[: 1 + also]}
        else:
            kind, needed = "not linear in the targets", set()
        words = [PROPERTY_WORDS[name][name in violated] for name in PROPERTY_WORDS if name in self.violations]
        parts = [f"{'nearly ' if needed & {*near} else ''}{kind}", ", ".join(filter(None, words))]
        if self.clustering.median() < CLUSTERED:
            parts.append("its weights take few values, as from a set of tasks")
        if near:
            parts.append(f"not exact: {', '.join(f'{name} ({self.violation(name).mean:.1g})' for name in near)}")
        return "; ".join(filter(None, parts))

    def _lines(self) -> list[tuple[str, str]]:
        rows = self.to_dataframe().to_dict("records")
        lines = [(row["property"], f"{row['violation']:10.2g}  {row['holds']}") for row in rows]
        lines += [(name, f"{'—':>10}  {why}") for name, why in self.not_tested.items()]
        if not self.clustering.isnan().any():
            lines.append(("clustering", f"{self.clustering.mean().item():10.2g}"))
        return [("property", "violation"), *lines, ("kind", self.description)]


# property: (words if it holds, words if not); empty where the first part of the sentence has them
PROPERTY_WORDS = {
    "order of the points": ("the order of the points does not matter", "it depends on the order of the points"),
    "rotation of the inputs": ("rotations of the inputs do not matter", "it depends on the axes of the inputs"),
    "additive over points": ("every point adds its own part", ""),
    "moments": ("the points count only through XᵀX and Xᵀy", "it reads more of the points than XᵀX and Xᵀy"),
    "scale of the inputs": ("the unit of the inputs does not matter", "the unit of the inputs matters"),
    "scale of the targets": ("", "predictions are not proportional to the targets"),
    "shift of the targets": ("it fits an intercept", ""),
}


# property: a combination of predictions on changed prompts (`Changes`) that is 0 if it holds
PROPERTIES: dict[str, dict[str, float]] = {
    "linear in the targets": {"mixed targets": 1, "plain": -0.6, "other targets": -0.8},
    "linear in the query": {"mixed query": 1, "plain": -0.6, "other query": -0.8},
    "order of the points": {"permuted": 1, "plain": -1},
    "rotation of the inputs": {"rotated": 1, "plain": -1},
    "moments": {"mixed points": 1, "plain": -1},
    "additive over points": {"plain": 1, "half exchanged": -1, "other half exchanged": -1, "context exchanged": 1},
    "scale of the inputs": {"inputs doubled": 1, "plain": -1},
    "scale of the targets": {"targets doubled": 0.5, "plain": -1},
    "shift of the targets": {"targets shifted": 1, "plain": -1},
}
OF_TARGETS = ("linear in the targets", "scale of the targets", "shift of the targets", "moments")
FILTER_TESTS = ("function of S", "one filter")
OF_A_FILTER = ("linear in the targets", "linear in the query", "moments", *FILTER_TESTS)
COMPARED = {
    "plain": 1.0, "permuted": 1.0, "rotated": 1.0, "mixed points": 1.0, "inputs enlarged": 1.0,
    "inputs stretched": 1.0, "noisy targets": 1.0, "targets doubled": 2.0, "other targets": 0.0, "mixed targets": 0.0,
}  # fmt: skip
"""Changes that `identify` compares learners on, and the factor from the plain prompts' target of the query to the
changed ones'; 0 where the target is a new one."""


OF_THE_QUERY = ("mixed query", "other query", "half exchanged", "other half exchanged", "context exchanged")
"""Changes that only combine the task's own points and queries in another way."""


class Changes:
    """Prompts, and changed ones by name, on which two learners of one kind predict alike.

    Attributes:
        prompts: the prompts of each change, drawn or changed with `seed`; "plain" are unchanged.
        size: root mean square of the context's targets: the constant that "targets shifted" adds.
    """

    def __init__(self, prompts: Prompts, seed: int):
        self._generator = torch.Generator().manual_seed(seed)
        self.xs, self.ys = xs, ys = prompts.xs.double(), prompts.ys.double()
        self.n_context, self.size = prompts.n_context, ys[:, :-1].square().mean().sqrt()
        other = xs @ self.normal(len(xs), xs.shape[2], ys.shape[2])  # linear in other weights, and noise
        other = other / other.square().mean().sqrt().clamp(min=1e-300) + 0.3 * self.normal(*ys.shape)
        other = other * self.size / other.square().mean().sqrt()
        query = xs.roll(1, 0)[:, -1:]  # of the next prompt
        order = torch.rand(ys.shape[:2], generator=self._generator, dtype=torch.float64)
        order[:, -1] = 2.0  # the query stays last
        permuted = [each.gather(1, order.argsort(1)[..., None].expand_as(each)) for each in (xs, ys)]
        turn = self._orthogonal(self.n_context)
        place = torch.arange(xs.shape[1])[:, None]
        first, context = place < self.n_context // 2, place < self.n_context
        noise = 0.5 * self.size * self.normal(*ys.shape)
        axes, sizes = self._orthogonal(xs.shape[2]), torch.linspace(0.6, 1.4, xs.shape[2], dtype=torch.float64)
        changed = {
            "plain": (xs, ys),
            "other targets": (xs, other),
            "mixed targets": (xs, 0.6 * ys + 0.8 * other),
            "other query": (torch.cat([xs[:, :-1], query], 1), ys),
            "mixed query": (torch.cat([xs[:, :-1], 0.6 * xs[:, -1:] + 0.8 * query], 1), ys),
            "permuted": permuted,
            "rotated": (xs @ self._orthogonal(xs.shape[2]), ys),
            "mixed points": [torch.cat([turn @ each[:, :-1], each[:, -1:]], 1) for each in (xs, ys)],
            "half exchanged": self._exchanged(first),
            "other half exchanged": self._exchanged(~first & context),
            "context exchanged": self._exchanged(context),
            "inputs doubled": (2 * xs, ys),
            "targets doubled": (xs, 2 * ys),
            "targets shifted": (xs, ys + self.size),
            "inputs enlarged": (1.3 * xs, ys),
            "inputs stretched": (xs @ (axes * sizes) @ axes.mT, ys),
            "noisy targets": (xs, torch.cat([(ys + noise)[:, :-1], ys[:, -1:]], 1)),
        }
        self.prompts = {name: Prompts(*values) for name, values in changed.items()}

    def predicted(self, learner: Learner, name: str) -> Float[Tensor, "prompt y"]:
        """Return a learner's predictions after a change, without warnings: a change may make an iteration diverge."""
        with warnings.catch_warnings(action="ignore"):
            return query_predictions(learner, self.prompts[name])

    def target(self, name: str) -> Float[Tensor, "prompt y"]:
        """Return the query's target after a change of `COMPARED`."""
        return self.prompts[name].ys[:, -1] if COMPARED[name] == 0 else COMPARED[name] * self.ys[:, -1]

    def normal(self, *shape: int) -> Tensor:
        """Return independent numbers from N(0, 1)."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def _orthogonal(self, n: int) -> Float[Tensor, "prompt n n"]:
        """Random rotations and reflections, one for each prompt."""
        q, r = torch.linalg.qr(self.normal(len(self.xs), n, n))
        return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]

    def _exchanged(self, which: Tensor) -> list[Tensor]:
        return [torch.where(which, each.roll(1, 0), each) for each in (self.xs, self.ys)]

    def unit_queries(self) -> Iterator[Prompts]:
        """Yield the prompts with queries along each axis of the inputs, up to `N_QUERIES`, of their typical length."""
        length = self.xs.square().mean().sqrt()
        for axis in torch.eye(self.xs.shape[2], dtype=torch.float64)[:N_QUERIES]:
            query = (length * axis).expand_as(self.xs[:, -1:])
            yield Prompts(torch.cat([self.xs[:, :-1], query], 1), self.ys)

    def directions(self) -> Iterator[tuple[Tensor, Prompts, Prompts, Tensor]]:
        """Yield eigenvalues λ of XᵀX, prompts with targets `X u` of a unit eigenvector u whose query is along u, the
        same with the query along another eigenvector, and the sizes of the targets `[prompt 1]`."""
        n, d = len(self.xs), self.xs.shape[2]
        _, values, vectors = torch.linalg.svd(self.xs[:, :-1])  # vectors [prompt direction x]
        rank, length = values.shape[1], self.xs[:, -1].norm(dim=1)
        for k in range(min(N_DIRECTIONS, rank)):
            own = torch.full((n,), k)
            if rank > N_DIRECTIONS:
                own = torch.randint(rank, (n,), generator=self._generator)
            other = (own + torch.randint(1, max(d, 2), (n,), generator=self._generator)) % d
            u, v = (vectors[torch.arange(n), each] * length[:, None] for each in (own, other))
            ys = self.xs @ u[:, :, None]
            size = self.size / ys[:, :-1].square().mean((1, 2)).sqrt().clamp(min=1e-300)
            ys = (ys * size[:, None, None]).expand(-1, -1, self.ys.shape[2])
            along, across = (Prompts(torch.cat([self.xs[:, :-1], q[:, None]], 1), ys) for q in (u, v))
            yield values[torch.arange(n), own].square(), along, across, (size * length.square())[:, None]


@takes_study
@checked
def fingerprint(
    learner: Learner,
    task: Task,
    *,
    n_prompts: Annotated[int, at_least(8)] = 512,
    seed: int = 0,
    progress: bool | None = None,
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

    Raises:
        ValueError: predictions are not finite, differ between two calls, or depend on the query's own target.

    Example:
        >>> print(fingerprint(AlgorithmLearner(algorithms.ols), LinearRegression()).description)
        a linear learner that applies one function to XᵀX (a spectral filter); ...
    """
    if task.n_context < 2:
        raise ValueError(f"properties of a context need two points or more, n_context is {task.n_context}")
    changes = Changes(task.sample(n_prompts, seed=seed, dtype=torch.float64), seed)
    return measured(learner, changes, progress)[0]


def check_answers(learner: Learner, prompts: Prompts, predicted: Tensor, *, fixed: bool = True) -> None:
    """Raise a ValueError if predictions depend on the query's own target or, with `fixed`, differ between two calls."""

    def change(of: Prompts) -> float:
        return (query_predictions(learner, of) - predicted).square().mean().item()

    ys = prompts.ys.clone()
    ys[:, -1] = ys[:, -1].roll(1, 0) if are_classes(ys) else ys[:, -1] + 1 + ys.abs().mean()
    rounding = 1e-9 * predicted.square().mean().item()
    read = change(Prompts(prompts.xs, ys))
    if not read > rounding:
        return
    again = change(prompts)
    if read > 4 * again:
        raise ValueError(
            f"predictions of {name_of(learner)} change with the query's own target, prompts.ys[:, -1], which is what "
            f"they should predict: use only prompts.context"
        )
    if fixed and again > rounding:
        raise ValueError(
            f"predictions of {name_of(learner)} differ between two calls on the same prompts, so no property can be "
            f"tested: call eval() on a module with dropout, or fix the seed of random numbers"
        )


def measured(learner: Learner, changes: Changes, progress: bool | None = None) -> tuple[Fingerprint, dict[str, Tensor]]:
    """Return the `fingerprint` on given prompts, and the predictions of each change that it needed `[prompt y]`."""
    plain = query_predictions(learner, changes.prompts["plain"])
    if not plain.isfinite().all():
        raise ValueError(f"{type(learner).__name__} does not predict finite numbers on this task")
    check_answers(learner, changes.prompts["plain"], plain)
    classes = are_classes(changes.ys)
    missing: dict[str, str] = dict.fromkeys((*OF_TARGETS, *FILTER_TESTS), "targets are classes") if classes else {}
    tested = {name: parts for name, parts in PROPERTIES.items() if name not in missing}
    needed = dict.fromkeys(name for parts in tested.values() for name in parts if name != "plain")
    predicted = {"plain": plain}
    for name in progress_bar(list(needed), unit="change", progress=progress, desc="fingerprint"):
        try:
            predicted[name] = changes.predicted(learner, name)
        except ArgumentError as error:  # a learner of Boolean inputs takes no others
            missing |= {each: f"{name}: {error}" for each, parts in tested.items() if name in parts}
    tested = {name: parts for name, parts in tested.items() if name not in missing}
    violations = {}
    for name, parts in tested.items():
        terms = [factor * predicted[each] for each, factor in parts.items()]
        terms += [torch.full_like(plain, -changes.size.item())] if name == "shift of the targets" else []
        violations[name] = torch.stack(terms).sum(0).square().mean(-1)
    eigenvalues = responses = changes.xs.new_zeros(0, len(plain))
    if not classes:
        eigenvalues, responses, leaked = _filter(learner, changes)
        scale = plain.square().mean() / responses.square().mean().clamp(min=1e-300)
        violations["function of S"] = leaked * scale
        violations["one filter"] = _scatter(eigenvalues, responses) * scale
    influence, squared = _influence(learner, changes, plain, classes), plain.square().mean(-1)
    clustering = torch.full_like(squared, torch.nan) if classes else _clustering(learner, changes)
    return Fingerprint(violations, squared, eigenvalues, responses, influence, clustering, missing), predicted


def _clustering(learner: Learner, changes: Changes) -> Float[Tensor, "prompt"]:
    """Squared distance of each prompt's implied weights from the nearest other's, over that of Gaussian ones."""
    implied = torch.cat([query_predictions(learner, each) for each in changes.unit_queries()], 1)
    centred = implied - implied.mean(0)
    other = torch.linalg.qr(changes.normal(*centred.shape)).Q  # as many rows, of the same covariance
    gaussian = other @ torch.linalg.svd(centred, full_matrices=False).S.diag()

    def nearest(rows: Tensor) -> Tensor:
        distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
        return distances.fill_diagonal_(torch.inf).amin(1)

    return nearest(centred) / nearest(gaussian).mean().clamp(min=1e-300)


def _filter(learner: Learner, changes: Changes) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and responses `[direction prompt]`, and squared responses along other eigenvectors `[prompt]`."""
    found, leaked = [], []
    for eigenvalues, along, across, unit in changes.directions():
        found.append((eigenvalues, (query_predictions(learner, along) / unit).mean(-1)))
        leaked.append((query_predictions(learner, across) / unit).square().mean(-1) * (along.x_dim > 1))
    every, responses = (torch.stack(column) for column in zip(*found, strict=True))
    return every, responses, torch.stack(leaked).mean(0)


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


def _influence(learner: Learner, changes: Changes, plain: Tensor, classes: bool) -> Float[Tensor, "point prompt"]:
    """Squared changes of the prediction per squared change of each point's target."""
    rows = []
    for point in range(changes.n_context):
        ys = changes.ys.clone()
        ys[:, point] = ys.roll(1, 0)[:, point] if classes else ys[:, point] + changes.size
        change = (ys - changes.ys)[:, point].square().mean(-1).clamp(min=1e-300)
        rows.append((query_predictions(learner, Prompts(changes.xs, ys)) - plain).square().mean(-1) / change)
    return torch.stack(rows)
