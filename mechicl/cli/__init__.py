"""The command line: `mechicl list`, `train PRESET`, `report CHECKPOINT --out DIR`, `import FOLDER --out DIR`,
`sweep PRESET --over AXES`, `join RUN... --out DIR`, `env`, and the option `--version`.

Help and lists are quick: a command imports torch only when it runs, except `mechicl train PRESET`, whose options are
the fields of the configs.
"""

import os
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any

import tyro
import yaml

from mechicl.base.version import __version__
from mechicl.cli.checkpoints import Import, Join, List
from mechicl.cli.env import Env
from mechicl.cli.report import Report
from mechicl.cli.sweep import SweepCommand

SweepSubcommand = Annotated[SweepCommand, tyro.conf.subcommand(name="sweep")]
DESCRIPTION = "Train small in-context learners and report which algorithm they run."


@dataclass(frozen=True)
class Train:
    """Train a preset, any of whose fields can be overridden, and save it as a checkpoint."""


@dataclass(frozen=True)
class NamedPreset:
    """A preset in the list of presets."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line.

    User errors print one line and exit with code 1; words that cannot be parsed print tyro's explanation and exit with
    code 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"mechicl {__version__}")
        return
    numbers = random.getstate()  # tyro draws random numbers, which must not change those of the caller
    try:
        _run(words)
    finally:
        random.setstate(numbers)


def _run(words: list[str]) -> None:
    options = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)
    try:
        commands, registry = _commands(words)
        command = tyro.cli(
            commands, prog="mechicl", description=DESCRIPTION, args=words, config=options, registry=registry
        )
        command.execute(shlex.join(["mechicl", *words]))
    except BrokenPipeError:  # the reader has stopped, as in `mechicl list | head -1`
        # flushing the rest when Python ends must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FloatingPointError, ValueError, OSError) as error:  # the first for a loss that is no longer finite
        print(f"mechicl: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("mechicl: interrupted; the same command resumes from its last save", file=sys.stderr)
        sys.exit(130)


def _commands(words: list[str]) -> tuple[Any, tyro.constructors.ConstructorRegistry | None]:
    """The commands for tyro and parsing rules; `train PRESET` gets config fields (needs torch) only with a preset."""
    train, registry = Train, None
    completions = any(word.startswith("--tyro-") for word in words)
    if "train" in words or completions:
        entries = yaml.safe_load(files("mechicl").joinpath("training/presets.yaml").read_text("utf-8"))
        summaries = {name: fields["help"] for name, fields in entries.items() if "help" in fields}
        presets: dict[str, Any] = dict.fromkeys(summaries, NamedPreset())
        if completions or not presets.keys().isdisjoint(words):
            from mechicl.cli.train import REGISTRY as registry  # here, because it imports torch
            from mechicl.cli.train import named_presets

            presets |= named_presets(words, summaries if completions else words)
        train = _train_command(tyro.extras.subcommand_type_from_defaults(presets, summaries, prefix_names=False))
    return List | train | SweepSubcommand | Report | Import | Join | Env, registry


def _train_command(presets: Any) -> Any:
    @dataclass(frozen=True)
    class WithPresets:
        preset: Annotated[presets, tyro.conf.arg(name="")]  # pyright: ignore[reportInvalidTypeForm]
        """What to train; `mechicl train PRESET --help` lists all that can be overridden."""

        def execute(self, command: str) -> None:
            """Train it."""
            self.preset.execute(command)

    WithPresets.__doc__ = Train.__doc__
    return Annotated[WithPresets, tyro.conf.subcommand(name="train")]
