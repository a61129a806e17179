"""The kernel view of one-layer models, and the functions that learners fit to a context."""

from collections.abc import Mapping
from typing import Any, Literal

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.weights.kernels import KernelView
from mechicl.prompts import Prompts
from mechicl.viz.elements import BELOW, COLORS, SIGNED, add_heatmap, add_line, bar_ticks, colors_for, panel, panels


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
    fig = panels(title, titles, shared_yaxes=True, horizontal_spacing=0.03)
    values, bound = grids[0][:, 0].tolist(), max(float(getattr(view, part).abs().max()) for view in views.values())
    hover = "query %{y:.2f}, context point %{x:.2f}: %{z:.4f}"
    for column, view in enumerate(views.values()):
        add_heatmap(fig, getattr(view, part), values, values, hover, coloraxis="coloraxis",
                    place=panel(column, len(views)))  # fmt: skip
    fig.update_xaxes(title_text="x of the context point", constrain="domain", matches="x")
    fig.update_yaxes(constrain="domain", scaleanchor="x", row=1, col=1)
    fig.update_yaxes(title_text="x of the query", col=1)
    fig.update_layout(
        height=420,
        width=170 + 290 * len(views),
        margin={"t": 100, "r": 90},
        coloraxis={
            "colorscale": SIGNED,
            "cmin": -bound,
            "cmax": bound,
            "colorbar": {"thickness": 12, "len": 0.9, "tickvals": bar_ticks(bound), "tickformat": ".2~g"},
        },
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
        functions: by learner, predictions from each prompt's context (`analysis.weights.adapted_functions`).
        initial: by learner, predictions before attention (`analysis.weights.initial_function`), dashed, in the
            learner's colour where it is one of `functions`.
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
    fig = panels(
        title, [f"prompt {i + 1}" for i in range(len(prompts))], columns=n_columns, shared_xaxes=True,
        shared_yaxes="all", horizontal_spacing=0.03, vertical_spacing=0.25 / n_rows**1.5 if n_rows > 1 else 0,
    )  # fmt: skip
    names = [*functions, *(name for name in initial if name not in functions)]
    colors = dict(zip(names, colors_for(names), strict=True))
    inputs = grid[:, 0].tolist()
    for i in range(len(prompts)):
        place = panel(i, n_columns)
        lines: list[tuple[str, Tensor, str, dict[str, Any]]] = []
        if truth is not None:
            lines.append(("true function", truth[i], "#bbbbbb", {"width": 6}))
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
    after = {**functions, **({} if truth is None else {"the true function": truth})}
    before = {f"{name}, before": values for name, values in initial.items()}
    expected = dict.fromkeys(after, (len(prompts), len(grid), 1)) | dict.fromkeys(before, (len(grid), 1))
    shapes = {name: tuple(values.shape) for name, values in (after | before).items()}
    if shapes != expected:
        raise ValueError(f"functions must have the shapes {expected}, got {shapes}")
