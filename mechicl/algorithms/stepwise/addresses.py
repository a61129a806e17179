"""Descent on the query's side with the kernel of a moving address, and its fit to a model."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm, context_of, count, query_of
from mechicl.base.arguments import checked
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

    Example:
        >>> one = torch.ones(3, 1, dtype=torch.float64)
        >>> descent = AddressDescent(torch.eye(10).expand(3, 1, 10, 10), 0.1 * one, 0.1 * one, kernel="linear")
        >>> prompts = LinearRegression().sample(4, seed=0, dtype=torch.float64)
        >>> torch.allclose(descent.predict(prompts), algorithms.gradient_descent(prompts, 3, step_size=0.1).query()[0])
        True
    """

    variables = ("x", "y", "transformed x", "prediction")

    @checked
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

    @checked(undefined=True)
    def run_query(self, prompts: Prompts) -> tuple[Float[Tensor, "prompt y"], Float[Tensor, "step head prompt point"]]:
        """Return the query's prediction, and its scores in every step, in the prompts' dtype."""
        context, query = self._start(prompts)
        scores = []
        for k in range(self.n_steps):
            scores.append(self._scores(k, query["transformed x"], self._keys(context))[:, :, 0].transpose(0, 1))
            query, context = self.step(k, query, context), self._next_context(k, context)
        return query["prediction"][:, 0], torch.stack(scores)

    @checked(undefined=True)
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
        hidden = scores.masked_fill(sees == 0, -torch.inf).masked_fill((sees == 0).all(-1, keepdim=True), 0.0)
        return hidden.softmax(-1) * sees
