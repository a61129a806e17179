"""The result of a run: models, snapshots, and the record of how they were trained."""

import math
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from mechicl.base.arguments import check_fields
from mechicl.base.tensor_files import read_tensors
from mechicl.checkpoints.checkpoint import models_from_stack
from mechicl.models import Model
from mechicl.training.config import TrainingConfig
from mechicl.training.ensemble import Ensemble
from mechicl.training.metrics import Metrics
from mechicl.training.state import RunState


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The models of a finished run, and how they were trained.

    Attributes:
        models: one per seed (of the first task, then of the others), in eval mode, on the CPU.
        record: "training" (the config), "seeds", "curve", wall time, hardware and versions as plain JSON data. The
            curve has "step" and "loss" (training loss, `[step][seed]`), "eval_step" and "eval_loss" (held-out loss).
        snapshot_steps: training steps of the snapshots.
        snapshots: for each weight's name, a tensor `[step seed ...]`: its values at these steps; empty without any.
    """

    models: list[Model]
    record: dict[str, Any]
    snapshot_steps: tuple[int, ...]
    snapshots: dict[str, Tensor]

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)


def snapshot_path(folder: Path, step: int) -> Path:
    """The file with the weights of a step."""
    return folder / "snapshots" / f"{step:09d}.safetensors"


def collect_result(
    config: TrainingConfig, folder: Path, state: RunState, ensemble: Ensemble, accelerator: Accelerator
) -> TrainingResult:
    """The result of a finished run, from its last state and the files of its folder."""
    buffers = ensemble.buffers_state()
    models = models_from_stack(config.model.replace(device="cpu"), {**ensemble.state(), **buffers})
    paths = {step: snapshot_path(folder, step) for step in config.snapshot_steps if step <= state.step}
    snapshots = {step: {**read_tensors(path)[0], **buffers} for step, path in paths.items() if path.is_file()}
    names = next(iter(snapshots.values()), {})
    lines = Metrics.read(folder)
    evaluations = [line for line in lines if "eval_loss" in line]
    training = [line for line in lines if "loss" in line]
    curve = {
        "eval_step": [line["step"] for line in evaluations],
        "eval_loss": [_finite(line["eval_loss"]) for line in evaluations],
        "step": [line["step"] for line in training],
        "loss": [_finite(line["loss"]) for line in training],
    }
    ended = {"stopped_at": state.stopped_at.tolist(), "diverged_at": state.diverged_at.tolist()}
    route = asdict(state.route)
    machine = {"processes": accelerator.num_processes, "threads": route.pop("threads"), "route": route}
    record = make_record(config, state.step, curve, state.wall_time, accelerator.device, **ended, **machine)
    stacked = {name: torch.stack([weights[name] for weights in snapshots.values()]) for name in names}
    return TrainingResult(models, record, tuple(snapshots), stacked)


def make_record(
    config: TrainingConfig, steps: int, curve: dict[str, Any], seconds: float, device: torch.device, **more: Any
) -> dict[str, Any]:
    """The record of a run as plain JSON data."""
    return {
        "seeds": [seed for _, seed in config.members],
        "training": config.to_dict(),
        "steps_done": steps,
        "curve": curve,
        "wall_time_s": round(seconds, 1),
        "hardware": hardware_name(device),
        "processes": 1,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        **more,
    }


def _finite(losses: list[float]) -> list[float | None]:
    return [loss if math.isfinite(loss) else None for loss in losses]


def hardware_name(device: torch.device) -> str:
    """Name of the hardware, such as "2 CPU cores" or "NVIDIA H200"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{os.cpu_count()} CPU cores ({platform.machine()}), {torch.get_num_threads()} threads"
    return device.type
