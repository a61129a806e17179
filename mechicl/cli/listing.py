"""`mechicl list`: a line on each shipped checkpoint, from its config.json and record.json alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechicl.base.files import read_json
from mechicl.base.shipped import available, shipped_folder


@dataclass(frozen=True)
class List:
    """List the trained models that come with mechicl."""

    def execute(self, command: str) -> None:
        """Print a line for each."""
        for name in available():
            print(f"{name:24} {_in_words(shipped_folder(name))}")


def _in_words(folder: Path) -> str:
    """What a checkpoint holds: its architecture, its seeds, what they reached.

    Raises:
        ValueError: one of its files is damaged or lacks something.
    """
    cfg, record = (read_json(folder / name) for name in ("config.json", "record.json"))
    try:
        if cfg.get("architecture") == "lstm":
            layers = _count(cfg["n_layers"], "LSTM layer")
        else:
            layers = f"{_count(cfg['n_layers'], 'layer')}, {_count(cfg['n_heads'], cfg['attention'] + ' head')}"
        return f"{layers}, width {cfg['d_model']}, {_training(cfg, record)}"
    except KeyError as error:
        raise ValueError(f"{folder} is no whole checkpoint: its files lack {error}") from error
    except (TypeError, AttributeError, IndexError, ArithmeticError) as error:  # anything may stand in a file
        raise ValueError(f"{folder} is no checkpoint: its files are not what a training writes ({error})") from error


def _training(cfg: dict[str, Any], record: dict[str, Any]) -> str:
    tasks = 1 + len(record.get("training", {}).get("more_tasks", ()))
    losses = record.get("curve", {}).get("eval_loss", [[float("nan")]])[-1]
    seeds = _count(len(record["seeds"]) // tasks, "seed")
    if tasks > 1:
        return f"{seeds} on each of {tasks} tasks"
    return f"{seeds}, {held_out(cfg.get('prompt_format'))} {sum(losses) / len(losses):.4f}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"


def held_out(prompt_format: str | None) -> str:
    """The name of the loss on held-out prompts."""
    return "held-out cross entropy (nats)" if prompt_format == "token_ids" else "held-out MSE"
