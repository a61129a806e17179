"""One way to bound memory: `memory=` in bytes, on what an analysis takes beside the model and its prompts.

That is what the operating system sees, resident memory, for bounds from 64 MiB on: `SET_ASIDE` of them is kept for what
a process takes when it does something for the first time. Smaller bounds hold for tensors alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

MEMORY = 2**30
"""The default of every `memory=`: 1 GiB."""

SET_ASIDE = 2**25
"""What is not spent on tensors of a bound of at least twice as much: 32 MiB. torch's code is read into memory when it
is first run, and its kernels and the allocator keep workspaces."""

Kept = Tensor | Mapping[str, Tensor] | float
"""What takes memory: tensors, or a number of bytes."""


class TooLittleMemory(ValueError):
    """A bound on memory that does not hold what is kept and one row.

    Attributes:
        needed: the least bound that does, in bytes.
    """

    def __init__(self, message: str, needed: float):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Budget:
    """A bound on memory, and how much of it is taken.

    Attributes:
        memory: the bound, in bytes.
        held: bytes that are kept all the while: results, values to put in.

    Example:
        >>> Budget(2**20).holding(torch.zeros(1000, dtype=torch.float64)).rows(per_row=4096)
        254
    """

    memory: float = MEMORY
    held: float = 0.0

    def holding(self, *kept: Kept) -> "Budget":
        """The budget beside more that is kept."""
        return replace(self, held=self.held + sum(map(count_bytes, kept)))

    @property
    def for_tensors(self) -> float:
        """How much of the bound is for tensors: all of it up to `SET_ASIDE`, all but `SET_ASIDE` from twice that on."""
        return max(min(self.memory, SET_ASIDE), self.memory - SET_ASIDE)

    def rows(self, per_row: float, *, at_most: float = 2**31, kind: str = "prompt") -> int:
        """How many rows of so many bytes may be worked on at a time, at least one.

        Raises:
            TooLittleMemory: a ValueError; there is not enough for one row, and the message says how much would be.
        """
        needed = self.held + per_row
        if not needed <= self.for_tensors:
            needed += SET_ASIDE if needed > SET_ASIDE else 0
            raise TooLittleMemory(
                f"memory={self.memory:.4g} bytes is too little: what is kept takes {self.held:.4g}, and each {kind} of "
                f"a run {per_row:.4g}. Give at least {needed:.4g}, or fewer prompts or cells",
                needed,
            )
        return int(max(min((self.for_tensors - self.held) / max(per_row, 1), at_most), 1))


def count_bytes(kept: Kept) -> float:
    """The memory of tensors (an expanded one takes what it is expanded from), or a number of bytes as it is."""
    if isinstance(kept, Mapping):
        return sum(map(count_bytes, kept.values()))
    return kept.untyped_storage().nbytes() if isinstance(kept, Tensor) else kept
