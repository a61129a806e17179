"""Scripts of `analyses/` as modules."""

import importlib
import sys
from typing import Any

from tests.pages import ROOT

ANALYSES = ROOT / "analyses"


def import_script(name: str) -> Any:
    """A script of `analyses/` by its name, with the others beside it to import from."""
    sys.path.insert(0, str(ANALYSES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ANALYSES))
