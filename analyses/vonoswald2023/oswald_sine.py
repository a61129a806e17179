"""Sine waves: an MLP and linear attention against the same MLP with a step of gradient descent (von Oswald et al. 2023,
section 3, Fig. 4, A.7 and A.8)."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.kernels import adapted_functions, initial_function, kernel_heatmaps, view_kernel
from analyses.support.resamples import crossed_median_interval, over_resamples, resampled_means
from analyses.support.script import Option, script
from analyses.support.seeds import by_seed, in_float64, query_errors
from mechicl import algorithms, viz
from mechicl.algorithms.kernel_smoothing import log_kernel
from mechicl.algorithms.tuning import minimize_on_grid
from mechicl.analysis import align
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import AlgorithmLearner, Learner, squared_errors
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.rows import over_seeds_and_prompts, seeds_and_prompts
from mechicl.statistics import Interval, interval, median_interval
from mechicl.tasks import SineRegression
from mechicl.viz.elements import BELOW, COLORS, add_line, colors_for, panels
from mechicl.viz.elements import panel as place_of

DRAWS = {
    "independent": "amplitude and phase independent, as in the text (the authors' code draws both with one key)",
    "one_key": "amplitude and phase drawn with one key, as in the authors' code",
}


ARMS = "attention and gradient descent"
OVER_SEEDS = "distance over the mean distance of the seed's models from the other seeds' of their kind"


@script(
    transformer=Option("sine-lsa", "name or folder of the models with learned attention"),
    descent=Option("sine-gd", "the same with a step of gradient descent in its place, from the same seeds"),
    n_prompts=10_000,
    n_drawn=Option(6, "held-out prompts that are drawn"),
    seed=1_000_003,
)
def compare(args: Any) -> Comparison:
    """Hold each seed's two models against each other."""
    transformer, descent = load_checkpoint(args.transformer), load_checkpoint(args.descent)
    task = transformer.task
    if not isinstance(task, SineRegression):
        raise ValueError(f"{transformer.name} was trained on {type(task).__name__}, not on sine waves")
    if transformer.record["seeds"] != descent.record["seeds"]:
        raise ValueError(f"{transformer.name} and {descent.name} must have the same seeds")
    held_out = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    learned, constructed = (in_float64(checkpoint.models) for checkpoint in (transformer, descent))
    bandwidth = _tuned_bandwidth(task.sample(5000, seed=args.seed + 1, dtype=torch.float64))
    smoothing = AlgorithmLearner(algorithms.kernel_smoothing, {"bandwidth": bandwidth})
    errors = {name: query_errors(models, held_out) for name, models in (("lsa", learned), ("gd", constructed))}
    mse = {name: values.mean(1) for name, values in errors.items()}
    listed = {name: by_seed(values / 2, ".5f") for name, values in mse.items()}
    losses = {name: resampled_means(values) for name, values in errors.items()}
    rows = [
        Row("half-MSE, predicting 0", None, interval(held_out.query.ys[:, 0].square() / 2), "prompts"),
        Row("half-MSE, Nadaraya-Watson smoothing, tuned", None, interval(squared_errors(smoothing, held_out)[:, 0] / 2),
            "prompts", f"Gaussian kernel, bandwidth {bandwidth:.3g}"),
        Row("half-MSE, MLP and linear attention", None, *over_seeds_and_prompts(errors["lsa"] / 2, transformer)[:2],
            listed["lsa"]),
        Row("half-MSE, MLP and a step of gradient descent", None,
            *over_seeds_and_prompts(errors["gd"] / 2, descent)[:2], listed["gd"]),
        Row("loss, attention over gradient descent", 1,
            *over_resamples(losses["lsa"] / losses["gd"], transformer, args.n_prompts, "median, paired by seed")),
        Row("loss, attention over gradient descent, each without the 1% of prompts that it is worst on", None,
            *over_seeds_and_prompts(errors["lsa"], transformer, errors["gd"], trim=0.01)),
        *(Row(f"loss at the end over that after three quarters of the training, {name}", None,
              median_interval(_last_quarter(checkpoint)), "seeds")
          for name, checkpoint in (("attention", transformer), ("gradient descent", descent))),
        Row("largest relative difference of the initial embedding and MLP of a seed's two models", None,
            _initial_difference(transformer, descent), "seeds", "both arms start from the same ones"),
    ]  # fmt: skip
    rows += _alignment_rows(learned, constructed, smoothing, held_out)
    grid = torch.linspace(*task.x_range, 101, dtype=torch.float64)[:, None]
    kinds = {"attention": learned, "gradient descent": constructed}
    rows += _initial_rows(kinds, grid, held_out)
    views = {}
    for name, models in kinds.items():
        kernels = [view_kernel(model, grid[::2], held_out[:1000]) for model in models]
        views[name] = kernels[0]
        nonlinear = torch.stack([_relative(view.remainder, view.prediction) for view in kernels], 1)
        rows += [
            Row(f"kernel of {name}: effective rank", None, interval(torch.tensor([v.effective_rank for v in kernels])),
                "seeds", "on a grid of inputs"),
            Row(f"kernel of {name}: |K - Kᵀ| / |K|", None, interval(torch.tensor([v.symmetry_error for v in kernels])),
                "seeds", "on a grid of inputs"),
            Row(f"kernel of {name}: share of predictions not linear in the targets (rms)", None,
                *over_resamples(nonlinear, transformer, 1000)),
        ]  # fmt: skip
    curves = {"attention": transformer.record["curve"], "gradient descent": descent.record["curve"]}
    eval_losses = {name: curve["eval_loss"] for name, curve in curves.items()}
    steps = curves["attention"]["eval_step"]
    losses_drawn = viz.losses_over_training(steps, eval_losses, log_x=True, log_y=True, half=True)
    figures = [
        _functions({name: models[0] for name, models in kinds.items()}, smoothing, held_out[: args.n_drawn], grid),
        Section("Loss during training", "Half the held-out mean squared error of each seed.", losses_drawn),
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
    return Comparison("Sine waves (Fig. 4, A.7, A.8)", lead, rows, figures)


def _last_quarter(checkpoint: Checkpoint) -> Float[Tensor, "seed"]:
    """The held-out loss at the end over that after three quarters of the steps."""
    losses = torch.tensor(checkpoint.record["curve"]["eval_loss"], dtype=torch.float64)
    return losses[-1] / losses[3 * len(losses) // 4]


def _initial_difference(first: Checkpoint, second: Checkpoint) -> float:
    """Largest relative difference of the two arms' weights outside attention, before training, over seeds."""
    apart = []
    for seed in first.record["seeds"]:
        one, two = (HookedTransformer(each.models[0].cfg, seed=seed).state_dict() for each in (first, second))
        names = [name for name in one if name.startswith(("embed.", "input_mlp."))]
        apart += [((one[name] - two[name]).norm() / one[name].norm().clamp_min(1e-30)).item() for name in names]
    return max(apart)


def _relative(part: Float[Tensor, "prompt"], whole: Float[Tensor, "prompt"]) -> Float[Tensor, "resample"]:
    """Root mean square of one over that of the other, on the prompts and on resamples of them."""
    squares = resampled_means(torch.stack([part.flatten().square(), whole.flatten().square()]))
    return (squares[:, 0] / squares[:, 1]).sqrt()


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()


def _alignment_rows(
    learned: list[HookedTransformer], constructed: list[HookedTransformer], smoothing: Learner, held_out: Prompts
) -> list[Row]:
    """Compare the two models of each seed; controls are two seeds of one kind, and smoothing."""
    seeds = range(len(learned))
    pairs = list(itertools.combinations(seeds, 2))
    alone, others = [(i,) for i in seeds], list(itertools.permutations(seeds, 2))
    compared: dict[str, tuple[list[tuple[int, ...]], list[tuple[Learner, Learner]]]] = {
        ARMS: (alone, list(zip(learned, constructed, strict=True))),
        "two seeds of attention": (pairs, list(itertools.combinations(learned, 2))),
        f"{ARMS} of other seeds": (others, [(learned[i], constructed[j]) for i, j in others]),
        "two seeds of gradient descent": (pairs, list(itertools.combinations(constructed, 2))),
        "attention and Nadaraya-Watson smoothing": (alone, [(model, smoothing) for model in learned]),
    }
    n, rows, distances = len(held_out), [], {}
    for name, (items, each) in compared.items():
        alignments = [align(a, b, held_out) for a, b in each]
        distances[name] = torch.stack([_relative(a.prediction_distance, held_out.query.ys) for a in alignments], 1)
        cosines = torch.stack([alignment.sensitivity_cosine for alignment in alignments])
        finite = cosines.isfinite().all(0)
        over = f"{'' if items is alone else f'pairs of {len(learned)} '}seeds and {n:,} prompts"
        quantities = {"prediction distance over rms target": distances[name],
                      "sensitivity cosine": resampled_means(cosines[:, finite])}  # fmt: skip
        for (quantity, values), published in zip(quantities.items(), ("small", "near 1"), strict=True):
            median, mean = crossed_median_interval(values, n, items)
            rows.append(Row(f"{quantity}, {name}", published if name == ARMS else None, median, over, f"mean {mean}"))
    between = torch.cat([distances[f"two seeds of {name}"] for name in ("attention", "gradient descent")], 1)
    for name in (ARMS, "attention and Nadaraya-Watson smoothing"):
        mine = torch.stack([between[:, [i in pair for pair in pairs * 2]].mean(1) for i in seeds], 1)
        ratios = distances[name] / mine
        median, mean = crossed_median_interval(ratios, n)
        note = f"of predictions; {by_seed(ratios[0])}; mean {mean}"
        over = seeds_and_prompts(len(seeds), n)
        rows.append(Row(f"{OVER_SEEDS}, {name}", "1" if name == ARMS else None, median, over, note))
    return rows


def _initial_rows(kinds: Mapping[str, list[HookedTransformer]], grid: torch.Tensor, held_out: Prompts) -> list[Row]:
    functions = {name: [initial_function(model, grid) for model in models] for name, models in kinds.items()}
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
    models: Mapping[str, HookedTransformer], smoothing: Learner, prompts: Prompts, grid: Float[Tensor, "query 1"]
) -> Section:
    """Functions that learners have made of some contexts, a panel for each prompt (Fig. 4, left)."""
    learners: dict[str, Learner] = {**models, "Nadaraya-Watson": smoothing}
    functions = {name: adapted_functions(learner, prompts, grid) for name, learner in learners.items()}
    initial = {name: initial_function(model, grid) for name, model in models.items()}
    truth, n_columns = _waves(prompts, grid), min(3, len(prompts))
    n_rows = -(-len(prompts) // n_columns)
    fig = panels(
        "Functions before and after the context", [f"prompt {i + 1}" for i in range(len(prompts))],
        columns=n_columns, shared_xaxes=True,
        shared_yaxes="all", horizontal_spacing=0.03, vertical_spacing=0.25 / n_rows**1.5 if n_rows > 1 else 0,
    )  # fmt: skip
    colors = dict(zip(functions, colors_for(list(functions)), strict=True))
    inputs = grid[:, 0].tolist()
    for i in range(len(prompts)):
        place = place_of(i, n_columns)
        dashed = {"dash": "dash", "width": 1.5}
        lines: list[tuple[str, Tensor, str, dict[str, Any]]] = [("true function", truth[i], "#bbbbbb", {"width": 6})]
        lines += [(f"{name}, before", values, colors[name], dashed) for name, values in initial.items()]
        lines += [(name, values[:, i], colors[name], {}) for name, values in functions.items()]
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
    return Section("Initial and adapted functions", "First seed; dashed: before the context is read.", fig)


def _waves(prompts: Prompts, grid: torch.Tensor) -> torch.Tensor:
    """The wave of each prompt on the grid: `a sin(x + phase) = s sin x + c cos x`, solved from its points."""

    def basis(xs: torch.Tensor) -> torch.Tensor:
        return torch.cat([xs.sin(), xs.cos()], dim=-1)

    return basis(grid) @ torch.linalg.lstsq(basis(prompts.xs), prompts.ys).solution


def _tuned_bandwidth(prompts: Prompts) -> float:
    """Return the bandwidth of kernel smoothing with the least mean squared error of the query's prediction.

    A geometric grid is searched, from 1/1000 to 100 times the largest spread of distances on a context.
    """
    logs = log_kernel(prompts.xs[:, -1:], prompts.xs[:, :-1])
    unit = (logs.amax(-1, keepdim=True) - logs).max().item() ** 0.5

    def error(bandwidth: float) -> float:
        predictions = algorithms.kernel_smoothing(prompts, bandwidth, at="query").query()[0]
        return (predictions - prompts.query.ys).square().mean().item()

    return minimize_on_grid(error, [unit * 1e5 ** (i / 100) / 1000 for i in range(101)])[0]


if __name__ == "__main__":
    compare.run()
