"""Libraries of others that run on our models, from the extra `tools`."""

import importlib
import importlib.util
import os
from typing import Any

import pytest


def require(name: str) -> None:
    """Without a module, skip the test, or fail it if `ALL_TOOLS` is set, as `make test-all` does."""
    if importlib.util.find_spec(name) is None:
        (pytest.fail if os.environ.get("ALL_TOOLS") else pytest.skip)(f"{name} is not installed: make test-all does it")


def imported(name: str) -> Any:
    """Import a module, see `require`."""
    require(name.split(".")[0])
    return importlib.import_module(name)
