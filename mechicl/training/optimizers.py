"""The optimisers of a run: Adam, and SOAP, which is Adam in each weight matrix's own axes."""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.base.optimizers import Adam, Unguarded
from mechicl.base.precision import at_least_float32

OptimizerName = Literal["adam", "soap"]
TIE = 1e-6  # relative to their mean, eigenvalues that differ by less count as equal


def make_optimizer(
    name: OptimizerName, weights: Float[Tensor, "seed weight"], shapes: Iterable[torch.Size], learning_rate: float
) -> torch.optim.Optimizer:
    """The optimiser of an ensemble's weights; `shapes` are those of the weights in a row, in order."""
    if name == "adam":
        return Adam([weights], lr=learning_rate, fused=weights.device.type in ("cpu", "cuda"))
    return SOAP(weights, shapes, lr=learning_rate)


def adam_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of torch's Adam for the one tensor that it updates; made if it has not taken a step."""
    (weights,) = optimizer.param_groups[0]["params"]
    if not optimizer.state[weights]:
        means = {name: torch.zeros_like(weights).detach() for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weights] = {"step": torch.zeros((), device=weights.device), **means}
    return {name: optimizer.state[weights][name] for name in ("step", "exp_avg", "exp_avg_sq")}


def adam_update(gradient: Tensor, state: dict[str, Tensor], settings: dict[str, Any], rate: Tensor) -> Tensor:
    """Adam's step by torch's formula, to be subtracted from the weights; for code that is compiled. Changes `state`."""
    beta, beta_2 = settings["betas"]
    step = state["step"].add_(1).double()
    gradient = at_least_float32(gradient)  # its square may be 0 in float16, and eps is
    mean = state["exp_avg"].to(gradient).lerp(gradient, 1 - beta)
    second = state["exp_avg_sq"].to(gradient).mul(beta_2).addcmul(gradient, gradient, value=1 - beta_2)
    state["exp_avg"].copy_(mean)
    state["exp_avg_sq"].copy_(second)
    root = second.sqrt() / (1 - beta_2**step).sqrt() + settings["eps"]
    return rate / (1 - beta**step) * mean / root


class SOAP(Unguarded):
    """Adam in the eigenbases of Shampoo's two factors, for many small matrices at once.

    A matrix W with gradient G has running means of G Gᵀ and Gᵀ G. Adam's second moment is kept in the axes of their
    eigenvectors, which are recomputed every few steps; the update is rotated back. Where a loss is ill-conditioned
    along directions that mix the entries of a matrix, this converges faster than Adam in the entries' axes.

    The last two axes of a weight are its matrix, axes before them (heads) count matrices. Vectors have Adam's update,
    and so do sides of a matrix that are longer than `max_size`. Source: Vyas et al. 2024, algorithm 3, with
    eigenvectors in full in place of one power iteration; eps is relative.

    Args:
        weights: the flattened weights of several models, one row per model; no operation mixes rows.
        shapes: shapes of the weights that make up a row, in order.
        lr: learning rate.
        betas: decay rates of the mean gradient, and of the second moments and factors.
        every: training steps between two computations of eigenvectors.
        eps: added to the root of the second moment, in units of its root mean over the matrix, so that rounding in the
            gradient stays small in the update.
        max_size: longest side of a matrix whose eigenvectors are computed.

    Example:
        >>> weights = torch.zeros(2, 12, requires_grad=True)  # two models with a matrix of 3 x 4
        >>> optimizer = SOAP(weights, [torch.Size([3, 4])], lr=0.1)
        >>> (weights - 1).square().sum().backward()
        >>> optimizer.step()
        >>> weights[0, 0].item() > 0
        True
    """

    @checked
    def __init__(
        self,
        weights: Float[Tensor, "seed weight"],
        shapes: Iterable[torch.Size],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        every: int = 10,
        eps: float = 1e-5,
        max_size: int = 1024,
    ):
        super().__init__([weights], {"lr": lr, "betas": betas, "every": every, "eps": eps, "max_size": max_size})
        self.groups: dict[tuple[int, int], Tensor] = {}  # columns of the matrices of each size, `[matrix row column]`
        start, columns = 0, {}
        for shape in shapes:
            rows, width = (shape[-2], shape[-1]) if len(shape) > 1 else (1, prod(shape))
            entries = torch.arange(start, start + prod(shape), device=weights.device)
            columns.setdefault((rows, width), []).append(entries.reshape(-1, rows, width))
            start += prod(shape)
        if start != weights.shape[1]:
            raise ValueError(f"shapes make {start} weights, but a row of weights has {weights.shape[1]}")
        self.groups = {size: torch.cat(parts) for size, parts in columns.items()}

    @checked
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all weights once from their gradients; return the loss that `closure` computes, if it is given."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for settings in self.param_groups:
            (weights,) = settings["params"]
            if weights.grad is not None:
                self._step(weights, weights.grad, settings)
        return loss

    def _step(self, weights: Tensor, gradient: Tensor, settings: dict[str, Any]) -> None:
        state, (beta, beta_2) = self.state[weights], settings["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state |= {"exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}
        state["step"] += 1
        step = int(state["step"])
        state["exp_avg"].lerp_(gradient, 1 - beta)
        mean = state["exp_avg"] / (1 - beta**step)
        due = (step - 1) % settings["every"] == 0
        for (rows, width), entries in self.groups.items():
            turns = []
            here = gradient[:, entries]  # [seed matrix row column]
            for side, size in (("left", rows), ("right", width)):
                if rows == 1 or size > settings["max_size"]:
                    continue
                name, factor = f"{side}_{rows}x{width}", here @ here.mT if side == "left" else here.mT @ here
                state.setdefault(name, torch.zeros(factor.shape).to(factor)).lerp_(factor, 1 - beta_2)
                if due:
                    state[f"{name}_axes"] = eigenvectors(state[name])
                turns.append((side, state[f"{name}_axes"]))
            second = state["exp_avg_sq"][:, entries].lerp(_turn(here, turns).square(), 1 - beta_2)
            state["exp_avg_sq"][:, entries] = second
            second = second / (1 - beta_2**step)
            floor = settings["eps"] * second.mean(dim=(-2, -1), keepdim=True).sqrt()
            root = second.sqrt() + floor + torch.finfo(second.dtype).tiny
            update = _turn(_turn(mean[:, entries], turns) / root, turns, back=True)
            weights[:, entries] = weights[:, entries] - settings["lr"] * update


def eigenvectors(factors: Float[Tensor, "*matrix size size"]) -> Float[Tensor, "*matrix size size"]:
    """Orthonormal eigenvectors of symmetric matrices, as columns; non-finite entries count as 0.

    For equal eigenvalues the weights' own axes are used, so that rounding does not choose.
    """
    scale = factors.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(factors.dtype).tiny)
    relative = torch.nan_to_num(factors / scale[..., None, None], posinf=0.0, neginf=0.0)
    ties = torch.linspace(0, TIE, factors.shape[-1], dtype=factors.dtype, device=factors.device)
    return torch.linalg.eigh(relative + ties.diag())[1].contiguous()


def _turn(matrices: Tensor, turns: list[tuple[str, Tensor]], *, back: bool = False) -> Tensor:
    for side, axes in turns:
        turn = axes.mT if (side == "left") != back else axes
        matrices = turn @ matrices if side == "left" else matrices @ turn
    return matrices


def clip_each_seed(gradient: Float[Tensor, "seed weight"], bound: float) -> None:
    """Scale each seed's gradient, in place, to a norm of at most `bound`."""
    gradient.mul_((bound / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0))
