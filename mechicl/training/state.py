"""The complete state of a run in one file, written atomically, so that a killed run goes on as if nothing happened."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mechicl.files import write_bytes
from mechicl.tensor_files import read_tensors, write_tensors
from mechicl.training.config import TrainingConfig

STATE_FILE = "state.safetensors"
METRICS_FILE = "metrics.jsonl"


@dataclass
class RunState:
    """Everything that the next step depends on.

    Attributes:
        step: number of steps done.
        weights: name to `[seed ...]`.
        moments: what the optimiser keeps: its step, Adam's first and second moments, "exp_avg.NAME", "exp_avg_sq.NAME"
            and "step.NAME", and SOAP's factors and axes.
        generators: the random state of each seed's prompts, `[seed byte]`.
        stopped_at: step at which each seed reached its target or diverged, -1 before, `[seed]`. Its weights stay put.
        diverged_at: step at which each seed's loss was no longer finite, -1 before, `[seed]`.
        wall_time: seconds spent so far.
        threads: of torch, on which the run's last bits depend; a resumed run takes as many again.
    """

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    generators: Tensor
    stopped_at: Tensor
    diverged_at: Tensor
    wall_time: float
    threads: int

    def save(self, folder: Path, config: TrainingConfig) -> None:
        """Write the state file of a run."""
        groups = {"weights": self.weights, "moments": self.moments}
        tensors = {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}
        tensors |= {"generators": self.generators, "stopped_at": self.stopped_at, "diverged_at": self.diverged_at}
        metadata = {"step": str(self.step), "wall_time": repr(self.wall_time), "threads": str(self.threads)}
        metadata["config"] = json.dumps(config.to_dict())
        write_tensors(folder / STATE_FILE, tensors, metadata)

    @classmethod
    def load(cls, folder: Path, config: TrainingConfig) -> "RunState":
        """Read the state file of a run.

        Raises:
            ValueError: the file is damaged, or belongs to a run with another config; the message names the fields.
        """
        path = folder / STATE_FILE
        tensors, metadata = read_tensors(path)
        absent = [key for key in ("step", "wall_time", "config") if key not in metadata]
        absent += [key for key in ("generators", "stopped_at") if key not in tensors]
        if absent:
            raise ValueError(f"{path} is not the state of a run: it has no {', '.join(absent)}")
        # through the config: a run that was saved before it had some field goes on with that field's default
        saved = json.loads(json.dumps(TrainingConfig.from_dict(json.loads(metadata["config"])).to_dict()))
        now = json.loads(json.dumps(config.to_dict()))
        different = [name for name in now if now[name] != saved.get(name)]
        if different:
            changes = "; ".join(f"{name}: {saved.get(name)} there, {now[name]} now" for name in different)
            raise ValueError(f"{folder} holds a run with another config ({changes}); use another folder or restart it")

        def group(prefix: str) -> dict[str, Tensor]:
            return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}

        return cls(
            step=int(metadata["step"]),
            weights=group("weights/"),
            moments=group("moments/"),
            generators=tensors["generators"],
            stopped_at=tensors["stopped_at"],
            # a run that was saved before diverged seeds could stop has none
            diverged_at=tensors.get("diverged_at", torch.full_like(tensors["stopped_at"], -1)),
            wall_time=float(metadata["wall_time"]),
            # a run that was saved before threads were chosen had all that torch has
            threads=int(metadata.get("threads", torch.get_num_threads())),
        )


def optimizer_moments(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """What an optimiser keeps, "KEY.NAME" by the weights' names, copies on the CPU."""
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{key}.{name}": value.detach().cpu().clone()
        for name, parameter in zip(names, parameters, strict=True)
        for key, value in optimizer.state[parameter].items()
    }


def restore_moments(optimizer: torch.optim.Optimizer, names: list[str], moments: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_moments`."""
    for name, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
        for saved, value in moments.items():
            key, _, of_weights = saved.rpartition(".")
            if of_weights == name:
                on_device = key != "step" or optimizer.param_groups[0].get("fused")  # fused kernels read the step there
                device = parameter.device if on_device else value.device
                optimizer.state[parameter][key] = value.clone().to(device)


class Metrics:
    """Metrics as JSON lines, one object a logged step; lines of steps after the last save go when a run resumes."""

    def __init__(self, folder: Path, from_step: int):
        self.path = folder / METRICS_FILE
        kept = [line for line in self.read(folder) if line["step"] <= from_step]
        write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """The lines of a run; one that a kill cut short is left out."""
        try:
            text = (folder / METRICS_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        lines = []
        for line in text.splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return lines
