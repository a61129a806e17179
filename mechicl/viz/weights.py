"""Figures of weights: their products, and losses on paths between models."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from mechicl.analysis.weights.paths import LossPath
from mechicl.analysis.weights.products import WeightProducts
from mechicl.base.arguments import checked
from mechicl.statistics import UNBOUNDED, interval
from mechicl.viz import elements as draw

BANDS = 3  # paths up to which overlapping bands can be distinguished


@checked
def connectivity_paths(paths: Mapping[str, LossPath | Sequence[LossPath]]) -> go.Figure:
    """Draw the mean squared error of the models on paths between two models, on a logarithmic axis.

    A bump between the ends is a barrier; a flat line means that both models are in one low-loss region.

    Args:
        paths: results of `interpolate`, or the `paths` of `connect_modes`, all with the same alphas; the keys are the
            labels in the legend. A value is one path, or a list with one per seed. With up to three keys, single paths
            have bands of 95% intervals over prompts. In keys with a comma, such as "tuned member, rescaled", the part
            before it selects the colour and the part after it the dash.
    """
    by_name = {name: [path] if isinstance(path, LossPath) else list(path) for name, path in paths.items()}
    alphas = [list(path.alphas) for seeds in by_name.values() for path in seeds]
    if not alphas or any(each != alphas[0] for each in alphas):
        raise ValueError(f"paths must have the same alphas, got {alphas}")
    title, x_title = "Loss along paths between two models", "α (0: the first model, 1: the second)"
    fig = draw.figure(title, x_title, "mean squared error", log_y=True)
    parts = {name: name.rpartition(", ") for name in by_name}
    ends = list(dict.fromkeys(end or kind for end, _, kind in parts.values()))
    kinds = list(dict.fromkeys(kind if end else "" for end, _, kind in parts.values()))
    colors = dict(zip(ends, draw.colors_for(ends), strict=True))
    for name, seeds in by_name.items():
        end, _, kind = parts[name]
        color, dash = colors[end or kind], draw.DASHES[kinds.index(kind if end else "") % len(draw.DASHES)]
        for i, path in enumerate(seeds):
            intervals = [
                interval(errors if len(seeds) == 1 else errors.mean(), within=UNBOUNDED)
                for errors in path.squared_errors
            ]
            look = {"showlegend": i == 0, "legendgroup": name, "opacity": 1 if len(seeds) == 1 else 0.7, "dash": dash}
            if len(by_name) <= BANDS:
                draw.add_intervals(fig, alphas[0], intervals, name, color, log_y=True, **look)
            else:
                draw.add_line(fig, alphas[0], [mean.mean for mean in intervals], name, color, **look)
    return draw.tick_log_axes(fig)


@checked
def weight_products_figure(trained: WeightProducts, construction: WeightProducts, names: Sequence[str]) -> go.Figure:
    """Draw the products W_KQ and W_PV of a trained linear attention head next to those of a construction.

    W_KQ = W_Q W_Kᵀ (with the score scale) and W_PV = W_V W_O, both `[d_model d_model]`, of layer 0 and head 0. Source:
    von Oswald et al. 2023, Fig. 9.

    Args:
        trained: the trained model's `read_weight_products(model).gauge_fixed()`, in which the mean diagonal of the
            x-block of W_KQ is 1.
        construction: products of the construction to compare with, in the same gauge.
        names: names of the residual stream's dimensions, for the axes.
    """
    products = {
        "W<sub>KQ</sub> / β, trained": trained.W_KQ[0, 0],
        "W<sub>KQ</sub>, construction": construction.W_KQ[0, 0],
        "β W<sub>PV</sub>, trained": trained.W_PV[0, 0],
        "W<sub>PV</sub>, construction": construction.W_PV[0, 0],
    }
    fig, matrices = draw.panels("", [*map(draw.Markup, products)], horizontal_spacing=0.06), list(products.values())
    for i, matrix in enumerate(matrices):
        bound = max(float(each.abs().max()) for each in matrices[i // 2 * 2 :][:2])  # two share a scale
        draw.add_heatmap(
            fig, matrix, names, names, "from %{y} to %{x}: %{z:.4f}", place=draw.panel(i, 4),
            showscale=i % 2 == 1, **draw.signed_scale(bound),
            colorbar={"x": 0.478 if i < 3 else 1.0, "thickness": 8, "tickfont": {"size": 9}, "tickformat": ".2~g",
                      "tickvals": draw.bar_ticks(bound)},
        )  # fmt: skip
    fig.update_yaxes(autorange="reversed", showticklabels=False)
    fig.update_yaxes(showticklabels=True, title_text="read from", col=1)
    fig.update_xaxes(tickangle=-60, title_text="written to")
    return fig.update_layout(height=370, font_size=11, margin={"l": 40, "r": 60})
