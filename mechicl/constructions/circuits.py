"""Models for hypotheses that no theorem's construction covers: two steps in a layer, ridge by Cramer's rule, induction.

Each function returns a float64 model and the hypothesis on it; `known_models` lists them.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mechicl.algorithms.stepwise import Hypothesis, Induction, MomentsThenRidge, ResidualDescent, best_match
from mechicl.constructions.operations import div
from mechicl.constructions.vocabulary import Head, Hidden, Layer, Stream, assemble
from mechicl.models import HookedTransformer

SHARPNESS = 1e3  # of `best_match`: so high that hardly any prompt has a second point with weight


class Factor(NamedTuple):
    """A number that an MLP reads: `e read + bias`."""

    read: Tensor
    bias: float = 0.0


def two_steps_in_a_layer(
    *, x_dim: int, n_context: int, step_size: float, layers: int
) -> tuple[HookedTransformer, Hypothesis]:
    """Gradient descent, two steps in every layer.

    Two steps from the residuals r take `2a Σ_i r_i <x_i, x> - a² B S x` from each residual, with `B = Σ_i r_i x_i` and
    `S = Σ_i x_iᵀ x_i`. Heads fetch the first term, B and `S x`; the MLP, whose activation is the square, adds the
    product of the last two and takes them out of the stream again.
    """
    stream = Stream(x=x_dim, y=1, position=n_context + 1, moment=x_dim, spread=x_dim)
    x, y, write = stream.read("x"), stream.read("y"), stream.write("y")
    one = stream.read("position").sum(1, keepdim=True)
    heads = [
        Head(query=x, key=x, value=y, output=-2 * step_size * write),
        Head(query=one, key=y, value=x, output=stream.write("moment")),
        Head(query=x, key=x, value=x, output=stream.write("spread")),
    ]
    moments, spreads = _numbers(stream, "moment"), _numbers(stream, "spread")
    products = [(moment, spread, step_size**2 * write[0]) for moment, spread in zip(moments, spreads, strict=True)]
    mlp = _products(stream, products + _erased(stream, "moment") + _erased(stream, "spread"))
    model = assemble(
        stream, [Layer(heads, mlp)] * layers, n_context=n_context, positional_embedding_type="one_hot", act_fn="square"
    )
    columns = torch.eye(stream.d_model, dtype=torch.float64)
    return model, Hypothesis(
        ResidualDescent(2 * layers, step_size=step_size),
        schedule=tuple((k, 2 * k) for k in range(layers + 1)),
        subspaces={"x": columns[:, :x_dim], "residual": columns[:, x_dim : x_dim + 1]},
    )


def ridge_by_cramers_rule(*, n_context: int, penalty: float, largest: float) -> tuple[HookedTransformer, Hypothesis]:
    """Ridge regression in 2 dimensions in closed form: one layer collects moments, and MLPs solve for the weights.

    Attention sums `x_iᵀ x_i` and `x_i y_i`; two MLPs make the determinant c of `S + λ` and minus the prediction times
    c; 13 more divide (`div`), up to rounding for c between λ² and `largest`.
    """
    stream = Stream(x=2, y=1, position=n_context + 1, spread=3, cross=2, solution=2, numerator=1, det=1, error=1)
    x, y = stream.read("x"), stream.read("y")
    one = stream.read("position").sum(1, keepdim=True)
    spread = stream.write("spread")
    gather = [
        Head(query=one, key=x[:, :1], value=x, output=spread[:2]),  # x_1 x_1 and x_1 x_2
        Head(query=one, key=x[:, 1:], value=x[:, 1:], output=spread[2:]),
        Head(query=one, key=y, value=x, output=stream.write("cross")),
    ]
    first, mixed, second = _numbers(stream, "spread")
    first, second = first._replace(bias=penalty), second._replace(bias=penalty)
    cross_1, cross_2 = _numbers(stream, "cross")
    to_1, to_2 = stream.write("solution")  # det times the weights
    (det,) = stream.write("det")
    solve = [
        (second, cross_1, to_1), (mixed, cross_2, -to_1),
        (first, cross_2, to_2), (mixed, cross_1, -to_2),
        (first, second, det), (mixed, mixed, -det),
    ]  # fmt: skip
    (numerator,) = stream.write("numerator")
    pairs = zip(_numbers(stream, "x"), _numbers(stream, "solution"), strict=True)
    project = [(number, weight, -numerator) for number, weight in pairs]  # minus: of y, the prediction is minus
    layers = [
        Layer(gather),
        Layer(mlp=_products(stream, solve + _erased(stream, "solution") + _erased(stream, "det"))),
        Layer(mlp=_products(stream, project + _erased(stream, "numerator"))),
        *div(stream, "numerator", "det", "y", scratch="error", low=penalty**2, high=largest, steps=12),
    ]
    model = assemble(stream, layers, n_context=n_context, positional_embedding_type="one_hot", act_fn="square")
    start = 3 + n_context + 1
    columns = torch.eye(stream.d_model, dtype=torch.float64)
    subspaces = {"x": columns[:, :2], "y, prediction": columns[:, 2:3], "moments": columns[:, start : start + 5]}
    schedule = ((0, 0), (1, 1), (len(layers), 2))
    return model, Hypothesis(MomentsThenRidge(penalty=penalty), schedule, subspaces)


def previous_token_then_induction(*, x_dim: int, n_context: int) -> tuple[HookedTransformer, Hypothesis]:
    """Induction on continuous tokens: targets take up the input before them, and the query looks for its own.

    The first layer's head copies each input into "previous" at its target's token, where an MLP notes its squared
    norm; the second layer's head scores `<x, previous> - |previous|² / 2` at targets' tokens and far less at inputs'.
    """
    stream = Stream(token=x_dim, position=2 * n_context + 1, previous=x_dim, square=1, y=1)
    token, position = stream.read("token"), stream.read("position")
    at_x, at_y = position[:, 0:-1:2], position[:, 1::2]  # of the context's points, one after the other
    copy = Head(query=at_y, key=at_x, value=token, output=stream.write("previous"))
    (square,) = stream.write("square")
    norm = [(number, number, square) for number in _numbers(stream, "previous")]
    hidden_inputs = -4 * position[:, 0::2].sum(1, keepdim=True)
    match = Head(
        query=SHARPNESS * torch.cat([token, position.sum(1, keepdim=True)], dim=1),
        key=torch.cat([stream.read("previous"), hidden_inputs - stream.read("square") / 2], dim=1),
        value=token[:, :1],
        output=-stream.write("y"),
    )
    model = assemble(
        stream,
        [Layer([copy], _products(stream, norm + _erased(stream, "square"))), Layer([match])],
        n_context=n_context, x_dim=x_dim, prompt_format="interleaved", positional_embedding_type="one_hot",
        keys="causal", attention="linear,softmax", score_scale=1.0, act_fn="square",
    )  # fmt: skip
    columns = torch.eye(stream.d_model, dtype=torch.float64)
    subspaces = {
        "x, target": columns[:, :x_dim],
        "previous": columns[:, -x_dim - 2 : -1],  # and its squared norm
        "prediction": columns[:, -1:],
    }
    return model, Hypothesis(Induction(partial(best_match, sharpness=SHARPNESS), causal=True), subspaces=subspaces)


def _numbers(stream: Stream, name: str) -> list[Factor]:
    """The entries of a subspace."""
    return [Factor(column) for column in stream.read(name).T]


def _erased(stream: Stream, name: str) -> list[tuple[Factor, Factor, Tensor]]:
    """Products that take a subspace away: each number times 1."""
    nothing = Factor(torch.zeros(stream.d_model, dtype=torch.float64), 1.0)
    return [(number, nothing, -row) for number, row in zip(_numbers(stream, name), stream.write(name), strict=True)]


def _products(stream: Stream, products: Sequence[tuple[Factor, Factor, Tensor]]) -> Hidden:
    """An MLP with the "square" activation that adds `(left right) write`: `4 l r = (l + r)² - (l - r)²`."""
    reads, writes, biases = [], [], []
    for left, right, write in products:
        for sign in (1, -1):
            reads.append(left.read + sign * right.read)
            writes.append(sign * write / 4)
            biases.append(left.bias + sign * right.bias)
    return Hidden(torch.stack(reads, dim=1), torch.stack(writes), torch.tensor(biases, dtype=torch.float64))
