"""The checkpoints that come with the package, and the loss of a model by its config; quick to import."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGED = Path(__file__).parents[1] / "_checkpoints"
_SOURCE_TREE = Path(__file__).parents[2] / "checkpoints"
CHECKPOINTS = _PACKAGED if _PACKAGED.is_dir() else _SOURCE_TREE


def available() -> list[str]:
    """List the names of the checkpoints that come with the package, in alphabetical order, for `load`."""
    if not CHECKPOINTS.is_dir():
        return []
    return sorted(folder.name for folder in CHECKPOINTS.iterdir() if (folder / "record.json").is_file())


def shipped_folder(name: str) -> Path:
    """Return the folder of a checkpoint that comes with the package; it need not exist."""
    return CHECKPOINTS / name


def predicts_classes(config: Mapping[str, Any]) -> bool:
    """Return True if models of a config are trained on cross entropy (nats), of tokens or classes, not on the MSE."""
    return config.get("prompt_format") == "token_ids" or config.get("predicts") == "classes"
