"""What the parts of the campaign share: cases by number, outcomes, and the processes that cases run in."""

import json
import os
import random
import resource
import selectors
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        kind: in a word or two, for the table.
        good: whether it is what is promised.
        words: what was done and what came of it.
        group: what worst offenders are grouped by.
        seconds: that the case took.
        mebibytes: by which the memory of its process grew, as the operating system has it.
    """

    kind: str
    good: bool
    words: str = ""
    group: str = ""
    seconds: float = 0.0
    mebibytes: float = 0.0


class Part(ABC):
    """A part of the campaign: numbered cases, each of which follows from the seed and its number alone.

    Attributes:
        name: on the command line.
        bar: what is to be shown, in words.
        n: cases of the whole campaign.
        sample: cases in `make test`.
        seconds: that a case may take before it is killed.
        room: bytes of address space that a case may take more, None without a bound.
        workers: cases at a time.
    """

    name: str
    bar: str
    n: int
    sample: int
    seconds: float = 60.0
    room: int | None = None
    workers: int = 2

    def __init__(self, folder: Path, seed: int, sampled: bool = False):
        self.folder, self.seed, self.sampled = folder, seed, sampled

    @abstractmethod
    def prepare(self) -> None:
        """What all cases start from; called once, before the processes of cases are forked."""

    @abstractmethod
    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        """One case, in a process and a folder of its own."""

    def passes(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether the bar is reached."""
        return all(outcome.good for outcome in outcomes)

    def summary(self, outcomes: Sequence[Outcome]) -> list[str]:
        """More lines for the end."""
        return []

    def case(self, number: int) -> Outcome:
        folder = self.folder / str(number)
        folder.mkdir()
        return self.run(number, random.Random(f"{self.name} {self.seed} {number}"), folder)

    def outcomes(self, numbers: Iterable[int]) -> Iterator[tuple[int, Outcome]]:
        """Cases with what came of them, in the order in which they end."""
        yield from run_apart(self.case, numbers, workers=self.workers, seconds=self.seconds, room=self.room)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """How often each kind of outcome was there."""
    counts = Counter((outcome.good, outcome.kind) for outcome in outcomes)
    lines = [f"  {count:6d}  {'' if good else 'NOT GOOD: '}{kind}" for (good, kind), count in counts.most_common()]
    return [*lines, f"  {sum(outcome.good for outcome in outcomes):6d}  of {len(outcomes)} good"]


# ---- processes ----


@dataclass
class _Child:
    process: int
    number: int
    started: float
    said: bytes = b""


def run_apart(
    case: Callable[[int], Outcome], numbers: Iterable[int], *, workers: int, seconds: float, room: int | None = None
) -> Iterator[tuple[int, Outcome]]:
    """Run cases in forked processes, which begin with all that this one has imported, and end with their time."""
    waiting, running = iter(numbers), {}
    with selectors.DefaultSelector() as selector:
        while True:
            while len(running) < workers and (number := next(waiting, None)) is not None:
                reader, child = _start(case, number, room)
                running[reader] = child
                selector.register(reader, selectors.EVENT_READ)
            if not running:
                return
            ends = min(child.started for child in running.values()) + seconds
            ready = {key.fd for key, _ in selector.select(max(0.0, ends - time.monotonic()))}
            for reader, child in list(running.items()):
                late = time.monotonic() - child.started > seconds
                ended = False
                if reader in ready:
                    chunk = os.read(reader, 2**16)
                    child.said += chunk
                    ended = not chunk or child.said.endswith(b"\n")
                if ended or late:
                    selector.unregister(reader)
                    os.close(reader)
                    del running[reader]
                    yield child.number, _end(child, late and not ended, seconds)


def _start(case: Callable[[int], Outcome], number: int, room: int | None) -> tuple[int, _Child]:
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return reader, _Child(process, number, time.monotonic())
    try:
        os.setsid()
        os.close(reader)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        begins, started = resident(), time.monotonic()
        if room is not None:
            limit_memory(room)
        try:
            outcome = case(number)
        except BaseException:
            outcome = Outcome("the case itself failed", False, traceback.format_exc())
        if not outcome.seconds:
            outcome = replace(outcome, seconds=time.monotonic() - started)
        if not outcome.mebibytes:
            outcome = replace(outcome, mebibytes=max(0, highest() - begins) / MIB)
        with os.fdopen(writer, "wb") as file:
            file.write(json.dumps(asdict(outcome)).encode() + b"\n")
    finally:
        os._exit(0)


def _end(child: _Child, late: bool, seconds: float) -> Outcome:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process, signal.SIGKILL)  # and what it has started
    code = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
    if child.said.endswith(b"\n"):
        return Outcome(**json.loads(child.said))
    if late:
        return Outcome("too slow", False, f"killed after {seconds:g} s", seconds=seconds)
    return Outcome("died", False, f"the process ended with {code}")


def resident() -> int:
    """Bytes of memory that this process has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def highest() -> int:
    """The most bytes that it had since it began, or since `forget_highest`."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_highest() -> None:
    """Begin to measure anew."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def limit_memory(room: int) -> None:
    """Let this process take only so many bytes of addresses more."""
    with open("/proc/self/statm", encoding="ascii") as file:
        there = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (there + room, resource.getrlimit(resource.RLIMIT_AS)[1]))


def forked(function: Callable[[], str]) -> tuple[int, int]:
    """Start a function in a process of its own: its number, and the file that its words can be read from."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    os.close(reader)
    try:
        words = function()
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
    os.write(writer, words.encode()[:4000])
    os._exit(0)


def joined(process: int, reader: int) -> tuple[int, str]:
    """How a forked function ended: the process's code, -9 if it was killed, and its words."""
    words = b""
    while chunk := os.read(reader, 4096):
        words += chunk
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), words.decode(errors="replace")
