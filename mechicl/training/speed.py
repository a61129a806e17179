"""What makes steps quicker: threads as they are worth, memory kept, TF32, fused attention, compiled passes."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mechicl.base.threads import threads_worth
from mechicl.models import TransformerConfig
from mechicl.models.transformer.fast import fuse_attention
from mechicl.training.config import TrainingConfig
from mechicl.training.data import goes_across
from mechicl.training.ensemble import Ensemble

AMPERE = (8, 0)
"""The first generation of NVIDIA GPUs with TF32."""


@contextmanager
def products_in_tf32(wanted: bool, device: torch.device) -> Iterator[None]:
    """While it lasts, float32 matrix products on a GPU may round their factors to TF32's 10 bits of mantissa.

    Raises:
        ValueError: TF32 is wanted, and the device does not have it.
    """
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
    """How many threads a run's steps are worth: by the multiplications of one layer's pass on one batch.

    One where products run across prompts (`goes_across`), and on one position after another in an LSTM; on a GPU as
    many as torch has.
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
    return threads_worth(rows * n_pos * per_position)


def keep_freed_memory() -> None:
    """Let the C library keep up to 512 MiB that were freed, from here on; without effect where it is not glibc.

    Otherwise what a step frees goes back to the system and comes again page by page in the next one: a tenth to a third
    of a step of five layers.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, Windows
        return
    trim_threshold, mmap_threshold = -1, -3  # names of malloc.h
    mallopt(trim_threshold, 2**29)
    mallopt(mmap_threshold, 2**25)  # the largest that it takes


def make_quicker(config: TrainingConfig, ensemble: Ensemble) -> None:
    """Turn on fused attention, where the config asks for it.

    Raises:
        ValueError: several seeds, or a model whose attention torch cannot fuse.
    """
    if not config.fused_attention:
        return
    if ensemble.n_seeds > 1:
        raise ValueError(
            f"fused_attention=True is for one seed at a time, and there are {ensemble.n_seeds}: run each by itself "
            f"(--seeds 0, --run a folder of its own)"
        )
    fuse_attention(ensemble.template)


def compiled(module: torch.nn.Module) -> Callable[..., Tensor]:
    """A module's forward pass, compiled by `torch.compile` at its first call, and again for prompts of other lengths.

    Raises:
        ValueError: at a call: it cannot be compiled here.
    """
    from torch._dynamo.exc import TorchDynamoException  # loading it takes seconds, and few runs need it

    quick = torch.compile(module)

    def run(*inputs: object) -> Tensor:
        try:
            return quick(*inputs)
        except TorchDynamoException as error:
            words = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"compile=True: torch cannot compile this model here ({words}): leave it out") from error

    return run
