"""The command line: `mechicl list`, `mechicl train PRESET`, `mechicl report CHECKPOINT --out DIR`."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import tyro

from mechicl import __version__
from mechicl.checkpoints import CheckpointError, Snapshots, available, load_checkpoint, save
from mechicl.training import PRESETS, TrainingConfig, TrainingDivergedError, train


@dataclass(frozen=True)
class List:
    """List the trained models that come with mechicl."""

    def execute(self, command: str) -> None:
        """Print a line for each."""
        for name in available():
            checkpoint = load_checkpoint(name)
            cfg, record = checkpoint.models[0].cfg, checkpoint.record
            losses = record["curve"]["eval_loss"][-1]
            print(
                f"{name:24} {cfg.n_layers} layer{'s' if cfg.n_layers != 1 else ''}, {cfg.n_heads} "
                f"{cfg.attention} head{'s' if cfg.n_heads != 1 else ''}, width {cfg.d_model}, {len(checkpoint.models)} "
                f"seed{'s' if len(checkpoint.models) != 1 else ''}, held-out MSE {sum(losses) / len(losses):.4f}"
            )


@dataclass(frozen=True)
class TrainPreset:
    """Train a preset, any of whose fields can be overridden, and save it as a checkpoint."""

    config: Annotated[TrainingConfig, tyro.conf.arg(name="")]
    """What to train."""
    out: Path | None = None
    """Folder of the checkpoint; by default checkpoints/PRESET."""
    run: Path | None = None
    """Folder of the run's saves, from which a killed run resumes; by default runs/PRESET."""
    restart: bool = False
    """Throw away the run folder's saves and start over."""
    quiet: bool = False
    """No progress bar."""

    def execute(self, command: str) -> None:
        """Train, then write the checkpoint with its record."""
        name = _preset_name(command)
        result = train(self.config, self.run or Path("runs") / name, restart=self.restart, progress=not self.quiet)
        record = {"name": name, "command": command, **result.record}
        record["versions"] |= {"mechicl": __version__, "transformer-lens": version("transformer-lens")}
        snapshots = Snapshots(result.snapshot_steps, result.snapshots) if result.snapshots else None
        folder = save(self.out or Path("checkpoints") / name, result.models, record, snapshots)
        losses = record["curve"]["eval_loss"][-1]
        print(f"{folder}: held-out MSE {', '.join(f'{loss:.5f}' for loss in losses)} (seeds {record['seeds']})")


def _preset_name(command: str) -> str:
    return next(word for word in shlex.split(command) if word in PRESETS)


PRESET_COMMANDS = tyro.extras.subcommand_type_from_defaults(
    {name: TrainPreset(preset.replace(model=preset.model.as_given())) for name, preset in PRESETS.items()},
    prefix_names=False,
)


@dataclass(frozen=True)
class Train:
    """Train a preset, any of whose fields can be overridden, and save it as a checkpoint."""

    preset: Annotated[PRESET_COMMANDS, tyro.conf.arg(name="")]  # type: ignore

    def execute(self, command: str) -> None:
        """Train it."""
        self.preset.execute(command)


COMMANDS = List | Train


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line; errors of the user's making end with one line and exit code 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = (tyro.conf.AvoidSubcommands,)
    command = tyro.cli(COMMANDS, prog="mechicl", description=__doc__, args=words, config=options)  # type: ignore[call-overload]
    try:
        command.execute(shlex.join(["mechicl", *words]))
    except (CheckpointError, TrainingDivergedError, ValueError, OSError) as error:
        print(f"mechicl: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
