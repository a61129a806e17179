"""Warnings that point at the user's own line, however deep in the library they come from."""

import sys
import warnings

OURS = ("mechicl.", "jaxtyping.", "beartype.")
"""Modules whose frames are not the user's; the last two check types in our tests."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn where the user called the library."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
