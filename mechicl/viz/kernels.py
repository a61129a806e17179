"""The kernel view of one-layer models, and the functions that learners fit to a context."""

from collections.abc import Mapping
from typing import Any, Literal

import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots
from torch import Tensor

from mechicl.analysis.weights.kernels import KernelView
from mechicl.prompts import Points, Prompts
from mechicl.viz.style import COLORS, add_line, figure

LINES = tuple(COLORS[kind] for kind in ("trained", "interpolated", "closed form", "GD++", "other"))


def kernel_heatmaps(
    views: Mapping[str, KernelView],
    *,
    part: Literal["kernel", "through_values"] = "kernel",
    title: str = "Gain by a unit of y at a context point",
) -> go.Figure:
    """Kernels of models side by side, in one scale, each with its symmetry error and effective rank.

    Args:
        views: by name, on the same grid of one-dimensional inputs.
        part: the whole kernel, or the part of it through values; symmetry and rank are always the whole kernel's.
        title: of the figure.

    Raises:
        ValueError: no views, grids that differ, inputs of more than one dimension, or an unknown part.
    """
    if part not in ("kernel", "through_values"):
        raise ValueError(f"part={part!r} is not one of ('kernel', 'through_values')")
    grids = [view.grid for view in views.values()]
    if not grids or any(grid.shape[1] != 1 or not grid.equal(grids[0]) for grid in grids):
        raise ValueError(f"needs views on one grid [point 1], got grids {[tuple(grid.shape) for grid in grids]}")
    titles = [
        f"{name}<br><span style='font-size:11px'>|K − Kᵀ| / |K| = {view.symmetry_error:.2f}, "
        f"effective rank {view.effective_rank:.1f}</span>"
        for name, view in views.items()
    ]
    fig = make_subplots(rows=1, cols=len(views), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.03)
    fig.update_layout(figure(title, "", "").layout)
    values, bound = grids[0][:, 0].tolist(), max(float(getattr(view, part).abs().max()) for view in views.values())
    for column, view in enumerate(views.values(), start=1):
        heat = go.Heatmap(
            z=getattr(view, part).tolist(), x=values, y=values, coloraxis="coloraxis",
            hovertemplate="query %{y:.2f}, context point %{x:.2f}: %{z:.4f}<extra></extra>",
        )  # fmt: skip
        fig.add_trace(heat, 1, column)
    fig.update_xaxes(title_text="x of the context point", constrain="domain", matches="x")
    fig.update_yaxes(constrain="domain", scaleanchor="x", row=1, col=1)
    fig.update_yaxes(title_text="x of the query", col=1)
    fig.update_annotations(font_size=13)
    fig.update_layout(
        height=420,
        width=170 + 290 * len(views),
        margin={"t": 100, "r": 90},
        coloraxis={"colorscale": "RdBu_r", "cmin": -bound, "cmax": bound, "colorbar": {"thickness": 12, "len": 0.9}},
    )
    return fig


def adapted_functions_figure(
    prompts: Prompts,
    grid: Float[Tensor, "query 1"],
    functions: Mapping[str, Float[Tensor, "prompt query 1"]],
    *,
    initial: Mapping[str, Float[Tensor, "query 1"]] | None = None,
    truth: Float[Tensor, "prompt query 1"] | None = None,
    columns: int = 3,
    title: str = "Functions before and after the context",
) -> go.Figure:
    """What learners have made of some contexts: a panel a prompt (von Oswald et al. 2023, Fig. 4, left).

    Args:
        prompts: with inputs and targets of one dimension.
        grid: the queries, ascending.
        functions: by learner, predictions from each prompt's context (`analysis.adapted_functions`).
        initial: by learner, predictions before attention (`analysis.initial_function`), dashed, in the learner's
            colour where it is one of `functions`.
        truth: the targets' function on the grid for each prompt.
        columns: panels in a row.
        title: of the figure.

    Raises:
        ValueError: no prompts, columns < 1, inputs or targets of more than one dimension, or functions of another
            shape than the prompts and the grid.
    """
    initial = initial or {}
    _check_functions(prompts, grid, functions, initial, truth, columns)
    n_columns = min(columns, len(prompts))
    n_rows = -(-len(prompts) // n_columns)
    fig = make_subplots(
        rows=n_rows, cols=n_columns, shared_xaxes=True, horizontal_spacing=0.03,
        shared_yaxes="all",  # type: ignore[arg-type]
        vertical_spacing=0.25 / n_rows**1.5 if n_rows > 1 else 0,
        subplot_titles=[f"prompt {i + 1}" for i in range(len(prompts))],
    )  # fmt: skip
    names = [*functions, *(name for name in initial if name not in functions)]
    colors = {name: LINES[i % len(LINES)] for i, name in enumerate(names)}
    inputs = grid[:, 0].tolist()
    for i in range(len(prompts)):
        lines: dict[str, tuple[Tensor, dict[str, Any]]] = {}
        if truth is not None:
            lines["true function"] = truth[i], {"color": "#bbbbbb", "width": 6}
        for name, values in initial.items():
            lines[f"{name}, before"] = values, {"color": colors[name], "dash": "dash", "width": 1.5}
        for name, values in functions.items():
            lines[name] = values[i], {"color": colors[name]}
        own = Points(prompts.xs[i, :-1], prompts.ys[i, :-1])
        panel = _panel(own, inputs, lines, shown=i == 0)
        for trace in panel.data:
            fig.add_trace(trace, i // n_columns + 1, i % n_columns + 1)
    fig.update_layout(figure(title, "", "").layout)
    fig.update_annotations(font_size=13)
    fig.update_layout(
        height=130 + 240 * n_rows, margin={"t": 90, "b": 60},
        legend={"orientation": "h", "x": 0, "y": -75 / (240 * n_rows), "yanchor": "top"},
    )  # fmt: skip
    fig.update_xaxes(title_text="")
    fig.update_yaxes(title_text="")
    for i in range(n_columns):
        last_row = (len(prompts) - 1 - i) // n_columns + 1  # the lowest panel of the column
        fig.update_xaxes(title_text="x", showticklabels=True, row=last_row, col=i + 1)
    fig.update_yaxes(title_text="y", showticklabels=True, col=1)
    for i in range(1, n_columns):
        fig.update_yaxes(showticklabels=False, col=i + 1)
    return fig


def _panel(
    context: Points, inputs: list[float], lines: Mapping[str, tuple[Tensor, dict[str, Any]]], shown: bool
) -> go.Figure:
    """One prompt's points and functions; `shown` in the legend."""
    panel = go.Figure()
    for name, (values, look) in lines.items():
        add_line(panel, inputs, values[:, 0].tolist(), name, legendgroup=name, showlegend=shown, **look)
    marker = {"color": COLORS["gradient descent"], "size": 7, "line": {"color": "white", "width": 1}}
    xs, ys = (values[:, 0].tolist() for values in context)
    panel.add_trace(
        go.Scatter(
            x=xs, y=ys, mode="markers", name="context", marker=marker, legendgroup="context", showlegend=shown
        )
    )  # fmt: skip
    return panel


def _check_functions(
    prompts: Prompts,
    grid: Tensor,
    functions: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
    truth: Tensor | None,
    columns: int,
) -> None:
    if len(prompts) == 0 or columns < 1 or (prompts.x_dim, prompts.y_dim) != (1, 1):
        raise ValueError(f"needs prompts with x_dim=1, y_dim=1 and columns >= 1, got {prompts}, {columns}")
    of_prompts = {**functions, **({} if truth is None else {"the true function": truth})}
    expected = dict.fromkeys(of_prompts, (len(prompts), len(grid), 1)) | {
        f"{name}, before": (len(grid), 1) for name in initial
    }
    found = {name: tuple(values.shape) for name, values in of_prompts.items()}
    found |= {f"{name}, before": tuple(values.shape) for name, values in initial.items()}
    if found != expected:
        raise ValueError(f"functions must have the shapes {expected}, got {found}")
