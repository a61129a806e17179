"""Try to break the library: kills, damaged files, bad arguments, failing hooks, threads, hostile files and words.

python -m tests.faults                          # all of it, 30 minutes on two cores (`make faults`)
python -m tests.faults fuzz --n 500 --seed 3    # a part, or several, with another seed
python -m tests.faults kills --seed 3 --only 17 # one case again, with all that is known of it
python -m tests.faults --sample                 # what `make test-all` runs, some cases of each part

Each part prints its failures as they come, each with the command that repeats it, and a table at the end.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.faults.damage import Damage
from tests.faults.fuzz import Fuzz
from tests.faults.hooks import Hooks
from tests.faults.hostile import Hostile
from tests.faults.kills import Kills
from tests.faults.memory import Memory
from tests.faults.part import Outcome, Part, table
from tests.faults.strings import Strings
from tests.faults.threads import Threads

PARTS: dict[str, type[Part]] = {
    part.name: part for part in (Kills, Damage, Hostile, Strings, Hooks, Threads, Memory, Fuzz)
}

SHOWN = 25
"""Failures of a part that are printed as they come; the table counts all of them."""


def run_part(part: Part, numbers: list[int]) -> bool:
    """Run cases of a part, print what is not good and a table; whether its bar is reached."""
    command = f"python -m tests.faults {part.name} --seed {part.seed}{' --sample' if part.sampled else ''}"
    print(f"\n{part.name}: {part.bar}\n  {command}", flush=True)
    started, outcomes, bad = time.monotonic(), list[Outcome](), 0
    part.prepare()
    print(f"  prepared in {time.monotonic() - started:.0f} s", flush=True)
    for number, outcome in part.outcomes(numbers):
        outcomes.append(outcome)
        bad += not outcome.good
        if (not outcome.good and bad <= SHOWN) or len(numbers) == 1:
            print(f"  {number}: {outcome.kind}; {shown(outcome, len(numbers) == 1)}", flush=True)
    if bad > SHOWN:
        print(f"  and {bad - SHOWN} more")
    good = part.passes(outcomes)
    lines = [*table(outcomes), *part.summary(outcomes)]
    print("\n".join(lines))
    again = f"; one again: {command} --only NUMBER" if not all(outcome.good for outcome in outcomes) else ""
    print(f"  {'reached' if good else 'MISSED'} in {time.monotonic() - started:.0f} s{again}", flush=True)
    return good


def shown(outcome: Outcome, whole: bool) -> str:
    words = outcome.words if whole else " ".join(outcome.words.split())[:300]
    return f"{words} ({outcome.seconds:.1f} s, {outcome.mebibytes:.0f} MiB)"


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__, formatter_class=plain)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, help="cases of each part")
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--sample", action="store_true", help="some cases of each part")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    missed = []
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        for name in args.parts or PARTS:
            folder = Path(root) / name
            folder.mkdir()
            part = PARTS[name](folder, args.seed, args.sample)
            part.workers = args.workers
            n = args.n if args.n is not None else part.sample if args.sample else part.n
            numbers = list(range(n)) if args.only is None else [args.only]
            if not run_part(part, numbers):
                missed.append(name)
    print(f"\n{'missed: ' + ', '.join(missed) if missed else 'every bar is reached'} (seed {args.seed})")
    sys.exit(bool(missed))
