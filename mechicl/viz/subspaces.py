"""The picture of learned subspaces: held-out R² by number of dimensions, beside the controls."""

import plotly.graph_objects as go

from mechicl.analysis.causes.subspaces import SubspaceSearch
from mechicl.viz.elements import BELOW, COLORS, add_intervals, colors_for, panel, panels


def subspace_curves(result: SubspaceSearch, title: str | None = None) -> go.Figure:
    """Held-out R² of learned subspaces (solid) and of their rests (dotted) by number of dimensions, a panel a layer;
    in the model and in the controls, with 95% intervals. What lies below -0.5 is not shown.

    Args:
        result: of `fit_subspace`.
        title: by default the variable and the hypothesis.
    """
    names = [f"after {layer} layer{'' if layer == 1 else 's'}" for layer in result.layers]
    title = title or f"{result.place}'s {', '.join(result.variables)}: {result.hypothesis}"
    columns = min(3, len(names))
    fig = panels(title, names, columns=columns)
    colors = [COLORS["trained"], *colors_for([*result.searches[1:]])]
    for s, search in enumerate(result.searches):
        for i in range(len(result.layers)):
            for curve, dash, suffix in zip(result.curves(s, i), ("solid", "dot"), ("", ", its rest"), strict=True):
                add_intervals(
                    fig, [str(dim) for dim in result.dims], curve, search + suffix, colors[s], dash=dash,
                    place=panel(i, columns), showlegend=not i, legendgroup=search + suffix,
                )  # fmt: skip
    fig.update_xaxes(title_text="dimensions", type="category")
    fig.update_yaxes(range=[-0.5, 1.05])
    fig.update_yaxes(title_text="held-out R²", col=1)
    fig.update_layout(legend=BELOW, height=130 + 330 * (-(-len(names) // columns)))
    return fig
