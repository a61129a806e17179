"""What a sweep can measure of a model by name: functions of a checkpoint that holds one model."""

from collections.abc import Callable
from typing import Any

from mechicl.checkpoints import Checkpoint

MEASURES: dict[str, Callable[[Checkpoint], Any]] = {}
"""Measures by the names that `mechicl sweep --measure` takes."""
