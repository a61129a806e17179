"""Runs of a bridge in which the blocks before some layer do nothing, and when two runs count as the same."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# A bridge's forward has `start_at_layer`, and nevertheless runs all its blocks: it replaces the stream that the
# chosen one is given, so what the blocks before it made is thrown away. Blocks that hand on their input save that.


def skipping_blocks(model: Any, n_blocks: int) -> AbstractContextManager[None]:
    """A context in which the first blocks of a bridge return what they are given."""
    return replacing_forwards([(block, _return_stream) for block in list(model.blocks)[:n_blocks]] if n_blocks else [])


@contextmanager
def replacing_forwards(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """A context in which modules have other forward methods, as instance attributes; the caller holds the lock."""
    # setattr would reach what a bridge wraps
    before = [(vars(module), vars(module).get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            vars(module)["forward"] = forward
        yield
    finally:
        for attributes, forward in before:
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward


def same_up_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same up to rounding of their largest entry, infinite or NaN in the same places."""
    if a.shape != b.shape:
        return False
    largest = max((float(part[part.isfinite()].abs().amax()) for part in (a, b) if part.isfinite().any()), default=0.0)
    return torch.allclose(a, b, rtol=0, atol=16 * torch.finfo(a.dtype).eps * largest, equal_nan=True)


def _return_stream(*args: Any, **kwargs: Any) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]
