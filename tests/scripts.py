"""Scripts of `analyses/` as modules; pytest has that folder on its path (pyproject.toml)."""

import importlib
from typing import Any

from tests.pages import ROOT

ANALYSES = ROOT / "analyses"


def import_script(name: str) -> Any:
    """A script of `analyses/` by its name, in whichever paper's folder it is."""
    folders = [path.parent.name for path in ANALYSES.glob(f"*/{name}.py")]
    return importlib.import_module(".".join([*folders, name]))
