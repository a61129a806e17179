"""Campaigns of numbered cases, each of which runs in a forked process, and their tables of outcomes."""

import multiprocessing
import os
import random
import resource
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MIB = 2**20
SHOWN = 10  # failures of each kind that are printed; the table counts all
FORK = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    """The outcome of one case.

    Attributes:
        kind: a word or two, for the table.
        good: True if it is as promised.
        text: the actions and their results.
        group: failures are counted by group, such as a function's name.
        seconds: duration of the case.
        mebibytes: growth of the process's resident memory.
    """

    kind: str
    good: bool
    text: str = ""
    group: str = ""
    seconds: float = 0.0
    mebibytes: float = 0.0


class Campaign(ABC):
    """Numbered cases, each of which depends on the seed and its number alone.

    Attributes:
        name: name on the command line.
        bar: the promise that is tested.
        n: number of cases in the whole campaign.
        sample: number of cases in `make test-all`.
        seconds: time after which a case is killed.
    """

    name: str
    bar: str
    n: int
    sample: int
    seconds: float = 60.0

    def __init__(self, folder: Path, seed: int, sampled: bool = False, workers: int = 2):
        self.folder, self.seed, self.sampled, self.workers = folder, seed, sampled, workers

    @abstractmethod
    def prepare(self) -> None:
        """Make the objects and files that all cases share, before their processes are forked."""

    @abstractmethod
    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        """Run one case in its own process and folder."""

    def passes(self, outcomes: Sequence[Outcome]) -> bool:
        """Tell whether the bar is reached."""
        return all(outcome.good for outcome in outcomes)

    def summary(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Return more lines for the end of the table."""
        return []

    def case(self, number: int) -> Outcome:
        folder = self.folder / str(number)
        folder.mkdir()
        return self.run(number, random.Random(f"{self.name} {self.seed} {number}"), folder)


def run_campaign(campaign: Campaign, numbers: list[int]) -> bool:
    """Run cases, print failures and a table, and tell whether the bar is reached."""
    command = f"python -m tests.faults {campaign.name} --seed {campaign.seed}{' --sample' if campaign.sampled else ''}"
    print(f"\n{campaign.name}: {campaign.bar}\n  {command}", flush=True)
    started, outcomes, alone = time.monotonic(), list[Outcome](), len(numbers) == 1
    campaign.prepare()
    for number, outcome in run_apart(campaign.case, numbers, workers=campaign.workers, seconds=campaign.seconds):
        outcomes.append(outcome)
        if alone or (not outcome.good and sum(each.kind == outcome.kind for each in outcomes) <= SHOWN):
            text = outcome.text if alone else " ".join(outcome.text.split())[:300]
            usage = f"{outcome.seconds:.1f} s, {outcome.mebibytes:.0f} MiB"
            print(f"  {number}: {outcome.kind}; {text} ({usage}); again: {command} --only {number}", flush=True)
    counts = Counter((outcome.good, outcome.kind) for outcome in outcomes)
    for (good, kind), count in counts.most_common():
        print(f"  {count:6d}  {'' if good else 'NOT GOOD: '}{kind}")
    print(f"  {sum(outcome.good for outcome in outcomes):6d}  of {len(outcomes)} good")
    print("".join(f"{line}\n" for line in campaign.summary(outcomes)), end="")
    passed = campaign.passes(outcomes)
    print(f"  {'reached' if passed else 'MISSED'} in {time.monotonic() - started:.0f} s", flush=True)
    return passed


# ---- processes ----


def start(function: Callable[[], Any]) -> tuple[Any, Connection]:
    """Start a function in a forked process; the connection receives its result, or its exception as text."""
    reader, writer = FORK.Pipe(duplex=False)

    def work() -> None:
        reader.close()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        try:
            result = function()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        writer.send(result)

    process = FORK.Process(target=work)
    process.start()
    writer.close()
    return process, reader


def finish(process: Any, reader: Connection) -> tuple[int, Any]:
    """Wait for a process and return its exit code, -9 if it was killed, and its result, or None."""
    try:
        result = reader.recv()
    except EOFError:
        result = None
    process.join()
    return process.exitcode, result


def run_apart(
    case: Callable[[int], Outcome], numbers: Iterable[int], *, workers: int, seconds: float
) -> Iterator[tuple[int, Outcome]]:
    """Run cases in forked processes with a time limit; yield outcomes in the order in which cases end."""
    waiting, running = iter(numbers), dict[Connection, tuple[Any, int, float]]()
    while True:
        while len(running) < workers and (number := next(waiting, None)) is not None:
            process, reader = start(lambda number=number: case(number))
            running[reader] = (process, number, time.monotonic())
        if not running:
            return
        first_end = min(started for *_, started in running.values()) + seconds
        ready = wait(list(running), max(0.0, first_end - time.monotonic()))
        for reader, (process, number, started) in list(running.items()):
            elapsed = time.monotonic() - started
            if reader in ready:
                code, outcome = finish(process, reader)
                if outcome is None:
                    outcome = Outcome("died", False, f"the process ended with {code}")
                elif isinstance(outcome, str):
                    outcome = Outcome("the case itself failed", False, outcome)
                outcome.seconds = outcome.seconds or elapsed
            elif elapsed > seconds:
                process.kill()
                process.join()
                outcome = Outcome("too slow", False, f"killed after {seconds:g} s", seconds=seconds)
            else:
                continue
            del running[reader]
            yield number, outcome


# ---- memory ----


@dataclass
class Usage:
    """Time and memory of a block."""

    seconds: float = 0.0
    mebibytes: float = 0.0


@contextmanager
def measured() -> Iterator[Usage]:
    """Measure the time of a block and how far the process's resident memory rises in it (Linux)."""
    usage, started, before = Usage(), time.monotonic(), _status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    try:
        yield usage
    finally:
        usage.seconds = time.monotonic() - started
        usage.mebibytes = (_status("VmHWM:") - before) / 1024


def _status(key: str) -> int:
    """Return a number of kilobytes that the operating system reports about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def limit_memory(n_bytes: int) -> None:
    """Limit the bytes that this process may still allocate."""
    limit = _status("VmSize:") * 1024 + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
