"""Progress bars, shown for work that takes longer than two seconds."""

from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm

from mechicl.base.settings import settings

DELAY = 2.0  # seconds


class Silent:
    """A bar that shows nothing.

    A disabled bar of tqdm still takes a lock, which forked processes share: Ctrl-C while it is taken would leave all
    others waiting for it.
    """

    def __init__(self, items: Iterable[Any] | None):
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(() if self.items is None else self.items)

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    set_postfix = set_postfix_str = close = update


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    unit: str,
    progress: bool | None = None,
    total: int | None = None,
    initial: int = 0,
    desc: str = "",
) -> tqdm | Silent:
    """Show a bar over `items`, or over `total` steps that are counted by `update()`; it disappears at the end.

    `unit` is a singular noun for one item, `initial` the number done in an earlier process, `desc` a word or two in
    front. `progress` is by default the setting of that name.
    """
    if not (settings.progress if progress is None else progress):
        return Silent(items)
    return tqdm(
        items, desc=desc or None, total=total, initial=initial, unit=unit, leave=False, delay=DELAY, dynamic_ncols=True
    )
