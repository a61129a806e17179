"""Running a script of `analyses/`: a command line from a dataclass, a printed table, saved results."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from mechicl.base.files import check_writable
from mechicl.checkpoints import Checkpoint, CheckpointError, available, load_checkpoint, random_weights
from mechicl.reports import Comparison
from mechicl.tasks import LinearRegression
from mechicl.training import PRESETS
from support.claims import UNTRAINED, Claim, with_untrained
from support.results import Results


@dataclass(frozen=True)
class ScriptArgs:
    """The arguments that every script has."""

    out: Path = Path("analyses/results")
    """Folder for the results, as JSON and as a page with pictures."""
    control: bool = True
    """Measure everything a second time on untrained models, the control of every claim."""
    random_weights: bool = False
    """Measure untrained models in place of every checkpoint's, for `make verify VERIFY=--random-weights`."""


Args = TypeVar("Args", bound=ScriptArgs)
State = Callable[[Comparison], Sequence[Claim]]
HOW = ("--control", "--no-control", "--random-weights", "--no-random-weights")
"""Options that say how to measure, and not what; the saved command is without them."""


def run_script(kind: type[Args], compare: Callable[[Args], Comparison], name: str, claims: State | None = None) -> None:
    """Parse the command line, compare, print the table, and save NAME.json and NAME.html.

    For claims on trained models, everything is measured again with new initial weights in place of every checkpoint's
    (`mechicl.checkpoints.random_weights`); these rows become each claim's control "untrained". User errors are printed
    on one line, with exit code 1.

    Args:
        kind: dataclass of the arguments.
        compare: the reproduction.
        name: name of the saved files; the argument `checkpoint` or `model`, if there is one, is appended.
        claims: states the paper's claims on the reproduction's rows.
    """
    args = tyro.cli(kind)
    how: dict[str, Any] = {
        "command": shlex.join(["python", f"analyses/{Path(sys.argv[0]).name}", *words_of(sys.argv[1:])]),
        "checkpoints": _checkpoints(args),
    }
    try:
        check_writable(args.out)
        with random_weights() if args.random_weights else nullcontext():
            start, worked = time.perf_counter(), time.process_time()
            comparison = compare(args)
            how["wall_time_s"] = round(time.perf_counter() - start, 1)
            how["cpu_time_s"] = round(time.process_time() - worked, 1)  # where other programs run too, it is less
            results = Results.of(comparison, () if claims is None else claims(comparison))
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    print(results)
    if claims is not None and args.control and not args.random_weights:
        results, words = _with_control(args, compare, claims, results)
        how |= {"untrained": words}
        print(f"untrained control: {words}")
    studied = getattr(args, "checkpoint", getattr(args, "model", None))
    results = replace(results, data={**how, **results.data})
    print(results.write(args.out, name if studied is None else f"{name}_{Path(studied).name}"))


def words_of(words: Sequence[str]) -> list[str]:
    """The words of a command line that say what is measured: without `HOW` and the folder of the results."""
    kept = [word for word in words if word not in HOW and not word.startswith("--out=")]
    return [w for i, w in enumerate(kept) if w != "--out" and (not i or kept[i - 1] != "--out")]


def _with_control(
    args: Args, compare: Callable[[Args], Comparison], claims: State, results: Results
) -> tuple[Results, str]:
    """The results with the same rows of untrained models in each claim, and words on what came of it."""
    if not any(claim.trained and claim.lines and UNTRAINED not in claim.controls for claim in results.claims):
        return results, "no claim needs one"
    try:
        with random_weights():
            without = compare(replace(args, out=args.out / UNTRAINED))  # what a script keeps to go on from
            stated = with_untrained(results.claims, claims(without))
    except Exception as error:  # what is wrong with an untrained model must not lose what the trained one gave
        return results, f"cannot be measured: {type(error).__name__}: {' '.join(str(error).split())}"
    passed = sum(
        claim.control_verdicts.get(UNTRAINED) == "agrees" == claim.verdict for claim in stated if claim.trained
    )
    return replace(results, claims=stated), f"{passed} of {len(stated)} claims hold of untrained models too"


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
