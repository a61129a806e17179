"""Fewer snapshots of a training, where a checkpoint's folder is larger than what is read of it."""

from collections.abc import Iterable
from pathlib import Path

from mechicl.checkpoints.checkpoint import CheckpointError, Snapshots
from mechicl.checkpoints.folders import load_checkpoint, save


def thin_snapshots(checkpoint: str | Path, steps: Iterable[int], out: str | Path) -> Path:
    """Write a checkpoint with the snapshots of some steps only; its models and its curve stay as they are, bit for bit.

    The steps that are left out are added to the record's `dropped_snapshots`.

    Args:
        checkpoint: name or folder of a checkpoint with snapshots.
        steps: those whose snapshots are kept, in any order; none keeps no snapshots.
        out: folder of the smaller checkpoint. It may be the one that is read.

    Returns:
        The folder.

    Raises:
        CheckpointError: a checkpoint that cannot be read, or without snapshots; a step that it has none of.

    Example:
        >>> thin_snapshots("runs/long/checkpoint", [0, 1000, 10_000], "runs/long/small")
        PosixPath('runs/long/small')
    """
    loaded, kept = load_checkpoint(checkpoint), set(steps)
    if loaded.snapshots is None:
        raise CheckpointError(f"{checkpoint} was saved without snapshots: there is nothing to thin")
    there = loaded.snapshots.steps
    if missing := sorted(kept - set(there)):
        raise CheckpointError(f"{checkpoint} has no snapshots of the steps {missing}; it has {list(there)}")
    indices = [i for i, step in enumerate(there) if step in kept]
    weights = {name: stacked[indices] for name, stacked in loaded.snapshots.weights.items()}
    dropped = {*loaded.record.get("dropped_snapshots", ()), *there} - kept
    record = {**loaded.record, "dropped_snapshots": sorted(dropped)}
    return save(out, loaded.models, record, Snapshots(tuple(there[i] for i in indices), weights) if indices else None)
