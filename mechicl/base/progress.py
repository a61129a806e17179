"""Progress bars, by one rule: shown for what takes longer than two seconds, unless `progress=False`."""

from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm

DELAY = 2.0  # seconds


class Silent:
    """What stands for a bar where none is shown.

    A bar of tqdm that is disabled takes a lock all the same, which processes share that are forked: Ctrl-C in the
    moment when it is taken would leave all others waiting for it.
    """

    n: float = 0
    bar_format: str | None = None

    def __init__(self, items: Iterable[Any] | None):
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(() if self.items is None else self.items)

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: float | None = 1) -> None:
        """Nothing is counted."""

    def set_postfix(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is shown."""

    def set_postfix_str(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing is open."""


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    unit: str,
    progress: bool = True,
    total: int | None = None,
    initial: int = 0,
    desc: str = "",
) -> tqdm | Silent:
    """A bar over `items`, or over `total` steps that its user counts by `update()`; gone when it is done.

    Args:
        items: what is gone through.
        unit: what is counted: "prompt", "run", "epoch".
        progress: False shows none.
        total: how many, where `items` cannot tell.
        initial: how many were done before, in an earlier process.
        desc: what is going on, in a word or two.

    Example:
        >>> for batch in progress_bar(prompts.split(512), unit="batch"):
        ...     model.predict(batch)
    """
    if not progress:
        return Silent(items)
    return tqdm(
        items, desc=desc or None, total=total, initial=initial, unit=unit, leave=False, delay=DELAY, dynamic_ncols=True
    )
