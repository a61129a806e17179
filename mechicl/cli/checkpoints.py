"""`mechicl list`, `mechicl import` and `mechicl join`: commands on checkpoints."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

from mechicl.base.files import read_json
from mechicl.base.shipped import available, predicts_classes, shipped_folder
from mechicl.base.version import __version__


@dataclass(frozen=True)
class List:
    """List the trained models that come with mechicl."""

    def execute(self, command: str) -> None:
        """Print a line for each, from its config.json and record.json alone."""
        for name in available():
            print(f"{name:24} {_summary(shipped_folder(name))}")


@dataclass(frozen=True)
class Import:
    """Import a model trained by the in-context-learning code of Garg et al. 2022 (state.pt, config.yaml)."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run, with state.pt and config.yaml. Code in them is never executed."""
    out: Path
    """Folder of the checkpoint."""
    step: int | None = None
    """Step of a snapshot, model_{step}.pt; by default the end of training, state.pt."""

    def execute(self, command: str) -> None:
        """Write the checkpoint."""
        from mechicl.checkpoints import save  # here, so that help does not wait for torch
        from mechicl.interop import load_garg
        from mechicl.tasks import task_to_dict

        model, task = load_garg(self.folder, step=self.step)
        versions = {"mechicl": __version__, "torch": version("torch")}
        record = {"name": self.out.name, "command": command, "imported": "in-context-learning", "versions": versions}
        if task is not None:  # reports and scripts draw their prompts from it
            record["training"] = {"task": task_to_dict(task)}
        print(f"{save(self.out, model, record)}: {model.cfg.n_layers} layers, x_dim {model.cfg.x_dim}")


@dataclass(frozen=True)
class Join:
    """Make one checkpoint of seeds that were trained in several runs of one config."""

    checkpoints: tyro.conf.Positional[tuple[str, ...]]
    """Names or folders of two checkpoints or more, in the order of their seeds in the result."""
    out: Path
    """Folder of the joined checkpoint; it may be one of those that are joined."""

    def execute(self, command: str) -> None:
        """Write the checkpoint."""
        from mechicl.checkpoints import join, load_checkpoint

        folder = join(self.checkpoints, self.out)
        print(f"{folder}: seeds {', '.join(map(str, load_checkpoint(folder).record['seeds']))}")


def _summary(folder: Path) -> str:
    """Architecture, seeds and losses of a checkpoint.

    Raises:
        ValueError: one of its files is damaged or incomplete.
    """
    cfg, record = (read_json(folder / name) for name in ("config.json", "record.json"))
    try:
        layers = _count(cfg["n_layers"], "LSTM layer" if cfg.get("architecture") == "lstm" else "layer")
        if cfg.get("architecture") == "table":
            layers += f" between columns and rows, {_count(cfg['n_heads'], 'head')} each"
        elif cfg.get("architecture") != "lstm":
            layers += f", {_count(cfg['n_heads'], cfg['attention'] + ' head')}"
        return f"{layers}, width {cfg['d_model']}, {_training(cfg, record)}"
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:  # files may contain anything
        words = "is not a checkpoint: its files are not as a training writes them"
        raise ValueError(f"{folder} {words}: {error}") from error


def _training(cfg: dict[str, Any], record: dict[str, Any]) -> str:
    tasks = 1 + len(record.get("training", {}).get("more_tasks", ()))
    losses = record.get("curve", {}).get("eval_loss", [[float("nan")]])[-1]
    seeds = _count(len(record["seeds"]) // tasks, "seed")
    if tasks > 1:
        return f"{seeds} on each of {tasks} tasks"
    known = [loss for loss in losses if loss is not None]
    lost = f" ({len(losses) - len(known)} diverged)" if len(known) < len(losses) else ""
    return f"{seeds}, {held_out(cfg)} {sum(known) / len(known) if known else float('nan'):.4f}{lost}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"


def held_out(config: dict[str, Any]) -> str:
    """Name the loss of a model on held-out prompts."""
    return "held-out cross entropy (nats)" if predicts_classes(config) else "held-out MSE"
