"""Running a script of `analyses/`: a command line from its options, a printed table, saved results."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from analyses.support.claims import SCRIPTS, UNTRAINED
from analyses.support.results import Results
from mechicl.base.files import check_writable
from mechicl.checkpoints import Checkpoint, CheckpointError, available, load_checkpoint, random_weights
from mechicl.reports import Comparison, Row
from mechicl.tasks import LinearRegression
from mechicl.training import PRESETS


@dataclass(frozen=True)
class ScriptArgs:
    """The arguments that every script has."""

    out: Path = Path("analyses/results")
    """Folder for the results, as JSON and as a page with pictures."""
    control: bool = True
    """Measure everything a second time on untrained models, the control of every claim."""


HOW = ("--control", "--no-control")
"""Options that say how to measure, and not what; the saved command is without them."""
HELP = {
    "checkpoint": "name or folder of a model", "checkpoints": "names or folders of models",
    "seed": "seed of the prompts", "n_prompts": "held-out prompts", "n_fitting": "prompts to fit on",
    "quiet": "no progress bar",
}  # fmt: skip
"""Help of options that most scripts have; the others are an `Option`."""


class Option(NamedTuple):
    """An option of a script's command line: its default, its help, and its type where the default does not tell."""

    default: Any
    help: str
    kind: Any = None


class Script:
    """A script of `analyses/`: a function that measures rows, and its options.

    Attributes:
        measure: takes the options, as a dataclass.
        options: the dataclass.
        derived: rows for claims that follow from a comparison's data; `derive` sets it.
    """

    def __init__(self, measure: Callable[[Any], Comparison], options: type[Any]):
        self.measure, self.options = measure, options
        self.derived: Callable[[Comparison], list[Row]] = lambda comparison: []

    def __call__(self, args: Any = None, **options: Any) -> Comparison:
        """Measure, with an instance of `options` or with options by name."""
        return self.measure(self.options(**options) if args is None else args)

    def derive(self, derived: Callable[[Comparison], list[Row]]) -> Callable[[Comparison], list[Row]]:
        """Take a function that returns rows for claims, from a comparison's data."""
        self.derived = derived
        return derived

    def run(self) -> None:
        """Run the command line: measure, print the table, and save NAME.json and NAME.html.

        For claims on trained models, everything is measured again with new initial weights in place of every
        checkpoint's (`mechicl.checkpoints.random_weights`); these rows become each claim's control "untrained". User
        errors are printed on one line, with exit code 1. NAME is the script's; the option `checkpoint` or `model`, if
        there is one, is appended.
        """
        path = Path(sys.argv[0])
        folder = f"{path.resolve().parent.name}/" if path.resolve().parent.parent == SCRIPTS else ""
        args = tyro.cli(self.options)
        studied = getattr(args, "checkpoint", getattr(args, "model", None))
        name = path.stem if studied is None else f"{path.stem}_{Path(studied).name}"
        how: dict[str, Any] = {
            "command": shlex.join(["python", f"analyses/{folder}{path.name}", *words_of(sys.argv[1:])]),
            "checkpoints": _checkpoints(args),
        }
        try:
            check_writable(args.out)
            start, worked = time.perf_counter(), time.process_time()
            comparison = self.measure(args)
            how["wall_time_s"] = round(time.perf_counter() - start, 1)
            how["cpu_time_s"] = round(time.process_time() - worked, 1)  # where other programs run too, it is less
            results = Results.of(comparison, name, self.derived(comparison))
            has_claims = bool(results.claims)
        except (ValueError, OSError) as error:
            print(f"{path.name}: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(1)
        print(results)
        if has_claims and args.control:
            results, words = self._with_control(args, results)
            how |= {"untrained": words}
            print(f"untrained control: {words}")
        # a report's data have the command of the checkpoint's training
        print(replace(results, data={**how, **results.data, **how}).write(args.out, name))

    def _with_control(self, args: Any, results: Results) -> tuple[Results, str]:
        """The results with the same rows of untrained models, and words on what came of it."""
        if not any(claim.trained and claim.lines and UNTRAINED not in claim.controls for claim in results.claims):
            return results, "no claim needs one"
        try:
            with random_weights():
                without = self.measure(replace(args, out=args.out / UNTRAINED))  # what a script keeps to go on from
                controlled = replace(results, untrained_rows=[*without.rows, *self.derived(without)])
                claims = controlled.claims
        except Exception as error:  # what is wrong with an untrained model must not lose what the trained one gave
            return results, f"cannot be measured: {type(error).__name__}: {' '.join(str(error).split())}"
        passed = sum(claim.untrained_verdict == "agrees" == claim.verdict for claim in claims if claim.trained)
        return controlled, f"{passed} of {len(claims)} claims hold of untrained models too"


def script(*, base: type[ScriptArgs] = ScriptArgs, **options: Any) -> Callable[[Callable[[Any], Comparison]], Script]:
    """Make a function of options a script of `analyses/`.

    Args:
        base: the options that it has besides its own.
        options: each a default, if `HELP` describes it, or an `Option`.
    """

    def decorate(measure: Callable[[Any], Comparison]) -> Script:
        rows = []
        for name, given in options.items():
            option = given if isinstance(given, Option) else Option(given, HELP[name])
            kind = Annotated[option.kind or _type_of(option.default), tyro.conf.arg(help=option.help)]
            rows.append((name, kind, field(default=option.default)))
        kind = make_dataclass("Args", rows, bases=(base,), frozen=True)
        kind.__doc__ = measure.__doc__
        return Script(measure, kind)

    return decorate


def _type_of(default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple[type(default[0]), ...]
    return Path if isinstance(default, Path) else type(default)


def words_of(words: Sequence[str]) -> list[str]:
    """The words of a command line that say what is measured: without `HOW` and the folder of the results."""
    kept = [word for word in words if word not in HOW and not word.startswith("--out=")]
    return [w for i, w in enumerate(kept) if w != "--out" and (not i or kept[i - 1] != "--out")]


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
