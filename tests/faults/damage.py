"""Files of trainings and checkpoints are damaged: loading gives the same bits, or an error that names the file."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from mechicl.checkpoints import CheckpointError, Snapshots, load_checkpoint, save, stack_models
from mechicl.training import train
from mechicl.training.state import EARLIER_STATE_FILE, STATE_FILE
from tests.faults.runner import Campaign, Outcome
from tests.faults.trainings import LSTM, differences, interrupt, small, unequal


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
    "bits flipped": _flip_bits,
    "a digit changed": _change_digit,
    "cut": lambda data, other, rng: data[: rng.randrange(len(data))],
    "emptied": lambda data, other, rng: b"",
    "longer": lambda data, other, rng: data + rng.randbytes(rng.randint(1, 200)),
    "last line repeated": lambda data, other, rng: data + data.splitlines(keepends=True)[-1],
    "a block of zeros": _zero_block,
    "replaced by another file": lambda data, other, rng: other,
    "removed": lambda data, other, rng: None,
}


class Damage(Campaign):
    """One file of a folder is damaged, or two."""

    name = "damage"
    bar = "damaged saves of trainings and checkpoints: the same bits, or an error that names the file"
    n = 500
    sample = 40

    def prepare(self) -> None:
        self.configs = {
            "transformer": (small(), small(seeds=(1,))),
            "LSTM": (small(model=LSTM, seeds=(0, 1)), small(model=LSTM, seeds=(2, 3))),
        }
        for name, (config, other) in self.configs.items():
            root = self.folder / name
            interrupt(config, root / "sound", 9)
            interrupt(other, root / "other", 9)
            for kind, each, end in (("checkpoint", config, "whole"), ("other checkpoint", other, "other whole")):
                result = train(each, root / end, progress=False)
                snapshots = Snapshots(result.snapshot_steps, result.snapshots)
                save(root / kind, result.models, result.record, snapshots)

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        name = rng.choice(list(self.configs))
        check = self._checkpoint if number % 5 == 4 else self._training
        return check(self.folder / name, rng, folder / "damaged")

    def _training(self, root: Path, rng: random.Random, folder: Path) -> Outcome:
        config, _ = self.configs[root.name]
        names, text = _damage(root / "sound", root / "other", folder, rng)
        text = f"{root.name}: {text}"
        for _ in range(2):
            try:
                train(config, folder, progress=False)
            except ValueError as error:
                message, text = str(error), f"{text}: {type(error).__name__}: {error}"
                if not (
                    str(folder) in message and (any(map(message.__contains__, names)) or "another config" in message)
                ):
                    return Outcome("an error that names no file", False, text)
                if f"is intact: rename {folder / EARLIER_STATE_FILE}" not in message:
                    return Outcome("a named error", True, text)
                (folder / EARLIER_STATE_FILE).replace(folder / STATE_FILE)  # follow the advice
                names = [name for name in names if name != STATE_FILE]
            except Exception as error:
                return Outcome("a raw error", False, f"{text}: {type(error).__name__}: {error}", type(error).__name__)
            else:
                break
        if wrong := differences(folder, root / "whole"):
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
        except Exception as error:
            return Outcome("a raw error", False, f"{text}: {type(error).__name__}: {error}", type(error).__name__)
        wrong = unequal(stack_models(loaded.models), stack_models(whole.models))
        assert whole.snapshots is not None
        if loaded.snapshots is None or unequal(loaded.snapshots.weights, whole.snapshots.weights):
            wrong.append("the snapshots")
        if loaded.record != whole.record:
            wrong.append("the record")
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
