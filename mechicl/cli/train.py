"""`mechicl train PRESET`: a subcommand for each preset, whose options are the fields of its config."""

import copy
import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import tyro
from accelerate import PartialState

from mechicl import __version__
from mechicl.checkpoints import Snapshots, save
from mechicl.cli.listing import held_out
from mechicl.tasks import AnyTask, FixedTasks, LinearRegression, SineRegression
from mechicl.training import PRESETS, Curriculum, Ramp, TrainingConfig, train
from mechicl.training.presets import SUMMARIES

TaskKind = Literal["LinearRegression", "SineRegression", "FixedTasks"]


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
            loss = held_out(getattr(config.model, "prompt_format", None))
            print(f"{folder}: {loss} {reached} (seeds {record['seeds']})")
        PartialState().destroy_process_group()


def _preset_name(command: str) -> str:
    return next(word for word in shlex.split(command) if word in PRESETS)


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


def train_command(words: Sequence[str], summary: str | None) -> Any:
    """The command's class, with the defaults that the words of a command line ask for, under a line of help."""
    kind = next((b for a, b in itertools.pairwise(words) if a == "--task" and b in get_args(TaskKind)), None)
    presets: Any = tyro.extras.subcommand_type_from_defaults(
        {name: _defaults(preset, cast(TaskKind | None, kind)) for name, preset in PRESETS.items()},
        SUMMARIES,
        prefix_names=False,
    )

    @dataclass(frozen=True)
    class Train:
        preset: Annotated[presets, tyro.conf.arg(name="")]  # pyright: ignore[reportInvalidTypeForm]
        """What to train; `mechicl train PRESET --help` lists all that can be overridden."""

        def execute(self, command: str) -> None:
            """Train it."""
            self.preset.execute(command)

    Train.__doc__ = summary
    return Train


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
