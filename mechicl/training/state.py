"""The complete state of a run in one file, written atomically, so that a killed run resumes bit for bit.

The file has digests of itself and of all files that belong to it, so that damage is always detected.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mechicl.base.files import check_file
from mechicl.base.tensor_files import read_tensors, signed, write_tensors
from mechicl.training.config import TrainingConfig
from mechicl.training.routes import Route

STATE_FILE = "state.safetensors"
EARLIER_STATE_FILE = "state.earlier.safetensors"  # the save before the last, to resume from if that is damaged


class DamagedSaveError(ValueError):
    """A file of a run's save is missing, or was changed after it was written."""


@dataclass
class RunState:
    """Everything that the next step depends on."""

    step: int  # number of training steps done
    weights: dict[str, Tensor]  # for each weight's name, a tensor `[seed ...]`
    # the optimiser's state: "exp_avg.weights", "exp_avg_sq.weights", "step.weights", and SOAP's factors and axes.
    moments: dict[str, Tensor]
    generators: Tensor  # the random state of each seed's prompts, `[seed byte]`
    # step at which each seed reached its target or diverged, -1 before, `[seed]`. Its weights are fixed.
    stopped_at: Tensor
    diverged_at: Tensor  # step at which each seed's loss was no longer finite, -1 before, `[seed]`
    wall_time: float  # seconds spent so far
    route: Route  # how steps are computed, on which the run's last bits depend; a resumed run uses the same one
    # number of bytes and SHA-256 of the other files of the save, by their path in the folder.
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    # SHA-256 of the weights that interventions copy from, by intervention.
    sources: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path, config: TrainingConfig) -> None:
        """Write the state file of a run, and keep the previous one."""
        groups = {"weights": self.weights, "moments": self.moments}
        tensors = {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}
        tensors |= {"generators": self.generators, "stopped_at": self.stopped_at, "diverged_at": self.diverged_at}
        metadata = {"step": str(self.step), "wall_time": repr(self.wall_time), "route": json.dumps(asdict(self.route))}
        metadata |= {"files": json.dumps(self.files), "config": json.dumps(config.to_dict())}
        if self.sources:
            metadata["sources"] = json.dumps(self.sources)
        _keep_earlier(folder)
        write_tensors(folder / STATE_FILE, tensors, signed(tensors, metadata))

    @classmethod
    def load(cls, folder: Path, config: TrainingConfig) -> "RunState":
        """Read the state file of a run: ValueError for another config, DamagedSaveError for changed files."""
        earlier = folder / EARLIER_STATE_FILE
        try:
            return cls._read(folder / STATE_FILE, config)
        except DamagedSaveError as error:
            words = "No earlier save is intact: use another folder, or restart the run"
            with suppress(ValueError):
                step = cls._read(earlier, config).step
                words = f"The save before it, of step {step}, is intact: rename {earlier} to {STATE_FILE} to continue"
            raise DamagedSaveError(f"{error}. {words}") from error

    @classmethod
    def _read(cls, path: Path, config: TrainingConfig) -> "RunState":
        try:
            tensors, metadata = read_tensors(path)
        except (OSError, ValueError) as error:
            raise DamagedSaveError(str(error)) from error
        if metadata != signed(tensors, metadata):
            raise DamagedSaveError(f"{path} was not written by a run, or has changed: its SHA-256 is missing or wrong")
        try:
            saved, files = (json.loads(metadata[name]) for name in ("config", "files"))
            step, wall_time = int(metadata["step"]), float(metadata["wall_time"])
            route = Route(**json.loads(metadata["route"]))
            files = {str(name): (int(n_bytes), str(digest)) for name, (n_bytes, digest) in files.items()}
            sources = dict(json.loads(metadata.get("sources", "{}")))
            generators, stopped_at, diverged_at = (tensors[n] for n in ("generators", "stopped_at", "diverged_at"))
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedSaveError(f"{path} was not written by a run: {error!r}") from error
        _check_config(path.parent, saved, config)
        for name, (n_bytes, digest) in files.items():
            if digest_of_start(path.parent / name, n_bytes) != digest:
                raise DamagedSaveError(f"{path.parent / name} is missing, or was changed after {path} was written")
        weights, moments = (
            {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            for prefix in ("weights/", "moments/")
        )
        return cls(step, weights, moments, generators, stopped_at, diverged_at, wall_time, route, files, sources)


def digest_of_start(path: Path, n_bytes: int) -> str | None:
    """The SHA-256 of the first bytes of a file; None if there are fewer."""
    digest, left = hashlib.sha256(), n_bytes
    try:
        check_file(path)
        with open(path, "rb") as file:
            while left > 0 and (data := file.read(min(left, 2**20))):
                digest.update(data)
                left -= len(data)
    except (OSError, ValueError):
        return None
    return None if left else digest.hexdigest()


def _keep_earlier(folder: Path) -> None:
    """Give the last save a second name; it stays the last one until a new one replaces it."""
    last, earlier, passing = folder / STATE_FILE, folder / EARLIER_STATE_FILE, folder / f".{EARLIER_STATE_FILE}.tmp"
    if last.is_file():
        passing.unlink(missing_ok=True)
        try:
            os.link(last, passing)
        except OSError:  # a file system without links
            shutil.copyfile(last, passing)
        os.replace(passing, earlier)
        passing.unlink(missing_ok=True)  # replacing a file by another name of the same file does nothing


def _check_config(folder: Path, saved: dict[str, Any], config: TrainingConfig) -> None:
    # through the config: a run that was saved before a field existed continues with that field's default
    before = json.loads(json.dumps(TrainingConfig.from_dict(saved).to_dict()))
    now = json.loads(json.dumps(config.to_dict()))
    before["routes"] = now.get("routes")  # the run keeps the route that it started with
    if "compile" not in now and not before.get("compile"):  # so, too
        before.pop("compile", None)
    different = [name for name in {**now, **before} if now.get(name) != before.get(name)]
    if different:
        changes = "; ".join(f"{name}: {before.get(name)} there, {now.get(name)} now" for name in different)
        raise ValueError(f"{folder} has a run with another config ({changes}); use another folder or restart it")


def optimizer_moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser of one tensor, "KEY.weights", copies on the CPU."""
    (parameter,) = optimizer.param_groups[0]["params"]
    return {f"{key}.weights": value.detach().cpu().clone() for key, value in optimizer.state[parameter].items()}


def restore_moments(optimizer: torch.optim.Optimizer, moments: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_moments`."""
    (parameter,) = optimizer.param_groups[0]["params"]
    for saved, value in moments.items():
        key = saved.removesuffix(".weights")
        on_device = key != "step" or optimizer.param_groups[0].get("fused")  # fused kernels read the step there
        optimizer.state[parameter][key] = value.clone().to(parameter.device if on_device else value.device)
