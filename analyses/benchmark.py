"""Measure every ratio in docs/project/benchmarks.md: `make bench`.

python analyses/benchmark.py                          # all parts, half an hour on a machine that does nothing else
python analyses/benchmark.py --full                   # 500 cells of a sweep, and cells of a minute: two hours
python analyses/benchmark.py training gpt2            # some parts; the others stay as they are in the results
python analyses/benchmark.py --loaded --rounds 1      # while the machine is busy: marked, and not to be quoted
python analyses/benchmark.py --write-page             # write the page and its picture from the results

Each ratio is taken round by round, ours and the peer's alternating, and shown by its median and range. Where other
processes take the cores, before or while a part is measured, it quotes no numbers.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.growth import picture, save_light
from benchmarks.rows import Settings
from benchmarks.suite import PARTS, MachineIsLoadedError, run, write_page

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "project" / "benchmarks.md"
PICTURE = DOCS / "images" / "cost-growth.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=1, help="of the compiled programs, only each n-th")
    parser.add_argument("--full", action="store_true", help="at full length: an hour and a half more")
    parser.add_argument("--loaded", action="store_true", help="measure while the machine is busy")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of results.json")
    parser.add_argument(
        "--write-page", action="store_true", help=f"write the results into {PAGE.name}, and draw its picture"
    )
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}: choose among {', '.join(PARTS)}")
    results = args.out / "results.json"
    if args.write_page:
        write_page(PAGE, results)
        if growth := json.loads(results.read_text())["parts"].get("growth"):
            save_light(picture(growth["rows"]), PICTURE)
        return
    settings = Settings(rounds=args.rounds, every=args.every, full=args.full)
    try:
        left_out = run(args.parts or PARTS, settings, results, loaded=args.loaded)
    except MachineIsLoadedError as error:
        sys.exit(str(error))
    if left_out:
        sys.exit(f"left out, for the reasons above: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
