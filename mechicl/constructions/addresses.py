"""A transformer that runs descent on the query's side by softmax or linear heads."""

import torch
from torch import Tensor

from mechicl.algorithms.stepwise import AddressDescent
from mechicl.base.arguments import Count, checked
from mechicl.constructions.vocabulary import Head, Hidden, Layer, Stream, assemble
from mechicl.models import HookedTransformer


@checked
def address_descent(algorithm: AddressDescent, *, n_context: Count, y_dim: Count = 1) -> HookedTransformer:
    """Build a transformer that equals `AddressDescent` to rounding: a known answer for tests of that hypothesis.

    The first layer copies the query's x into its address z, a vector by which the query attends. In each further
    layer, one for each step, head h attends to point i with the score `x_iᵀ A_h z`. It adds the targets that it reads
    to the prediction, and moves z by the inputs that it reads. With `moving_keys` the context points move addresses of
    their own, from which keys are made.

    Args:
        algorithm: the algorithm; causal ones are not built.
        n_context: number of context points of the config.
        y_dim: dimension of the targets.

    Example:
        >>> matrices, rates = torch.eye(5).expand(2, 1, 5, 5), torch.ones(2, 1)
        >>> algorithm = algorithms.stepwise.AddressDescent(matrices, rates, 0.5 * rates)
        >>> constructions.address_descent(algorithm, n_context=20).cfg.n_layers
        3
    """
    if algorithm.causal:
        raise ValueError("algorithm must not be causal: every point of a paired prompt attends to the whole context")
    x_dim = algorithm.matrices.shape[-1]
    stream = Stream(x=x_dim, y=y_dim, address=x_dim, prediction=y_dim)
    x, y, address = stream.read("x"), stream.read("y"), stream.read("address")
    keys = address if algorithm.moving_keys else x
    values = torch.cat([keys, y], dim=1)
    copy = Layer(mlp=Hidden(read=x, write=stream.write("address")))

    def head(matrix: Tensor, target_rate: Tensor, address_rate: Tensor) -> Head:
        moved = [-address_rate * stream.write("address"), -target_rate * stream.write("prediction")]
        return Head(query=address @ matrix.double().mT, key=keys, value=values, output=torch.cat(moved))

    steps = zip(algorithm.matrices, algorithm.target_rates, algorithm.address_rates, strict=True)
    layers = [Layer([head(*each) for each in zip(*step, strict=True)]) for step in steps]
    # a context point's y stays its target: the query's y starts at 0, and takes the prediction at the end
    answer = Hidden(read=stream.read("prediction"), write=stream.write("y"))
    layers[-1] = Layer(layers[-1].heads, answer)
    return assemble(
        stream, [copy, *layers], n_context=n_context, attention=algorithm.kernel, act_fn="identity", score_scale=1.0
    )
