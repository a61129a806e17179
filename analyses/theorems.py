"""Hand-written weights compared with their theorem: the library's algorithm, or the theorem's formula."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analyses.support.checks import numbers
from analyses.support.proofs import mov, mul, total, with_pseudo_examples
from analyses.support.script import Option, script
from mechicl import algorithms
from mechicl.constructions import (
    Head,
    Layer,
    Stream,
    assemble,
    copy_targets,
    copy_then_gradient_descent,
    gd_plus_plus,
    gradient_descent,
    kernel_gradient_descent,
    linear_optimum,
    newton,
    preconditioned_gd,
    recurrent,
    relu_optimum,
    softmax_gradient_descent,
)
from mechicl.constructions.operations import aff, div
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row

BOUNDS = (1e-12, 1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 1.0, math.inf)
"""Errors are rounded up to one of these: their digits are rounding, and differ between machines."""
X_DIM, Y_DIM, N_CONTEXT, STEPS = 6, 2, 12, 5
SIZES: dict[str, Any] = {"x_dim": X_DIM, "y_dim": Y_DIM, "n_context": N_CONTEXT}
STEP_SIZE, GAMMA, SCORE_SCALE, PENALTY, COPY_SCALE = 0.05, 0.02, 0.01, 0.3, 20.0
DISCOUNT = 0.9
ALPHA = 1e-3  # below 2 / λ_max² of all prompts here, of which λ_max is about 10
OSWALD, FU, NERTINGER, NOTE = "von Oswald et al. 2023", "Fu et al. 2024", "Nertinger 2025", "the lecture note on ICL"


@script(n_prompts=Option(64, "random prompts"), seed=0)
def compare(args: Any) -> Comparison:
    """Error and size of every construction."""
    rows = []
    for certificate in certificates(args.seed, args.n_prompts):
        name = f"{certificate.theorem}: {certificate.construction}"
        bound = next(bound for bound in BOUNDS if certificate.max_relative_error <= bound)
        note = f"{certificate.layers} layers"
        statement = certificate.statement.split(",")[0]
        rows.append(Row(f"{name}, {statement}", certificate.statement, f"at most {bound:g}", "", note))
    lead = (
        f"Largest difference over {args.n_prompts} random prompts (seed {args.seed}), relative to the largest expected "
        "value, at 6 dimensions, 2 targets, 12 points and 5 steps, in float64."
    )
    return Comparison("Constructions against their theorems", lead, rows)


@compare.derive
def derived_rows(comparison: Comparison) -> list[Row]:
    """Return the numbers of layers of the operations of Proposition 1, from the rows' notes."""
    noted = {
        row.quantity.split("(")[1].split(")")[0]: row for row in comparison.rows if "Proposition 1 (" in row.quantity
    }
    return [Row(f"layers of {name}", None, numbers(row.note)[0]) for name, row in noted.items()]


class Certificate(NamedTuple):
    """The error of a construction relative to its algorithm: a row of the table."""

    theorem: str
    construction: str
    layers: int
    width: int
    heads: int
    max_relative_error: float
    statement: str


@torch.no_grad()
def certificates(seed: int = 0, n_prompts: int = 64) -> Iterator[Certificate]:
    """Compare every construction with the algorithm that it equals by theorem, in float64, on random prompts.

    Inputs are from `N(0, 1/4)`, targets from `N(0, 1)`. All have 6 input dimensions, 2 targets, 12 context points and 5
    steps. The two sides are independent: the models run layer by layer, the algorithms use an eigendecomposition or the
    theorem's formula. Errors are the largest over all prompts, relative to the largest value that the algorithm
    predicts; the statement is "exact" (up to rounding), or the order of the error.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, dtype=torch.float64, generator=generator)
    xs, ys = 0.5 * normal(n_prompts, N_CONTEXT + 1, X_DIM), normal(n_prompts, N_CONTEXT + 1, Y_DIM)
    prompts, n = Prompts(xs, ys), N_CONTEXT
    start, preconditioner = normal(X_DIM, Y_DIM), (0.3 * normal(X_DIM).abs()).diag()
    weights, bias = normal(X_DIM, 8) / math.sqrt(X_DIM), normal(8)

    steps: dict[str, Any] = {**SIZES, "step_size": STEP_SIZE, "steps": STEPS}
    reference = algorithms.gradient_descent(prompts, STEPS, step_size=STEP_SIZE, initial_weights=start)
    model = gradient_descent(**steps, initial_weights=start)
    yield _certify(f"{OSWALD}, Proposition 1", gradient_descent, model, prompts, reference.query()[0])
    reference = algorithms.gd_plus_plus(prompts, STEPS, step_size=STEP_SIZE, gamma=GAMMA)
    model = gd_plus_plus(**steps, gamma=GAMMA)
    yield _certify(f"{OSWALD}, A.10", gd_plus_plus, model, prompts, reference.query()[0])
    reference = algorithms.preconditioned_gd(prompts, STEPS, preconditioner=preconditioner)
    model = preconditioned_gd(**SIZES, preconditioner=preconditioner, steps=STEPS)
    yield _certify(f"{NERTINGER}, Theorem 1", preconditioned_gd, model, prompts, reference.query()[0])
    features = Prompts((prompts.xs @ weights + bias).relu(), prompts.ys)
    reference = algorithms.gradient_descent(features, STEPS, step_size=STEP_SIZE / 10)
    options: dict[str, Any] = {"weights": weights, "bias": bias, "n_context": n, "y_dim": Y_DIM}
    model = kernel_gradient_descent(**options, step_size=STEP_SIZE / 10, steps=STEPS)
    yield _certify(f"{OSWALD}, Proposition 2", kernel_gradient_descent, model, prompts, reference.query()[0])

    approximate = f"O(n e^(-score_scale / 2)), score_scale = {COPY_SCALE}"
    expected = torch.zeros(len(prompts), 2 * n + 1, Y_DIM, dtype=torch.float64)
    expected[:, :-1:2] = prompts.context.ys
    for attention, model, statement in (
        ("linear", copy_targets(**SIZES), "exact"),
        ("softmax", copy_targets(**SIZES, attention="softmax"), "exact"),
        ("softmax", copy_targets(**SIZES, attention="softmax", score_scale=COPY_SCALE), approximate),
    ):
        copied = model(prompts, stop_at_layer=1)[..., -Y_DIM:]
        yield _certify(f"{OSWALD}, Proposition 3 ({attention})", copy_targets, model, copied, expected, statement)
    model = copy_then_gradient_descent(**steps)
    expected = algorithms.gradient_descent(prompts, STEPS, step_size=STEP_SIZE).query()[0]
    yield _certify(f"{OSWALD}, Propositions 3 and 1", copy_then_gradient_descent, model, prompts, expected)

    scores = torch.einsum("pnx,px->pn", prompts.context.xs, prompts.query.xs)  # <x_i, x_q>
    centred = STEP_SIZE * _weighted_targets(scores - scores.mean(-1, keepdim=True), prompts)
    plain = algorithms.gradient_descent(prompts, step_size=STEP_SIZE).query()[0]
    for sink, suffix, expected in ((True, "with a sink", plain), (False, "to the centred sum", centred)):
        model = softmax_gradient_descent(**SIZES, step_size=STEP_SIZE, score_scale=SCORE_SCALE, sink=sink)
        statement = f"O(score_scale²), score_scale = {SCORE_SCALE}"
        yield _certify(f"{OSWALD}, A.9, {suffix}", softmax_gradient_descent, model, prompts, expected, statement)

    expected = algorithms.newton(prompts, STEPS, alpha=ALPHA).query()[0]
    for attention in ("linear", "relu"):
        model = newton(**SIZES, steps=STEPS, alpha=ALPHA, attention=attention)
        yield _certify(f"{FU}, Theorem 1 ({attention})", newton, model, prompts, expected)
    regularised = with_pseudo_examples(prompts, PENALTY)
    expected = algorithms.newton(regularised, STEPS, alpha=ALPHA).query()[0]
    model = newton(**{**SIZES, "n_context": n + X_DIM}, steps=STEPS, alpha=ALPHA)
    yield _certify(f"{NOTE}, Theorem 3.1", newton, model, regularised, expected)

    single, spread = Prompts(xs, ys[..., :1]), torch.arange(1.0, X_DIM + 1, dtype=torch.float64)
    model = linear_optimum(covariance=spread.diag(), n_context=n)
    best = (1 / ((n + 1) / n * spread + spread.sum() / n)).diag()
    expected = algorithms.preconditioned_gd(single, preconditioner=best).query()[0]
    yield _certify(f"{NERTINGER}, Theorem 2", linear_optimum, model, single, expected)
    expected = _weighted_targets(scores.relu(), single) / n / (0.5 * (n - 1) / n + (X_DIM + 2) / n)
    yield _certify(f"{NERTINGER}, Theorem 4", relu_optimum, relu_optimum(x_dim=X_DIM, n_context=n), single, expected)
    yield from _recurrent_layers(prompts)
    yield from _operations(prompts)


def _recurrent_layers(prompts: Prompts) -> Iterator[Certificate]:
    delta, gated, mesa = (
        "Yang et al. 2024, DeltaNet",
        "Yang et al. 2024, gated linear attention",
        "von Oswald et al. 2025",
    )
    forgets: dict[str, Any] = {"discount": DISCOUNT}
    step: dict[str, Any] = {"step_size": STEP_SIZE}
    penalty: dict[str, Any] = {"penalty": PENALTY}
    online, descent = algorithms.online_gradient_descent, algorithms.discounted_gradient_descent
    recursive = partial(algorithms.recursive_least_squares, fading=False)
    for theorem, construction, options, algorithm in (
        (delta, recurrent.online_gradient_descent, step, online),
        ("Yang et al. 2025, Gated DeltaNet", recurrent.online_gradient_descent, step | forgets, online),
        (f"{mesa}, ridge", recurrent.recursive_least_squares, penalty, algorithms.ridge),
        (f"{mesa}, forgetting", recurrent.recursive_least_squares, penalty | forgets, recursive),
        (f"{gated}, no gate", recurrent.discounted_gradient_descent, step, algorithms.gradient_descent),
        (gated, recurrent.discounted_gradient_descent, step | forgets, descent),
        ("Dao & Gu 2024, Mamba-2", recurrent.discounted_averaging, forgets, algorithms.discounted_averaging),
    ):
        expected = algorithm(prompts, **options).query()[0]
        yield _certify(theorem, construction, construction(**SIZES, **options), prompts, expected)


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
    square, approximate = {"act_fn": "square"}, "O(0.8^(2^steps)), steps = 8"
    for name, operation, layers, expected, options, statement in (
        ("Proposition 1 (mov)", mov, [mov(stream, "x", "target", [(0, n_pos - 1)])], moved, {}, "exact"),
        ("Proposition 1 (aff)", aff, [Layer([nothing], affine)], ys @ matrix + bias, {"act_fn": "relu"}, "exact"),
        ("Proposition 1 (mul)", mul, [Layer([nothing], mul(stream, "x", "x", "target"))], xs.square(), square, "exact"),
        ("Proposition 1 (div)", div, [[nothing], *number_of_x, *quotient], xs / number, square, approximate),
        ("Lemma 1", total, [[summed]], sums.expand_as(xs), {"normalize_by_context": True}, "exact"),
    ):
        config = {"keys": "full", "positional_embedding_type": "one_hot", **options}
        model = assemble(stream, layers, n_context=N_CONTEXT, **config)
        result = model(prompts, stop_at_layer=model.cfg.n_layers) @ stream.read("target")
        yield _certify(f"{FU}, {name}", operation, model, result, expected, statement)


def _weighted_targets(weights: Tensor, prompts: Prompts) -> Tensor:
    return torch.einsum("pn,pny->py", weights, prompts.context.ys)


def _certify(
    theorem: str, construction: Callable, model: HookedTransformer, result: Prompts | Tensor, expected: Tensor,
    statement: str = "exact",
) -> Certificate:  # fmt: skip
    result = model.predict(result) if isinstance(result, Prompts) else result
    error = ((result - expected).abs().max() / expected.abs().max()).item()
    cfg = model.cfg
    return Certificate(theorem, construction.__name__, cfg.n_layers, cfg.d_model, cfg.n_heads, error, statement)


if __name__ == "__main__":
    compare.run()
