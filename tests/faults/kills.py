"""Trainings and saves are killed at random moments, some while a second process works in the same folder."""

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
from tests.faults.runner import Campaign, Outcome, finish, start
from tests.faults.trainings import LSTM, TOKEN_MODEL, TOKENS, differences, small, unequal

CONFIGS: dict[str, dict[str, Any]] = {
    "two seeds": {"seeds": (0, 3), "schedule": "cosine", "gradient_clip": 0.1, "n_snapshots": 9, "save_every": 2},
    "tokens": {"task": TOKENS, "model": TOKEN_MODEL, "steps": 60},
    "LSTM": {"model": LSTM, "steps": 60},
}
WRITES = ("fsync", "replace", "link", "unlink")
IN_USE = "FolderInUseError"


class Kills(Campaign):
    """SIGKILL at random times, and before or after system calls that write files."""

    name = "kills"
    bar = "killed at random moments, also with two processes in one folder: the same bits, or a named error"
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
        return (self._training, self._two_processes, self._training, self._checkpoint)[number % 4](rng, folder)

    def _training(self, rng: random.Random, folder: Path) -> Outcome:
        """One training, killed once to three times."""
        name = rng.choice(list(self.configs))
        killed = [
            _kill(lambda: self._train(name, folder), self.seconds_of[name], rng) for _ in range(rng.randint(1, 3))
        ]
        return self._resumed(name, folder, f"a training ({name}), {', '.join(killed)}")

    def _two_processes(self, rng: random.Random, folder: Path) -> Outcome:
        """Two processes start the same training, a moment apart; one of them may be killed."""
        name, after, started = rng.choice(list(self.configs)), 0.0, []
        for _ in range(2):
            started.append(start(lambda: self._train(name, folder)))
            time.sleep(rng.choice((0.0, 0.0, 0.2 * rng.random())))
        victim = rng.choice((None, 0, 1))
        if victim is not None:
            after = rng.uniform(0, self.seconds_of[name])
            time.sleep(after)
            started[victim][0].kill()
        ends = [finish(*each) for each in started]
        text = f"two processes ({name}): {ends}, killed {victim} after {after:.2f} s"
        results = [result or "" for code, result in ends if code != -signal.SIGKILL]
        if any(result != "done" and IN_USE not in result for result in results):
            return Outcome("another error", False, text)
        if victim is None and "done" not in results:
            return Outcome("neither trained", False, text)
        return self._resumed(name, folder, text)

    def _checkpoint(self, rng: random.Random, folder: Path) -> Outcome:
        """A save over a checkpoint, killed: the folder contains the old checkpoint or the new one."""
        config = rng.choice([config.model for config in self.configs.values()])
        old, new = ([build(config, seed=seed)] for seed in (1, 2))
        save(folder, old, {"which": "old"})
        text = _kill(lambda: str(save(folder, new, {"which": "new"})), 0.03, rng, calls=24)
        for name in (load_checkpoint(folder).record["which"], "again"):
            if name == "again":
                save(folder, new, {"which": "again"})
            loaded = load_checkpoint(folder)
            expected = {"old": old, "new": new, "again": new}[name]
            if loaded.record["which"] != name or unequal(stack_models(loaded.models), stack_models(expected)):
                return Outcome("a mixture of two checkpoints", False, f"{text}: {name}")
        return _without_leftovers(folder, "the old checkpoint or the new one", text)

    def _train(self, name: str, folder: Path) -> str:
        train(self.configs[name], folder, progress=False)
        return "done"

    def _resumed(self, name: str, folder: Path, text: str) -> Outcome:
        try:
            train(self.configs[name], folder, progress=False)
        except Exception as error:
            return Outcome("training does not resume", False, f"{text}: {type(error).__name__}: {error}")
        if wrong := differences(folder, self.folder / name):
            return Outcome("other bits", False, f"{text}: {wrong}")
        return _without_leftovers(folder, "the same bits", text)


def _without_leftovers(folder: Path, kind: str, text: str) -> Outcome:
    left = [path.name for path in folder.rglob("*") if path.name.endswith((".tmp", mechicl.base.files.NEW))]
    return Outcome("files are left", False, f"{text}: {left}") if left else Outcome(kind, True, text)


def _kill(work: Callable[[], str], seconds: float, rng: random.Random, calls: int = 60) -> str:
    """Start a function, and kill it after a time, or at one of its first calls of a system function."""
    if rng.random() < 0.5:
        after = rng.uniform(0, 1.1 * seconds)
        process, reader = start(work)
        time.sleep(after)
        process.kill()
        text = f"killed after {after:.3f} s"
    else:
        name, number, when = rng.choice(WRITES), rng.randint(1, calls), rng.choice(("before", "after"))

        def die() -> str:
            setattr(mechicl.base.files.os, name, _deadly(getattr(os, name), number, when))
            return work()

        process, reader = start(die)
        text = f"killed {when} call {number} of {name}"
    code, result = finish(process, reader)
    return text if code == -signal.SIGKILL else f"{text} (it had ended: {result})"


def _deadly(function: Callable[..., Any], number: int, when: str) -> Callable[..., Any]:
    """Wrap a function so that the process is killed before or after its n-th call."""
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
