"""Predictions of sequences of unequal lengths: within a model's context, within memory, and how good they are."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.analysis.finetuning.forward_passes import Weights, run_with_changes
from mechicl.base.memory import MEMORY, Budget
from mechicl.models.opening.adapter import ModelAdapter

LARGEST_BATCH = 16  # more sequences at a time are hardly faster


def check_lengths(model: Any, sequences: Sequence[Tensor]) -> None:
    """Refuse (ValueError) sequences that a model has no positions for."""
    cfg, longest = model.cfg, max(map(len, sequences))
    unlimited = getattr(cfg, "positional_embedding_type", "standard") in ("none", "sinusoidal", "rotary")
    if not unlimited and longest > cfg.n_ctx:
        raise ValueError(
            f"a prompt of {longest} tokens is longer than the model's context of n_ctx={cfg.n_ctx}: take fewer or "
            f"shorter demonstrations"
        )


def predict_sequences(
    adapter: ModelAdapter,
    sequences: Sequence[Tensor],
    changes: Weights | None = None,
    *,
    linearized: bool = False,
    memory: float = MEMORY,
) -> Float[Tensor, "query d_out"]:
    """Predictions at the end of sequences of unequal lengths; changes as for `run_with_changes`."""
    outputs: dict[int, Tensor] = {}
    for index, tokens in equal_length_batches(adapter.model, sequences, memory):
        batch, _ = run_with_changes(adapter, adapter.encode(tokens), {}, changes, linearized=linearized)
        outputs |= dict(zip(index, batch, strict=True))
    return torch.stack([outputs[i] for i in range(len(sequences))])


def equal_length_batches(
    model: Any, sequences: Sequence[Tensor], memory: float = MEMORY
) -> Iterator[tuple[list[int], Tensor]]:
    """Batches of sequences of equal length that fit into memory: their indices and tokens `[prompt pos ...]`.

    There is no padding, which architectures treat differently.
    """
    by_length: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        by_length.setdefault(len(sequence), []).append(i)
    cfg = model.cfg
    heads, d_head = getattr(cfg, "n_heads", 1), getattr(cfg, "d_head", None) or cfg.d_model
    widths = 8 * cfg.d_model + 2 * (getattr(cfg, "d_mlp", None) or 0) + 6 * heads * d_head
    for length, index in by_length.items():
        # about two layers' activations and a layer's scores, each with its derivative
        n_numbers = 2 * length * (2 * widths + 4 * heads * length)
        n = Budget(memory).rows(n_numbers * next(model.parameters()).element_size(), at_most=LARGEST_BATCH)
        for first in range(0, len(index), n):
            batch = index[first : first + n]
            yield batch, torch.stack([sequences[i] for i in batch])


def scores_and_losses(
    outputs: Float[Tensor, "query d_out"],
    targets: Int[Tensor, "query"] | Float[Tensor, "query y"],
    choices: Int[Tensor, "choice"] | None,
) -> tuple[Float[Tensor, "query"], Float[Tensor, "query"]]:
    """The score (the higher the better) and the loss of each prediction, float64 on the CPU.

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
