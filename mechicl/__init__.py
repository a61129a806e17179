"""mechicl: mechanistic interpretability of in-context learning.

Which learning algorithm does a transformer run in its forward pass, and where? See `mechicl.models`,
`mechicl.algorithms`, `mechicl.constructions`, `mechicl.analysis`, `mechicl.checkpoints`.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from mechicl.base.version import __version__ as __version__

if TYPE_CHECKING:
    from mechicl.base.settings import settings as settings
    from mechicl.checkpoints import Study as Study
    from mechicl.checkpoints import load as load
    from mechicl.interop import load_language_model as load_language_model
    from mechicl.models import wrap as wrap
    from mechicl.reports import report as report


# OpenMP threads that spin while they wait slow down every other process on the machine. OpenMP reads this variable
# once, when torch is loaded.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_SUBMODULES = (
    "algorithms", "analysis", "checkpoints", "compat", "constructions", "interop", "learners", "models", "prompts",
    "reports", "tasks", "training", "viz",
)  # fmt: skip
_FUNCTIONS = {
    "Study": "mechicl.checkpoints", "load": "mechicl.checkpoints", "load_language_model": "mechicl.interop",
    "report": "mechicl.reports", "settings": "mechicl.base.settings", "wrap": "mechicl.models",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Submodules and functions load when they are first named, so that `import mechicl` costs nothing."""
    if name in _SUBMODULES:
        return importlib.import_module(f"mechicl.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module 'mechicl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES, *_FUNCTIONS])
