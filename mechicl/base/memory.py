"""Bounds on memory: `settings.memory` limits the bytes that an analysis needs in addition to the model and its prompts.

For bounds of at least 64 MiB this is resident memory, as the operating system measures it: `SET_ASIDE` bytes are
reserved for code and workspaces that torch loads when first used. Smaller bounds apply to tensors alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from mechicl.base.settings import settings

SET_ASIDE = 2**25
"""Bytes of a large bound that are not spent on tensors: 32 MiB."""
Kept = Tensor | Mapping[str, Tensor] | float
"""Tensors that take memory, or a number of bytes."""


class TooLittleMemory(ValueError):
    """A bound on memory that is too small for the kept tensors and one row.

    Attributes:
        needed: the smallest bound that suffices, in bytes.
    """

    def __init__(self, message: str, needed: float):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Budget:
    """A bound on memory, and how much of it is taken."""

    memory: float = field(default_factory=lambda: settings.memory)  # the bound, in bytes
    kept: float = 0.0  # bytes that are needed throughout: results, activations to patch in

    def holding(self, *kept: Kept) -> "Budget":
        """Return the budget with more bytes kept."""
        return replace(self, kept=self.kept + sum(map(count_bytes, kept)))

    @property
    def for_tensors(self) -> float:
        """The part of the bound for tensors: all of it up to `SET_ASIDE`, all but `SET_ASIDE` from twice that on."""
        return max(min(self.memory, SET_ASIDE), self.memory - SET_ASIDE)

    def rows(self, per_row: float, *, at_most: float = 2**31) -> int:
        """Return how many rows of `per_row` bytes fit at a time; raise `TooLittleMemory` if none does."""
        needed = self.kept + per_row
        if not needed <= self.for_tensors:
            needed += SET_ASIDE if needed > SET_ASIDE else 0
            raise TooLittleMemory(
                f"mechicl.settings(memory={self.memory:.4g}) is too little: results take {self.kept:.4g} bytes, and "
                f"each prompt of a run {per_row:.4g}. Set at least {needed:.4g}, or give fewer prompts or cells",
                needed,
            )
        return int(max(min((self.for_tensors - self.kept) / max(per_row, 1), at_most), 1))


def count_bytes(kept: Kept) -> float:
    """Count the bytes of tensors (an expanded one counts as its storage), or return a number of bytes unchanged."""
    if isinstance(kept, Mapping):
        return sum(map(count_bytes, kept.values()))
    return kept.untyped_storage().nbytes() if isinstance(kept, Tensor) else kept
