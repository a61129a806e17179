"""What makes steps quicker: TF32 products, fused attention, compiled passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mechicl.models.transformer.fast import fuse_attention
from mechicl.training.config import TrainingConfig
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
