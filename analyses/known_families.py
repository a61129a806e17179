"""Does `identify` name the right family, or none where none is right, and is it as sure as it is right?"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch

from analyses.support.script import Option, script
from analyses.support.unlisted import halves, unlisted
from mechicl import constructions
from mechicl.analysis import Identification, identify
from mechicl.analysis.behaviour.families import ELSEWHERE, EVIDENCE, NONE, PRICE, family_weights, totals
from mechicl.constructions import hide, known_models
from mechicl.models import HookedTransformer
from mechicl.reports import Comparison, Row, Section
from mechicl.tasks import LinearRegression, Task
from mechicl.viz.elements import add_line, figure

RIGHT = {  # a known model's name begins with: the family that is right
    "copying, then gradient descent": "gradient descent",  # predictions show nothing of the copying
    "gradient descent with momentum": "gradient descent with momentum",
    "gradient descent": "gradient descent",
    "GD++": "GD++",
    "preconditioned gradient descent": "preconditioned gradient descent",
    "Newton": "Newton",
    "kernel gradient descent": "kernel gradient descent on 1 and x",  # or none: it is near for some features
    "nearest neighbour": "nearest neighbours",
    "previous token, then induction": "nearest neighbours",  # on inputs that never come again, it is the nearest one
    "online gradient descent": "online gradient descent",
    "ridge": "ridge",
}
KINDS = (
    "gradient descent", "GD++", "preconditioned gradient descent", "Newton", "copying, then gradient descent",
    "gradient descent by softmax heads", "kernel gradient descent", "gradient descent with momentum, 4 steps",
    "nearest neighbour", "online gradient descent, 6 points", "gradient descent, 3 steps of two layers",
)  # fmt: skip
GRID = [
    (evidence, price, elsewhere)
    for evidence in (8.0, 12.0, 16.0, 24.0, 32.0)
    for price in (0.125, 0.25, 0.5)
    for elsewhere in (5e-4, 1e-3, 2e-3, 3e-3, 5e-3)
]
NOISE = 1e-4
"""Of the noisy models' weights."""
BINS = (0.0, 0.3, 0.5, 0.7, 0.85, 0.95, 1.0)
LEAST = 1e-3  # probability, whose logarithm a wrong answer costs at most


@dataclass(frozen=True)
class Case:
    """One identification."""

    model: str  # its name
    right: str  # the family that it should be called by
    called: str  # what it was called
    confidence: float  # how sure
    distance: float  # of what it was called, over squared predictions
    n_prompts: int  # that it was identified on
    description: str = ""  # the kind of learner, from its fingerprint

    @property
    def rights(self) -> tuple[str, ...]:
        """The families that count as right: for kernels that the family may not hold, none does too."""
        return (self.right, NONE) if self.right.startswith("kernel") else (self.right,)

    @property
    def is_right(self) -> bool:
        """Whether the family is right, whatever the number of steps."""
        return self.called.split(",")[0] in self.rights


Measured = tuple[Case, Identification]
HALVES = ("first", "second")


@script(
    n_prompts=Option(128, "prompts for the known models and the unlisted learners"),
    n_varied=Option(110, "variations: other sizes, parameters, disguises and noise, on 64 to 256 prompts"),
    seed=Option(0, "seed of prompts and disguises"),
)
def compare(args: Any) -> Comparison:
    """The known models, plain, hidden and noisy; then variations of them, and learners on no list."""
    rows, groups = [], {}
    for label, options in {"plain": {}, "hidden": {"hidden": True}, "noisy": {"hidden": True, "noise": NOISE}}.items():
        cases = []
        for model in known_models(**options, seed=args.seed):
            if (right := right_family(model.name)) is not None:
                result = _identified(model.model, model.task, args.n_prompts, args.seed)
                cases.append(_case(f"{model.name} ({label})", right, result))
        rows += [Row(f"right families, {label}", None, _n_right(cases)), *map(_row, cases)]
    open_world = {half: _unlisted(names, args) for half, names in zip(HALVES, halves(), strict=True)}
    known: dict[str, list[Measured]] = {half: [] for half in HALVES}
    for i in range(args.n_varied):
        drawn = varied_model(i, args.seed)
        try:
            result = _identified(drawn.model, drawn.task, drawn.n_prompts, args.seed + 7 * i)
        except (ValueError, RuntimeError):  # noise has made a model that explodes
            continue
        known[HALVES[(i // len(KINDS)) % 2]].append((_case(drawn.name, drawn.right, result), result))
    for half in HALVES:
        groups[half] = [*known[half], *open_world[half]]
    of_calibration, picture, numbers = _calibrated(groups)
    rows += _of_unlisted({half: [case for case, _ in open_world[half]] for half in HALVES})
    of_variations = [case for half in HALVES for case, _ in known[half]]
    rows.append(Row("right families, variations", None, _n_right(of_variations)))
    rows += [_row(case) for case in of_variations if not case.is_right]
    sections = [Section("Is it as sure as it is right?", "", [picture])]
    lead = (
        f"Known models (`constructions.known_models()`) on {args.n_prompts} prompts, noise {NOISE:g} of each "
        f"weight matrix's size; {args.n_varied} variations of them: 3 to 6 dimensions, other parameters and steps, all "
        f"disguised, noise of 0 to 1e-3, 64 to 256 prompts; {len(unlisted())} learners on no list, each with noisy and "
        f"exact targets. The constants were chosen on one half of these, and are tested on the other."
    )
    return Comparison("Are known algorithms named, and others not?", lead, [*of_calibration, *rows], sections, numbers)


def _unlisted(names: Sequence[str], args: Any) -> list[Measured]:
    found, learners = [], unlisted()
    for noise_std in (0.3, 0.0):
        task = LinearRegression(x_dim=5, n_context=20, inputs="gaussian", noise_std=noise_std)
        for name in names:
            result = _identified(learners[name], task, args.n_prompts, args.seed)
            found.append((_case(f"{name} (targets' noise {noise_std:g})", NONE, result), result))
    return found


def _of_unlisted(cases: dict[str, list[Case]]) -> list[Row]:
    rows = []
    for half, each in cases.items():
        named = [case for case in each if case.called != NONE and case.confidence >= 0.5]
        rows.append(
            Row(
                f"unlisted learners of the {half} half named with a confidence of 50%",
                None,
                f"{len(named)} of {len(each)}",
                "",
                "; ".join(f"{c.model}: {c.called}" for c in named),
            )
        )
        rows.append(Row(f"unlisted learners of the {half} half called {NONE!r}", None, _n_right(each)))
    return rows + [Row(case.model, None, f"{case.called} ({case.confidence:.0%})", "", case.description)
                   for each in cases.values() for case in each]  # fmt: skip


def right_family(name: str) -> str | None:
    return next((family for start, family in RIGHT.items() if name.startswith(start)), None)


@dataclass(frozen=True)
class Varied:
    """A variation of a known model."""

    name: str
    right: str
    model: HookedTransformer
    task: Task
    n_prompts: int


def varied_model(i: int, seed: int = 0) -> Varied:
    """The variation with a number: its kind by turns, all else at random."""
    generator = torch.Generator().manual_seed(100_000 * seed + i)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * torch.rand(1, generator=generator, dtype=torch.float64).item()

    kind, x_dim = KINDS[i % len(KINDS)], number(3, 6)
    n = number(2 * x_dim, 5 * x_dim)
    task = LinearRegression(x_dim=x_dim, n_context=n)
    sizes: dict[str, Any] = {"x_dim": x_dim, "n_context": n}
    step_size = 2.8 / n * uniform(0.3, 1)
    if kind == "gradient descent":
        model = constructions.gradient_descent(**sizes, step_size=step_size, steps=number(1, 8))
    elif kind == "GD++":
        steps, growth = number(2, 5), uniform(1, 2.5)
        step_sizes = [step_size * growth**k for k in range(steps)]
        gammas = [20 / n * uniform(0.01, 0.05) * growth**k for k in range(steps)]
        model = constructions.gd_plus_plus(**sizes, step_size=step_sizes, gamma=gammas, steps=steps)
    elif kind == "preconditioned gradient descent":
        turned = torch.linalg.qr(torch.randn(x_dim, x_dim, generator=generator, dtype=torch.float64)).Q
        matrix = turned @ torch.diag(torch.tensor([uniform(0.5, 4) for _ in range(x_dim)]).double()) @ turned.T
        model = constructions.preconditioned_gd(**sizes, preconditioner=matrix, steps=number(1, 3))
    elif kind == "Newton":
        model = constructions.newton(**sizes, steps=number(2, 6), alpha=4.8 / n**2 * uniform(0.3, 1))
    elif kind.startswith("copying"):
        model = constructions.copy_then_gradient_descent(**sizes, step_size=step_size, steps=number(1, 3))
    elif kind.startswith("gradient descent by softmax"):
        model = constructions.softmax_gradient_descent(**sizes, step_size=step_size, score_scale=0.01)
    elif kind.startswith("kernel"):
        features, steps = number(6, 16), number(1, 3)
        weights = torch.randn(x_dim, features, generator=generator, dtype=torch.float64)
        bias = torch.randn(features, generator=generator, dtype=torch.float64)
        model = constructions.kernel_gradient_descent(
            weights=weights, bias=bias, n_context=n, step_size=0.06 / n * uniform(0.3, 1), steps=steps
        )
    else:
        known = next(each for each in known_models() if each.name == kind)
        model, task = known.model, known.task
    noise = 0.0 if number(0, 3) == 0 else 10 ** uniform(-6, -3)
    n_prompts = 2 ** number(6, 8)
    right = right_family(kind)
    assert right is not None
    name = f"{kind}, variation {i}"
    return Varied(name, right, hide(model, seed=seed + i, noise=noise).model, task, n_prompts)


def _identified(model: Any, task: Task, n_prompts: int, seed: int) -> Identification:
    return identify(
        model, task, n_prompts=n_prompts, seed=seed, with_references=False, with_limits=False, progress=False
    )


def _case(name: str, right: str, result: Identification) -> Case:
    nearest = result.distance(result.likeliest).mean
    kind = result.fingerprint.description if result.fingerprint else ""
    return Case(name, right, result.answer.name, result.confidence, nearest, len(result.squared_predictions), kind)


def _n_right(cases: Sequence[Case]) -> str:
    return f"{sum(case.is_right for case in cases)} of {len(cases)}"


def _row(case: Case) -> Row:
    note = f"distance {case.distance:.2g}" + ("" if case.is_right else f", wrong: {case.right}")
    return Row(case.model, None, f"{case.called} ({case.confidence:.0%})", "", note)


# ---- calibration ----


def _calibrated(groups: dict[str, list[Measured]]) -> tuple[list[Row], go.Figure, dict]:
    """Rows, the curves and numbers: the constants chosen on one half of the cases, measured on the other."""
    chosen = max(GRID, key=lambda numbers: _score(groups["first"], *numbers))
    words = "evidence {:g}, price {:g}, elsewhere {:g}"
    curves = {half: curve([case.confidence for case, _ in each], [case.is_right for case, _ in each])
              for half, each in groups.items()}  # fmt: skip
    rows = [Row("best numbers for the first half", None, words.format(*chosen), "",
                f"used: {words.format(EVIDENCE, PRICE, ELSEWHERE)}")]  # fmt: skip
    for half, each in curves.items():
        rows += _rows_of(each, f", {half} half", "the constants were chosen on the first half")
    return rows, _picture(curves["second"], curves["first"]), curves


def _score(cases: Sequence[Measured], evidence: float, price: float, elsewhere: float) -> float:
    """The mean logarithm of the probability of what is right."""
    logs = []
    for case, result in cases:
        weights = totals(result.matches, family_weights(result.matches, evidence, price, elsewhere))
        logs.append(math.log(max(sum(weights.get(name, 0.0) for name in case.rights), LEAST)))
    return sum(logs) / len(logs)


def curve(confidences: Sequence[float], right: Sequence[bool]) -> list[dict[str, float]]:
    """By bin of confidence: its ends, the mean confidence, the share of right names, and the number of cases."""
    bins = []
    for low, high in itertools.pairwise(BINS):
        inside = [(sure, ok) for sure, ok in zip(confidences, right, strict=True)
                  if low < sure <= high or (low == BINS[0] and sure <= low)]  # fmt: skip
        if n := len(inside):
            mean, share = (sum(values) / n for values in zip(*inside, strict=True))
            bins.append({"low": low, "high": high, "confidence": mean, "right": share, "n": n})
    return bins


def _rows_of(bins: Sequence[dict[str, float]], label: str, note: str) -> list[Row]:
    total = sum(each["n"] for each in bins)
    error = sum(each["n"] * abs(each["confidence"] - each["right"]) for each in bins) / total
    rows = [Row(f"calibration error{label}", None, round(error, 3), "", f"mean over cases, by bin; {note}")]
    for each in bins:
        name = f"right where the confidence is {each['low']:.0%} to {each['high']:.0%}{label}"
        words = f"{each['right']:.0%} of {each['n']:.0f}, at a mean confidence of {each['confidence']:.0%}"
        rows.append(Row(name, None, words))
    return rows


def _picture(measured: Sequence[dict[str, float]], refitted: Sequence[dict[str, float]]) -> go.Figure:
    fig = figure("Confidence and share of right names", "confidence", "share of right names")
    add_line(fig, [0, 1], [0, 1], "calibrated", "#999999", dash="dot")
    for bins, name, color in ((measured, "tested", "#0072b2"), (refitted, "chosen on", "#d55e00")):
        x, y = [each["confidence"] for each in bins], [each["right"] for each in bins]
        add_line(fig, x, y, name, color, mode="lines+markers")
    return fig


if __name__ == "__main__":
    compare.run()
