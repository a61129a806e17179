"""Warnings that point at the user's line where Python can do that."""

import sys
import warnings
from pathlib import Path
from typing import Any

# From Python 3.12 on, warnings skip the library's files; before, they point at the caller of the function that warns.
_WHERE: dict[str, Any] = (
    {"skip_file_prefixes": (str(Path(__file__).parents[1]),)} if sys.version_info >= (3, 12) else {"stacklevel": 3}
)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn where the user called the library."""
    warnings.warn(message, category, **_WHERE)
