"""Campaigns of numbered cases, each of which runs in a forked process, and their tables of outcomes."""

import itertools
import math
import multiprocessing
import os
import random
import resource
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MIB = 2**20
SHOWN = 10  # failures of each kind that are printed; the table counts all
SLOW, DIED = "too slow", "died"
FORK = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    """The outcome of one case: a word or two for the table, whether it is as promised, and what happened.

    Failures are counted by `group`, such as a function's name; `mebibytes` is the growth of the process.
    """

    kind: str
    good: bool
    text: str = ""
    group: str = ""
    seconds: float = 0.0
    mebibytes: float = 0.0


class Campaign(ABC):
    """`n` numbered cases (`sample` in `make test-all`), each of which depends on the seed and its number alone.

    `bar` is the promise that is tested; a case is killed after `seconds`.
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

    def explain(self, number: int, outcome: Outcome) -> None:
        """Complete the outcome of a case that was killed or died."""
        outcome.text = outcome.text or f"case {number}"

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
    started, outcomes, few = time.monotonic(), list[Outcome](), len(numbers) < 10
    campaign.prepare()
    for number, outcome in run_apart(campaign.case, numbers, workers=campaign.workers, seconds=campaign.seconds):
        if outcome.kind in (SLOW, DIED):
            campaign.explain(number, outcome)
        outcomes.append(outcome)
        if few or (not outcome.good and sum(each.kind == outcome.kind for each in outcomes) <= SHOWN):
            text = outcome.text if few else " ".join(outcome.text.split())[:300]
            usage = f"{outcome.seconds:.1f} s, {outcome.mebibytes:.0f} MiB"
            print(f"  {number}: {outcome.kind}; {text} ({usage}); again: {command} --only {number}",
                  flush=True)  # fmt: skip
    for (good, kind), count in Counter((outcome.good, outcome.kind) for outcome in outcomes).most_common():
        print(f"  {count:6d}  {'' if good else 'NOT GOOD: '}{kind}")
    print(f"  {sum(outcome.good for outcome in outcomes):6d}  of {len(outcomes)} good")
    print("".join(f"{line}\n" for line in campaign.summary(outcomes)), end="")
    passed = campaign.passes(outcomes)
    print(f"  {'reached' if passed else 'MISSED'} in {time.monotonic() - started:.0f} s", flush=True)
    return passed


def start(function: Callable[[], Any], seconds: float = 0.0) -> tuple[Any, Connection]:
    """Start a function in a forked process; the connection receives its result, or its exception as text.

    The process is killed after a number of seconds other than 0.
    """
    reader, writer = FORK.Pipe(duplex=False)

    def work() -> None:
        reader.close()
        signal.alarm(math.ceil(seconds))
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
    """Wait for a process and return its exit code, negative if it was killed, and its result, or None."""
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
        for number in itertools.islice(waiting, workers - len(running)):
            process, reader = start(partial(case, number), seconds)
            running[reader] = (process, number, time.monotonic())
        if not running:
            return
        for reader in wait(list(running)):
            assert isinstance(reader, Connection)
            process, number, started = running.pop(reader)
            code, outcome = finish(process, reader)
            if code == -signal.SIGALRM:
                outcome = Outcome(SLOW, False)
            elif outcome is None:
                outcome = Outcome(DIED, False, f"the process ended with {code}")
            elif isinstance(outcome, str):
                outcome = Outcome("the case itself failed", False, outcome)
            outcome.seconds = outcome.seconds or time.monotonic() - started
            yield number, outcome


@contextmanager
def measured(outcome: Outcome) -> Iterator[None]:
    """Measure the time of a block and how far the process's resident memory rises in it (Linux)."""
    started, before = time.monotonic(), _status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    try:
        yield
    finally:
        outcome.seconds = time.monotonic() - started
        outcome.mebibytes = (_status("VmHWM:") - before) / 1024


def _status(key: str) -> int:
    """Return a number of kilobytes that the operating system reports about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def limit_memory(n_bytes: int) -> None:
    """Limit the bytes that this process may still allocate."""
    limit = _status("VmSize:") * 1024 + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
