"""The kernel view of one attention layer after an input MLP.

With keys "context", one layer, and a score for each key separately (no softmax), the context's tokens do not change
before they are attended to, so that the query's prediction is a sum over the context, exactly:

    prediction(x_q) = initial(x_q) + Σ_i score(x_q; x_i, y_i) · written(x_i, y_i)

`score` is the query's attention to the token of point i, and `written` the contribution of that token's value to the
read-out. In a `gradient_descent` layer the score is `m(x_i, y_i)·m(x_q)`, with m the stream's inputs, and `written` is
the target times the step size: the paper's kernel smoothing (A.8, eq. 13), with targets made by the MLP.

The MLP reads y too, so neither factor need be linear in y_i. The part of the layer that is linear in y_i around 0 is
`Σ_i k(x_q, x_i) y_i`, and a remainder is left:

    score · written = constant(x_q; x_i) + k(x_q, x_i) y_i + remainder
    k(x_q, x_i) = score(x_q; x_i, 0) ∂written(x_i, 0)/∂y_i + ∂score(x_q; x_i, 0)/∂y_i written(x_i, 0)

Source: von Oswald et al. 2023, Proposition 2 and A.8. All shapes have rows for points.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.autograd.functional import jvp

from mechicl.learners import Learner
from mechicl.models import HookedTransformer
from mechicl.models.transformer.attention import elementwise_attention
from mechicl.prompts import Prompts
from mechicl.viz import elements as draw


@dataclass(frozen=True, eq=False)
class KernelView:
    """The smoothing kernel of a one-layer model on a grid of inputs, and parts of its predictions for prompts."""

    grid: Float[Tensor, "point x"]
    # the derivative of the prediction at a point (row) with respect to y at the other, at y = 0
    kernel: Float[Tensor, "point other"]
    prediction: Float[Tensor, "prompt"]
    remainder: Float[Tensor, "prompt"]  # the part of a prediction that is not linear in the targets

    @property
    def effective_rank(self) -> float:
        """The rank `(Σ|λ|)² / Σ λ²` over eigenvalues of the symmetric part: k for k equal ones; NaN if all are 0."""
        size = torch.linalg.eigvalsh((self.kernel + self.kernel.mT) / 2).abs()
        return (size.sum().square() / size.square().sum()).item()

    @property
    def symmetry_error(self) -> float:
        """The asymmetry `|K - Kᵀ| / |K|`: 0 for a symmetric kernel, 2 for an antisymmetric one; NaN for 0."""
        return ((self.kernel - self.kernel.mT).norm() / self.kernel.norm()).item()


@torch.no_grad()
def adapted_functions(
    learner: Learner, prompts: Prompts, grid: Float[Tensor, "query x"]
) -> Float[Tensor, "query prompt y"]:
    """Predict a grid of queries from each prompt's context (von Oswald et al. 2023, Fig. 4, the adjusted functions)."""
    return torch.stack([learner.predict(prompts.with_query(x.expand(len(prompts), -1))) for x in grid])


@torch.no_grad()
def initial_function(model: HookedTransformer, xs: Float[Tensor, "point x"]) -> Float[Tensor, "point y"]:
    """Compute predictions without any context: the read-out of the embedded query (von Oswald et al. 2023, Fig. 4)."""
    return model.read_out(streams(model, xs[None]))[0]


@torch.no_grad()
def view_kernel(model: HookedTransformer, grid: Float[Tensor, "point x"], prompts: Prompts) -> KernelView:
    """Measure the smoothing kernel of a one-layer model on a grid, and the remainder of its predictions for prompts.

    Args:
        model: one layer without softmax and an optional input MLP, on paired prompts with one target.
        grid: inputs, each taken as a query and as a context point.
        prompts: the kernel is that of prompts with as many context points, on which the scale of attention may depend.
    """
    cfg = model.cfg
    kind = cfg.prompt_format, cfg.n_layers, cfg.keys, cfg.y_dim
    if kind != ("paired", 1, "context", 1) or cfg.attention == "softmax":
        raise ValueError(f"model must have one layer without softmax, paired prompts and one target, got {cfg}")

    # a contribution depends on one key's y, so that the derivative along all targets at once has all slopes
    def on_grid(ys: Tensor) -> Tensor:
        return contributions(model, grid[None], grid[None], ys[None], prompts.n_context)[0, ..., 0]

    def total_at(ys: Tensor) -> Tensor:
        xs = prompts.context.xs
        return contributions(model, prompts.query.xs[:, None], xs, ys, prompts.n_context).sum((1, 2, 3))

    zeros, ys = torch.zeros_like(grid[:, :1]), prompts.context.ys
    with torch.enable_grad():
        _, kernel = jvp(on_grid, zeros, torch.ones_like(zeros))
        # along ys at 0 the value is the sum of contributions without targets, the derivative is Σ_i k(x_q, x_i) y_i
        constant, linear = jvp(total_at, torch.zeros_like(ys), ys)
    remainder: Any = total_at(ys) - constant - linear  # type: ignore[operator]
    return KernelView(grid, kernel, model.predict(prompts)[:, 0], remainder)  # type: ignore[arg-type]


def streams(
    model: HookedTransformer, xs: Float[Tensor, "batch point x"], ys: Float[Tensor, "batch point y"] | None = None
) -> Float[Tensor, "batch point d_model"]:
    """Embed points, with read-in and MLP; queries if there are no targets."""
    return model.embed_tokens(torch.cat([xs, -xs @ model.initial_weights if ys is None else ys], dim=2))


def contributions(
    model: HookedTransformer, queries: Float[Tensor, "batch row x"], xs: Float[Tensor, "batch point x"],
    ys: Float[Tensor, "batch point y"], n_context: int,
) -> Float[Tensor, "batch row point y"]:  # fmt: skip
    """Compute `score · written` of each context point for each query: predictions are their sum and `initial`."""
    cfg, keys = model.cfg, streams(model, xs, ys)[:, None]
    scores = cfg.score_scale * (streams(model, queries)[:, None] @ model.W_Q[0] @ model.W_K[0].mT @ keys.mT)
    pattern = elementwise_attention(cfg, scores) / (n_context if cfg.normalize_by_context else 1)
    written = cfg.damping * (keys @ model.W_V[0] @ model.W_O[0] @ model.W_U)
    return einsum(pattern, written, "batch head row point, batch head point y -> batch row point y")


def kernel_heatmaps(views: Mapping[str, KernelView]) -> go.Figure:
    """Draw kernels of models on one grid side by side, in one scale, each with symmetry error and effective rank."""
    values = next(iter(views.values())).grid[:, 0].tolist()
    titles = [
        f"{draw.literal(name)}<br><span style='font-size:11px'>|K − Kᵀ| / |K| = {view.symmetry_error:.2f}, "
        f"effective rank {view.effective_rank:.1f}</span>"
        for name, view in views.items()
    ]
    title = "Gain by a unit of y at a context point"
    fig = draw.panels(title, [*map(draw.Markup, titles)], shared_yaxes=True, horizontal_spacing=0.03)
    kernels = [view.kernel for view in views.values()]
    bound = max(float(kernel.abs().max()) for kernel in kernels)
    hover = "query %{y:.2f}, context point %{x:.2f}: %{z:.4f}"
    for i, kernel in enumerate(kernels):
        place = draw.panel(i, len(kernels))
        draw.add_heatmap(fig, kernel, values, values, hover, coloraxis="coloraxis", place=place)
    fig.update_xaxes(title_text="x of the context point", constrain="domain", matches="x")
    fig.update_yaxes(constrain="domain", scaleanchor="x", row=1, col=1).update_yaxes(title_text="x of the query", col=1)
    bar = {"thickness": 12, "len": 0.9, "tickvals": draw.bar_ticks(bound), "tickformat": ".2~g"}
    return fig.update_layout(
        height=420, width=170 + 290 * len(views), margin={"t": 100, "r": 90},
        coloraxis={"colorscale": draw.SIGNED, "cmin": -bound, "cmax": bound, "colorbar": bar},
    )  # fmt: skip
