"""The checkpoints that come with the package; quick to import."""

from pathlib import Path

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
