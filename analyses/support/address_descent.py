"""Fit address descent to a model's predictions and attention scores."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise import AddressDescent
from mechicl.algorithms.stepwise.addresses import AddressKernel
from mechicl.base.optimizers import Adam
from mechicl.base.progress import progress_bar
from mechicl.prompts import Prompts


@torch.enable_grad()
def fit_address_descent(
    prompts: Prompts,
    targets: Float[Tensor, "prompt y"],
    *,
    scores: Float[Tensor, "step head prompt point"] | None = None,
    steps: int = 6,
    heads: int = 4,
    kernel: AddressKernel = "softmax",
    moving_keys: bool = False,
    causal: bool = False,
    iterations: int = 1500,
    batch_size: int = 512,
    learning_rate: float = 0.01,
    held_out: int = 1024,
    seed: int = 0,
    progress: bool | None = None,
) -> tuple[AddressDescent, float]:
    """Fit address descent to a model's predictions, and to its attention scores, by Adam.

    All its parameters are fitted: a matrix and two rates for each step and head. Predictions alone hardly determine
    them, as softmax and linear kernels fit them equally well; scores do.

    Args:
        prompts: the prompts, of which the last `held_out` are only measured on.
        targets: the model's predictions of the query.
        scores: attention scores of the model's query at the context's points, for each step and head; centred over
            points. None to fit predictions alone.
        steps: number of steps.
        heads: number of heads in each step.
        kernel: "softmax" or "linear".
        moving_keys: True for context points that move their addresses too.
        causal: True if a context point reads only itself and the points before it.
        iterations: number of optimizer iterations.
        batch_size: prompts in each of them.
        learning_rate: the largest; it falls to 0 along a cosine.
        seed: seed of initial values and batches.

    Returns:
        The fitted algorithm, float64, and its mean squared distance from held-out predictions, relative to the mean
        square of the targets.
    """
    if scores is not None and scores.shape[:2] != (steps, heads):
        raise ValueError(f"scores must be of {steps} steps and {heads} heads, got {tuple(scores.shape[:2])}")
    n_fitting = len(prompts) - held_out
    if n_fitting < 1:
        raise ValueError(f"held_out must be below the number of prompts, {len(prompts)}; got {held_out}")
    generator = torch.Generator().manual_seed(seed)
    x_dim, fitted = prompts.x_dim, prompts.to(dtype=torch.float32)
    scale = 1.0 if kernel == "softmax" else 1 / prompts.n_context
    noise = 0.1 * torch.randn(steps, heads, x_dim, x_dim, generator=generator)
    values = [scale * (torch.eye(x_dim) + noise), torch.full((steps, heads), 1 / heads)]
    values.append(values[1].clone())
    for value in values:
        value.requires_grad_(True)
    options = {"kernel": kernel, "moving_keys": moving_keys, "causal": causal}
    optimizer = Adam(values, lr=learning_rate)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=iterations)
    power = targets.square().mean().item()
    centred = None if scores is None else _centred(scores.float())
    spread = None if centred is None else centred.square().mean((2, 3)).clamp(min=1e-12)
    for _ in progress_bar(range(iterations), unit="iteration", progress=progress, desc="address descent"):
        rows = torch.randint(n_fitting, (batch_size,), generator=generator)
        predicted, found = AddressDescent(*values, **options).run_query(fitted[rows])
        loss = (predicted - targets[rows].float()).square().mean() / power
        if centred is not None and spread is not None:
            distances = (_centred(found) - centred[:, :, rows]).square().mean((2, 3))
            loss = loss + (distances / spread).mean()
        optimizer.zero_grad()
        if not math.isfinite(loss.item()):
            raise ValueError("the fit diverges: take a smaller learning_rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        optimizer.step()
        rates.step()
    algorithm = AddressDescent(*(value.detach().double() for value in values), **options)
    distance = (algorithm.predict(prompts[n_fitting:].to(dtype=torch.float64)) - targets[n_fitting:].double()).square()
    return algorithm, distance.mean().item() / targets[n_fitting:].square().mean().item()


def _centred(scores: Tensor) -> Tensor:
    """Scores minus their mean over points, which a softmax ignores."""
    return scores - scores.mean(-1, keepdim=True)
