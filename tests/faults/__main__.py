"""Try to break the library: kills, damaged files, hostile files and texts, faulty arguments.

python -m tests.faults                          # all campaigns, 25 minutes on two cores (`make faults`)
python -m tests.faults calls --n 500 --seed 3   # one campaign, or several, with another seed
python -m tests.faults kills --seed 3 --only 17 # one case again, with all details
python -m tests.faults --sample                 # the cases that `make test-all` runs

Each campaign prints its failures as they come, with the command that repeats them, and a table at the end.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # cases run in forked processes, in which OpenMP's threads do not work
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tests.faults.calls import Calls
from tests.faults.folders import Folders
from tests.faults.hostile import Hostile
from tests.faults.runner import Campaign, run_campaign
from tests.faults.saves import Damage, Kills
from tests.faults.texts import Texts

CAMPAIGNS: dict[str, type[Campaign]] = {each.name: each for each in (Kills, Damage, Hostile, Folders, Texts, Calls)}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("campaigns", nargs="*", help=f"of {', '.join(CAMPAIGNS)}; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, help="number of cases of each campaign")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of single cases")
    parser.add_argument("--sample", action="store_true", help="only a few cases of each campaign")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if unknown := [name for name in args.campaigns if name not in CAMPAIGNS]:
        parser.error(f"no campaign {unknown[0]!r}: there are {', '.join(CAMPAIGNS)}")
    torch.set_num_threads(1)
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    missed = []
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        for name in args.campaigns or CAMPAIGNS:
            folder = Path(root) / name
            folder.mkdir()
            campaign = CAMPAIGNS[name](folder, args.seed, args.sample, args.workers)
            n = args.n if args.n is not None else campaign.sample if args.sample else campaign.n
            if not run_campaign(campaign, list(range(n)) if args.only is None else args.only):
                missed.append(name)
    print(f"\n{'missed: ' + ', '.join(missed) if missed else 'every bar is reached'} (seed {args.seed})")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
