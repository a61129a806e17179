"""Seeds that were trained in several runs, joined to one checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mechicl.base.annotations import short
from mechicl.base.arguments import checked
from mechicl.checkpoints.checkpoint import Checkpoint, CheckpointError, Snapshots
from mechicl.checkpoints.folders import load_checkpoint, save
from mechicl.tasks import task_to_dict

OF_A_RUN = ("command", "seeds", "steps_done", "wall_time_s", "hardware", "processes", "versions")
"""Entries that a joined record keeps for each run."""
MAY_DIFFER = ("seeds", "more_tasks", "log_every", "save_every", "tracker", "cpu")
"""Fields of a training config that two runs of one training may differ in."""


@checked
def join(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Join checkpoints of different seeds, trained in several runs of one config, into one checkpoint.

    Its record contains all loss curves, and the command, seeds, wall time, hardware and versions of each run (`runs`).

    Args:
        folders: two or more checkpoints, by name or path. Their models are stored in this order.
        out: folder to write the joined checkpoint to, which is returned. It may be one of `folders`.

    Raises:
        CheckpointError: fewer than two; a checkpoint that cannot be read; several tasks in one; models, training
            configs, numbers of steps, or steps of curves or snapshots that differ; seeds in more than one of them.

    Example:
        >>> join(["checkpoints/gpt2-8l", "runs/gpt2-8l-seed1/checkpoint"], "checkpoints/gpt2-8l")
        PosixPath('checkpoints/gpt2-8l')
    """
    parts = [load_checkpoint(folder) for folder in folders]
    if len(parts) < 2:
        raise CheckpointError(f"join() needs two checkpoints or more, got {len(parts)}")
    _check_alike(parts, [str(folder) for folder in folders])
    records = [part.record for part in parts]
    seeds = [seed for record in records for seed in record["seeds"]]
    runs: list[dict[str, Any]] = []
    for each in records:
        runs += each.get("runs") or [{name: each[name] for name in OF_A_RUN if name in each}]
    record = {name: value for name, value in records[0].items() if name not in (*OF_A_RUN, "runs", "sha256")}
    record |= {"name": Path(out).name, "seeds": seeds, "training": {**records[0]["training"], "seeds": seeds}}
    record |= {"command": "; ".join(run["command"] for run in runs if run.get("command")), "runs": runs}
    record |= {name: records[0][name] for name in ("steps_done", "versions") if name in records[0]}
    record["wall_time_s"] = round(sum(run.get("wall_time_s") or 0 for run in runs), 1)
    record["hardware"] = "; ".join(dict.fromkeys(run["hardware"] for run in runs if run.get("hardware")))
    for name in ("stopped_at", "diverged_at"):
        record.pop(name, None)
        if all(name in each for each in records):
            record[name] = [step for each in records for step in each[name]]
    if "curve" in records[0]:
        record["curve"] = dict(records[0]["curve"])
        for name in {"loss", "eval_loss"} & record["curve"].keys():
            lines = zip(*(each["curve"][name] for each in records), strict=True)
            record["curve"][name] = [[loss for part in line for loss in part] for line in lines]
    kept, snapshots = [part.snapshots for part in parts if part.snapshots], None
    if kept:
        weights = {name: torch.cat([each.weights[name] for each in kept], 1) for name in kept[0].weights}
        snapshots = Snapshots(kept[0].steps, weights)
    return save(out, [model for part in parts for model in part.models], record, snapshots)


def _check_alike(parts: Sequence[Checkpoint], names: Sequence[str]) -> None:
    for part, name in zip(parts, names, strict=True):
        if missing := {"seeds", "training"} - part.record.keys():
            raise CheckpointError(f"{name}: its record has no {missing.pop()!r}, so it cannot be joined")
        if part.record["training"].get("more_tasks"):
            raise CheckpointError(f"{name} was trained on several tasks at once; join() takes one task")
    first, name = _to_compare(parts[0]), names[0]
    for part, other in zip(parts[1:], names[1:], strict=True):
        for what, theirs in _to_compare(part).items():
            ours = first[what]
            # an older version without a field trained with its default
            if keys := [key for key in ours if key in theirs and ours[key] != theirs[key]]:
                values = ((key, short(repr(theirs[key])), short(repr(ours[key]))) for key in keys)
                differences = ", ".join(f"{key} {its} instead of {others}" for key, its, others in values)
                raise CheckpointError(f"{other} has another {what} than {name}: {differences}")
    seeds = [seed for part in parts for seed in part.record["seeds"]]
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise CheckpointError(f"seeds {twice} are in more than one of {', '.join(names)}: give each seed once")


def _to_compare(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the parts of a checkpoint that are the same in all runs of one training."""
    config = {k: v for k, v in checkpoint.record["training"].items() if k not in MAY_DIFFER}
    curve, snapshots = checkpoint.record.get("curve", {}), checkpoint.snapshots
    return {
        "model": checkpoint.models[0].cfg.to_dict(),
        "training config": config | {"task": task_to_dict(checkpoint.task), "model": None},
        "number of steps": {"steps_done": checkpoint.record.get("steps_done")},
        "learning curve": {key: curve.get(key) for key in ("eval_step", "step")},
        "set of snapshots": {"steps": snapshots and snapshots.steps},
    }
