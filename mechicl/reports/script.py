"""What the scripts of `analyses/` share: a command line from a dataclass, a printed table, saved results."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from mechicl.checkpoints import Checkpoint, CheckpointError, available, load_checkpoint
from mechicl.reports.claims import Claim
from mechicl.reports.comparison import Comparison
from mechicl.tasks import LinearRegression
from mechicl.training import PRESETS


@dataclass(frozen=True)
class ScriptArgs:
    """The arguments that every script has."""

    out: Path = Path("analyses/results")
    """Folder for the results, as JSON and as a page with pictures."""


Args = TypeVar("Args", bound=ScriptArgs)


def run_script(
    kind: type[Args],
    compare: Callable[[Args], Comparison],
    name: str,
    claims: Callable[[Comparison], Sequence[Claim]] | None = None,
) -> None:
    """Parse the command line, compare, print the table, and save NAME.json and NAME.html.

    Errors of the user's making end with one line and exit code 1.

    Args:
        kind: dataclass of the arguments.
        compare: the reproduction.
        name: of the saved files; where there is a `checkpoint` or a `model` among the arguments, its name is added.
        claims: what the paper says of the reproduction's rows.
    """
    args = tyro.cli(kind)
    try:
        comparison = compare(args)
        if claims is not None:
            comparison = replace(comparison, claims=claims(comparison))
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    print(comparison)
    studied = getattr(args, "checkpoint", getattr(args, "model", None))
    how = {
        "command": shlex.join(["python", f"analyses/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "checkpoints": _checkpoints(args),
    }
    comparison = replace(comparison, data={**how, **comparison.data})
    print(comparison.write(args.out, name if studied is None else f"{name}_{Path(studied).name}"))


def regression_checkpoint(name: str) -> tuple[Checkpoint, LinearRegression]:
    """A checkpoint and the linear regression that it was trained on.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, or one that was trained on another task.
    """
    checkpoint = load_checkpoint(name)
    if not isinstance(checkpoint.task, LinearRegression):
        raise CheckpointError(f"{name} was trained on {type(checkpoint.task).__name__}, not on linear regression")
    return checkpoint, checkpoint.task


def _checkpoints(args: Any) -> list[str]:
    """The names of checkpoints among a script's arguments."""
    values = [value for value in vars(args).values() for value in (value if isinstance(value, tuple) else (value,))]
    return [value for value in values if value in available() or value in PRESETS]
