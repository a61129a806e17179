"""The kernel view of one attention layer after an input MLP.

With keys "context", one layer, and a score for each key alone (no softmax), the context's tokens do not change before
they are attended to, so that the query's prediction is a sum over the context, exactly:

    prediction(x_q) = initial(x_q) + Σ_i score(x_q; x_i, y_i) · written(x_i, y_i)

`score` is the attention that the query pays to the token of point i, and `written` what that token's value adds to the
read-out. In a `gradient_descent` layer the score is `m(x_i, y_i)·m(x_q)`, with m the stream's inputs, times
`score_scale` and over n if the config says so, and `written` is the stream's target times the step size: the paper's
kernel smoothing (A.8, eq. 13), with the targets that the MLP makes.

The MLP reads y too, so that neither factor need be linear in y_i. What a sum `Σ_i k(x_q, x_i) y_i` can say of the
layer is the part that is linear in y_i around 0, and `decompose` says how large the rest is on a prompt:

    score · written = constant(x_q; x_i) + k(x_q, x_i) y_i + remainder
    k(x_q, x_i) = score(x_q; x_i, 0) ∂written(x_i, 0)/∂y_i + ∂score(x_q; x_i, 0)/∂y_i written(x_i, 0)

Source: von Oswald et al. 2023, Proposition 2 and A.8. All shapes have rows for points.
"""

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.autograd.functional import jvp

from mechicl.base.memory import MEMORY
from mechicl.learners import prompt_batches
from mechicl.models import HookedTransformer
from mechicl.models.transformer.attention import elementwise_attention
from mechicl.prompts import Prompts
from mechicl.statistics import Result


@dataclass(frozen=True, eq=False)
class PredictionParts(Result):
    """What the predictions of a one-layer model for the query are sums of. All in units of y.

    Attributes:
        prediction: by the model's own forward pass.
        initial: before attention (`initial_function`).
        constant: `Σ_i` of what context tokens would contribute if their targets were 0.
        linear: `Σ_i k(x_q, x_i) y_i`, kernel smoothing without a normaliser.
        remainder: the rest of the contributions: the part that is not linear in the targets.
        error: `prediction - initial - constant - linear - remainder`: rounding.
    """

    prediction: Float[Tensor, "prompt"]
    initial: Float[Tensor, "prompt"]
    constant: Float[Tensor, "prompt"]
    linear: Float[Tensor, "prompt"]
    remainder: Float[Tensor, "prompt"]
    error: Float[Tensor, "prompt"]


@dataclass(frozen=True, eq=False)
class KernelView(Result):
    """The kernel that a one-layer model smooths by, on a grid of inputs; float64 on the CPU. Samples are prompts.

    Attributes:
        grid: `[point x]`.
        initial: the prediction at each point before attention `[point]`.
        kernel: `[point other]`, what the prediction at a point gains by a unit of y at the other (see `kernel`).
        through_values: `[point other]`, the part of it by which the other's value changes: the score times the slope
            of what is written. The rest comes from scores that change with y.
        scores: `[point other]`, of a query to the token of a context point with y = 0: the attention pattern, over n
            if the model divides by it. In a `gradient_descent` layer it is proportional to `m(x)·m(x')`, symmetric;
            in others its scale means nothing, for values may be scaled back.
        parts: what predictions for prompts are sums of.
    """

    grid: Float[Tensor, "point x"]
    initial: Float[Tensor, "point"]
    kernel: Float[Tensor, "point other"]
    through_values: Float[Tensor, "point other"]
    scores: Float[Tensor, "point other"]
    parts: PredictionParts

    def samples(self) -> dict[str, Float[Tensor, "prompt"]]:
        """The parts of each prompt's prediction."""
        return self.parts.samples()

    @property
    def eigenvalues(self) -> Float[Tensor, "point"]:
        """Of the kernel's symmetric part, the largest absolute value first."""
        return spectrum(self.kernel)

    @property
    def effective_rank(self) -> float:
        """Of the kernel's symmetric part."""
        return effective_rank(self.kernel)

    @property
    def symmetry_error(self) -> float:
        """Of the kernel: `|K - Kᵀ| / |K|`."""
        return symmetry_error(self.kernel)

    @property
    def identity_error(self) -> float:
        """The largest difference between a prediction and the sum of its parts, in units of y."""
        return self.parts.error.abs().max().item()


def features(
    model: HookedTransformer, xs: Float[Tensor, "point x"], ys: Float[Tensor, "point y"] | None = None
) -> Float[Tensor, "point d"]:
    """m(x, y): the stream's dimensions other than `cfg.y_slot`, of a point's token after the read-in and the MLP.

    Args:
        model: a model on paired prompts, with one layer.
        xs: inputs, in any dtype and on any device.
        ys: targets; without them the tokens are queries'.

    Returns:
        `d_model - y_dim` features of each point, differentiable.

    Raises:
        ValueError: a model of another kind, or inputs or targets of other dimensions than the model's.

    Source: von Oswald et al. 2023, A.7 and A.8.
    """
    _check_model(model)
    stream = _stream(model, xs, ys)
    slot = model.cfg.y_slot
    return torch.cat([stream[:, : slot.start], stream[:, slot.stop :]], dim=1)


def initial_function(model: HookedTransformer, xs: Float[Tensor, "point x"]) -> Float[Tensor, "point y"]:
    """The prediction before attention: the read-out of the embedded query, as for a query without any context.

    Raises:
        ValueError: as for `features`.

    Source: von Oswald et al. 2023, Fig. 4, the initial function.
    """
    _check_model(model)
    return model.read_out(_stream(model, xs, None)[None])[0]


def contributions(model: HookedTransformer, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
    """What each context point adds to the query's prediction: `prediction = initial + Σ_i contribution_i`, exactly.

    In units of y, differentiable.

    Raises:
        ValueError: as for `features`.
    """
    _check_model(model)
    return _contributions(model, _stream(model, prompts.query.xs, None), *prompts.context)


def kernel(
    model: HookedTransformer,
    xs: Float[Tensor, "point x"],
    others: Float[Tensor, "other x"],
    *,
    n_context: int | None = None,
) -> Float[Tensor, "point other"]:
    """k(x, x'): what the prediction at x gains by a unit of y at a context point x', for small y.

    `k(x, x') = ∂ contribution(x', y'; x) / ∂y'` at y' = 0: the score that x pays to the token (x', 0) times the slope
    of what that token writes, plus the change of the score with y' times what (x', 0) writes. Where the MLP neither
    reads nor changes y, as in `constructions.kernel_gradient_descent`, that is `a m(x)·m(x')`.
    Elsewhere it need not be symmetric.

    Args:
        model: as for `features`, with y_dim 1.
        xs: queries.
        others: inputs of context points.
        n_context: points in the context, which divides the scores of a model with `normalize_by_context`; by default
            the model's.

    Raises:
        ValueError: as for `features`, targets of more than one dimension, or n_context < 1.

    Source: von Oswald et al. 2023, A.8, eq. 13.
    """
    _check_model(model, one_target=True)
    n_context = model.cfg.n_context if n_context is None else n_context
    if n_context is None or n_context < 1:
        raise ValueError(f"n_context must be at least 1, got {n_context}")
    _, through_values, through_scores = _linear_part(model, _stream(model, xs, None), others, n_context)
    return through_values + through_scores


def decompose(model: HookedTransformer, prompts: Prompts, *, memory: float = MEMORY) -> PredictionParts:
    """The parts of each query's prediction (see `PredictionParts`), as float64 tensors on the CPU.

    Raises:
        ValueError: as for `kernel`, or prompts without context.
    """
    _check_model(model, one_target=True)
    if prompts.n_context == 0:
        raise ValueError("a prediction without context has no contributions")
    parts = [_decompose(model, part) for part in prompt_batches(model, prompts, memory, copies=4)]  # with slopes
    return PredictionParts(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def view_kernel(model: HookedTransformer, grid: Float[Tensor, "point x"], prompts: Prompts) -> KernelView:
    """The kernel of a one-layer model on a grid, and the parts of its predictions for prompts.

    Args:
        model: as for `kernel`, with one head.
        grid: inputs, each taken as a query and as a context point.
        prompts: to check the sum of the parts on; their number of context points is that of the kernel.

    Raises:
        ValueError: as for `decompose`, more than one head, or no prompts or grid points.

    Source: von Oswald et al. 2023, A.8.

    Example:
        >>> sine, grid = load_checkpoint("sine-lsa"), torch.linspace(-5, 5, 101)[:, None]
        >>> view = view_kernel(sine.models[0], grid, sine.task.sample(1000, seed=0))
        >>> view.symmetry_error, view.effective_rank
    """
    _check_model(model, one_target=True)
    if model.cfg.n_heads > 1:
        raise ValueError(f"scores and what is written come apart in a model with one head, not {model.cfg.n_heads}")
    if len(prompts) == 0 or len(grid) == 0:
        raise ValueError(f"needs prompts and grid points, got {len(prompts)} and {len(grid)}")
    parts = decompose(model, prompts)
    with torch.no_grad():
        queries = _stream(model, grid, None)
        scores, through_values, through_scores = _linear_part(model, queries, grid, prompts.n_context)
        initial = model.read_out(queries[None])[0, :, 0]
    return KernelView(
        grid=grid.cpu().double(),
        initial=initial.cpu().double(),
        kernel=(through_values + through_scores).cpu().double(),
        through_values=through_values.cpu().double(),
        scores=scores[0].cpu().double(),
        parts=parts,
    )


def spectrum(matrix: Float[Tensor, "point point"]) -> Float[Tensor, "point"]:
    """Eigenvalues of a matrix's symmetric part, the largest absolute value first."""
    eigenvalues = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    return eigenvalues[eigenvalues.abs().argsort(descending=True)]


def effective_rank(matrix: Float[Tensor, "point point"]) -> float:
    """`(Σ|λ|)² / Σ λ²` over the eigenvalues of the symmetric part: k for k equal ones; NaN if all are 0."""
    size = spectrum(matrix).abs()
    return (size.sum().square() / size.square().sum()).item()


def symmetry_error(matrix: Float[Tensor, "point point"]) -> float:
    """`|K - Kᵀ| / |K|` in the Frobenius norm: 0 for a symmetric matrix, 2 for an antisymmetric one; NaN for 0."""
    return ((matrix - matrix.mT).norm() / matrix.norm()).item()


# ---- the layer, from its weights ----


def _check_model(model: HookedTransformer, *, one_target: bool = False) -> None:
    cfg = model.cfg
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
        raise ValueError(f"the kernel view is of models with {needed} and no softmax; this one has {other}")


def _stream(model: HookedTransformer, xs: Tensor, ys: Tensor | None) -> Float[Tensor, "point d_model"]:
    """The tokens of points after the read-in and the MLP, or without targets those of queries."""
    cfg = model.cfg
    xs = xs.to(cfg.device, cfg.torch_dtype)
    if xs.ndim != 2 or xs.shape[1] != cfg.x_dim:
        raise ValueError(f"xs must be [point x] with x_dim={cfg.x_dim}, got {tuple(xs.shape)}")
    ys = -xs @ model.initial_weights if ys is None else ys.to(cfg.device, cfg.torch_dtype)
    if ys.shape != (len(xs), cfg.y_dim):
        raise ValueError(f"ys must be [point y] = {(len(xs), cfg.y_dim)}, got {tuple(ys.shape)}")
    return model.embed_tokens(torch.cat([xs, ys], dim=1)[:, None])[:, 0]


def _scores(
    model: HookedTransformer,
    queries: Float[Tensor, "*batch row d_model"],
    keys: Float[Tensor, "*batch point d_model"],
    n_context: int,
) -> Float[Tensor, "*batch head row point"]:
    """The attention that queries pay to keys."""
    W_KQ = model.W_Q[0] @ model.W_K[0].mT  # [head d_model d_model]
    scores = model.cfg.score_scale * (queries[..., None, :, :] @ W_KQ @ keys[..., None, :, :].mT)
    pattern = elementwise_attention(model.cfg, scores)
    return pattern / max(n_context, 1) if model.cfg.normalize_by_context else pattern


def _written(model: HookedTransformer, keys: Float[Tensor, "*batch point d_model"]) -> Tensor:
    """What a token with attention 1 adds to the prediction, by each head: `[*batch head point y]`."""
    values = keys[..., None, :, :] @ model.W_V[0] @ model.W_O[0] @ model.W_U
    return model.cfg.damping * values


def _linear_part(
    model: HookedTransformer, queries: Float[Tensor, "point d_model"], others: Float[Tensor, "other x"], n_context: int
) -> tuple[Float[Tensor, "head point other"], Float[Tensor, "point other"], Float[Tensor, "point other"]]:
    """Scores at targets of 0, and the two parts of the kernel: through values, and through scores."""

    # A contribution is a product, score(y) · written(y), each factor of one key's y alone. So one forward-mode
    # derivative with all targets moved at once has the slopes of every key, and the product rule has the kernel:
    # score · written' + score' · written at y = 0.
    def factors(ys: Tensor) -> tuple[Tensor, Tensor]:
        keys = _stream(model, others, ys)
        return _scores(model, queries, keys, n_context), _written(model, keys)[..., 0]

    zeros = torch.zeros(len(others), 1, device=model.cfg.device, dtype=model.cfg.torch_dtype)
    (scores, written), (score_slopes, slopes) = jvp(factors, zeros, torch.ones_like(zeros))
    return scores, (scores * slopes[:, None]).sum(0), (score_slopes * written[:, None]).sum(0)


def _contributions(
    model: HookedTransformer, queries: Float[Tensor, "prompt d_model"], xs: Tensor, ys: Tensor
) -> Float[Tensor, "prompt point y"]:
    keys = _stream(model, xs.flatten(0, 1), ys.flatten(0, 1)).unflatten(0, xs.shape[:2])
    scores = _scores(model, queries[:, None], keys, xs.shape[1])[:, :, 0]
    return einsum(scores, _written(model, keys), "prompt head point, prompt head point y -> prompt point y")


def _decompose(model: HookedTransformer, prompts: Prompts) -> tuple[Tensor, ...]:
    prompts = prompts.to(model.cfg.device, model.cfg.torch_dtype)
    (xs, ys), query = prompts.context, prompts.query.xs

    def sums(ys: Tensor) -> Float[Tensor, "prompt"]:
        return _contributions(model, _stream(model, query, None), xs, ys).sum((1, 2))

    with torch.no_grad():
        prediction, initial, total = model.predict(prompts)[:, 0], initial_function(model, query)[:, 0], sums(ys)
    # along ys from 0: the value is what contributions are without targets, the derivative is Σ_i k(x_q, x_i) y_i
    constant, linear = jvp(sums, torch.zeros_like(ys), ys)
    values = prediction, initial, total, constant, linear
    prediction, initial, total, constant, linear = torch.stack(values).double()  # type: ignore[arg-type]
    return prediction, initial, constant, linear, total - constant - linear, prediction - initial - total
