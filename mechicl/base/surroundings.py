"""Torch's global state during calls: results depend on the arguments alone."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Lock

import torch
import torch.utils._device

_CPU, _LOCK, _UNCHANGED = torch.device("cpu"), Lock(), nullcontext()
_REPLACED: list[torch.dtype] = []  # the default dtype of the process, once for every block that replaces it


def standard_surroundings() -> AbstractContextManager[None]:
    """Make float32 tensors on the CPU by default in a block; inference mode becomes `no_grad`, without its limits.

    The default dtype belongs to all threads: the last of the blocks that run at the same time restores it.
    """
    is_standard = (
        torch.get_default_dtype() is torch.float32
        and not _REPLACED
        and torch.utils._device.CURRENT_DEVICE in (None, _CPU)
        and not torch.is_inference_mode_enabled()
    )
    return _UNCHANGED if is_standard else _replaced()


@contextmanager
def _replaced() -> Iterator[None]:
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.utils._device.CURRENT_DEVICE not in (None, _CPU):
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
