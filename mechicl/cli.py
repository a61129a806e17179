"""The command line: `mechicl list`, `train PRESET`, `report CHECKPOINT --out DIR`, `import FOLDER --out DIR`."""

import os

# Threads of OpenMP that spin while they wait slow every other process on the machine, ours included. They read this
# when torch is imported, and processes that are started from here inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import copy
import dataclasses
import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import tyro
from accelerate import PartialState

from mechicl import __version__
from mechicl.checkpoints import CheckpointError, Snapshots, available, load_checkpoint, save
from mechicl.interop import load_garg
from mechicl.models import LSTMConfig, ModelConfig
from mechicl.reports import write_report
from mechicl.tasks import AnyTask, FixedTasks, LinearRegression, SineRegression, task_to_dict
from mechicl.training import PRESETS, Curriculum, Ramp, TrainingConfig, TrainingDivergedError, train
from mechicl.training.presets import SUMMARIES

DESCRIPTION = "Train small in-context learners, and report which algorithm they run."
TaskKind = Literal["LinearRegression", "SineRegression", "FixedTasks"]


@dataclass(frozen=True)
class List:
    """List the trained models that come with mechicl."""

    def execute(self, command: str) -> None:
        """Print a line for each."""
        for name in available():
            checkpoint = load_checkpoint(name)
            cfg, record = checkpoint.models[0].cfg, checkpoint.record
            losses = record.get("curve", {}).get("eval_loss", [[float("nan")]])[-1]
            if isinstance(cfg, LSTMConfig):
                layers = _count(cfg.n_layers, "LSTM layer")
            else:
                layers = f"{_count(cfg.n_layers, 'layer')}, {_count(cfg.n_heads, f'{cfg.attention} head')}"
            tasks = 1 + len(record.get("training", {}).get("more_tasks", ()))
            seeds = _count(len(checkpoint.models) // tasks, "seed")
            if tasks > 1:
                training = f"{seeds} on each of {tasks} tasks"
            else:
                training = f"{seeds}, {_held_out(cfg)} {sum(losses) / len(losses):.4f}"
            print(f"{name:24} {layers}, width {cfg.d_model}, {training}")


def _held_out(cfg: ModelConfig) -> str:
    return "held-out cross entropy (nats)" if cfg.prompt_format == "token_ids" else "held-out MSE"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"


@dataclass(frozen=True)
class TrainPreset:
    """Train a preset, any of whose fields can be overridden, and save it as a checkpoint."""

    config: Annotated[TrainingConfig, tyro.conf.arg(name="")]
    """What to train."""
    task: TaskKind | None = None
    """Another kind of task than the preset's, whose fields are then --task.FIELD. FixedTasks are drawn from the
    preset's task (--task.task.FIELD)."""
    out: Path | None = None
    """Folder of the checkpoint; by default "checkpoint" in the run's folder."""
    run: Path | None = None
    """Folder of the run's saves, from which a killed run resumes; by default runs/PRESET."""
    restart: bool = False
    """Throw away the run folder's saves and start over."""
    quiet: bool = False
    """No progress bar."""

    def execute(self, command: str) -> None:
        """Train, then write the checkpoint with its record."""
        name = _preset_name(command)
        config = self.config.replace(curriculum=None) if self.config.curriculum == Curriculum() else self.config
        run = self.run or Path("runs") / name
        result = train(config, run, restart=self.restart, progress=not self.quiet)
        if PartialState().is_main_process:
            record = {"name": name, "command": command, **result.record}
            record["versions"] |= {"mechicl": __version__, "transformer-lens": version("transformer-lens")}
            snapshots = Snapshots(result.snapshot_steps, result.snapshots) if result.snapshots else None
            folder = save(self.out or run / "checkpoint", result.models, record, snapshots)
            losses = record.get("curve", {}).get("eval_loss", [[float("nan")]])[-1]
            reached = ", ".join(f"{loss:.5f}" for loss in losses)
            print(f"{folder}: {_held_out(config.model)} {reached} (seeds {record['seeds']})")
        PartialState().destroy_process_group()


def _preset_name(command: str) -> str:
    return next(word for word in shlex.split(command) if word in PRESETS)


@dataclass(frozen=True)
class Report:
    """Open a trained model and write what was measured: report.html (offline) and report.json."""

    checkpoint: tyro.conf.Positional[str]
    """Name of a shipped checkpoint (see `mechicl list`), or the path of one."""
    out: Path
    """Folder to write to."""
    n_prompts: int = 10_000
    """Held-out prompts for each measurement."""
    quiet: bool = False
    """No progress bar."""

    def execute(self, command: str) -> None:
        """Write the report."""
        started = time.perf_counter()
        path = write_report(self.checkpoint, self.out, n_prompts=self.n_prompts, progress=not self.quiet)
        print(f"{path} ({time.perf_counter() - started:.0f} s)")


@dataclass(frozen=True)
class Import:
    """Import a model trained by the in-context-learning code of Garg et al. 2022 (state.pt, config.yaml)."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run, with state.pt and config.yaml. Nothing in them is executed."""
    out: Path
    """Folder of the checkpoint."""

    def execute(self, command: str) -> None:
        """Write the checkpoint."""
        model, task = load_garg(self.folder)
        versions = {"mechicl": __version__, "torch": version("torch")}
        record = {"name": self.out.name, "command": command, "imported": "in-context-learning", "versions": versions}
        if task is not None:  # what reports and scripts draw their prompts from
            record["training"] = {"task": task_to_dict(task)}
        print(f"{save(self.out, model, record)}: {model.cfg.n_layers} layers, x_dim {model.cfg.x_dim}")


def _task(preset: TrainingConfig, kind: TaskKind | None) -> AnyTask:
    """The task of a kind that the command line starts from. One that does not fit the model is refused later."""
    if kind is None:
        return preset.task
    if kind == "FixedTasks":  # these hold prompts of points, which a task of token sequences has none of
        return FixedTasks(LinearRegression() if preset.on_tokens else preset.eval_task, n_tasks=preset.batch_size)
    return LinearRegression() if kind == "LinearRegression" else SineRegression()


def _defaults(preset: TrainingConfig, kind: TaskKind | None) -> TrainPreset:
    """A preset as the command line starts from it, before anything that depends on other fields is filled in."""
    config = copy.copy(preset)  # not replace(): what does not fit yet may do so with the words that follow
    for field, value in {
        "task": _task(preset, kind),
        "model": preset.model.unfilled(),
        "curriculum": preset.curriculum or Curriculum(),
    }.items():
        object.__setattr__(config, field, value)
    return TrainPreset(config)


def _commands(kind: TaskKind | None) -> Any:
    presets: Any = tyro.extras.subcommand_type_from_defaults(
        {name: _defaults(preset, kind) for name, preset in PRESETS.items()}, SUMMARIES, prefix_names=False
    )

    @dataclass(frozen=True)
    class Train:
        """Train a preset, any of whose fields can be overridden, and save it as a checkpoint."""

        preset: Annotated[presets, tyro.conf.arg(name="")]  # pyright: ignore[reportInvalidTypeForm]
        """What to train; `mechicl train PRESET --help` lists all that can be overridden."""

        def execute(self, command: str) -> None:
            """Train it."""
            self.preset.execute(command)

    return List | Train | Report | Import


REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def _ramp(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """A ramp of a curriculum is two to four words, or None."""
    if info.type != Ramp | None:
        return None

    def parse(words: list[str]) -> Ramp | None:
        if words == ["None"]:
            return None
        if len(words) < 2:
            raise ValueError(f"a ramp has a start and an end, got {words[0]}")
        return Ramp(*map(int, words))

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=(1, 2, 3, 4),
        metavar="{None}|START END [INCREMENT [INTERVAL]]",
        instance_from_str=parse,
        is_instance=lambda value: value is None or isinstance(value, Ramp),
        str_from_instance=lambda ramp: ["None"] if ramp is None else [str(n) for n in dataclasses.astuple(ramp)],
    )


@REGISTRY.primitive_rule
def _more_tasks(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """The further tasks of a preset can be kept or dropped, not overridden one by one."""
    if info.type != tuple[AnyTask, ...]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{None}",
        choices=("None",),
        instance_from_str=lambda words: (),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda tasks: [f"{len(tasks)} of them" if tasks else "None"],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line.

    Errors of the user's making end with one line and exit code 1; words that cannot be parsed with tyro's explanation
    and exit code 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    kind = next((b for a, b in itertools.pairwise(words) if a == "--task" and b in get_args(TaskKind)), None)
    options = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)
    try:
        command = tyro.cli(
            _commands(cast(TaskKind | None, kind)),
            prog="mechicl",
            description=DESCRIPTION,
            args=words,
            config=options,
            registry=REGISTRY,
        )
        command.execute(shlex.join(["mechicl", *words]))
    except (CheckpointError, TrainingDivergedError, ValueError, OSError) as error:
        print(f"mechicl: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("mechicl: interrupted; a training goes on from its last save when called again", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
