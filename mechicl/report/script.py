"""What the scripts of `analyses/` share: a command line from a dataclass, a printed table, saved results."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import tyro

from mechicl.report.comparison import Comparison


@runtime_checkable
class ScriptArgs(Protocol):
    """The arguments of a script: a dataclass with at least a folder for the results."""

    @property
    def out(self) -> Path: ...  # noqa: D102


Args = TypeVar("Args", bound=ScriptArgs)


def run_script(kind: type[Args], compare: Callable[[Args], Comparison], name: str) -> None:
    """Parse the command line, compare, print the table, and save NAME.json and NAME.html.

    Errors of the user's making end with one line and exit code 1.

    Args:
        kind: dataclass of the arguments.
        compare: the reproduction.
        name: of the saved files; where there is a `checkpoint` or a `model` among the arguments, its name is added.
    """
    args = tyro.cli(kind)
    try:
        comparison = compare(args)
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    print(comparison)
    studied = getattr(args, "checkpoint", getattr(args, "model", None))
    print(comparison.write(args.out, name if studied is None else f"{name}_{Path(studied).name}"))
