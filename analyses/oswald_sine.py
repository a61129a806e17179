"""Sine waves: an MLP and linear attention against the same MLP with a step of gradient descent (von Oswald et al. 2023,
section 3, Fig. 4, A.7 and A.8).

python analyses/oswald_sine.py
"""

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import algorithms, viz
from mechicl.analysis import align
from mechicl.analysis.weights import adapted_functions, initial_function, view_kernel
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import AlgorithmLearner, Learner, squared_errors
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import Interval, interval, median_interval
from mechicl.tasks import SineRegression
from mechicl.viz.elements import BELOW, COLORS, add_line, colors_for, panels
from mechicl.viz.elements import panel as place_of
from mechicl.viz.weights import kernel_heatmaps
from support.checks import every, near
from support.claims import Claim, Claims
from support.script import ScriptArgs, run_script

DRAWS = {
    "independent": "amplitude and phase independent, as in the text (the authors' code draws both with one key)",
    "one_key": "amplitude and phase drawn with one key, as in the authors' code",
}


@dataclass(frozen=True)
class Args(ScriptArgs):
    """Losses, alignment, initial and adapted functions, kernels."""

    transformer: str = "sine-lsa"
    """Name or folder of the models with learned attention."""
    descent: str = "sine-gd"
    """Name or folder of the models with a step of gradient descent in its place, from the same seeds."""
    n_prompts: int = 10_000
    """Held-out prompts."""
    n_drawn: int = 6
    """Held-out prompts that are drawn."""
    seed: int = 1_000_003
    """Seed of the held-out prompts."""


def compare(args: Args) -> Comparison:
    """Hold each seed's two models against each other."""
    transformer, descent = load_checkpoint(args.transformer), load_checkpoint(args.descent)
    task = transformer.task
    if not isinstance(task, SineRegression):
        raise ValueError(f"{transformer.name} was trained on {type(task).__name__}, not on sine waves")
    if transformer.record["seeds"] != descent.record["seeds"]:
        raise ValueError(f"{transformer.name} and {descent.name} must have the same seeds")
    held_out = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    learned, constructed = (_in_float64(checkpoint) for checkpoint in (transformer, descent))
    bandwidth = algorithms.tuned_bandwidth(task.sample(5000, seed=args.seed + 1, dtype=torch.float64))
    smoothing = AlgorithmLearner(algorithms.kernel_smoothing, {"bandwidth": bandwidth})
    mse = {name: _mse(models, held_out) for name, models in (("lsa", learned), ("gd", constructed))}
    rows = [
        Row("half-MSE, predicting 0", None, interval(held_out.query.ys[:, 0].square() / 2), "prompts"),
        Row("half-MSE, Nadaraya-Watson smoothing, tuned", None, interval(squared_errors(smoothing, held_out)[:, 0] / 2),
            "prompts", f"Gaussian kernel, bandwidth {bandwidth:.3g}"),
        Row("half-MSE, MLP and linear attention", None, interval(mse["lsa"] / 2), "seeds", _listed(mse["lsa"] / 2)),
        Row("half-MSE, MLP and a step of gradient descent", None, interval(mse["gd"] / 2), "seeds",
            _listed(mse["gd"] / 2)),
        Row("loss, attention over gradient descent", 1, median_interval(mse["lsa"] / mse["gd"]), "seeds",
            "paired by seed"),
    ]  # fmt: skip
    rows += _alignment_rows(learned, constructed, smoothing, held_out)
    grid = torch.linspace(*task.x_range, 101, dtype=torch.float64)[:, None]
    rows += _initial_rows(learned, constructed, grid, held_out)
    views = {}
    for name, models in (("attention", learned), ("gradient descent", constructed)):
        by_seed = [view_kernel(model, grid[::2], held_out[:1000]) for model in models]
        views[name] = by_seed[0]
        nonlinear = [_rms(view.parts.remainder) / _rms(view.parts.prediction) for view in by_seed]
        rows += [
            Row(f"kernel of {name}: effective rank", None, interval(torch.tensor([v.effective_rank for v in by_seed])),
                "seeds"),
            Row(f"kernel of {name}: |K - Kᵀ| / |K|", None, interval(torch.tensor([v.symmetry_error for v in by_seed])),
                "seeds"),
            Row(f"kernel of {name}: share of predictions not linear in the targets (rms)", None,
                interval(torch.stack(nonlinear)), "seeds"),
        ]  # fmt: skip
    figures = [
        _functions(learned[0], constructed[0], smoothing, task, held_out[: args.n_drawn], grid),
        _curves(transformer, descent),
        Section("Kernels", "What a prediction gains by a unit of y at a context point, first seed. The paper's view is "
               "k(x, x') = m(x)·m(x'); where MLPs read y too, it is the model's part that is linear in the targets.",
               kernel_heatmaps(views)),
    ]  # fmt: skip
    lead = (
        f"Sine waves a sin(x + phase), amplitudes U{task.amplitude_range}, {DRAWS[task.amplitude_phase]}, "
        f"{task.n_context} points, on "
        f"{args.n_prompts:,} held-out prompts (seed {args.seed}). Embedding into 40 dimensions, residual MLP of 160 "
        f"units, one layer of linear attention; the control has gradient descent on the last dimension, with a learned "
        f"step size, in its place."
    )
    data = {"mse": {name: values.tolist() for name, values in mse.items()}, "bandwidth": bandwidth}
    return Comparison("Sine waves (Fig. 4, A.7, A.8)", lead, rows, figures, data)


def _in_float64(checkpoint: Checkpoint) -> list[HookedTransformer]:
    return [copy.deepcopy(model).double() for model in checkpoint.models]


def _mse(models: list[HookedTransformer], prompts: Prompts) -> torch.Tensor:
    return torch.stack([squared_errors(model, prompts)[:, 0].mean() for model in models])


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()


def _listed(values: torch.Tensor) -> str:
    return "by seed " + ", ".join(f"{value:.5f}" for value in values.tolist())


def _alignment_rows(
    learned: list[HookedTransformer], constructed: list[HookedTransformer], smoothing: Learner, held_out: Prompts
) -> list[Row]:
    """Compare the two models of each seed; controls are two seeds of one kind, and smoothing."""
    pairs: dict[str, list[tuple[Learner, Learner]]] = {
        "attention and gradient descent": list(zip(learned, constructed, strict=True)),
        "two seeds of attention": list(itertools.combinations(learned, 2)),
        "attention and Nadaraya-Watson smoothing": [(model, smoothing) for model in learned],
    }
    size = _rms(held_out.query.ys)
    rows = []
    for name, each in pairs.items():
        alignments = [align(a, b, held_out) for a, b in each]
        claim = name == "attention and gradient descent"
        distance = torch.stack([_rms(alignment.prediction_distance) for alignment in alignments]) / size
        cosine = torch.stack([alignment.sensitivity_cosine.nanmean() for alignment in alignments])
        over = "pairs" if "seeds" in name else "seeds"
        rows += [
            Row(
                f"prediction distance over rms target, {name}",
                "small" if claim else None,
                median_interval(distance),
                over,
            ),
            Row(f"sensitivity cosine, {name}", "near 1" if claim else None, interval(cosine), over),
        ]
    return rows


def _initial_rows(
    learned: list[HookedTransformer], constructed: list[HookedTransformer], grid: torch.Tensor, held_out: Prompts
) -> list[Row]:
    functions = {
        "attention": [initial_function(model, grid) for model in learned],
        "gradient descent": [initial_function(model, grid) for model in constructed],
    }
    both = list(zip(*functions.values(), strict=True))
    target = _rms(held_out.query.ys)

    def apart(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Interval:
        return median_interval(torch.stack([_rms(a - b) for a, b in pairs]) / target)

    sizes = median_interval(torch.stack([(_rms(a) + _rms(b)) / 2 for a, b in both]) / target)
    distance = "rms distance of the two initial functions over rms target"
    return [
        Row("rms of the initial functions over rms target", None, sizes, "seeds"),
        Row(distance, "almost identical", apart(both), "seeds"),
        *(
            Row(f"{distance}, two seeds of {name}", None, apart(itertools.combinations(each, 2)), "pairs")
            for name, each in functions.items()
        ),
    ]


def _functions(
    learned: HookedTransformer,
    constructed: HookedTransformer,
    smoothing: Learner,
    task: SineRegression,
    prompts: Prompts,
    grid: torch.Tensor,
) -> Section:
    learners = {"attention": learned, "gradient descent": constructed, "Nadaraya-Watson": smoothing}
    figure = adapted_functions_figure(
        prompts,
        grid,
        {name: adapted_functions(learner, prompts, grid) for name, learner in learners.items()},
        initial={name: initial_function(model, grid) for name, model in (("attention", learned),
                                                                         ("gradient descent", constructed))},
        truth=_waves(prompts, grid),
    )  # fmt: skip
    return Section("Initial and adapted functions", "First seed; dashed: before the context is read.", figure)


def adapted_functions_figure(
    prompts: Prompts,
    grid: Float[Tensor, "query 1"],
    functions: Mapping[str, Float[Tensor, "prompt query 1"]],
    *,
    initial: Mapping[str, Float[Tensor, "query 1"]],
    truth: Float[Tensor, "prompt query 1"],
    columns: int = 3,
) -> go.Figure:
    """Functions that learners have made of some contexts, a panel for each prompt (Fig. 4, left).

    Args:
        prompts: with inputs and targets of one dimension.
        grid: the queries, ascending.
        functions: by learner, predictions from each prompt's context.
        initial: by learner, predictions before attention; dashed, in the learner's colour.
        truth: the targets' function on the grid for each prompt.
        columns: panels in a row.
    """
    n_columns = min(columns, len(prompts))
    n_rows = -(-len(prompts) // n_columns)
    fig = panels(
        "Functions before and after the context", [f"prompt {i + 1}" for i in range(len(prompts))],
        columns=n_columns, shared_xaxes=True,
        shared_yaxes="all", horizontal_spacing=0.03, vertical_spacing=0.25 / n_rows**1.5 if n_rows > 1 else 0,
    )  # fmt: skip
    names = [*functions, *(name for name in initial if name not in functions)]
    colors = dict(zip(names, colors_for(names), strict=True))
    inputs = grid[:, 0].tolist()
    for i in range(len(prompts)):
        place = place_of(i, n_columns)
        lines: list[tuple[str, Tensor, str, dict[str, Any]]] = [("true function", truth[i], "#bbbbbb", {"width": 6})]
        for name, values in initial.items():
            lines.append((f"{name}, before", values, colors[name], {"dash": "dash", "width": 1.5}))
        lines += [(name, values[i], colors[name], {}) for name, values in functions.items()]
        for name, values, color, look in lines:
            add_line(fig, inputs, values[:, 0].tolist(), name, color, place=place, legendgroup=name,
                     showlegend=i == 0, **look)  # fmt: skip
        marker = {"color": COLORS["gradient descent"], "size": 7, "line": {"color": "white", "width": 1}}
        xs, ys = prompts.xs[i, :-1, 0].tolist(), prompts.ys[i, :-1, 0].tolist()
        points = go.Scatter(x=xs, y=ys, mode="markers", name="context", marker=marker, legendgroup="context",
                            showlegend=i == 0)  # fmt: skip
        fig.add_trace(points, **place)
    fig.update_layout(height=130 + 240 * n_rows, margin={"t": 90, "b": 60}, legend=BELOW | {"y": -75 / (240 * n_rows)})
    for i in range(n_columns):
        lowest = (len(prompts) - 1 - i) // n_columns + 1  # the row of the lowest panel in this column
        fig.update_xaxes(title_text="x", showticklabels=True, row=lowest, col=i + 1)
        fig.update_yaxes(showticklabels=i == 0, title_text="y" if i == 0 else "", col=i + 1)
    return fig


def _waves(prompts: Prompts, grid: torch.Tensor) -> torch.Tensor:
    """The wave of each prompt on the grid: `a sin(x + phase) = s sin x + c cos x`, solved from its points."""

    def basis(xs: torch.Tensor) -> torch.Tensor:
        return torch.cat([xs.sin(), xs.cos()], dim=-1)

    return basis(grid) @ torch.linalg.lstsq(basis(prompts.xs), prompts.ys).solution


def _curves(transformer: Checkpoint, descent: Checkpoint) -> Section:
    curves = {"attention": transformer.record["curve"], "gradient descent": descent.record["curve"]}
    figure = viz.losses_over_training(
        curves["attention"]["eval_step"], {name: curve["eval_loss"] for name, curve in curves.items()}, log_x=True,
        log_y=True,
    )  # fmt: skip
    return Section("Loss during training", "Half the held-out mean squared error of each seed.", figure)


def claims(comparison: Comparison) -> list[Claim]:
    """State the paper's claims on sine waves."""
    paper = Claims("vonoswald2023", comparison.rows)
    distance, cosine = "prediction distance over rms target,", "sensitivity cosine,"
    initial = paper["rms of the initial functions over rms target"]
    drawn = DRAWS["one_key" if DRAWS["one_key"] in comparison.lead else "independent"]
    paper.add(
        "Fig. 4, centre", "loss, MLP and linear attention over MLP and a step of gradient descent",
        "loss, attention over gradient descent",
        why=f"half-MSE {paper['half-MSE, MLP and linear attention']} and "
        f"{paper['half-MSE, MLP and a step of gradient descent']}; Nadaraya-Watson smoothing "
        f"{paper['half-MSE, Nadaraya-Watson smoothing, tuned']}; {drawn}",
    )  # fmt: skip
    cause = "measure: the paper draws examples of one training; a distance over seeds has how far apart any two are"
    seeds = "two seeds of attention"
    paper.add(
        "Fig. 4, right", "distance of predictions over rms target", f"{distance} attention and gradient descent",
        check=every(near, 0), cause=cause, controls={seeds: [f"{distance} {seeds}"]},
        why=f"attention and smoothing {paper[f'{distance} attention and Nadaraya-Watson smoothing']}; {drawn}",
    )  # fmt: skip
    paper.add("Fig. 4, right", "cosine of sensitivities", f"{cosine} attention and gradient descent",
    check=every(near, 1),
              cause=cause, controls={seeds: [f"{cosine} {seeds}"]}, why=drawn)  # fmt: skip
    apart = "rms distance of the two initial functions over rms target"
    paper.add("Fig. 4, left", apart, apart, check=every(near, 0), cause=cause,
              controls={f"two seeds of {name}": [f"{apart}, two seeds of {name}"]
                        for name in ("attention", "gradient descent")},
              why=f"the functions themselves have {initial}; {drawn}")  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "oswald_sine", claims)
