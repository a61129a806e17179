"""Checks of numbers that dataclasses of settings share."""

import math
from typing import Any


def is_whole(value: Any) -> bool:
    """An int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """A real number, neither infinite nor NaN, that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_whole(settings: Any, **minima: int) -> None:
    """Refuse fields that are no whole numbers of at least their minimum.

    Raises:
        ValueError: names the field.
    """
    for name, least in minima.items():
        value = getattr(settings, name)
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} must be an int of at least {least:g}, got {value!r}")


def require_finite(settings: Any, *names: str, least: float) -> None:
    """Refuse fields that are no finite numbers of at least `least`.

    Raises:
        ValueError: names the field.
    """
    for name in names:
        value = getattr(settings, name)
        if not is_finite(value) or value < least:
            raise ValueError(f"{name} must be a finite number of at least {least:g}, got {value!r}")
