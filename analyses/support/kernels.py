"""The kernel view of one attention layer after an input MLP.

With keys "context", one layer, and a score for each key separately (no softmax), the context's tokens do not change
before they are attended to, so that the query's prediction is a sum over the context, exactly:

    prediction(x_q) = initial(x_q) + Σ_i score(x_q; x_i, y_i) · written(x_i, y_i)

`score` is the query's attention to the token of point i, and `written` the contribution of that token's value to the
read-out. In a `gradient_descent` layer the score is `m(x_i, y_i)·m(x_q)`, with m the stream's inputs, and `written` is
the target times the step size: the paper's kernel smoothing (A.8, eq. 13), with targets made by the MLP.

The MLP reads y too, so neither factor need be linear in y_i. The part of the layer that is linear in y_i around 0 is
`Σ_i k(x_q, x_i) y_i`, and `decompose` measures the remainder on a prompt:

    score · written = constant(x_q; x_i) + k(x_q, x_i) y_i + remainder
    k(x_q, x_i) = score(x_q; x_i, 0) ∂written(x_i, 0)/∂y_i + ∂score(x_q; x_i, 0)/∂y_i written(x_i, 0)

Source: von Oswald et al. 2023, Proposition 2 and A.8. All shapes have rows for points.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.autograd.functional import jvp

from mechicl.base.arguments import checked
from mechicl.learners import Learner, prompt_batches
from mechicl.learners.learners import predictions_at
from mechicl.models import HookedTransformer, PromptedModel
from mechicl.models.transformer.attention import elementwise_attention
from mechicl.models.transformer.config_rules import check_attends
from mechicl.prompts import Prompts
from mechicl.statistics import Result
from mechicl.viz import elements as draw


@dataclass(frozen=True, eq=False)
class PredictionParts(Result):
    """The terms of a one-layer model's predictions for the query, in units of y.

    Attributes:
        prediction: prediction by the model's own forward pass.
        initial: prediction before attention (`initial_function`).
        constant: the sum of the context tokens' contributions if their targets were 0.
        linear: `Σ_i k(x_q, x_i) y_i`, kernel smoothing without a normaliser.
        remainder: the part of the contributions that is not linear in the targets.
        error: `prediction` minus the other terms: rounding.
    """

    prediction: Float[Tensor, "prompt"]
    initial: Float[Tensor, "prompt"]
    constant: Float[Tensor, "prompt"]
    linear: Float[Tensor, "prompt"]
    remainder: Float[Tensor, "prompt"]
    error: Float[Tensor, "prompt"]


@dataclass(frozen=True, eq=False)
class KernelView(Result):
    """The smoothing kernel of a one-layer model, on a grid of inputs; float64 on the CPU. Samples are prompts.

    Attributes:
        initial: the prediction at each point before attention `[point]`.
        kernel: `[point other]`, the derivative of the prediction at a point with respect to y at the other, at y = 0.
        through_values: `[point other]`, the kernel's part from the other's value: the score times the slope of
            `written`. The rest comes from scores that change with y.
        scores: `[point other]`, attention of a query to the token of a context point with y = 0. In a
            `gradient_descent` layer it is proportional to `m(x)·m(x')`; in others its scale is arbitrary, since values
            may be scaled inversely.
        parts: the terms of predictions for prompts.
    """

    grid: Float[Tensor, "point x"]
    initial: Float[Tensor, "point"]
    kernel: Float[Tensor, "point other"]
    through_values: Float[Tensor, "point other"]
    scores: Float[Tensor, "point other"]
    parts: PredictionParts

    def samples(self) -> dict[str, Float[Tensor, "prompt"]]:
        """Return the parts of each prompt's prediction."""
        return self.parts.samples()

    @property
    def eigenvalues(self) -> Float[Tensor, "point"]:
        """Eigenvalues of the kernel's symmetric part, the largest absolute value first."""
        eigenvalues = torch.linalg.eigvalsh((self.kernel + self.kernel.mT) / 2)
        return eigenvalues[eigenvalues.abs().argsort(descending=True)]

    @property
    def effective_rank(self) -> float:
        """The rank `(Σ|λ|)² / Σ λ²` over eigenvalues of the symmetric part: k for k equal ones; NaN if all are 0."""
        size = self.eigenvalues.abs()
        return (size.sum().square() / size.square().sum()).item()

    @property
    def symmetry_error(self) -> float:
        """The asymmetry `|K - Kᵀ| / |K|`: 0 for a symmetric kernel, 2 for an antisymmetric one; NaN for 0."""
        return ((self.kernel - self.kernel.mT).norm() / self.kernel.norm()).item()


@checked
@torch.no_grad()
def adapted_functions(
    learner: Learner, prompts: Prompts, grid: Float[Tensor, "query x"]
) -> Float[Tensor, "prompt query y"]:
    """Predict a grid of queries from each prompt's context: the function that the learner has inferred from it.

    Args:
        learner: a model, or anything else with `predict(prompts)` (a model computes each context only once, which is
            fast).
        prompts: prompts that give the contexts; their queries are ignored.
        grid: query inputs, the same for all prompts. Predictions are in units of y.

    Source: von Oswald et al. 2023, Fig. 4, the adjusted functions.
    """
    if grid.shape[1] != prompts.x_dim:
        raise ValueError(f"grid must be [query x] with x_dim={prompts.x_dim}, got {tuple(grid.shape)}")
    grid = grid.to(prompts.device, prompts.dtype)
    parts = []
    for part in prompt_batches(learner, prompts, copies=max(len(grid), 1)):
        if isinstance(learner, PromptedModel):
            queries = grid.expand(len(part), 1, *grid.shape)
            *_, stream = learner.query_streams(part, queries, at="query")
            parts.append(learner.read_out(stream[:, 0]))
        else:
            xs, ys = (values.repeat_interleave(len(grid), dim=0) for values in (part.xs, part.ys))
            predicted = predictions_at(learner, Prompts(xs, ys).with_query(grid.repeat(len(part), 1)))[:, 0]
            parts.append(predicted.unflatten(0, (len(part), len(grid))))
    return torch.cat(parts)


@checked
def initial_function(model: HookedTransformer, xs: Float[Tensor, "point x"]) -> Float[Tensor, "point y"]:
    """Compute a one-layer model's predictions without any context: the read-out of the embedded query.

    The embedding includes the input MLP, if the model has one. Source: von Oswald et al. 2023, Fig. 4, the initial
    function.

    Args:
        model: one layer on paired prompts, where only the context is attended to.
        xs: inputs of the queries.
    """
    _check_model(model)
    return model.read_out(point_streams(model, xs)[None])[0]


def contributions(model: HookedTransformer, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
    """Compute each context point's contribution to the query's prediction, differentiable, in units of y.

    `prediction = initial + Σ_i contribution_i`, exactly.
    """
    _check_model(model)
    xs, ys = prompts.context
    queries = point_streams(model, prompts.query.xs)[:, None]
    keys = point_streams(model, xs.flatten(0, 1), ys.flatten(0, 1)).unflatten(0, xs.shape[:2])
    scores = _scores(model, queries, keys, prompts.n_context)[:, :, 0]
    return einsum(scores, _written(model, keys), "prompt head point, prompt head point y -> prompt point y")


@torch.no_grad()
def decompose(model: HookedTransformer, prompts: Prompts) -> PredictionParts:
    """Split each query's prediction into its terms (see `PredictionParts`), float64 on the CPU."""
    _check_model(model, one_target=True)
    parts = []
    for part in prompt_batches(model, prompts, copies=4):  # with derivatives
        part = part.to(model.cfg.device, model.cfg.torch_dtype)

        def total_at(ys: Float[Tensor, "prompt point y"], part: Prompts = part) -> Float[Tensor, "prompt"]:
            return contributions(model, Prompts(part.xs, ys)).sum((1, 2))

        prediction, initial = model.predict(part)[:, 0], initial_function(model, part.query.xs)[:, 0]
        # along ys at 0 the value is the sum of contributions without targets, the derivative is Σ_i k(x_q, x_i) y_i
        with torch.enable_grad():
            constant, linear = jvp(total_at, torch.zeros_like(part.ys), part.ys)
        values = torch.stack([prediction, initial, total_at(part.ys), constant, linear])  # type: ignore[list-item]
        prediction, initial, total, constant, linear = values.double().cpu()
        remainder, error = total - constant - linear, prediction - initial - total
        parts.append((prediction, initial, constant, linear, remainder, error))
    return PredictionParts(*(torch.cat(column) for column in zip(*parts, strict=True)))


@checked
def view_kernel(model: HookedTransformer, grid: Float[Tensor, "point x"], prompts: Prompts) -> KernelView:
    """Measure the smoothing kernel of a one-layer model on a grid, and the terms of its predictions for prompts.

    Such a model predicts `initial(x) + Σ_i contribution(x; x_i, y_i)`. The kernel `k(x, x_i)` is the derivative of a
    contribution with respect to y_i, at y_i = 0: if contributions are linear in y, the model is a kernel smoother.
    Source: von Oswald et al. 2023, A.8.

    Args:
        model: one head, one layer without softmax and an optional input MLP, on paired prompts (one token (x, y) per
            point) with one target.
        grid: inputs, each taken as a query and as a context point.
        prompts: prompts whose predictions are split into terms. The kernel is that of prompts with the same number of
            context points, on which the scale of attention may depend.

    Returns:
        A `KernelView`: `kernel` K `[point other]` on the grid (row: query) and `initial` `[point]`, the prediction
        without context. `eigenvalues` λ are those of `(K + Kᵀ) / 2`, the largest absolute value first; `effective_rank`
        is `(Σ|λ|)² / Σ λ²`; `symmetry_error` is `|K - Kᵀ| / |K|` (0 if symmetric, 2 if antisymmetric). `parts` has, for
        each prompt, the `prediction` and its terms in units of y: `initial`, `constant` (contributions if all targets
        were 0), `linear` (`Σ_i k(x, x_i) y_i`) and `remainder`.
    """
    _check_model(model, one_target=True)
    if model.cfg.n_heads > 1:
        raise ValueError(f"model must have one head, to separate scores from values, got {model.cfg.n_heads}")
    if len(prompts) == 0 or prompts.n_context == 0 or len(grid) == 0:
        raise ValueError(f"prompts must have contexts and grid points, got {prompts} and {len(grid)} points")
    parts, initial = decompose(model, prompts), initial_function(model, grid)[:, 0]
    scores, through_values, through_scores = kernel_parts(model, grid, grid, prompts.n_context)
    view = (grid, initial, through_values + through_scores, through_values, scores[0])
    return KernelView(*(values.detach().cpu().double() for values in view), parts=parts)


# ---- the layer, from its weights ----


def _check_model(model: HookedTransformer, *, one_target: bool = False) -> None:
    cfg = model.cfg
    check_attends(cfg)
    needed = {
        "prompt_format": "paired", "n_layers": 1, "keys": "context", "normalization_type": None, "attn_bias": False,
        "block_mlp": False, "token_clip": None, "positional_embedding_type": "none",
    }  # fmt: skip
    other = {name: getattr(cfg, name) for name, value in needed.items() if getattr(cfg, name) != value}
    if cfg.attention == "softmax":
        other["attention"] = cfg.attention
    if one_target and cfg.y_dim != 1:
        other["y_dim"], needed["y_dim"] = cfg.y_dim, 1
    if other:
        raise ValueError(f"model must have {needed} and no softmax, got {other}")


def point_streams(model: HookedTransformer, xs: Tensor, ys: Tensor | None = None) -> Float[Tensor, "point d_model"]:
    """Embed points, with read-in and MLP, `[point d_model]`; queries if there are no targets."""
    cfg = model.cfg
    xs = xs.to(cfg.device, cfg.torch_dtype)
    if xs.shape[1] != cfg.x_dim:
        raise ValueError(f"xs must be [point x] with x_dim={cfg.x_dim}, got {tuple(xs.shape)}")
    ys = -xs @ model.initial_weights if ys is None else ys.to(cfg.device, cfg.torch_dtype)
    return model.embed_tokens(torch.cat([xs, ys], dim=1)[:, None])[:, 0]


def _scores(
    model: HookedTransformer,
    queries: Float[Tensor, "*batch row d_model"],
    keys: Float[Tensor, "*batch point d_model"],
    n_context: int,
) -> Float[Tensor, "*batch head row point"]:
    W_KQ = model.W_Q[0] @ model.W_K[0].mT  # [head d_model d_model]
    scores = model.cfg.score_scale * (queries[..., None, :, :] @ W_KQ @ keys[..., None, :, :].mT)
    pattern = elementwise_attention(model.cfg, scores)
    return pattern / max(n_context, 1) if model.cfg.normalize_by_context else pattern


def _written(model: HookedTransformer, keys: Float[Tensor, "*batch point d_model"]) -> Tensor:
    """The contribution of a token with attention 1 to the prediction, by each head: `[*batch head point y]`."""
    values = keys[..., None, :, :] @ model.W_V[0] @ model.W_O[0] @ model.W_U
    return model.cfg.damping * values


def kernel_parts(
    model: HookedTransformer, xs: Float[Tensor, "point x"], others: Float[Tensor, "other x"], n_context: int
) -> tuple[Float[Tensor, "head point other"], Float[Tensor, "point other"], Float[Tensor, "point other"]]:
    """Compute scores at targets of 0 and the two parts of the kernel (von Oswald et al. 2023, A.8, eq. 13)."""

    # A contribution is a product, score(y) · written(y), of factors that depend on one key's y. So one forward-mode
    # derivative along all targets at once gives the slopes of every key, and the product rule gives the kernel:
    # score · written' + score' · written at y = 0.
    def factors(ys: Tensor) -> tuple[Tensor, Tensor]:
        keys = point_streams(model, others, ys)
        return _scores(model, point_streams(model, xs), keys, n_context), _written(model, keys)[..., 0]

    zeros = torch.zeros(len(others), 1, device=model.cfg.device, dtype=model.cfg.torch_dtype)
    (scores, written), (score_slopes, slopes) = jvp(factors, zeros, torch.ones_like(zeros))
    return scores, (scores * slopes[:, None]).sum(0), (score_slopes * written[:, None]).sum(0)


# ---- its picture ----


def kernel_heatmaps(
    views: Mapping[str, KernelView], *, part: Literal["kernel", "through_values"] = "kernel"
) -> go.Figure:
    """Draw kernels of models side by side, in one scale, each with its symmetry error and effective rank.

    Args:
        views: results of `view_kernel` on the same grid of one-dimensional inputs; the keys are the panels' titles.
        part: the whole kernel, or the part of it through values; symmetry and rank are always the whole kernel's.
    """
    grids = [view.grid for view in views.values()]
    if not grids or any(grid.shape[1] != 1 or not grid.equal(grids[0]) for grid in grids):
        raise ValueError(f"views must have one grid [point 1], got grids {[tuple(grid.shape) for grid in grids]}")
    titles = [
        f"{draw.literal(name)}<br><span style='font-size:11px'>|K − Kᵀ| / |K| = {view.symmetry_error:.2f}, "
        f"effective rank {view.effective_rank:.1f}</span>"
        for name, view in views.items()
    ]
    title = "Gain by a unit of y at a context point"
    fig = draw.panels(title, [*map(draw.Markup, titles)], shared_yaxes=True, horizontal_spacing=0.03)
    kernels = [getattr(view, part) for view in views.values()]
    values, bound = grids[0][:, 0].tolist(), max(float(kernel.abs().max()) for kernel in kernels)
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
