"""Settings that every analysis reads: `mechicl.settings`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from mechicl.base.arguments import Positive, check_fields


@dataclass(frozen=True)
class Settings:
    """Values of the settings.

    Attributes:
        memory: bytes that an analysis may use in addition to the model and its prompts.
        progress: whether progress bars are shown where a function's `progress` is None.
    """

    memory: Positive = 2**30
    progress: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


class AmbientSettings:
    """The settings in force: those of the innermost `with settings(...)` block, or else the process's default.

    A block applies to its own thread and asyncio task; the default applies to all others.

    Example:
        >>> with settings(memory=2**28):
        ...     settings.memory / 2**20
        256.0
    """

    def __init__(self) -> None:
        self._default = Settings()
        self._block: ContextVar[Settings | None] = ContextVar("mechicl_settings", default=None)

    @property
    def current(self) -> Settings:
        """All settings in force."""
        return self._block.get() or self._default

    @property
    def memory(self) -> float:
        """Bytes that an analysis may use in addition to the model and its prompts; 1 GiB by default."""
        return self.current.memory

    @property
    def progress(self) -> bool:
        """True if functions show progress bars by default."""
        return self.current.progress

    @contextmanager
    def __call__(self, **values: Any) -> Iterator[Settings]:
        """Replace settings in a `with` block (ArgumentError for a value that is not allowed)."""
        token = self._block.set(replace(self.current, **values))
        try:
            yield self.current
        finally:
            self._block.reset(token)

    def set_default(self, **values: Any) -> None:
        """Replace settings outside of blocks, in all threads of the process."""
        self._default = replace(self._default, **values)


settings = AmbientSettings()
"""The library's settings, as `mechicl.settings`."""
