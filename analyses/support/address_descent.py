"""Descent on the query's side with the kernel of a moving address: the algorithm, its transformer, and its fit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm, context_of, count, query_of
from mechicl.base.optimizers import Adam
from mechicl.constructions.vocabulary import Head, Hidden, Layer, Stream, assemble
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts

AddressKernel = Literal["softmax", "linear"]


class AddressDescent(StepwiseAlgorithm):
    """Descent on the query's side: the query reads targets by the kernel of an address, and inputs to move the address.

    `p ← p + Σ_h β_h Σ_i w_hi y_i` and `z ← z - Σ_h γ_h Σ_i w_hi x_i` from `z = x`, where the weights `w_hi` of head h
    are `softmax_i(x_iᵀ A_h z)` or, with a linear kernel, `x_iᵀ A_h z`. With one linear head, `A = I` and `β = γ`, it is
    `QueryDescent`. With `moving_keys` all points move their addresses, and addresses are read instead of inputs:
    `w_hi` is a kernel of `z_iᵀ A_h z`, and the address moves by `Σ_i w_hi z_i`, a step like that of GD++.

    Args:
        matrices: A of each step and head.
        target_rates: β of each step and head.
        address_rates: γ of each step and head.
        kernel: "softmax" or "linear".
        moving_keys: True if context points move their addresses too.
        causal: True if a context point reads only itself and the points before it.
    """

    variables = ("x", "y", "transformed x", "prediction")

    def __init__(
        self,
        matrices: Float[Tensor, "step head x x"],
        target_rates: Float[Tensor, "step head"],
        address_rates: Float[Tensor, "step head"],
        *,
        kernel: AddressKernel = "softmax",
        moving_keys: bool = False,
        causal: bool = False,
    ):
        self.matrices, self.target_rates, self.address_rates = matrices, target_rates, address_rates
        self.n_steps, self.kernel, self.moving_keys, self.causal = len(matrices), kernel, moving_keys, causal
        keys = ", keys that move" if moving_keys else ""
        self.name = f"{kernel} address descent, {count(self.n_steps, 'step')}, {count(matrices.shape[1], 'head')}{keys}"

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """Read targets and inputs by the kernel of every reader's address."""
        keys = self._keys(context)
        if not keys.shape[1]:
            return dict(readers)
        return self._read(k, readers, context, self._weights(self._scores(k, readers["transformed x"], keys), sees))

    def _keys(self, context: State) -> Tensor:
        return context["transformed x" if self.moving_keys else "x"]

    def _read(self, k: int, readers: State, context: State, weights: Tensor) -> State:
        address = readers["transformed x"]
        target_rates, address_rates = (
            rates[k].to(address)[:, None, None] for rates in (self.target_rates, self.address_rates)
        )
        return readers | {
            "prediction": readers["prediction"] + (target_rates * weights).sum(1) @ context["y"],
            "transformed x": address - (address_rates * weights).sum(1) @ self._keys(context),
        }

    def run_query(self, prompts: Prompts) -> tuple[Float[Tensor, "prompt y"], Float[Tensor, "step head prompt point"]]:
        """Return the query's prediction, and its scores in every step, in the prompts' dtype."""
        context, query = self._start(prompts)
        scores = []
        for k in range(self.n_steps):
            scores.append(self._scores(k, query["transformed x"], self._keys(context))[:, :, 0].transpose(0, 1))
            query, context = self.step(k, query, context), self._next_context(k, context)
        return query["prediction"][:, 0], torch.stack(scores)

    def exchange(
        self, prompts: Prompts, sources: Prompts, *, steps: Sequence[int], component: Literal["pattern", "q"]
    ) -> Float[Tensor, "prompt y"]:
        """Predict with the kernel's weights ("pattern") or the addresses ("q") of a run on sources, in some steps.

        Addresses only decide what is read: the query's own address is what moves. `analysis.causes.exchange_patterns`
        does the same in a model.
        """
        (context, query), (other_context, other) = self._start(prompts), self._start(sources)
        for k in range(self.n_steps):
            address = (other if k in steps else query)["transformed x"]
            keys = self._keys(other_context if k in steps and component == "pattern" else context)
            read = self._read(k, query, context, self._weights(self._scores(k, address, keys), None))
            query, other = read, self.step(k, other, other_context)
            context, other_context = self._next_context(k, context), self._next_context(k, other_context)
        return query["prediction"][:, 0]

    def _start(self, prompts: Prompts) -> tuple[State, State]:
        xs, ys = prompts.xs, prompts.ys
        whole = {"x": xs, "y": ys, "transformed x": xs, "prediction": torch.zeros_like(ys)}
        return context_of(whole), query_of(whole)

    def _next_context(self, k: int, context: State) -> State:
        if not self.moving_keys:
            return context
        n = context["x"].shape[1]
        return self.step(k, context, context, context["x"].new_ones(n, n).tril() if self.causal else None)

    def _scores(
        self, k: int, address: Float[Tensor, "prompt reader x"], keys: Float[Tensor, "prompt point x"]
    ) -> Float[Tensor, "prompt head reader point"]:
        """Return `x_iᵀ A_h z` of step k."""
        return (address[:, None] @ self.matrices[k].to(address).mT) @ keys[:, None].mT

    def _weights(self, scores: Tensor, sees: Tensor | None = None) -> Tensor:
        """Return the kernel of scores: readers that see no points read nothing."""
        if self.kernel == "linear":
            return scores if sees is None else scores * sees
        if sees is None:
            return scores.softmax(-1)
        hidden = scores.masked_fill(sees == 0, -torch.inf)
        blind = (sees == 0).all(-1, keepdim=True)
        return (hidden.masked_fill(blind, 0.0).softmax(-1) * sees) if blind.any() else hidden.softmax(-1)


def address_descent(algorithm: AddressDescent, *, n_context: int) -> HookedTransformer:
    """Build a transformer that equals `AddressDescent` to rounding: a known answer for tests of that hypothesis.

    The first layer copies the query's x into its address z, a vector by which the query attends. In each further
    layer, one for each step, head h attends to point i with the score `x_iᵀ A_h z`. It adds the targets that it reads
    to the prediction, and moves z by the inputs that it reads. With `moving_keys` the context points move addresses of
    their own, from which keys are made.
    """
    if algorithm.causal:
        raise ValueError("algorithm must not be causal: every point of a paired prompt attends to the whole context")
    x_dim = algorithm.matrices.shape[-1]
    stream = Stream(x=x_dim, y=1, address=x_dim, prediction=1)
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


@dataclass(frozen=True)
class AddressFit:
    """An address descent that was fitted from one start."""

    algorithm: AddressDescent  # float64
    objective: float  # the minimised value: see `fit_address_descent`
    unexplained: float  # mean squared distance from held-out predictions, relative to the mean square of these targets
    iterations: int  # of L-BFGS
    converged: bool  # whether the fit ended because its objective no longer fell


@torch.enable_grad()
def fit_address_descent(
    prompts: Prompts,
    targets: Float[Tensor, "prompt y"],
    *,
    scores: Float[Tensor, "step head prompt point"] | None = None,
    steps: int,
    heads: int,
    starts: int,
    iterations: int,
    held_out: int,
    seed: int = 0,
    **options: Any,
) -> list[AddressFit]:
    """Fit address descent to a model's predictions, and to its attention scores, from several starts.

    All its parameters are fitted: a matrix and two rates for each step and head. Predictions alone hardly determine
    them, as softmax and linear kernels fit them equally well; scores do better. The objective is the mean squared
    distance from the predictions, relative to their mean square, plus the same for scores, averaged over steps and
    heads. Each start takes 200 steps of Adam on batches of 128 prompts. L-BFGS on all prompts then runs until the
    objective falls by less than 0.1% in 100 iterations.

    Args:
        prompts: the prompts, of which the last `held_out` are only measured on.
        targets: the model's predictions of the query.
        scores: attention scores of the model's query at the context's points, for each step and head; centred over
            points. None to fit predictions alone.
        heads: number of heads in each step.
        starts: number of random initial values.
        iterations: largest number of L-BFGS iterations of a start.
        options: `kernel`, `moving_keys` and `causal` of the algorithm.

    Returns:
        A fit for each start, the one with the smallest objective first.
    """
    n_fitting = len(prompts) - held_out
    x_dim, fitted = prompts.x_dim, prompts.to(dtype=torch.float32)
    power = targets.square().mean().item()
    centred = None if scores is None else centre(scores.float())
    spread = None if centred is None else centred.square().mean((2, 3)).clamp(min=1e-12)

    def objective(values: Sequence[Tensor], rows: Tensor) -> Tensor:
        predicted, found = AddressDescent(*values, **options).run_query(fitted[rows])
        loss = (predicted - targets[rows].float()).square().mean() / power
        if centred is not None and spread is not None:
            distances = (centre(found) - centred[:, :, rows]).square().mean((2, 3))
            loss = loss + (distances / spread).mean()
        if not math.isfinite(loss.item()):
            raise ValueError("the fit diverges")
        return loss

    fits, whole = [], torch.arange(n_fitting)
    for start in range(starts):
        generator = torch.Generator().manual_seed(1000 * seed + start)
        scale = 1 / prompts.n_context if options.get("kernel") == "linear" else 1.0
        noise = 0.1 * torch.randn(steps, heads, x_dim, x_dim, generator=generator)
        rates = torch.full((steps, heads), 1 / heads)
        values = [scale * (torch.eye(x_dim) + noise), rates, rates.clone()]
        for value in values:
            value.requires_grad_(True)
        _adam(values, lambda rows, values=values: objective(values, rows), n_fitting, generator)
        found, n, converged = _lbfgs(values, lambda values=values: objective(values, whole), iterations)
        algorithm = AddressDescent(*(value.detach().double() for value in values), **options)
        own = algorithm.predict(prompts[n_fitting:].to(dtype=torch.float64)) - targets[n_fitting:].double()
        unexplained = own.square().mean().item() / targets[n_fitting:].square().mean().item()
        fits.append(AddressFit(algorithm, found, unexplained, n, converged))
    return sorted(fits, key=lambda fit: fit.objective)


def _adam(
    values: Sequence[Tensor], objective: Callable[[Tensor], Tensor], n_fitting: int, generator: torch.Generator
) -> None:
    optimizer = Adam(values, lr=0.03)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=200)
    for _ in range(200):
        optimizer.zero_grad()
        objective(torch.randint(n_fitting, (128,), generator=generator)).backward()
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        optimizer.step()
        rates.step()


def _lbfgs(values: Sequence[Tensor], objective: Callable[[], Tensor], iterations: int) -> tuple[float, int, bool]:
    """Minimise in place; return the objective, the number of iterations, and True if it no longer fell."""
    optimizer = torch.optim.LBFGS(
        values, max_iter=100, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0
    )

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    n, before = 0, math.inf
    while n < iterations:
        optimizer.step(evaluate)
        n, found = n + 100, objective().item()
        if before - found < 1e-3 * found:
            return found, n, True
        before = found
    return before, n, False


def centre(scores: Tensor) -> Tensor:
    """Scores minus their mean over points, which a softmax ignores."""
    return scores - scores.mean(-1, keepdim=True)
