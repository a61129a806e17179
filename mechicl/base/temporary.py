"""Changes that last as long as a `with` does, and are undone whenever Ctrl-C comes."""

import io
from collections.abc import Callable, Generator
from typing import Any


class Temporary(io.IOBase):
    """A context in which something is changed.

    An interrupt, which Python lets in between two steps of the main thread, may come at any time: before the change is
    whole, after it and before the body, in the body, and while it is undone. A `@contextmanager` leaves its change
    where it comes as the context is entered or left.

    Args:
        do: makes the change.
        undo: takes back as much of it as has been made; twice is no more than once.
        value: what `as` gives.
    """

    # The way out. Python looks for interrupts before the first line of each of its functions, an `__exit__` too, and
    # after each call, but not on the way into a `finally`. So the change is undone in the `finally` of a generator that
    # has been waiting since before it was made. What leads there is written in C: `with` calls the `__exit__` of
    # IOBase, which calls `close`, which is the generator's, and that one goes on inside the `finally`.

    def __init__(self, do: Callable[[], object], undo: Callable[[], object], value: Any = None):
        self._do, self._value = do, value
        self._waiting = _undoing(undo)
        self.close = self._waiting.close  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> Any:
        try:
            next(self._waiting)
            self._do()
        except BaseException:
            self.close()
            raise
        return self._value


def _undoing(undo: Callable[[], object]) -> Generator[None]:
    done = False
    try:
        yield
    finally:
        try:
            undo()
            done = True
        finally:
            if not done:  # the interrupt came meanwhile
                undo()


def together(*contexts: Temporary) -> Temporary:
    """One context of several, entered in this order and left in the other."""

    def enter() -> None:
        for context in contexts:
            context.__enter__()

    def leave() -> None:
        for context in reversed(contexts):
            context.close()

    return Temporary(enter, leave)
