"""Warnings that point at the user's line."""

import contextlib
import functools
import os
import sys
import warnings
from pathlib import Path

import jaxtyping
import torch

_PASSED = (
    *(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], *torch.__path__, *jaxtyping.__path__)),
    contextlib.__file__,
    functools.__file__,
)
"""Files whose frames are between the user's line and a warning: the library, and what calls it back."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn where the user called the library: at the first line outside of it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_code.co_filename.startswith(_PASSED):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
