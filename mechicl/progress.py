"""Progress bars, by one rule: shown for what takes longer than two seconds, unless `progress=False`."""

from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

DELAY = 2.0  # seconds


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    unit: str,
    progress: bool = True,
    total: int | None = None,
    initial: int = 0,
    desc: str = "",
) -> tqdm:
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
    return tqdm(
        items, desc=desc or None, total=total, initial=initial, unit=unit, disable=not progress, leave=False,
        delay=DELAY, dynamic_ncols=True,
    )  # fmt: skip
