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
    """Refuse sequences that a model has no positions for.

    Raises:
        ValueError: gives the numbers and the fix.
    """
    cfg = model.cfg
    if getattr(cfg, "positional_embedding_type", "standard") in ("none", "sinusoidal", "rotary"):
        return
    longest = max(map(len, sequences))
    if longest > cfg.n_ctx:
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
    """Sequences of equal length together, as many as fit into memory: their indices and tokens `[prompt pos ...]`.

    There is no padding, which architectures treat differently.

    Raises:
        ValueError: not enough memory for one of them.
    """
    by_length: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        by_length.setdefault(len(sequence), []).append(i)
    for length, index in by_length.items():
        n = Budget(memory).rows(_bytes_of_pass(model, length), at_most=LARGEST_BATCH)
        for first in range(0, len(index), n):
            batch = index[first : first + n]
            yield batch, torch.stack([sequences[i] for i in batch])


def _bytes_of_pass(model: Any, n_pos: int) -> float:
    """About what a pass holds for a sequence: two layers' activations, a layer's scores, each with its derivative."""
    cfg = model.cfg
    heads = getattr(cfg, "n_heads", 1)
    d_head = getattr(cfg, "d_head", None) or cfg.d_model
    widths = 8 * cfg.d_model + 2 * (getattr(cfg, "d_mlp", None) or 0) + 6 * heads * d_head
    return 2 * next(model.parameters()).element_size() * n_pos * (2 * widths + 4 * heads * n_pos)


def scores_and_losses(
    outputs: Float[Tensor, "query d_out"],
    targets: Int[Tensor, "query"] | Float[Tensor, "query y"],
    choices: Int[Tensor, "choice"] | None,
) -> tuple[Float[Tensor, "query"], Float[Tensor, "query"]]:
    """How good predictions are: the score (the higher the better) and the loss of each, float64 on the CPU.

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
