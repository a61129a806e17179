"""Compression of a model into a narrower stream, in superposition, by training it to imitate the original."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import mse_loss

from mechicl.base.arguments import Count, Natural, Positive, checked
from mechicl.base.optimizers import Adam
from mechicl.base.progress import progress_bar
from mechicl.constructions.hiding import check_basis_free, in_another_stream
from mechicl.models import HookedTransformer
from mechicl.models.transformer.config_rules import check_attends
from mechicl.prompts import Prompts

_BATCH = 64


@dataclass(frozen=True, eq=False)
class CompressedModel:
    """A model in a narrower stream, and how well it imitates the original; see `compress`."""

    model: HookedTransformer
    stream: Float[Tensor, "d_model new_d_model"]
    projected: float
    trained: float


@checked
def compress(
    model: HookedTransformer, prompts: Prompts | Int[Tensor, "prompt pos"], *, d_model: Count, steps: Natural = 600,
    learning_rate: Positive = 1e-3, seed: int = 0, progress: bool | None = None,
) -> CompressedModel:  # fmt: skip
    """Move a model into a stream of fewer dimensions (superposition), and train it to imitate the original.

    The result tests analyses: each head and MLP keeps its role, but weights no longer show the circuit. The stream is
    projected onto the principal directions (uncentred) of its values on the prompts. If the model uses at most
    `d_model` dimensions, as many compiled programs do, this is exact. Otherwise unrelated directions share dimensions,
    and Adam trains all weights to reproduce the outputs and projected streams of the original; if that makes the model
    worse, the projected one is returned. Source: Lindner et al. 2023, section 5, who train the projection alone.

    Args:
        model: a mechicl model that `hide` accepts (no norms, gates, clipping, biases or rotary positions).
        prompts: training data: `Prompts`, or token ids for a model of tokens.
        d_model: width of the new stream, at most the model's.
        steps: number of training steps, each on up to 64 prompts; 0 returns the projected model.
        learning_rate: learning rate of Adam at the first step.

    Returns:
        `CompressedModel`: `model`; `stream` `[d_model new_d_model]` with orthonormal columns, the map into the new
        stream; `projected` and `trained`, the mean squared difference of the model's outputs from the original's after
        projection and after training (absolute, over all positions and entries, on the given prompts).

    Example:
        >>> model = constructions.induction(d_vocab=4, n_ctx=6)
        >>> ids = torch.randint(4, (64, 6), generator=torch.Generator().manual_seed(0))
        >>> narrow = compress(model, ids, d_model=14, steps=0, progress=False)
        >>> narrow.model.cfg.d_model, model.cfg.d_model
        (14, 18)
    """
    check_basis_free(model.cfg)
    check_attends(model.cfg)
    if d_model > model.cfg.d_model:
        raise ValueError(f"d_model must be at most the model's {model.cfg.d_model}, got {d_model}")
    if not len(prompts):
        raise ValueError("prompts must not be empty")
    tokens = model.encode(prompts) if isinstance(prompts, Prompts) else prompts
    with torch.no_grad():
        outputs, streams = _run(model, tokens)
        directions = torch.linalg.svd(torch.cat([s.flatten(0, 1).double() for s in streams]), full_matrices=False).Vh
        stream = directions[:d_model].T.contiguous()
        narrow = _projected(model, stream)
    tokens = tokens.double() if tokens.is_floating_point() else tokens
    targets = [outputs.double(), *(each.double() @ stream for each in streams)]
    before = _error(narrow, tokens, targets[0])
    projected = {name: weight.clone() for name, weight in narrow.state_dict().items()}
    _imitate(narrow, tokens, targets, steps, learning_rate, seed, progress)
    after = _error(narrow, tokens, targets[0])
    if not after < before:  # True for NaN
        narrow.load_state_dict(projected)
        after = before
    return CompressedModel(narrow.eval(), stream, before, after)


def _projected(model: HookedTransformer, stream: Tensor) -> HookedTransformer:
    narrow, weights = in_another_stream(model, stream), dict(model.named_parameters())
    for name, weight in narrow.named_parameters():
        kind = name.rpartition(".")[2]
        if kind in ("W_Q", "W_K", "W_V", "W_in"):
            weight.copy_(stream.T @ weights[name].double())
        elif kind in ("W_O", "W_out", "b_out"):
            weight.copy_(weights[name].double() @ stream)
        elif kind in ("b_in", "sink"):
            weight.copy_(weights[name])
    return narrow


def _run(model: HookedTransformer, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    streams: list[Tensor] = []
    after = {f"blocks.{layer}.hook_resid_{half}" for layer in range(model.cfg.n_layers) for half in ("mid", "post")}
    hooks: list[Any] = [
        (name, lambda stream, hook: streams.append(stream))
        for name in model.hook_dict
        if name in after | {"blocks.0.hook_resid_pre"}
    ]
    return model.run_with_hooks(tokens, fwd_hooks=hooks), streams


def _error(model: HookedTransformer, tokens: Tensor, outputs: Tensor) -> float:
    with torch.no_grad():
        return mse_loss(model(tokens), outputs).item()


@torch.enable_grad()
def _imitate(
    model: HookedTransformer, tokens: Tensor, targets: Sequence[Tensor], steps: int, learning_rate: float, seed: int,
    progress: bool | None,
) -> None:  # fmt: skip
    optimizer = Adam(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    generator = torch.Generator().manual_seed(seed)
    for _ in progress_bar(range(steps), unit="step", progress=progress):
        batch = torch.randint(len(tokens), (min(_BATCH, len(tokens)),), generator=generator)
        outputs, streams = _run(model, tokens[batch])
        losses = [mse_loss(value, target[batch]) for value, target in zip([outputs, *streams], targets, strict=True)]
        optimizer.zero_grad()
        (losses[0] + sum(losses[1:]) / len(streams)).backward()
        optimizer.step()
        schedule.step()
