"""Files of runs and checkpoints are damaged: what goes on from them is the same, bit for bit, or a named error."""

import random
import shutil
import string
from collections.abc import Callable
from pathlib import Path

from mechicl.checkpoints import CheckpointError, Snapshots, load_checkpoint, save, stack_models
from mechicl.training import train
from mechicl.training.state import EARLIER_STATE_FILE, STATE_FILE
from tests.faults.part import Outcome, Part
from tests.faults.runs import LSTM, differences, interrupt, small, unequal

Change = Callable[[bytes, bytes, random.Random], bytes | None]


def _flip(data: bytes, other: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 8))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _digit(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Another digit where there is one: JSON stays JSON."""
    places = [i for i, each in enumerate(data) if chr(each) in string.digits]
    if not places:
        return _flip(data, other, rng)
    place = rng.choice(places)
    return data[:place] + str((int(chr(data[place])) + rng.randint(1, 9)) % 10).encode() + data[place + 1 :]


KINDS: dict[str, Change] = {
    "a bit": _flip,
    "a digit": _digit,
    "cut": lambda data, other, rng: data[: rng.randrange(len(data))],
    "empty": lambda data, other, rng: b"",
    "longer": lambda data, other, rng: data + rng.randbytes(rng.randint(1, 200)),
    "a line twice": lambda data, other, rng: data + data.splitlines(keepends=True)[-1],
    "a hole": lambda data, other, rng: _hole(data, rng),
    "another's": lambda data, other, rng: other,
    "gone": lambda data, other, rng: None,
}


def _hole(data: bytes, rng: random.Random) -> bytes:
    """Zeros where a block of the disk was never written."""
    start = rng.randrange(len(data))
    return data[:start] + bytes(min(512, len(data) - start)) + data[start + 512 :]


class Damage(Part):
    """One file in a folder is damaged, sometimes two."""

    name = "damage"
    bar = "damaged saves of runs and checkpoints: the same bits, or an error that names the file"
    n = 500
    sample = 40

    def prepare(self) -> None:
        self.configs = {
            "transformer": (small(), small(seeds=(1,))),
            "LSTM": (small(model=LSTM, seeds=(0, 1)), small(model=LSTM, seeds=(2, 3))),
        }
        for name, (config, other) in self.configs.items():
            result = train(config, self.folder / name / "whole", progress=False)
            interrupt(config, self.folder / name / "sound", 9)
            interrupt(other, self.folder / name / "other", 9)
            twin = train(other, self.folder / name / "other whole", progress=False)
            for kind, each in (("checkpoint", result), ("other checkpoint", twin)):
                snapshots = Snapshots(each.snapshot_steps, each.snapshots)
                save(self.folder / name / kind, each.models, each.record, snapshots)

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        name = rng.choice(list(self.configs))
        if number % 5 == 4:
            return self._checkpoint(self.folder / name, rng, folder / "damaged")
        return self._run(self.folder / name, rng, folder / "damaged")

    def _run(self, root: Path, rng: random.Random, folder: Path) -> Outcome:
        config, _ = self.configs[root.name]
        names, words = _damage(root / "sound", root / "other", folder, rng)
        words = f"{root.name}: {words}"
        try:
            train(config, folder, progress=False)
        except ValueError as error:
            said = str(error)
            words = f"{words}: {type(error).__name__}: {error}"
            if not (str(folder) in said and (any(name in said for name in names) or "another config" in said)):
                return Outcome("an error that names no file", False, words)
            if f"is whole: rename {folder / EARLIER_STATE_FILE}" in said:  # it says what to do
                (folder / EARLIER_STATE_FILE).replace(folder / STATE_FILE)
                try:
                    train(config, folder, progress=False)
                except ValueError as other:  # two files were damaged
                    rest = [name for name in names if name != STATE_FILE]
                    second = str(folder) in str(other) and any(name in str(other) for name in rest)
                    kind = "a named error of each of two files" if second else "an error that names no file"
                    return Outcome(kind, second, f"{words}, then {other}")
                if wrong := differences(folder, root / "whole"):
                    return Outcome("the earlier save goes on to other bits", False, f"{words}: {wrong}")
                return Outcome("a named error, and the earlier save goes on to the same bits", True, words)
            return Outcome("a named error", True, words)
        except Exception as error:
            return Outcome("a raw error", False, f"{words}: {type(error).__name__}: {error}", type(error).__name__)
        if wrong := differences(folder, root / "whole"):
            return Outcome("other bits", False, f"{words}: {wrong}")
        return Outcome("the same bits", True, words)

    def _checkpoint(self, root: Path, rng: random.Random, folder: Path) -> Outcome:
        _, words = _damage(root / "checkpoint", root / "other checkpoint", folder, rng)
        words, whole = f"{root.name}, checkpoint: {words}", load_checkpoint(root / "checkpoint")
        try:
            loaded = load_checkpoint(folder)
        except CheckpointError as error:
            words = f"{words}: {error}"
            named = str(folder) in str(error)
            return Outcome("a named error" if named else "an error that names no file", named, words)
        except Exception as error:
            return Outcome("a raw error", False, f"{words}: {type(error).__name__}: {error}", type(error).__name__)
        wrong = unequal(stack_models(loaded.models), stack_models(whole.models))
        assert whole.snapshots is not None
        if loaded.snapshots is None or unequal(loaded.snapshots.weights, whole.snapshots.weights):
            wrong.append("the snapshots")
        if wrong:
            return Outcome("other weights", False, f"{words}: {wrong}")
        if loaded.record != whole.record:
            return Outcome("another record", False, words)
        return Outcome("the same bits", True, words)


def _damage(sound: Path, other: Path, folder: Path, rng: random.Random) -> tuple[list[str], str]:
    """Copy a folder and damage a file of it, or two; their names, and words for it."""
    shutil.copytree(sound, folder)
    files = [path.relative_to(sound) for path in sorted(sound.rglob("*")) if path.is_file() and path.stat().st_size]
    files = [path for path in files if path.name != ".lock"]
    chosen = rng.sample(files, rng.choice((1, 1, 1, 2)))
    words = []
    for path in chosen:
        kind = rng.choice(list(KINDS))
        data = (sound / path).read_bytes()
        twin = other / path
        if (kind == "another's" and rng.random() < 0.5) or not twin.is_file():  # or another file of the same kind
            kin = [each for each in files if each.suffix == path.suffix and each != path]
            twin = sound / rng.choice(kin or files)
        damaged = KINDS[kind](data, twin.read_bytes(), rng)
        words.append(f"{path}: {kind}")
        if damaged is None:
            (folder / path).unlink()
        else:
            (folder / path).write_bytes(damaged)
    return [path.name for path in chosen], ", ".join(words)
