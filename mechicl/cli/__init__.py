"""The command line: `mechicl list`, `train PRESET`, `report CHECKPOINT --out DIR`, `import FOLDER --out DIR`,
`sweep PRESET --over AXES`, `join RUN... --out DIR`.

Its help and its list answer at once: no command's module imports torch, or what brings torch along, before the command
is run. `mechicl train` is the exception: its options are the fields of the configs.
"""

import os
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from mechicl.cli.import_run import Import
from mechicl.cli.join import Join
from mechicl.cli.listing import List
from mechicl.cli.report import Report
from mechicl.cli.sweep import SweepCommand

Sweep = Annotated[SweepCommand, tyro.conf.subcommand(name="sweep")]
DESCRIPTION = "Train small in-context learners and report which algorithm they run."


@dataclass(frozen=True)
class Train:
    """Train a preset, any of whose fields can be overridden, and save it as a checkpoint."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line.

    Errors of the user's making end with one line and exit code 1; words that cannot be parsed with tyro's explanation
    and exit code 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    numbers = random.getstate()  # tyro draws from them, and they are the caller's
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
    except BrokenPipeError:  # the reader has seen enough, as in `mechicl list | head -1`
        # what is still to be flushed when Python ends must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FloatingPointError, ValueError, OSError) as error:  # the first is a loss that is no longer finite
        print(f"mechicl: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("mechicl: interrupted; the same command goes on from what it has saved", file=sys.stderr)
        sys.exit(130)


def _commands(words: list[str]) -> tuple[Any, tyro.constructors.ConstructorRegistry | None]:
    """The commands as tyro takes them, and the rules for their words; `train` has options only where it is called."""
    if "train" not in words and not any(word.startswith("--tyro-") for word in words):  # those write shell completions
        return List | Train | Sweep | Report | Import | Join, None
    from mechicl.cli.train import REGISTRY, train_command  # here, because it takes seconds: it imports torch

    return List | train_command(words, Train.__doc__) | Sweep | Report | Import | Join, REGISTRY
