"""Faster steps: the best number of threads, freed memory kept, TF32."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mechicl.base.threads import threads_worth
from mechicl.models import TransformerConfig
from mechicl.training.config import TrainingConfig
from mechicl.training.data import goes_across

AMPERE = (8, 0)  # the first generation of NVIDIA GPUs with TF32


@contextmanager
def products_in_tf32(wanted: bool, device: torch.device) -> Iterator[None]:
    """If wanted, let float32 matrix products on a GPU round their factors to TF32's 10 bits of mantissa."""
    if not wanted:
        yield
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE:
        raise ValueError(f"tf32=True needs an NVIDIA GPU of the Ampere generation or later, and this is {device.type}")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def threads_for(config: TrainingConfig, device: torch.device) -> int:
    """The fastest number of threads for a run, by the multiplications between two times that threads await each other.

    That is one layer's pass, or a whole compiled step. It is 1 where products run across prompts (`goes_across`); an
    LSTM processes positions in turn. On a GPU it is torch's own number.
    """
    if device.type != "cpu":
        return torch.get_num_threads()
    if goes_across(config, device):
        return 1
    model = config.model
    n_pos = getattr(config.task, "n_ctx", None) or model.format.n_tokens(config.task.n_context)
    rows = config.batch_size * len(config.members)
    if not isinstance(model, TransformerConfig):
        return threads_worth(rows * 8 * (model.d_model or 1) ** 2)
    d_attn, d_mlp = model.n_heads * model.d_head, (model.d_mlp or 0) if model.block_mlp else 0
    per_position = model.d_model * (4 * d_attn + 2 * d_mlp) + 2 * n_pos * d_attn
    # a step has about three times the multiplications of its pass, and Python's threads take about eight times as long
    passes = 3 * model.n_layers / 8 if config.compile else 1
    return threads_worth(rows * n_pos * per_position * passes)


def keep_freed_memory() -> None:
    """Let glibc keep up to 512 MiB of freed memory; other C libraries ignore it.

    Otherwise freed memory returns page by page in the next step: a tenth to a third of a step of five layers.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, Windows
        return
    trim_threshold, mmap_threshold = -1, -3  # names of malloc.h
    mallopt(trim_threshold, 2**29)
    mallopt(mmap_threshold, 2**25)  # the largest that it takes
