"""Models whose algorithm is known, each with its hypothesis: the ground truth for tests of hypotheses."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mechicl.algorithms.stepwise import (
    AfterCopying,
    Hypothesis,
    Induction,
    KernelReading,
    NewtonSteps,
    OnlineDescent,
    ResidualDescent,
    ResidualRidge,
    StepwiseAlgorithm,
)
from mechicl.algorithms.stepwise.base import count
from mechicl.algorithms.stepwise.copying import best_match
from mechicl.algorithms.stepwise.descent import DiscountedDescent, nearest
from mechicl.algorithms.stepwise.inverses import MomentsThenRidge
from mechicl.base.arguments import NonNegative, checked
from mechicl.checkpoints import load
from mechicl.constructions.copying import copy_then_gradient_descent
from mechicl.constructions.gradient_descent import (
    gd_plus_plus,
    gradient_descent,
    kernel_gradient_descent,
    preconditioned_gd,
    softmax_gradient_descent,
)
from mechicl.constructions.hiding import hide
from mechicl.constructions.newton import newton
from mechicl.constructions.operations import div, erased, joined, product
from mechicl.constructions.recurrent import (
    discounted_averaging,
    discounted_gradient_descent,
    online_gradient_descent,
    recursive_least_squares,
)
from mechicl.constructions.trained import recipes
from mechicl.constructions.vocabulary import Head, Hidden, Layer, Stream, assemble
from mechicl.models import HookedTransformer
from mechicl.tasks import LinearRegression, Task

X_DIM, N_CONTEXT = 5, 20
STEP_SIZE, GAMMA, ALPHA = 0.14, 0.03, 0.012  # near the largest with which no prompt of the task diverges
GROWING_RATES = (0.14, 0.4, 1.3, 3.5), (0.06, 0.2, 0.6, 1.5)
"""Step sizes and γ of GD++ that grow as the eigenvalues shrink: each γ leaves them below `4 / (27 γ)`."""
POINT = {"x": Stream(x=X_DIM, y=1).read("x"), "residual": Stream(x=X_DIM, y=1).read("y")}
"""Subspaces of the stream of paired constructions."""


@dataclass(frozen=True, eq=False)
class KnownModel:
    """A model, the algorithm that it runs, and its task.

    Attributes:
        name: name in tables, such as "GD++, 2 steps".
        model: the `HookedTransformer`.
        hypothesis: the true `stepwise.Hypothesis`: the algorithm, the steps that each layer computes, and the subspaces
            of the stream that carry its variables.
        task: distribution of prompts for which the parameters were chosen.
        exact: True if the model equals the algorithm up to rounding.
    """

    name: str
    model: Any
    hypothesis: Hypothesis
    task: Task
    exact: bool = True


@checked
def known_models(
    *, trained: bool = False, recurrent: bool = False, hidden: bool = False, noise: NonNegative = 0.0, seed: int = 0
) -> list[KnownModel]:
    """Return models whose algorithm is known, plain or obfuscated: ground truth for tests of interpretability methods.

    Args:
        trained: return models that were trained so that exchanging the algorithm's variables between two prompts has
            the same effect in the model as in the algorithm (interchange training). They come with the package. By
            default, models written by hand.
        recurrent: return layers with a state, written by hand.
        hidden: obfuscate the models with `hide`: a rotated stream, random gauges and distractors that read each other.
        noise: noise added to the weights of hidden models, relative to the root mean square of each matrix.

    Returns:
        `KnownModel` objects: `name`, `model`, `hypothesis` (with the algorithm), `task` and `exact`.

    Example:
        >>> [known.name for known in known_models()][:3]
        ['gradient descent, 1 step', 'gradient descent, 2 steps', 'gradient descent, 4 steps']
    """
    if noise and not hidden:
        raise ValueError(f"noise must be 0 for plain models, got {noise}: add hidden=True")
    if trained and recurrent:
        raise ValueError("trained and recurrent are different sets of models: set one of them")
    if trained:
        plain = [
            KnownModel(recipe.title, load(name).double(), recipe.hypothesis, recipe.config.task, exact=False)
            for name, recipe in recipes().items()
        ]
    else:
        plain = list(_recurrent_models() if recurrent else _models())
    if not hidden:
        return plain
    return [_hidden(known, seed + i, noise) for i, known in enumerate(plain)]


def _models() -> Iterator[KnownModel]:
    task = LinearRegression(x_dim=X_DIM, n_context=N_CONTEXT)
    sizes: dict[str, Any] = {"x_dim": X_DIM, "n_context": N_CONTEXT}
    for steps in (1, 2, 4, 8):
        model = gradient_descent(**sizes, step_size=STEP_SIZE, steps=steps)
        hypothesis = Hypothesis(ResidualDescent(steps, step_size=STEP_SIZE), subspaces=POINT)
        yield KnownModel(f"gradient descent, {count(steps, 'step')}", model, hypothesis, task)
    for steps in (2, 3, 4, 8):
        rates: dict[str, Any] = {"step_size": STEP_SIZE, "gamma": GAMMA}
        if steps <= len(GROWING_RATES[0]):
            rates = {"step_size": GROWING_RATES[0][:steps], "gamma": GROWING_RATES[1][:steps]}
        model = gd_plus_plus(**sizes, steps=steps, **rates)
        hypothesis = Hypothesis(ResidualDescent(steps, **rates), subspaces=POINT)
        yield KnownModel(f"GD++, {count(steps, 'step')}", model, hypothesis, task)
    matrix = torch.diag(torch.linspace(1, 4, X_DIM, dtype=torch.float64))
    for steps in (1, 3):
        model = preconditioned_gd(**sizes, preconditioner=matrix, steps=steps)
        algorithm = ResidualDescent(steps, step_size=1 / N_CONTEXT, preconditioner=matrix)
        hypothesis = Hypothesis(algorithm, subspaces=POINT)
        yield KnownModel(f"preconditioned gradient descent, {count(steps, 'step')}", model, hypothesis, task)
    yield from (_newton(iterations, "linear", task) for iterations in (3, 5, 7))
    yield _newton(4, "relu", task)
    for steps in (1, 3):
        model = copy_then_gradient_descent(**sizes, step_size=STEP_SIZE, steps=steps)
        hypothesis = Hypothesis(AfterCopying(ResidualDescent(steps, step_size=STEP_SIZE)))
        yield KnownModel(f"copying, then gradient descent, {count(steps, 'step')}", model, hypothesis, task)
    model = softmax_gradient_descent(**sizes, step_size=STEP_SIZE, score_scale=0.01)
    hypothesis = Hypothesis(ResidualDescent(1, step_size=STEP_SIZE), subspaces=POINT)
    yield KnownModel("gradient descent by softmax heads with a sink, 1 step", model, hypothesis, task, exact=False)
    yield _kernel_descent(task)
    yield _nearest_neighbour(task)
    yield _online_descent()
    yield _two_layers_a_step(task)
    yield _gradient_descent_with_momentum(task)
    model, hypothesis = two_steps_in_a_layer(**sizes, step_size=STEP_SIZE, layers=3)
    yield KnownModel("gradient descent, 6 steps, two in a layer", model, hypothesis, task)
    noisy = LinearRegression(x_dim=2, n_context=10, noise_std=0.3)
    model, hypothesis = ridge_by_cramers_rule(n_context=10, penalty=0.4, largest=25.0)
    yield KnownModel("ridge, by Cramer's rule", model, hypothesis, noisy)
    model, hypothesis = previous_token_then_induction(**sizes)
    yield KnownModel("previous token, then induction", model, hypothesis, task)


def _recurrent_models() -> Iterator[KnownModel]:
    """Layers with a state. Their points are causal: each reads itself and those before it."""
    sizes: dict[str, Any] = {"x_dim": X_DIM, "n_context": N_CONTEXT}
    rate, penalty, discount = 0.8, 0.3, 0.9
    total = sum(discount**k for k in range(N_CONTEXT))
    single: list[tuple[str, HookedTransformer, StepwiseAlgorithm]] = [
        ("DeltaNet, online gradient descent", online_gradient_descent(**sizes, step_size=rate),
         OnlineDescent(N_CONTEXT, step_size=rate, causal=True)),
        ("Mesa, ridge", recursive_least_squares(**sizes, penalty=penalty),
         ResidualRidge(1, penalty=penalty, causal=True)),
        ("gated linear, discounted gradient descent",
         discounted_gradient_descent(**sizes, step_size=STEP_SIZE, discount=discount),
         DiscountedDescent(1, step_size=STEP_SIZE, discount=discount)),
        ("Mamba-2, discounted averaging", discounted_averaging(**sizes, discount=discount),
         DiscountedDescent(1, step_size=1 / total, discount=discount)),
    ]  # fmt: skip
    double: list[tuple[str, HookedTransformer, StepwiseAlgorithm]] = [
        ("DeltaNet, 2 layers", _stacked(single[0][1]), OnlineDescent(N_CONTEXT, step_size=rate, passes=2, causal=True)),
        ("Mesa, 2 layers", _stacked(single[1][1]), ResidualRidge(2, penalty=penalty, causal=True)),
        ("gated linear, 2 layers", _stacked(single[2][1]),
         DiscountedDescent(2, step_size=STEP_SIZE, discount=discount)),
    ]  # fmt: skip
    task = LinearRegression(**sizes)
    for name, model, algorithm in single + double:
        layers = model.cfg.n_layers
        schedule = tuple((k, k * algorithm.n_steps // layers) for k in range(layers + 1))
        yield KnownModel(name, model, Hypothesis(algorithm, schedule, POINT), task)


def _stacked(model: HookedTransformer) -> HookedTransformer:
    """Run the model's one layer twice."""
    deep = HookedTransformer(model.cfg.replace(n_layers=2, recurrent=True))
    deep.blocks[0].load_state_dict(model.blocks[0].state_dict())
    return deep.eval()


def _newton(iterations: int, attention: Literal["linear", "relu"], task: Task) -> KnownModel:
    model = newton(x_dim=X_DIM, n_context=N_CONTEXT, steps=iterations, alpha=ALPHA, attention=attention)
    stream = Stream(x=X_DIM, y=1, inverse=X_DIM)
    # the prediction is written, with a minus, where the context's tokens have their targets
    parts = {"x": "x", "y, prediction": "y", "inverse times x": "inverse"}
    subspaces = {variables: stream.read(part) for variables, part in parts.items()}
    heads = "" if attention == "linear" else ", ReLU heads"
    hypothesis = Hypothesis(NewtonSteps(iterations, alpha=ALPHA), subspaces=subspaces)
    return KnownModel(f"Newton, {iterations} iterations{heads}", model, hypothesis, task)


def _kernel_descent(task: Task) -> KnownModel:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(X_DIM, 12, generator=generator, dtype=torch.float64)
    bias = torch.randn(12, generator=generator, dtype=torch.float64)

    def product_of_features(readers: Tensor, points: Tensor) -> Tensor:
        return (readers @ weights + bias).relu() @ (points @ weights + bias).relu().mT

    step_size = 0.003
    model = kernel_gradient_descent(
        weights=weights, bias=bias, n_context=N_CONTEXT, step_size=step_size, steps=3, act_fn="relu"
    )
    algorithm = KernelReading(product_of_features, 3, step_size=step_size, name="kernel gradient descent, 3 steps")
    return KnownModel("kernel gradient descent, 3 steps", model, Hypothesis(algorithm), task)


def _nearest_neighbour(task: Task) -> KnownModel:
    """Square the inputs in an MLP; a softmax head scores `<x, x_i> - |x_i|²/2`, so sharply that one key takes all."""
    stream = Stream(x=X_DIM, y=1, square=1, one=1)
    x, scale = stream.read("x"), 1e6
    squares = Hidden(read=x, write=torch.ones(X_DIM, 1, dtype=torch.float64) @ stream.write("square"))
    ones = Hidden(
        read=torch.cat([squares.read, torch.zeros(stream.d_model, 1, dtype=torch.float64)], dim=1),
        write=torch.cat([squares.write, stream.write("one")]),
        bias=torch.cat([torch.zeros(X_DIM), torch.ones(1)]).double(),
    )
    look = Head(
        query=torch.cat([x, stream.read("one")], dim=1),
        key=torch.cat([x, -0.5 * stream.read("square")], dim=1),
        value=stream.read("y"),
        output=-stream.write("y"),
    )
    model = assemble(
        stream, [[look]], n_context=N_CONTEXT, attention="softmax", score_scale=scale, act_fn="square", input_mlp=ones
    )
    hypothesis = Hypothesis(KernelReading(nearest, name="nearest neighbour"))
    return KnownModel("nearest neighbour", model, hypothesis, task, exact=False)


def _online_descent() -> KnownModel:
    """Before each step an MLP copies the residual of the step's point, and no other, to where attention reads it."""
    n, bound, step_size = 6, 50.0, 0.5
    task = LinearRegression(x_dim=X_DIM, n_context=n)
    stream = Stream(x=X_DIM, y=1, position=n + 1, turn=1)
    y, x = stream.read("y"), stream.read("x")

    def select(k: int | None) -> Hidden:
        """Set `turn ← y` at point k and 0 elsewhere: relu(±y + bound (position_k - 1)), minus the old turn."""
        turn, write = stream.read("turn"), stream.write("turn")
        gate = bound * (stream.read("position")[:, k : k + 1] if k is not None else 0 * y)
        read = torch.cat([y + gate, -y + gate, turn, -turn], dim=1)
        bias = torch.tensor([-bound, -bound, 0.0, 0.0], dtype=torch.float64)
        return Hidden(read, torch.cat([write, -write, -write, write]), bias)

    nothing = Head(x, x, y, 0 * stream.write("y"))
    step = Head(query=x, key=x, value=stream.read("turn"), output=-step_size * stream.write("y"))
    layers = [Layer([nothing], select(0))]
    layers += [Layer([step], select(k + 1 if k + 1 < n else None)) for k in range(n)]
    model = assemble(stream, layers, n_context=n, positional_embedding_type="one_hot", act_fn="relu", keys="context")
    hypothesis = Hypothesis(OnlineDescent(n, step_size=step_size))
    return KnownModel("online gradient descent, 6 points", model, hypothesis, task)


def _two_layers_a_step(task: Task) -> KnownModel:
    """Write each step of gradient descent into "change" by attention; the next layer's MLP adds it to the residual."""
    steps = 3
    stream = Stream(x=X_DIM, y=1, change=1)
    x, y, change = stream.read("x"), stream.read("y"), stream.read("change")
    read = Head(query=x, key=x, value=y, output=-STEP_SIZE * stream.write("change"))
    nothing = Head(x, x, y, 0 * stream.write("y"))
    apply = Hidden(read=change, write=stream.write("y") - stream.write("change"))
    model = assemble(stream, [Layer([read]), Layer([nothing], apply)] * steps, n_context=N_CONTEXT, act_fn="identity")
    schedule = tuple((2 * k, k) for k in range(steps + 1))
    hypothesis = Hypothesis(ResidualDescent(steps, step_size=STEP_SIZE), schedule=schedule)
    return KnownModel("gradient descent, 3 steps of two layers", model, hypothesis, task)


def _gradient_descent_with_momentum(task: Task) -> KnownModel:
    """Add to a velocity by attention; an MLP adds the velocity to the residual and lets it decay."""
    steps, momentum, step_size = 4, 0.3, 0.1
    stream = Stream(x=X_DIM, y=1, velocity=1)
    x, velocity = stream.read("x"), stream.read("velocity")
    # between layers the stream has β v: attention adds a Σ r_i <x_i, x>, then the MLP subtracts it from the residual
    pull = Head(query=x, key=x, value=stream.read("y"), output=step_size * stream.write("velocity"))
    move = Hidden(read=velocity, write=(momentum - 1) * stream.write("velocity") - stream.write("y"))
    model = assemble(stream, [Layer([pull], move)] * steps, n_context=N_CONTEXT, act_fn="identity")
    algorithm = ResidualDescent(steps, step_size=step_size, momentum=momentum)
    return KnownModel("gradient descent with momentum, 4 steps", model, Hypothesis(algorithm), task)


def _hidden(known: KnownModel, seed: int, noise: float) -> KnownModel:
    prompts = known.task.sample(32, seed=seed, dtype=torch.float64)
    copy, old = hide(known.model, seed=seed, junk_prompts=prompts, noise=noise), known.hypothesis
    subspaces = {name: copy.stream.T @ columns for name, columns in old.subspaces.items()}
    hypothesis = Hypothesis(old.algorithm, old.schedule, subspaces)
    return KnownModel(f"{known.name}, hidden", copy.model, hypothesis, known.task, known.exact and not noise)


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
    schedule = tuple((k, 2 * k) for k in range(layers + 1))
    return model, Hypothesis(ResidualDescent(2 * layers, step_size=step_size), schedule, {"x": x, "residual": y})


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
    moments = torch.cat([stream.read("spread"), stream.read("cross")], dim=1)
    subspaces = {"x": x, "y, prediction": y, "moments": moments}
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
    subspaces = {
        "x, target": token,
        "previous": torch.cat([previous, stream.read("square")], dim=1),
        "prediction": stream.read("y"),
    }
    return model, Hypothesis(Induction(partial(best_match, sharpness=SHARPNESS), causal=True), subspaces=subspaces)
