"""Does `identify` name the right family, and is it as sure as it is right? On models whose algorithm is known."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from analyses.support.script import Option, script
from mechicl import constructions
from mechicl.analysis import Identification, identify
from mechicl.analysis.behaviour.families import ELSEWHERE, EVIDENCE, PRICE, family_weights
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
    "kernel gradient descent": "kernel gradient descent on 1 and x",  # the nearest kernel that the family holds
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
    for evidence in (4.0, 8.0, 16.0, 32.0, 64.0)
    for price in (0.0, 0.125, 0.25, 0.5, 1.0)
    for elsewhere in (0.1, 0.2, 0.4, 0.8)
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
    noise: float  # in the model's weights
    n_prompts: int  # that it was identified on

    @property
    def is_right(self) -> bool:
        """Whether the family is right, whatever the number of steps."""
        return self.called.split(",")[0] == self.right


@script(
    n_prompts=Option(256, "prompts for the known models"),
    n_varied=Option(220, "variations: other sizes, parameters, disguises and noise, on 8 to 256 prompts"),
    seed=Option(0, "seed of prompts and disguises"),
)
def compare(args: Any) -> Comparison:
    """The known models, plain, hidden and noisy; then the variations."""
    rows = []
    for label, options in {"plain": {}, "hidden": {"hidden": True}, "noisy": {"hidden": True, "noise": NOISE}}.items():
        cases = []
        for model in known_models(**options, seed=args.seed):
            if (right := right_family(model.name)) is not None:
                result = _identified(model.model, model.task, args.n_prompts, args.seed)
                cases.append(_case(f"{model.name} ({label})", right, result, options.get("noise", 0.0)))
        rows += [Row(f"right families, {label}", None, _n_right(cases)), *map(_row, cases)]
    varied, results = [], []
    for i in range(args.n_varied):
        drawn = varied_model(i, args.seed)
        try:
            result = _identified(drawn.model, drawn.task, drawn.n_prompts, args.seed + 7 * i)
        except (ValueError, RuntimeError):  # noise has made a model that explodes
            continue
        results.append(result)
        varied.append(_case(drawn.name, drawn.right, result, drawn.noise))
    of_calibration, picture, numbers = _calibrated(varied, results)
    sections = [Section("Is it as sure as it is right?", "", [picture])]
    lead = (
        f"Known models (`constructions.known_models()`) on {args.n_prompts} prompts, noise {NOISE:g} of each "
        f"weight matrix's size; {len(varied)} variations of them: 3 to 6 dimensions, other parameters and steps, all "
        f"disguised, noise of 0 to 0.1, 8 to 256 prompts."
    )
    return Comparison("Are known algorithms named?", lead, [*of_calibration, *rows], sections, numbers)


def right_family(name: str) -> str | None:
    return next((family for start, family in RIGHT.items() if name.startswith(start)), None)


@dataclass(frozen=True)
class Varied:
    """A variation of a known model."""

    name: str
    right: str
    model: HookedTransformer
    task: Task
    noise: float
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
    noise = 0.0 if number(0, 3) == 0 else 10 ** uniform(-6, -1)
    n_prompts = 2 ** number(3, 8)
    right = right_family(kind)
    assert right is not None
    name = f"{kind}, variation {i}"
    return Varied(name, right, hide(model, seed=seed + i, noise=noise).model, task, noise, n_prompts)


def _identified(model: Any, task: Task, n_prompts: int, seed: int) -> Identification:
    return identify(
        model, task, n_prompts=n_prompts, seed=seed, with_references=False, with_limits=False, progress=False
    )


def _case(name: str, right: str, result: Identification, noise: float) -> Case:
    answer = result.answer
    n_prompts, distance = len(result.squared_predictions), result.distance(answer).mean
    return Case(name, right, answer.name, result.confidence, distance, noise, n_prompts)


def _n_right(cases: Sequence[Case]) -> str:
    return f"{sum(case.is_right for case in cases)} of {len(cases)}"


def _row(case: Case) -> Row:
    note = f"distance {case.distance:.2g}" + ("" if case.is_right else f", wrong: {case.right}")
    return Row(case.model, None, f"{case.called} ({case.confidence:.0%})", "", note)


# ---- calibration ----


def _calibrated(cases: Sequence[Case], results: Sequence[Identification]) -> tuple[list[Row], go.Figure, dict]:
    """Rows, the curve and numbers: the three numbers chosen on one half of the cases, measured on the other."""
    halves = [[i for i in range(len(cases)) if (i // len(KINDS)) % 2 == half] for half in (0, 1)]
    table = [[_by_family(result, *numbers) for numbers in GRID] for result in results]
    scores = torch.tensor([[math.log(max(each.get(case.right, 0.0), LEAST)) for each in row]
                           for case, row in zip(cases, table, strict=True)])  # fmt: skip
    chosen = [int(scores[half].mean(0).argmax()) for half in halves]
    everything = GRID[int(scores.mean(0).argmax())]
    crossed = [(i, table[i][chosen[1 - half]]) for half in (0, 1) for i in halves[half]]
    pairs = [(cases[i], weights, max(weights, key=weights.__getitem__))
             for i, weights in sorted(crossed, key=lambda pair: pair[0])]  # fmt: skip
    refitted = curve([weights[top] for _, weights, top in pairs], [top == case.right for case, _, top in pairs])
    measured = curve([case.confidence for case in cases], [case.is_right for case in cases])
    words = "evidence {:g}, price {:g}, elsewhere {:g}"
    rows = [
        Row("right families, variations", None, _n_right(cases)),
        *_rows_of(measured, "", f"with {words.format(EVIDENCE, PRICE, ELSEWHERE)}, chosen on other variations"),
        *_rows_of(refitted, ", refitted", "with the numbers that are best on the other half of the variations"),
        Row("best numbers for these variations", None, words.format(*everything), "",
            f"on the halves: {'; '.join(words.format(*GRID[k]) for k in chosen)}"),
    ]  # fmt: skip
    return rows, _picture(measured, refitted), {"curve": measured, "refitted_curve": refitted}


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
    for bins, name, color in ((measured, "measured", "#0072b2"), (refitted, "numbers refitted", "#d55e00")):
        x, y = [each["confidence"] for each in bins], [each["right"] for each in bins]
        add_line(fig, x, y, name, color, mode="lines+markers")
    return fig


def _by_family(result: Identification, evidence: float, price: float, elsewhere: float) -> dict[str, float]:
    distances: Tensor = torch.stack([match.squared_distances for match in result.matches])
    numbers = [match.n_fitted + match.n_given for match in result.matches]
    scale = result.squared_predictions.mean().item()
    weights = family_weights(distances, numbers, scale, evidence=evidence, price=price, elsewhere=elsewhere)
    totals: dict[str, float] = {}
    for match, weight in zip(result.matches, weights.tolist(), strict=True):
        totals[match.family] = totals.get(match.family, 0.0) + weight
    return totals


if __name__ == "__main__":
    compare.run()
