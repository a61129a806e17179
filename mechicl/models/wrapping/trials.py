"""Trial runs of a module: do predictions depend on later points, and how many bytes does a run compute?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mechicl.prompts import Prompts

MOST_CUTS = 16


def change_futures(prompts: Prompts) -> tuple[Prompts, list[int]]:
    """Repeat the first prompt n times, then with n changed futures; also returns where each change begins."""
    n = prompts.n_context
    cuts = sorted({round(i * n / (MOST_CUTS - 1)) for i in range(MOST_CUTS)})
    before = prompts[[0] * len(cuts)]
    beyond = (torch.arange(n + 1) - torch.tensor(cuts)[:, None])[..., None].to(prompts.device)
    xs = torch.where(beyond > 0, 1 - 2 * before.xs, before.xs)
    after = Prompts(xs, torch.where(beyond >= 0, 1 - 2 * before.ys, before.ys))
    return Prompts.concatenate([before, after]), cuts


def sees_no_future(read: Tensor, cuts: Sequence[int], n_context: int) -> bool:
    """True if no row of the points `[2n, point ...]`, from `change_futures`, depends on its point's future."""
    if read.shape[1] != n_context + 1:
        return False
    before, after = (part[range(len(cuts)), list(cuts)] for part in read.chunk(2))
    return not differ(before, after)


def differ(a: Tensor, b: Tensor) -> bool:
    """True if two tensors differ by more than rounding."""
    tolerance = min(1000 * torch.finfo(a.dtype).eps, 0.05) * max(a.abs().max().item(), b.abs().max().item())
    return bool(((a - b).abs() > tolerance).any())


def refuse_training_mode(module: nn.Module) -> None:
    """Refuse (ValueError) a module in training mode: dropout would change every run, and batch norm itself."""
    training = next((name for name, part in module.named_modules() if part.training), None)
    if training is not None:
        raise ValueError(f"the model is in training mode ({training or 'all of it'}): call model.eval() first")


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """A context in which no part of a module is in training mode: no dropout, no update of running means."""
    training = [part for part in module.modules() if part.training]
    try:
        module.eval()
        yield
    finally:
        for part in training:
            part.training = True


@torch.no_grad()
def bytes_of_run(module: nn.Module, run: Callable[[], Any]) -> float:
    """Count the bytes of all tensors that a run in eval mode computes, except views and the module's own tensors."""
    with _CountedBytes(module) as counted, in_eval_mode(module):
        run()
    return counted.bytes


class _CountedBytes(TorchDispatchMode):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.bytes = 0
        self._kept: list[Any] = [t.untyped_storage() for t in (*module.parameters(), *module.buffers())]
        self._seen = {storage.data_ptr() for storage in self._kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self._seen:
                storage = each.untyped_storage()
                self._kept.append(storage)  # kept, so that no later tensor gets its address
                self._seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return result
