"""Each construction, built at a representative size and held against the theorem's formula as a plain loop."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from mechicl.constructions.copying import copy_targets, copy_then_gradient_descent
from mechicl.constructions.gradient_descent import gd_plus_plus, gradient_descent
from mechicl.constructions.kernel import kernel_gradient_descent
from mechicl.constructions.newton import newton, ridge, with_pseudo_examples
from mechicl.constructions.one_step import linear_optimum, preconditioned_gd, relu_optimum
from mechicl.constructions.operations import aff, div, mov, mul, total
from mechicl.constructions.softmax import softmax_gradient_descent
from mechicl.constructions.vocabulary import Head, Layer, Stream, assemble
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts

X_DIM, Y_DIM, N_CONTEXT, STEPS = 6, 2, 12, 5
SIZES = {"x_dim": X_DIM, "y_dim": Y_DIM, "n_context": N_CONTEXT}
STEP_SIZE, GAMMA, SCORE_SCALE, PENALTY, COPY_SCALE = 0.05, 0.02, 0.01, 0.3, 20.0
ALPHA = 1e-3  # below 2 / λ_max² of all prompts here, of which λ_max is about 10

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]  # from one prompt's X, Y and x_q


@dataclass(frozen=True)
class Certificate:
    """How far a construction is from the algorithm that it equals by theorem.

    Attributes:
        theorem: paper, and what it proves.
        construction: the function that builds it.
        layers: number of layers.
        width: of the residual stream.
        heads: number of heads a layer.
        max_relative_error: largest difference over all prompts, as a part of the largest expected value.
        statement: "exact" (up to rounding), or the order of the error.
    """

    theorem: str
    construction: str
    layers: int
    width: int
    heads: int
    max_relative_error: float
    statement: str = "exact"


def certificates_table(seed: int = 0, n_prompts: int = 64) -> pd.DataFrame:
    """`certificates` as a table: one row a construction, one column an attribute of `Certificate`."""
    return pd.DataFrame([dataclasses.asdict(certificate) for certificate in certificates(seed, n_prompts)])


@torch.no_grad()
def certificates(seed: int = 0, n_prompts: int = 64) -> list[Certificate]:
    """Every construction at 6 dimensions, 2 targets, 12 points and 5 steps, against loops over points and steps.

    The loops are written out in this file and share nothing with `mechicl.algorithms`. All in float64. Operations are
    one layer each, but for `div`, before whose nine layers three more make the number to divide by.

    Args:
        seed: of the random prompts: inputs `N(0, 1/4)`, targets `N(0, 1)`.
        n_prompts: their number, at least 1.

    Raises:
        ValueError: n_prompts < 1.

    Example:
        >>> certificates_table()[["construction", "layers", "max_relative_error", "statement"]]
    """
    if n_prompts < 1:
        raise ValueError(f"n_prompts must be at least 1, got {n_prompts}")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    prompts = Prompts(0.5 * normal(n_prompts, N_CONTEXT + 1, X_DIM), normal(n_prompts, N_CONTEXT + 1, Y_DIM))
    return [
        *_descent(prompts, normal(X_DIM, Y_DIM), 0.3 * normal(X_DIM, X_DIM)),
        *_kernel(prompts, normal(X_DIM, 8) / math.sqrt(X_DIM), normal(8)),
        *_copying(prompts),
        *_softmax(prompts),
        *_newton(prompts),
        *_optima(prompts),
        *_operations(prompts),
    ]


def _descent(prompts: Prompts, start: Tensor, matrix: Tensor) -> Iterator[Certificate]:
    model = gradient_descent(**SIZES, step_size=STEP_SIZE, steps=STEPS, initial_weights=start)
    expected = _loop(prompts, _steps(STEP_SIZE * torch.eye(X_DIM).double(), STEPS, start))
    yield _certificate("000, Proposition 1", gradient_descent, model, model.predict(prompts), expected)

    model = gd_plus_plus(**SIZES, step_size=STEP_SIZE, gamma=GAMMA, steps=STEPS)
    yield _certificate("000, A.10", gd_plus_plus, model, model.predict(prompts), _loop(prompts, _gd_plus_plus))

    model = preconditioned_gd(**SIZES, preconditioner=matrix, steps=STEPS)
    expected = _loop(prompts, _steps(matrix / N_CONTEXT, STEPS))
    yield _certificate("004, Theorem 1", preconditioned_gd, model, model.predict(prompts), expected)


def _kernel(prompts: Prompts, weights: Tensor, bias: Tensor) -> Iterator[Certificate]:
    model = kernel_gradient_descent(
        weights=weights, bias=bias, n_context=N_CONTEXT, y_dim=Y_DIM, step_size=STEP_SIZE / 2, steps=STEPS
    )
    features = Prompts((prompts.xs @ weights + bias).relu(), prompts.ys)
    expected = _loop(features, _steps(STEP_SIZE / 2 * torch.eye(8).double(), STEPS))
    yield _certificate("000, Proposition 2", kernel_gradient_descent, model, model.predict(prompts), expected)


def _copying(prompts: Prompts) -> Iterator[Certificate]:
    rough = f"O(n e^(-score_scale / 2)), score_scale = {COPY_SCALE}"
    build = partial(copy_targets, x_dim=X_DIM, y_dim=Y_DIM, n_context=N_CONTEXT)
    for attention, model, statement in (
        ("linear", build(), "exact"),
        ("softmax", build(attention="softmax"), "exact"),
        ("softmax", build(attention="softmax", score_scale=COPY_SCALE), rough),
    ):
        expected = torch.zeros(len(prompts), 2 * N_CONTEXT + 1, Y_DIM).double()
        expected[:, :-1:2] = prompts.context.ys
        found = model(prompts, stop_at_layer=1)[..., -Y_DIM:]
        yield _certificate(f"000, Proposition 3 ({attention})", copy_targets, model, found, expected, statement)
    model = copy_then_gradient_descent(**SIZES, step_size=STEP_SIZE, steps=STEPS)
    expected = _loop(prompts, _steps(STEP_SIZE * torch.eye(X_DIM).double(), STEPS))
    theorem = "000, Propositions 3 and 1"
    yield _certificate(theorem, copy_then_gradient_descent, model, model.predict(prompts), expected)


def _softmax(prompts: Prompts) -> Iterator[Certificate]:
    statement = f"O(score_scale²), score_scale = {SCORE_SCALE}"
    descent = _steps(STEP_SIZE * torch.eye(X_DIM).double(), 1)
    for sink, theorem, predict in (
        (True, "000, A.9, with a sink", descent),
        (False, "000, A.9, to the centred sum", _centred_step),
    ):
        model = softmax_gradient_descent(**SIZES, step_size=STEP_SIZE, score_scale=SCORE_SCALE, sink=sink)
        found, expected = model.predict(prompts), _loop(prompts, predict)
        yield _certificate(theorem, softmax_gradient_descent, model, found, expected, statement)


def _newton(prompts: Prompts) -> Iterator[Certificate]:
    for attention in ("linear", "relu"):
        model = newton(**SIZES, steps=STEPS, alpha=ALPHA, attention=attention)
        expected = _loop(prompts, _iterated(0.0))
        yield _certificate(f"002, Theorem 1 ({attention})", newton, model, model.predict(prompts), expected)
    model = ridge(x_dim=X_DIM, y_dim=Y_DIM, n_context=N_CONTEXT, steps=STEPS, alpha=ALPHA)
    found, expected = model.predict(with_pseudo_examples(prompts, PENALTY)), _loop(prompts, _iterated(PENALTY))
    yield _certificate("001, Theorem 3.1", ridge, model, found, expected)


def _optima(prompts: Prompts) -> Iterator[Certificate]:
    one_target = Prompts(prompts.xs, prompts.ys[..., :1])
    n, spread = N_CONTEXT, torch.arange(1.0, X_DIM + 1).double()
    model = linear_optimum(covariance=spread.diag(), n_context=n)
    best = (1 / ((n + 1) / n * spread + spread.sum() / n)).diag()
    expected = _loop(one_target, _steps(best / n, 1))
    yield _certificate("004, Theorem 2", linear_optimum, model, model.predict(one_target), expected)

    model = relu_optimum(x_dim=X_DIM, n_context=n)
    yield _certificate(
        "004, Theorem 4", relu_optimum, model, model.predict(one_target), _loop(one_target, _rectified_step)
    )


def _operations(prompts: Prompts) -> Iterator[Certificate]:
    n_pos = N_CONTEXT + 1
    stream = Stream(x=X_DIM, y=Y_DIM, position=n_pos, target=X_DIM, number=1, scratch=1)
    xs, ys = prompts.xs, prompts.ys.clone()
    ys[:, -1] = 0  # the query's, as in its token
    matrix = torch.linspace(-1, 1, Y_DIM * X_DIM).double().reshape(Y_DIM, X_DIM)
    bias = torch.ones(X_DIM).double()
    moved = torch.zeros_like(xs)
    moved[:, n_pos - 1] = xs[:, 0]
    number = 1 + xs[..., :1].square()  # to divide by: at least 1, and below 9 for prompts of this size
    number_of_x = [
        Layer(mlp=mul(stream, "x", "x", "target")),
        Layer(mlp=aff(stream, {"target": torch.eye(X_DIM, 1)}, "number", bias=bias[:1], act_fn="square")),
    ]
    quotient = div(stream, "x", "number", "target", scratch="scratch", low=1, high=9, steps=8)
    nothing = Head(stream.read("x"), stream.read("x"), stream.read("x"), 0 * stream.write("x"))  # a model has a head
    affine = aff(stream, {"y": matrix}, "target", bias=bias, act_fn="relu")
    summed, sums = total(stream, "x", "target", n_positions=n_pos), xs.sum(1, keepdim=True)
    square, rough = {"act_fn": "square"}, "O(0.8^(2^steps)), steps = 8"
    for name, operation, layers, expected, options, statement in (
        ("Proposition 1 (mov)", mov, [mov(stream, "x", "target", [(0, n_pos - 1)])], moved, {}, "exact"),
        ("Proposition 1 (aff)", aff, [Layer([nothing], affine)], ys @ matrix + bias, {"act_fn": "relu"}, "exact"),
        ("Proposition 1 (mul)", mul, [Layer([nothing], mul(stream, "x", "x", "target"))], xs.square(), square, "exact"),
        ("Proposition 1 (div)", div, [[nothing], *number_of_x, *quotient], xs / number, square, rough),
        ("Lemma 1", total, [[summed]], sums.expand_as(xs), {"normalize_by_context": True}, "exact"),
    ):
        config = {"keys": "full", "positional_embedding_type": "one_hot", **options}
        model = assemble(stream, layers, n_context=N_CONTEXT, **config)
        found = model(prompts, stop_at_layer=model.cfg.n_layers) @ stream.read("target")
        yield _certificate(f"002, {name}", operation, model, found, expected, statement)


def _certificate(
    theorem: str,
    construction: Callable,
    model: HookedTransformer,
    found: Tensor,
    expected: Tensor,
    statement: str = "exact",
) -> Certificate:
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    cfg = model.cfg
    return Certificate(theorem, construction.__name__, cfg.n_layers, cfg.d_model, cfg.n_heads, error, statement)


# ---- the algorithms, one prompt at a time ----


def _loop(prompts: Prompts, predict: Predict) -> Tensor:
    """`predict(X, Y, x_q)` for every prompt: `[prompt y]`."""
    return torch.stack([predict(x[:-1], y[:-1], x[-1]) for x, y in zip(prompts.xs, prompts.ys, strict=True)])


def _steps(matrix: Tensor, steps: int, start: Tensor | None = None) -> Predict:
    """Steps of preconditioned gradient descent on the summed squared error."""

    def predict(xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
        weights = query.new_zeros(len(query), ys.shape[1]) if start is None else start
        for _ in range(steps):
            gradient = torch.zeros_like(weights)
            for x, y in zip(xs, ys, strict=True):
                gradient = gradient + torch.outer(x, x @ weights - y)
            weights = weights - matrix @ gradient
        return query @ weights

    return predict


def _gd_plus_plus(xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
    prediction = ys.new_zeros(ys.shape[1])
    for _ in range(STEPS):
        update, second = STEP_SIZE * xs.T @ ys, xs.T @ xs
        prediction = prediction + query @ update
        ys = ys - xs @ update
        xs, query = xs - GAMMA * xs @ second, query - GAMMA * query @ second
    return prediction


def _iterated(penalty: float) -> Predict:
    """Iterative Newton on the second moments plus `penalty` times the identity."""

    def predict(xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
        second = xs.T @ xs + penalty * torch.eye(len(query), dtype=xs.dtype)
        inverse = ALPHA * second
        for _ in range(STEPS):
            inverse = 2 * inverse - inverse @ second @ inverse
        return query @ inverse @ xs.T @ ys

    return predict


def _centred_step(xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
    scores = xs @ query
    return STEP_SIZE * (scores - scores.mean()) @ ys


def _rectified_step(xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
    n, d = xs.shape
    return (xs @ query).relu() @ ys / n / (0.5 * (n - 1) / n + (d + 2) / n)
