"""Sequences of different lengths: in batches, within a model's context, their predictions and how good these are."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.analysis.finetuning.runs import Weights, read
from mechicl.models.adapter import ModelAdapter


def check_lengths(model: Any, sequences: Sequence[Tensor]) -> None:
    """Refuse sequences that a model has no positions for.

    Raises:
        ValueError: gives the numbers and the fix.
    """
    cfg = model.cfg
    if getattr(cfg, "positional_embedding_type", "standard") in ("none", "sinusoidal"):
        return
    longest = max(map(len, sequences))
    if longest > cfg.n_ctx:
        raise ValueError(
            f"a prompt of {longest} tokens is longer than the model's context of n_ctx={cfg.n_ctx}: take fewer or "
            f"shorter demonstrations"
        )


def predictions(
    adapter: ModelAdapter,
    sequences: Sequence[Tensor],
    changes: Weights | None = None,
    *,
    linearized: bool = False,
    batch_size: int = 16,
) -> Float[Tensor, "query d_out"]:
    """Predictions at the end of sequences of different lengths; changes as for `read`."""
    parts = {}
    for index, tokens in batches(sequences, batch_size):
        outputs, _ = read(adapter, adapter.encode(tokens), {}, changes, linearized=linearized)
        parts |= dict(zip(index, outputs, strict=True))
    return torch.stack([parts[i] for i in range(len(sequences))])


def batches(sequences: Sequence[Tensor], batch_size: int) -> Iterator[tuple[list[int], Tensor]]:
    """Sequences of equal length together, at most so many: their indices and tokens `[prompt pos ...]`.

    There is no padding, which architectures treat differently.
    """
    by_length: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        by_length.setdefault(len(sequence), []).append(i)
    for index in by_length.values():
        for first in range(0, len(index), batch_size):
            part = index[first : first + batch_size]
            yield part, torch.stack([sequences[i] for i in part])


def scores_and_losses(
    outputs: Float[Tensor, "query d_out"],
    targets: Int[Tensor, "query"] | Float[Tensor, "query y"],
    choices: Int[Tensor, "choice"] | None,
) -> tuple[Float[Tensor, "query"], Float[Tensor, "query"]]:
    """How good predictions are: score (the higher the better) and loss of each, float64 on the CPU.

    Among choices: 1 where the right one has the highest logit and 0 elsewhere; cross entropy over the choices, in nats.
    In a regression: squared error summed over the target's dimensions, and minus it as the score.
    """
    outputs, targets = outputs.detach().cpu().double(), targets.cpu()
    if choices is None:
        loss = (outputs - targets.double()).square().sum(-1)
        return -loss, loss
    logits = outputs[:, choices.cpu()]
    right = (targets[:, None] == choices.cpu()).int().argmax(-1)
    return (logits.argmax(-1) == right).double(), F.cross_entropy(logits, right, reduction="none")
