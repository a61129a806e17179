"""Everything that the packages of the library export."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import mechicl


def exported() -> Iterator[tuple[str, Any]]:
    """Yield the full names in all packages' `__all__`, outer packages first, and what they name."""
    packages = [each.name for each in pkgutil.walk_packages(mechicl.__path__, "mechicl.") if each.ispkg]
    for package in sorted(packages, key=lambda name: (name.count("."), name)):
        module = importlib.import_module(package)
        yield from ((f"{package}.{name}", getattr(module, name)) for name in sorted(getattr(module, "__all__", ())))
