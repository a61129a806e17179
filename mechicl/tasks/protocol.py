"""What is asked of a task."""

from typing import Any, Protocol, runtime_checkable

import torch

from mechicl.prompts import Prompts


@runtime_checkable
class Task(Protocol):
    """What training, saving, loading, the analyses and the reports need of a task of points: one's own may be any class
    that has this.

    The base `PromptDistribution` gives `sample` and `replace` to a frozen dataclass that says in `_sample` how prompts
    are drawn. To be saved with a checkpoint a task is a dataclass whose fields are plain data (numbers, strings, tuples
    of them, another task), and has a name to be found by (see `register`).
    """

    @property
    def x_dim(self) -> int: ...  # noqa: D102
    @property
    def y_dim(self) -> int: ...  # noqa: D102
    @property
    def n_context(self) -> int: ...  # noqa: D102

    def sample(
        self,
        n_prompts: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Prompts:
        """A batch of prompts, each of a task of its own; with a seed or a generator, not both."""
        ...

    def replace(self, **changes: Any) -> "Task":
        """A copy with some fields changed."""
        ...
