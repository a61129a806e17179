"""Models for hypotheses without a theorem: two steps in a layer, ridge by Cramer's rule, induction.

Each function returns a float64 model and the hypothesis on it; `known_models` lists them.
"""

from functools import partial

import torch

from mechicl.algorithms.stepwise import Hypothesis, Induction, ResidualDescent
from mechicl.algorithms.stepwise.copying import best_match
from mechicl.algorithms.stepwise.inverses import MomentsThenRidge
from mechicl.constructions.operations import div, erased, joined, product
from mechicl.constructions.vocabulary import Head, Layer, Stream, assemble
from mechicl.models import HookedTransformer

SHARPNESS = 1e3  # of `best_match`: so high that hardly any prompt has a second point with weight


def two_steps_in_a_layer(
    *, x_dim: int, n_context: int, step_size: float, layers: int
) -> tuple[HookedTransformer, Hypothesis]:
    """Build gradient descent with two steps in every layer.

    Two steps from the residuals r subtract `2a Σ_i r_i <x_i, x> - a² B S x` from each residual, with `B = Σ_i r_i x_i`
    and `S = Σ_i x_iᵀ x_i`. Heads compute the first term, B and `S x`; the MLP, whose activation is the square, adds the
    product of the last two and removes them from the stream.
    """
    stream = Stream(x=x_dim, y=1, position=n_context + 1, moment=x_dim, spread=x_dim)
    x, y, write = stream.read("x"), stream.read("y"), stream.write("y")
    one = stream.read("position").sum(1, keepdim=True)
    heads = [
        Head(query=x, key=x, value=y, output=-2 * step_size * write),
        Head(query=one, key=y, value=x, output=stream.write("moment")),
        Head(query=x, key=x, value=x, output=stream.write("spread")),
    ]
    second = product(stream.read("moment"), stream.read("spread"), step_size**2 * write.expand(x_dim, -1))
    mlp = joined(second, erased(stream, "moment", "spread"))
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
    """Build ridge regression in 2 dimensions in closed form: one layer sums moments, and MLPs solve for the weights.

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
    first, mixed, second = stream.read("spread").T
    cross_1, cross_2 = stream.read("cross").T
    (to_1, to_2), (det,) = stream.write("solution"), stream.write("det")  # the solution is det times the weights
    factors = [
        (second, cross_1, to_1), (mixed, cross_2, -to_1),
        (first, cross_2, to_2), (mixed, cross_1, -to_2),
        (first, second, det), (mixed, mixed, -det),
    ]  # fmt: skip
    left, right, write = map(torch.stack, zip(*factors, strict=True))
    on_left, on_right = penalty * torch.tensor([[1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 0]], dtype=torch.float64)
    solve = product(left.T, right.T, write, on_left, on_right)
    numerator = -stream.write("numerator").expand(2, -1)  # minus: of y, the prediction is minus
    layers = [
        Layer(gather),
        Layer(mlp=joined(solve, erased(stream, "solution", "det"))),
        Layer(mlp=joined(product(x, stream.read("solution"), numerator), erased(stream, "numerator"))),
        *div(stream, "numerator", "det", "y", scratch="error", low=penalty**2, high=largest, steps=12),
    ]
    model = assemble(stream, layers, n_context=n_context, positional_embedding_type="one_hot", act_fn="square")
    start = 3 + n_context + 1
    columns = torch.eye(stream.d_model, dtype=torch.float64)
    subspaces = {"x": columns[:, :2], "y, prediction": columns[:, 2:3], "moments": columns[:, start : start + 5]}
    schedule = ((0, 0), (1, 1), (len(layers), 2))
    return model, Hypothesis(MomentsThenRidge(penalty=penalty), schedule, subspaces)


def previous_token_then_induction(*, x_dim: int, n_context: int) -> tuple[HookedTransformer, Hypothesis]:
    """Build induction on continuous tokens: the query attends to the target whose input is nearest.

    The first layer's head copies each input into "previous" at its target's token, where an MLP computes its squared
    norm; the second layer's head scores `<x, previous> - |previous|² / 2` at targets' tokens and far less at inputs'.
    """
    stream = Stream(token=x_dim, position=2 * n_context + 1, previous=x_dim, square=1, y=1)
    token, position = stream.read("token"), stream.read("position")
    at_x, at_y = position[:, 0:-1:2], position[:, 1::2]  # of the context's points, one after the other
    copy = Head(query=at_y, key=at_x, value=token, output=stream.write("previous"))
    previous = stream.read("previous")
    norm = product(previous, previous, stream.write("square").expand(x_dim, -1))
    hidden_inputs = -4 * position[:, 0::2].sum(1, keepdim=True)
    match = Head(
        query=SHARPNESS * torch.cat([token, position.sum(1, keepdim=True)], dim=1),
        key=torch.cat([previous, hidden_inputs - stream.read("square") / 2], dim=1),
        value=token[:, :1],
        output=-stream.write("y"),
    )
    model = assemble(
        stream,
        [Layer([copy], joined(norm, erased(stream, "square"))), Layer([match])],
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
