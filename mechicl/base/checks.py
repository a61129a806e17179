"""Checks of numbers that settings and arguments share."""

import math
import sys
from typing import Any


def is_whole(value: Any) -> bool:
    """An int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """A real number, neither infinite nor NaN, that is not a bool."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max  # math.isfinite() fails on larger ones
    return isinstance(value, float) and math.isfinite(value)


def check_whole(least: int, **values: Any) -> None:
    """Refuse values that are no whole numbers of at least `least`.

    Raises:
        ValueError: names the value.
    """
    for name, value in values.items():
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} must be an int of at least {least:g}, got {value!r}")


def check_positive(**values: Any) -> None:
    """Refuse values that are no positive finite numbers.

    Raises:
        ValueError: names the value.
    """
    for name, value in values.items():
        try:
            good = bool(value > 0 and math.isfinite(value))
        except (TypeError, OverflowError):  # no number, or one that no float can hold
            good = False
        if not good:
            raise ValueError(f"{name} must be positive and finite, got {value!r}")


def require_whole(settings: Any, **minima: int) -> None:
    """Refuse fields that are no whole numbers of at least their minimum.

    Raises:
        ValueError: names the field.
    """
    for name, least in minima.items():
        check_whole(least, **{name: getattr(settings, name)})


def require_finite(settings: Any, *names: str, least: float) -> None:
    """Refuse fields that are no finite numbers of at least `least`.

    Raises:
        ValueError: names the field.
    """
    for name in names:
        value = getattr(settings, name)
        if not is_finite(value) or value < least:
            raise ValueError(f"{name} must be a finite number of at least {least:g}, got {value!r}")


def require_active_dims(settings: Any) -> None:
    """Refuse a field `active_dims` that is neither None nor a whole number from 1 to the field `x_dim`.

    Raises:
        ValueError: names the value.
    """
    if settings.active_dims is not None:
        require_whole(settings, active_dims=1)
        if settings.active_dims > settings.x_dim:
            raise ValueError(f"active_dims must be 1 to x_dim={settings.x_dim}, got {settings.active_dims}")
