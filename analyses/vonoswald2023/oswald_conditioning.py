"""The effect of GD++ on condition numbers, and whether it explains its γ (von Oswald et al. 2023, A.10, Fig. 13)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch

from analyses.support.conditioning import (
    FLOOR,
    Conditioning,
    EigenvalueRange,
    measure_conditioning,
    transformed_eigenvalues,
)  # fmt: skip
from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.seeds import by_seed
from mechicl.analysis import fit_construction
from mechicl.reports import Comparison, Row, Section, published
from mechicl.statistics import Interval, interval
from mechicl.viz.elements import COLORS, add_band, add_line, colors_for, figure, panel, panels

SHOWN = (0.05, 0.08, 0.099, 0.11, 0.12, 0.13, 0.14, 0.15, 0.18)
"""γ of the distributions over tasks; according to the paper, condition numbers explode above 0.1."""
QUANTILES = 400  # that a distribution is drawn from
DISTRIBUTION = 25  # points of the task whose distribution the paper shows


@dataclass(frozen=True, eq=False)
class GammaStudy:
    """The measurements for one number of points."""

    n: int
    conditioning: Conditioning  # of the first draw, with the γ in the weights (median of the seeds)
    ranges: list[EigenvalueRange]  # extreme eigenvalues of each draw
    gamma: torch.Tensor  # in the weights, one a seed
    best: Interval  # with the least mean logarithm of the condition number

    @property
    def typical(self) -> float:
        """γ in the weights of the median seed: one seed of five may be far from its optimum."""
        return self.conditioning.gammas[0]

    @property
    def heuristic(self) -> Interval:
        return interval(torch.tensor([r.heuristic_gamma for r in self.ranges], dtype=torch.float64))


@script(
    checkpoints=("lsa-2l-looped", "lsa-2l-looped-n25", "lsa-2l-looped-n50", "lsa-2l-looped-n100"),
    n_prompts=Option(10_000, "tasks in a draw, as in the paper"),
    draws=Option(40, "draws that the extreme eigenvalues are taken over; everything else is measured on the first"),
    seed=Option(0, "seed of the first draw; the others have the next ones"),
)
def compare(args: Any) -> Comparison:
    """Rows for each number of points, and the three panels of Fig. 13."""
    studies = [_measure(name, args) for name in args.checkpoints]
    rows = [row for part in (_eigenvalue_rows, _gamma_rows, _condition_rows) for m in studies for row in part(m)]
    by_name = {f"n = {m.n}": m for m in studies}
    observed = {name: m.typical or m.best.mean for name, m in by_name.items()}  # models without training have none
    grids = {name: m.conditioning.at(_grid(m)) for name, m in by_name.items()}
    ranges = {name: m.conditioning.extremes for name, m in by_name.items()}
    figures = [
        Section("Map of the eigenvalues",
                f"For the γ in the weights of the median seed; solid over the eigenvalues of {args.n_prompts:,} tasks. "
                "All of them lie below the root 1/γ.", eigenvalue_map(ranges, observed)),
        Section("Condition number against γ",
                "Above: from the smallest and the largest eigenvalue of all tasks, the paper's heuristic (star: without"
                " transformation; diamond: the least). Below: of each task separately. Dotted: γ in the trained "
                "weights.", condition_numbers(grids, observed)),
    ]  # fmt: skip
    shown = next((m for m in studies if m.n == DISTRIBUTION), None)
    if shown is not None:
        several = shown.conditioning.at(SHOWN)
        rows += _distribution_rows(shown, several)
        words = f"Condition numbers of {args.n_prompts:,} tasks. The γ in the weights is {shown.typical:.4f}."
        drawn = condition_number_distribution(several)
        figures.append(Section(f"Distribution over tasks, n = {shown.n}", words, drawn))
    lead = (
        f"Eigenvalues of S, the sum of x xᵀ over the context points, for draws of {args.n_prompts:,} tasks with x ~ "
        f"U(-1/2, 1/2), d = 10, and looped two-layer linear attention trained on them. One transformation of GD++ maps "
        f"λ to λ (1 - γλ)²."
    )
    return Comparison("Condition numbers under GD++ (A.10, Fig. 13)", lead, rows, figures)


def _measure(name: str, args: Any) -> GammaStudy:
    checkpoint, task = regression_checkpoint(name)
    fit = fit_construction(checkpoint.models, "gd++", task, refine=False, n_prompts=64)
    gamma = fit.projected.parameters["gamma"][:, 0]
    prompts = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    first = measure_conditioning(prompts, [max(0.0, gamma.median().item())])  # untrained weights may have any sign
    ranges = [first.extremes]
    for seed in range(args.seed + 1, args.seed + args.draws):
        again = task.sample(args.n_prompts, seed=seed, dtype=torch.float64)
        ranges.append(measure_conditioning(again, [0.0]).extremes)
    return GammaStudy(task.n_context, first, ranges, gamma, first.best_gamma(seed=args.seed))


def _printed(n: int) -> dict[str, float]:
    """Return the paper's numbers for n points; empty if it has none."""
    printed = published("oswald2023_a10")
    if n not in printed["n"]:
        return {}
    return {key: values[printed["n"].index(n)] for key, values in printed.items()}


def _eigenvalue_rows(m: GammaStudy) -> list[Row]:
    rows = []
    for which in ("largest", "smallest"):
        values = torch.tensor([getattr(r, which) for r in m.ranges], dtype=torch.float64)
        low, high = values.min().item(), values.max().item()
        words = f"{low:.3g} to {high:.3g} in {len(values)} draws"
        many_decades = high > 2 * low and low / 100 < FLOOR
        ends = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        drawn = Interval(values.mean().item(), *ends, n=len(values))  # where single draws lie: one was printed
        measured = words if many_decades else drawn
        note = f"cut at {FLOOR:g}" if many_decades else words
        rows.append(Row(f"{which} eigenvalue, n = {m.n}", _printed(m.n).get(f"{which}_eigenvalue"), measured,
                        "draws, where 95% of them lie", note))  # fmt: skip
    return rows


def _gamma_rows(m: GammaStudy) -> list[Row]:
    printed = _printed(m.n)
    paper = printed.get("gamma_of_trained_2_layer_recurrent")
    typical = m.typical
    heuristic_note = f"{_over(m.heuristic.mean, typical):.2f} times the median seed's"
    if printed:
        from_printed = EigenvalueRange(printed["smallest_eigenvalue"], printed["largest_eigenvalue"]).heuristic_gamma
        heuristic_note += f"; the printed eigenvalues give {from_printed:.4f}"
    beyond = m.conditioning.beyond_root()[0].mean
    return [
        Row(f"γ in the weights, n = {m.n}", paper, interval(m.gamma), "seeds",
            f"median {typical:.4g}; {by_seed(m.gamma, '.4f')}"),
        Row(f"γ with the least condition number of all tasks' range, n = {m.n}", "slightly larger than in the weights",
            m.heuristic, "draws", heuristic_note),
        Row(f"γ with the least mean log condition number, n = {m.n}", None, m.best, "prompts",
            f"{_over(m.best.mean, typical):.2f} times the median seed's"),
        Row(f"γ in the weights times the largest eigenvalue, n = {m.n}", "below 1",
            typical * max(r.largest for r in m.ranges), f"{len(m.ranges)} draws",
            f"{100 * beyond:g}% of tasks have an eigenvalue beyond the root"),
    ]  # fmt: skip


def _condition_rows(m: GammaStudy) -> list[Row]:
    c, gamma = m.conditioning, m.conditioning.gammas[0]
    at_best = c.at([m.best.mean])

    def share(conditioning: Conditioning) -> Interval | str:
        improved = conditioning.improved()[0]
        return f"all {improved.n:,}" if improved.mean == 1 else improved

    after = "median condition number after,"
    return [
        Row(f"median condition number before, n = {m.n}", None, c.median_before(), "prompts"),
        Row(f"{after} γ in the weights, n = {m.n}", "smaller", c.medians()[0], "prompts", f"γ = {gamma:.4f}"),
        Row(f"{after} our best γ, n = {m.n}", None, at_best.medians()[0], "prompts", f"γ = {m.best.mean:.4f}"),
        Row(f"share of tasks that improve, γ in the weights, n = {m.n}", None, share(c), "prompts"),
        Row(f"share of tasks that improve, our best γ, n = {m.n}", None, share(at_best), "prompts"),
    ]


def _distribution_rows(m: GammaStudy, several: Conditioning) -> list[Row]:
    """The claim that condition numbers explode for γ above 0.1."""
    above = several.quantiles([0.99])[0].tolist()
    before = several.before.quantile(0.99).item()
    rows = []
    for gamma, median, high, better in zip(several.gammas, several.medians(), above, several.improved(), strict=True):
        note = f"99% quantile {high:.3g} (before: {before:.3g}); {100 * better.mean:.4g}% of tasks improve"
        claim = None if gamma < 0.1 else "explodes"
        rows.append(Row(f"median condition number after, γ = {gamma:g}, n = {m.n}", claim, median, "prompts", note))
    return rows


def _over(value: float, gamma: float) -> float:
    """A value over the γ in the weights, which is 0 in models without training."""
    return value / gamma if gamma else math.inf


def _grid(m: GammaStudy) -> list[float]:
    """γ from 0 past the best one of single tasks, with the corner and the end of the range's condition number."""
    span = m.conditioning.extremes
    corners = [span.heuristic_gamma, 0.999 / span.largest]
    return sorted({*torch.linspace(0, 1.5 * m.best.mean, 97, dtype=torch.float64).tolist(), *corners})


# ---- figures ----


def eigenvalue_map(ranges: Mapping[str, EigenvalueRange], gammas: Mapping[str, float]) -> go.Figure:
    """`λ (1 - γλ)²` against λ for several γ: solid where a task's eigenvalues lie, dotted past 1/γ (Fig. 13, left)."""
    fig = figure("Eigenvalues after one transformation of GD++", "eigenvalue λ of S", "λ (1 − γλ)²")
    for color, (name, span) in zip(colors_for(list(ranges)), ranges.items(), strict=True):
        gamma = gammas[name]
        for low, high, dash in ((span.smallest, span.largest, "solid"), (span.largest, 4 / (3 * gamma), "dot")):
            if low >= high:  # eigenvalues up to where the map is as high as at its local maximum
                continue
            x = torch.linspace(low, high, 200, dtype=torch.float64)
            y = transformed_eigenvalues(x, gamma).tolist()
            add_line(fig, x.tolist(), y, f"{name}, γ = {gamma:.3g}", color, dash=dash, showlegend=dash == "solid",
                     legendgroup=name)  # fmt: skip
    end = 1.05 * max(4 / (3 * gamma) for gamma in gammas.values())
    add_line(fig, [0, end], [0, end], "unchanged", "#999999", dash="dash")
    top = max(transformed_eigenvalues(torch.tensor(r.largest), gammas[n]).item() for n, r in ranges.items())
    fig.update_yaxes(range=[0, 1.1 * max(top, *(4 / (27 * gamma) for gamma in gammas.values()))])
    fig.update_xaxes(range=[0, end])
    return fig


def condition_numbers(results: Mapping[str, Conditioning], observed: Mapping[str, float]) -> go.Figure:
    """Condition numbers against γ: of the range of eigenvalues (top), and of each prompt (Fig. 13, centre).

    Above, a star is the range's condition number without transformation, a diamond the γ with the least; lines end at
    1/λ_max, where the range comes to contain the map's root. Below, lines are medians over prompts, bands their middle
    half. Dotted are the observed γ.
    """
    title = "Condition numbers after one transformation of GD++"
    names = ("smallest and largest eigenvalue of all tasks", "each task separately: median and middle half")
    fig = panels(title, names, columns=1, shared_xaxes=True, vertical_spacing=0.09)
    above, below = panel(0, 1), panel(1, 1)
    for color, (name, result) in zip(colors_for(list(results)), results.items(), strict=True):
        span, x = result.extremes, list(result.gammas)
        whole = [value if math.isfinite(value) else None for value in span.condition_numbers(x).tolist()]
        low, middle, high = result.quantiles([0.25, 0.5, 0.75]).tolist()
        add_line(fig, x, whole, name, color, legendgroup=name, place=above)
        for symbol, gamma, words in (("star", 0.0, "no transformation"), ("diamond", span.heuristic_gamma, "least")):
            point = go.Scatter(
                x=[gamma], y=span.condition_numbers([gamma]).tolist(), mode="markers", name=f"{name}: {words}",
                marker={"color": color, "size": 10, "symbol": symbol}, showlegend=False, legendgroup=name,
            )  # fmt: skip
            fig.add_trace(point, **above)
        add_band(fig, x, low, high, color, below)
        add_line(fig, x, middle, name, color, showlegend=False, legendgroup=name, place=below)
        for place in (above, below):
            fig.add_vline(x=observed[name], line={"color": color, "dash": "dot", "width": 1.5}, **place)
    fig.update_layout(height=680)
    fig.update_xaxes(title_text="γ", row=2)
    of_ranges = max(result.extremes.largest / result.extremes.smallest for result in results.values())
    of_prompts = max(result.before.median().item() for result in results.values())
    for row, decades in enumerate((math.log10(of_ranges), math.log10(of_prompts)), start=1):
        fig.update_yaxes(title_text="condition number", type="log", exponentformat="power", row=row,
                         dtick=max(1, math.ceil(decades / 6)))  # fmt: skip
    return fig


def condition_number_distribution(result: Conditioning) -> go.Figure:
    """A violin over prompts for S itself and one for each γ, on a logarithmic axis (Fig. 13, right).

    The outermost eighth of a percent of the prompts at either end is left out.
    """
    fig = figure("Condition numbers of single tasks, by γ", "γ", "condition number")
    probabilities = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
    labelled = [("before", result.before), *zip((f"{g:g}" for g in result.gammas), result.after, strict=True)]
    decades = 1
    for label, values in labelled:
        logs = values.cpu().log10().quantile(probabilities)
        decades = max(decades, math.ceil(logs.max().item()))
        color = COLORS["gradient descent"] if label == "before" else COLORS["GD++"]
        fig.add_trace(
            go.Violin(
                x=[label] * QUANTILES, y=logs.tolist(), name=label, line={"color": color, "width": 1.3}, points=False,
                scalemode="width", width=0.85, spanmode="hard", box={"visible": True, "width": 0.25}, hoverinfo="skip",
                showlegend=False,
            )
        )  # fmt: skip
    ticks = list(range(0, decades + 1, max(1, math.ceil(decades / 8))))
    fig.update_yaxes(tickvals=ticks, ticktext=[f"10<sup>{k}</sup>" for k in ticks])
    fig.update_xaxes(type="category")
    fig.update_layout(height=420)
    return fig


if __name__ == "__main__":
    compare.run()
