"""Trainings and saves are killed at random moments, some beside a second process that works in the same folder."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mechicl.base.files
from mechicl.checkpoints import load_checkpoint, save, stack_models
from mechicl.models import build
from mechicl.training import train
from tests.faults.part import Outcome, Part, forked, joined
from tests.faults.runs import LSTM, READER, WORDS, differences, small, unequal

CONFIGS: dict[str, dict[str, Any]] = {
    "two seeds": {"seeds": (0, 3), "schedule": "cosine", "gradient_clip": 0.1, "n_snapshots": 9, "save_every": 2},
    "tokens": {"task": WORDS, "model": READER, "steps": 60},
    "LSTM": {"model": LSTM, "steps": 60},
}
WRITES = ("fsync", "replace", "link", "unlink")
SECOND = "FolderInUseError"
CALLS = 60
"""Into how many calls of the system a kill may fall."""


class Kills(Part):
    """SIGKILL, always."""

    name = "kills"
    bar = "killed at random moments, also two drivers on one folder: the same bits, or a named error for the second"
    n = 200
    sample = 8

    def prepare(self) -> None:
        self.configs = {name: small(**({"steps": 120} | fields)) for name, fields in CONFIGS.items()}
        self.seconds_of = {}
        for name, config in self.configs.items():
            started = time.monotonic()
            train(config, self.folder / name, progress=False)
            self.seconds_of[name] = time.monotonic() - started

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        return (self._training, self._two_drivers, self._training, self._checkpoint)[number % 4](rng, folder)

    def _training(self, rng: random.Random, folder: Path) -> Outcome:
        """One run, killed once to three times."""
        name = rng.choice(list(self.configs))
        seconds = self.seconds_of[name]
        killed = [self._killed(lambda: self._train(name, folder), seconds, rng) for _ in range(rng.randint(1, 3))]
        return self._ends_well(name, folder, f"a training ({name}), {', '.join(killed)}")

    def _two_drivers(self, rng: random.Random, folder: Path) -> Outcome:
        """Two processes start the same run, a moment apart; one of them may be killed."""
        name, seconds = rng.choice(list(self.configs)), 0.0
        drivers = []
        for _ in range(2):
            drivers.append(forked(lambda: self._train(name, folder)))
            time.sleep(rng.choice((0.0, 0.0, 0.2 * rng.random())))
        victim = rng.choice((None, 0, 1))
        if victim is not None:
            seconds = rng.uniform(0, self.seconds_of[name])
            time.sleep(seconds)
            os.kill(drivers[victim][0], signal.SIGKILL)
        ends = [joined(*driver) for driver in drivers]
        words = f"two drivers ({name}): {ends}, killed {victim} after {seconds:.2f} s"
        wrong = [said for code, said in ends if not (code == -signal.SIGKILL or said == "done" or SECOND in said)]
        if wrong:
            return Outcome("another error for the second", False, words)
        if victim is None and not any(said == "done" for _, said in ends):
            return Outcome("nobody trained", False, words)
        outcome = self._ends_well(name, folder, words)
        if outcome.good and any(SECOND in said for _, said in ends):
            return Outcome("the second was told, and the same bits", True, words)
        return outcome

    def _checkpoint(self, rng: random.Random, folder: Path) -> Outcome:
        """A save over a checkpoint, killed: the folder loads as the old one or the new one."""
        config = rng.choice([config.model for config in self.configs.values()])
        old, new = ([build(config, seed=seed)] for seed in (1, 2))
        save(folder, old, {"which": "old"})
        words = self._killed(lambda: str(save(folder, new, {"which": "new"})), 0.03, rng, calls=24)
        loaded = load_checkpoint(folder)
        which = {"old": old, "new": new}[loaded.record["which"]]
        if unequal(stack_models(loaded.models), stack_models(which)):
            return Outcome("a mixture of two checkpoints", False, words)
        save(folder, new, {"which": "again"})
        loaded = load_checkpoint(folder)
        if loaded.record["which"] != "again" or unequal(stack_models(loaded.models), stack_models(new)):
            return Outcome("the next save is another", False, words)
        if left := _left(folder):
            return Outcome("files are left", False, f"{words}: {left}")
        return Outcome("the old checkpoint or the new one", True, words)

    def _train(self, name: str, folder: Path) -> str:
        train(self.configs[name], folder, progress=False)
        return "done"

    def _killed(self, work: Callable[[], object], seconds: float, rng: random.Random, calls: int = CALLS) -> str:
        """Start something, and kill it after a time or in the middle of writing a file."""
        if rng.random() < 0.5:
            after = rng.uniform(0, 1.1 * seconds)
            process, reader = forked(lambda: str(work()))
            time.sleep(after)
            os.kill(process, signal.SIGKILL)
            words = f"killed after {after:.3f} s"
        else:
            name, number, when = rng.choice(WRITES), rng.randint(1, calls), rng.choice(("before", "after"))

            def dies() -> str:
                setattr(mechicl.base.files.os, name, _deadly(getattr(os, name), number, when))
                return str(work())

            process, reader = forked(dies)
            words = f"killed {when} call {number} of {name}"
        code, said = joined(process, reader)
        return words if code == -signal.SIGKILL else f"{words} (it had ended: {said})"

    def _ends_well(self, name: str, folder: Path, words: str) -> Outcome:
        try:
            train(self.configs[name], folder, progress=False)
        except Exception as error:
            return Outcome("it does not go on", False, f"{words}: {type(error).__name__}: {error}")
        if wrong := differences(folder, self.folder / name):
            return Outcome("other bits", False, f"{words}: {wrong}")
        if left := _left(folder):
            return Outcome("files are left", False, f"{words}: {left}")
        return Outcome("the same bits", True, words)


def _left(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith((".tmp", mechicl.base.files.NEW))]


def _deadly(function: Callable[..., Any], number: int, when: str) -> Callable[..., Any]:
    """The function, whose call of a number kills the process."""
    count = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if count == number and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call
