"""`mechicl train PRESET`: a subcommand for each preset, whose options are the fields of its config."""

import copy
import dataclasses
import itertools
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from accelerate import PartialState

from mechicl.base.files import check_writable
from mechicl.base.version import __version__
from mechicl.checkpoints import Snapshots, save
from mechicl.cli.checkpoints import held_out
from mechicl.tasks import AnyTask, FixedTasks, LinearRegression
from mechicl.tasks.registry import TASK_TYPES
from mechicl.training import PRESETS, Clamp, Curriculum, Ramp, TrainingConfig, train
from mechicl.training.config import resize_task

if TYPE_CHECKING:
    TaskKind = str
else:  # the library's own kinds
    TaskKind = Literal[tuple(TASK_TYPES)]


@dataclass(frozen=True)
class TrainPreset:
    """Train a preset, any of whose fields can be overridden, and save it as a checkpoint."""

    config: Annotated[TrainingConfig, tyro.conf.arg(name="")]
    """The training config."""
    task: TaskKind | None = None
    """Replace the preset's task by one of another kind, with fields --task.FIELD. FixedTasks are drawn from the
    preset's task (--task.task.FIELD)."""
    d: int | None = None
    """Dimension of the inputs of task and model; the curriculum is scaled in proportion."""
    n: int | None = None
    """Number of context points of task and model; the curriculum is scaled in proportion."""
    curriculum: Literal["preset", "none", "None"] = "preset"
    """The preset's curriculum, which takes the same share of a shorter run, or none: whole prompts throughout."""
    out: Path | None = None
    """Folder of the checkpoint; by default "checkpoint" in the run's folder."""
    run: Path | None = None
    """Folder of the run's saves, from which a killed run resumes; by default runs/PRESET."""
    restart: bool = False
    """Delete the run folder's saves and start over."""
    quiet: bool = False
    """No progress bar."""

    def execute(self, command: str) -> None:
        """Train, then write the checkpoint with its record."""
        name = next(word for word in shlex.split(command) if word in PRESETS)
        config = self.config.replace(curriculum=None) if self.config.curriculum == Curriculum() else self.config
        for option, field, size in (("--d", "x_dim", self.d), ("--n", "n_context", self.n)):
            if size is not None and getattr(config.task, field) != size:
                words = f"{option} {size} and the task's {field}={getattr(config.task, field)}"
                raise ValueError(f"{words} disagree: give only one of them")
        run = self.run or Path("runs") / name
        if config.curriculum is not None and config.curriculum != PRESETS[name].curriculum and not self.quiet:
            print(f"curriculum: {config.curriculum}")
        out = self.out or run / "checkpoint"
        if os.environ.get("RANK", "0") == "0":  # before accelerate has started the processes' group
            check_writable(out)  # before training, not after it
        result = train(config, run, restart=self.restart, progress=not self.quiet)
        if PartialState().is_main_process:
            record = {"name": name, "command": command, **result.record}
            record["versions"] |= {"mechicl": __version__, "transformer-lens": version("transformer-lens")}
            snapshots = Snapshots(result.snapshot_steps, result.snapshots) if result.snapshots else None
            folder = save(out, result.models, record, snapshots)
            losses = record.get("curve", {}).get("eval_loss", [[float("nan")]])[-1]
            reached = ", ".join(f"{loss:.5f}" for loss in losses)
            print(f"{folder}: {held_out(config.model.to_dict())} {reached} (seeds {record['seeds']})")
        PartialState().destroy_process_group()


def _word_after(words: Sequence[str], option: str) -> str | None:
    pairs = [word.partition("=")[::2] for word in words if word.startswith(f"{option}=")]
    pairs += [pair for pair in itertools.pairwise(words) if pair[0] == option]
    return pairs[-1][1] if pairs else None


def _number_after(words: Sequence[str], option: str) -> int | None:
    try:
        number = int(_word_after(words, option) or "")  # as the parser reads it, such as 4_000
    except ValueError:
        return None
    return number if number >= 0 else None  # others are refused when parsed


def _task(preset: TrainingConfig, kind: str | None) -> AnyTask:
    """The task of a kind that the command line starts from; whether it fits the model is checked later."""
    task_type: Any = TASK_TYPES.get(kind or "")
    if task_type is None:  # not given, or refused when parsed
        return preset.task
    if task_type is FixedTasks:  # these are prompts of points, not token sequences
        return FixedTasks(LinearRegression() if preset.on_tokens else preset.eval_tasks[0], n_tasks=preset.batch_size)
    return task_type()


def _defaults(preset: TrainingConfig, words: Sequence[str]) -> TrainPreset:
    """A preset that a command line starts from, with the kind and size of task in its words.

    Nothing is checked yet, and fields that depend on others are not filled in, because the other words change them.
    """
    d, n, steps = (_number_after(words, option) for option in ("--d", "--n", "--steps"))
    task = resize_task(_task(preset, _word_after(words, "--task")), d, n)
    model = preset.model.replace(**{name: size for name, size in (("x_dim", d), ("n_context", n)) if size is not None})
    curriculum = preset.curriculum
    if curriculum is None or _word_after(words, "--curriculum") in ("none", "None"):
        curriculum = Curriculum()
    elif hasattr(task, "active_dims"):  # else the curriculum cannot change it, which is refused later
        share = min(1.0, (preset.steps if steps is None else steps) / preset.steps)
        curriculum = curriculum.resized(task if d or n else preset.task, share)
    more_tasks = tuple(resize_task(task, d, n) for task in preset.more_tasks)
    config = copy.copy(preset)
    fields = {"task": task, "more_tasks": more_tasks, "model": model.unfilled(), "curriculum": curriculum}
    for field, value in fields.items():
        object.__setattr__(config, field, value)
    return TrainPreset(config)


def named_presets(words: Sequence[str], names: Iterable[str]) -> dict[str, TrainPreset]:
    """Return the presets of these names, with defaults that depend on the words of a command line."""
    return {name: _defaults(PRESETS[name], words) for name in names if name in PRESETS}


REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def _ramp(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Parse a ramp of a curriculum: two to four words, or None."""
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
    """Parse further tasks and interventions, which can be kept or dropped, but not overridden one by one."""
    if info.type not in (tuple[AnyTask, ...], tuple[Clamp, ...]):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{None}",
        choices=("None",),
        instance_from_str=lambda words: (),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda tasks: [f"{len(tasks)} of them" if tasks else "None"],
    )
