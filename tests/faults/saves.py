"""Trainings and checkpoints that are killed or damaged: the same bits afterwards, or an error that names the file."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mechicl.base.files
from mechicl.base.tensor_files import read_tensors
from mechicl.checkpoints import CheckpointError, Snapshots, load_checkpoint, save, stack_models
from mechicl.training import Clamp, train
from mechicl.training.metrics import Metrics
from mechicl.training.state import EARLIER_STATE_FILE, STATE_FILE
from tests.faults.runner import Campaign, Outcome, finish, start
from tests.training import runs
from tests.training.runs import LSTM, READER, WORDS, interrupted

CLAMPS = (
    Clamp("pattern", 0, head=0, method="copy", source="induction-2l", steps=(0, 40)),
    Clamp("z", 1, method="freeze", snapshot=20, steps=(25, 50)),
)
CONFIGS: dict[str, dict[str, Any]] = {
    "two seeds": {"seeds": (0, 3), "schedule": "cosine", "gradient_clip": 0.1, "n_snapshots": 9, "save_every": 2},
    "tokens": {"task": WORDS, "model": READER, "steps": 60},
    "LSTM": {"model": LSTM, "steps": 60},
    "clamped tokens": {"task": WORDS, "model": READER, "steps": 60, "seeds": (0, 1), "interventions": CLAMPS},
}
small = partial(runs.small, save_every=3, n_snapshots=4)
WRITES = ("fsync", "replace", "link", "unlink")


def differences(a: Path, b: Path) -> list[str]:
    """Compare the folders of two trainings bit for bit: the last save, the metrics, the snapshots."""
    wrong = [f"the state's {name}" for name in unequal(*(read_tensors(folder / STATE_FILE)[0] for folder in (a, b)))]
    lines = [[{**line, "steps_per_second": 0} for line in Metrics.read(folder)] for folder in (a, b)]
    wrong += ["the metrics"] * (lines[0] != lines[1])
    for name in sorted({path.name for folder in (a, b) for path in folder.glob("snapshots/*")}):
        if not all((folder / "snapshots" / name).is_file() for folder in (a, b)):
            return [*wrong, f"snapshot {name} is in one folder only"]
        tensors = (read_tensors(folder / "snapshots" / name)[0] for folder in (a, b))
        wrong += [f"{name}'s {tensor}" for tensor in unequal(*tensors)]
    return wrong


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in any bit."""
    return [name for name in {**a, **b} if name not in a or name not in b or not torch.equal(a[name], b[name])]


# ---- kills ----
class Kills(Campaign):
    """SIGKILL at random times, and before or after system calls that write files."""

    name = "kills"
    bar = "killed at random moments, also with two processes in one folder: the same bits, or a named error"
    n, sample = 200, 8

    def prepare(self) -> None:
        self.configs = {name: small(**({"steps": 120} | fields)) for name, fields in CONFIGS.items()}
        self.seconds_of = {}
        for name, config in self.configs.items():
            started = time.monotonic()
            train(config, self.folder / name, progress=False)
            self.seconds_of[name] = time.monotonic() - started

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        return (self._training, self._two_processes, self._training)[number % 3](rng, folder)

    def _training(self, rng: random.Random, folder: Path) -> Outcome:
        """One training, killed once to three times."""
        name, times = rng.choice(list(self.configs)), rng.randint(1, 3)
        killed = [_kill(lambda: self._train(name, folder), self.seconds_of[name], rng) for _ in range(times)]
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
        if any(result != "done" and "FolderInUseError" not in result for result in results):
            return Outcome("another error", False, text)
        if victim is None and "done" not in results:
            return Outcome("neither trained", False, text)
        return self._resumed(name, folder, text)

    def _train(self, name: str, folder: Path) -> str:
        train(self.configs[name], folder, progress=False)
        return "done"

    def _resumed(self, name: str, folder: Path, text: str) -> Outcome:
        try:
            self._train(name, folder)
        except Exception as error:
            return Outcome("training does not resume", False, f"{text}: {type(error).__name__}: {error}")
        if wrong := differences(folder, self.folder / name):
            return Outcome("other bits", False, f"{text}: {wrong}")
        return _without_leftovers(folder, "the same bits", text)


def _without_leftovers(folder: Path, kind: str, text: str) -> Outcome:
    left = [path.name for path in folder.rglob("*") if path.name.endswith((".tmp", mechicl.base.files.NEW))]
    return Outcome("files are left", False, f"{text}: {left}") if left else Outcome(kind, True, text)


def _kill(work: Callable[[], str], seconds: float, rng: random.Random) -> str:
    """Start a function, and kill it after a time, or at one of its first calls of a system function."""
    if rng.random() < 0.5:
        after = rng.uniform(0, 1.1 * seconds)
        process, reader = start(work)
        time.sleep(after)
        process.kill()
        text = f"killed after {after:.3f} s"
    else:
        name, number, when = rng.choice(WRITES), rng.randint(1, 60), rng.choice(("before", "after"))

        def die() -> str:
            setattr(mechicl.base.files.os, name, _deadly(getattr(os, name), number, when))
            return work()

        process, reader = start(die)
        text = f"killed {when} call {number} of {name}"
    code, result = finish(process, reader)
    return text if code == -signal.SIGKILL else f"{text} (it had ended: {result})"


def _deadly(function: Callable[..., Any], number: int, when: str) -> Callable[..., Any]:
    """Wrap a function so that the process is killed before or after its n-th call."""
    left = number

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


# ---- damage ----
def _flip_bits(data: bytes, other: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 8))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _change_digit(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Change a digit, which leaves JSON valid."""
    places = [i for i, each in enumerate(data) if 48 <= each < 58]
    if not places:
        return _flip_bits(data, other, rng)
    place = rng.choice(places)
    return data[:place] + str((data[place] - 48 + rng.randint(1, 9)) % 10).encode() + data[place + 1 :]


def _zero_block(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Zeros, as of a block of the disk that was never written."""
    start = rng.randrange(len(data))
    return data[:start] + bytes(min(512, len(data) - start)) + data[start + 512 :]


KINDS: dict[str, Callable[[bytes, bytes, random.Random], bytes | None]] = {
    "bits flipped": _flip_bits, "a digit changed": _change_digit, "a block of zeros": _zero_block,
    "cut": lambda data, other, rng: data[: rng.randrange(len(data))], "emptied": lambda data, other, rng: b"",
    "longer": lambda data, other, rng: data + rng.randbytes(rng.randint(1, 200)),
    "last line repeated": lambda data, other, rng: data + data.splitlines(keepends=True)[-1],
    "replaced by another file": lambda data, other, rng: other, "removed": lambda data, other, rng: None,
}  # fmt: skip


class Damage(Campaign):
    """One file of a folder is damaged, or two."""

    name = "damage"
    bar = "damaged saves of trainings and checkpoints: the same bits, or an error that names the file"
    n, sample = 500, 40

    def prepare(self) -> None:
        self.configs = {
            "transformer": (small(), small(seeds=(1,))),
            "LSTM": (small(model=LSTM, seeds=(0, 1)), small(model=LSTM, seeds=(2, 3))),
        }
        for name, (config, other) in self.configs.items():
            root = self.folder / name
            for each, end, kind in ((config, "sound", "checkpoint"), (other, "other", "other checkpoint")):
                interrupted(each, root / end, 9)
                result = train(each, root / f"whole {end}", progress=False)
                save(root / kind, result.models, result.record, Snapshots(result.snapshot_steps, result.snapshots))

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        name = rng.choice(list(self.configs))
        check = self._checkpoint if number % 5 == 4 else self._training
        try:
            return check(self.folder / name, rng, folder / "damaged")
        except Exception as error:
            return Outcome("a raw error", False, f"{type(error).__name__}: {error}", type(error).__name__)

    def _training(self, root: Path, rng: random.Random, folder: Path) -> Outcome:
        names, text = _damage(root / "sound", root / "other", folder, rng)
        text = f"{root.name}: {text}"
        for _ in range(2):
            try:
                train(self.configs[root.name][0], folder, progress=False)
            except ValueError as error:
                message, text = str(error), f"{text}: {type(error).__name__}: {error}"
                is_named = any(map(message.__contains__, names)) or "another config" in message
                if str(folder) not in message or not is_named:
                    return Outcome("an error that names no file", False, text)
                if f"is intact: rename {folder / EARLIER_STATE_FILE}" not in message:
                    return Outcome("a named error", True, text)
                (folder / EARLIER_STATE_FILE).replace(folder / STATE_FILE)  # follow the advice
                names = [name for name in names if name != STATE_FILE]
            else:
                break
        if wrong := differences(folder, root / "whole sound"):
            return Outcome("other bits", False, f"{text}: {wrong}")
        return Outcome("the same bits", True, text)

    def _checkpoint(self, root: Path, rng: random.Random, folder: Path) -> Outcome:
        _, text = _damage(root / "checkpoint", root / "other checkpoint", folder, rng)
        text, whole = f"{root.name}, checkpoint: {text}", load_checkpoint(root / "checkpoint")
        try:
            loaded = load_checkpoint(folder)
        except CheckpointError as error:
            is_named = str(folder) in str(error)
            return Outcome("a named error" if is_named else "an error that names no file", is_named, f"{text}: {error}")
        wrong = unequal(stack_models(loaded.models), stack_models(whole.models))
        assert whole.snapshots is not None
        if loaded.snapshots is None or unequal(loaded.snapshots.weights, whole.snapshots.weights):
            wrong.append("the snapshots")
        wrong += ["the record"] * (loaded.record != whole.record)
        return Outcome("other contents", False, f"{text}: {wrong}") if wrong else Outcome("the same bits", True, text)


def _damage(sound: Path, other: Path, folder: Path, rng: random.Random) -> tuple[list[str], str]:
    """Copy a folder and damage one or two of its files; return their names and a description."""
    shutil.copytree(sound, folder)
    files = [path.relative_to(sound) for path in sorted(sound.rglob("*")) if path.is_file() and path.stat().st_size]
    files = [path for path in files if path.name != ".lock"]
    chosen = rng.sample(files, rng.choice((1, 1, 1, 2)))
    kinds = [rng.choice(list(KINDS)) for _ in chosen]
    for path, kind in zip(chosen, kinds, strict=True):
        twin = other / path
        if not twin.is_file() or rng.random() < 0.5:  # a file of the same type in the same folder
            twin = sound / rng.choice([each for each in files if each.suffix == path.suffix and each != path] or files)
        damaged = KINDS[kind]((sound / path).read_bytes(), twin.read_bytes(), rng)
        if damaged is None:
            (folder / path).unlink()
        else:
            (folder / path).write_bytes(damaged)
    return [path.name for path in chosen], ", ".join(f"{p}: {kind}" for p, kind in zip(chosen, kinds, strict=True))
