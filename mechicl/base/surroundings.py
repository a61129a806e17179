"""Torch's global state during calls: results depend on the arguments alone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch

_CPU, _LOCK = torch.device("cpu"), Lock()
_REPLACED: list[torch.dtype] = []  # the default dtype of the process, once for every block that replaces it


def are_standard() -> bool:
    """Tell whether torch makes float32 tensors on the CPU by default, outside inference mode."""
    return (
        torch.get_default_dtype() is torch.float32
        and not _REPLACED
        and _makes_cpu_tensors()
        and not torch.is_inference_mode_enabled()
    )


def _makes_cpu_tensors() -> bool:
    # torch changes the default device by a mode of functions; without any mode this takes a tenth of a microsecond
    return not torch._C._len_torch_function_stack() or torch.get_default_device() == _CPU


@contextmanager
def standard_surroundings() -> Iterator[None]:
    """Make float32 tensors on the CPU by default in a block; inference mode becomes `no_grad`, without its limits.

    The default dtype belongs to all threads: the last of the blocks that run at the same time restores it.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if not _makes_cpu_tensors():
            stack.enter_context(_CPU)
        with _LOCK:
            _REPLACED.append(_REPLACED[0] if _REPLACED else torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            with _LOCK:
                before = _REPLACED.pop()
                if not _REPLACED:
                    torch.set_default_dtype(before)
