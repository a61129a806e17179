"""Files made to hang, to fill the memory or to run code give a named error, quickly, and nothing else."""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from mechicl.analysis import align
from mechicl.checkpoints import load_checkpoint, save
from mechicl.interop import load_garg
from mechicl.models import build
from mechicl.statistics import load_result
from mechicl.sweeps import load_table
from mechicl.tasks import LinearRegression
from mechicl.text import load_texts
from mechicl.training import train
from tests.faults.runner import Campaign, Outcome, measured
from tests.faults.saves import small
from tests.training.runs import MODEL, interrupted

SECONDS, MEBIBYTES = 2.0, 500.0
GARG = {"n_dims": 5, "n_positions": 11, "n_embd": 32, "n_layer": 2, "n_head": 4, "family": "gpt2"}
FOLDER_NAMES = ("a\nb", "..", "x" * 250, "<script>", "\udcff", "-rf", "a;b", " ")
MARKER = "EXECUTED"
STRIDE = 37  # coprime to the number of cases, so that a sample has cases of all kinds
Spoil = Callable[[Path], None]


class _Attack:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.folder / MARKER,))


# ---- ways to spoil a file, which was removed before ----
def _data(data: bytes | str) -> Spoil:
    def spoil(path: Path) -> None:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    return spoil


def _sparse(path: Path) -> None:
    path.write_bytes(b'{"a": "')
    os.truncate(path, 3 * 2**30)


def _tensors_header(size: int | None = None) -> Spoil:
    """A safetensors file that claims a header of a size, or a tensor of 4 TB."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}).encode()
    return _data((size or len(header)).to_bytes(8, "little") + header)


def _config(**changes: Any) -> Spoil:
    """Change fields of a checkpoint's config, and its digest in the record."""

    def spoil(path: Path) -> None:
        record_path = path.with_name("record.json")
        record, folder = json.loads(record_path.read_text()), path.parent
        path.write_text(json.dumps({**json.loads((folder / "sound.json").read_text()), **changes}))
        record["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        record_path.write_text(json.dumps(record))

    return spoil


ANYWHERE: dict[str, Spoil] = {
    "a FIFO": os.mkfifo, "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name), "3 GiB of zeros": _sparse,
    "a folder": lambda path: path.mkdir(), "a pickle": lambda path: _data(pickle.dumps(_Attack(path.parent)))(path),
}  # fmt: skip
TENSORS = {"a header that claims 4 TB": _tensors_header(), "a header of 2^62 bytes": _tensors_header(2**62)}
JSON = {
    "endless nesting": _data(b"[" * 10**6), "a long number": _data(b'{"a": ' + b"1" * 10**6 + b"}"),
    "bytes that are not text": _data(b"\xff\xfe{"),
}  # fmt: skip
SIZES = {
    "n_layers": 10**6, "d_model": 20_000, "n_heads": 10**5, "d_head": 10**6, "n_context": 10**9, "d_mlp": 10**8,
    "x_dim": 10**7, "d_vocab": 10**9,
}  # fmt: skip
YAML = {
    "nesting": "[" * 20_000, "an object": f"!!python/object/apply:os.system ['touch {MARKER}']", "zeros": "\0" * 100,
    **{f"{name} of {value}": yaml.safe_dump({"model": {**GARG, name: value}})
       for name, value in (("n_embd", 40_000), ("n_positions", 10**8))},
}  # fmt: skip
BOMBS: dict[str, Spoil] = {
    "a pickle of torch": lambda path: torch.save({"model_state_dict": _Attack(path.parent)}, path),
    "an expanded tensor": lambda path: torch.save(
        {"model_state_dict": {"_read_in.weight": torch.zeros(1).expand(2**34, 5)}}, path
    ),
}  # fmt: skip
FILES: dict[str, dict[str, dict[str, Spoil]]] = {
    "checkpoint": {
        "record.json": {}, "config.json": JSON | {f"{name} of {n}": _config(**{name: n}) for name, n in SIZES.items()},
        "weights.safetensors": TENSORS,
    },
    "training": {"state.safetensors": TENSORS, "metrics.jsonl": {}},
    "result": {"result.json": JSON, "tensors.safetensors": TENSORS},
    "garg": {"config.yaml": {name: _data(text) for name, text in YAML.items()}, "state.pt": BOMBS},
    "texts": {"train.jsonl": {}}, "sweep": {"sweep.json": {}},
}  # fmt: skip
"""By kind of folder and file, ways to spoil it in addition to `ANYWHERE`."""
CASES = [
    (kind, file, words, spoil) for kind, files in FILES.items() for file, ways in files.items()
    for words, spoil in (ANYWHERE | ways).items()
]  # fmt: skip


class Hostile(Campaign):
    """One file of a folder is replaced by a hostile one, and the folder is opened."""

    name = "hostile"
    bar = f"hostile files: a named error in under {SECONDS:g} s and {MEBIBYTES:g} MiB"
    n, sample, seconds = 120, 30, 12.0

    def prepare(self) -> None:
        sound = self.sound = self.folder / "sound"
        model = build(MODEL).eval()
        save(sound / "checkpoint", model, {"seeds": [0], "name": "x"})
        interrupted(small(), sound / "training", 9)
        align(model, model, LinearRegression(x_dim=3, n_context=4).sample(8, seed=0)).save(sound / "result")
        for name in ("garg", "texts", "sweep"):
            (sound / name).mkdir()
        (sound / "garg" / "config.yaml").write_text(yaml.safe_dump({"model": GARG}))
        torch.save({"model_state_dict": {"_read_in.weight": torch.zeros(32, 5)}}, sound / "garg" / "state.pt")
        (sound / "texts" / "train.jsonl").write_text('{"text": "a", "label": 0}\n')
        (sound / "sweep" / "sweep.json").write_text("{}")

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        number = number * STRIDE % self.n
        if number >= len(CASES):
            return self._strange_name(FOLDER_NAMES[number % len(FOLDER_NAMES)], folder)
        kind, name, words, spoil = CASES[number]
        path = folder / kind / name
        shutil.copytree(self.sound / kind, path.parent)
        shutil.copy(path, path.with_name("sound.json"))
        path.unlink()
        spoil(path)
        openers: dict[str, Callable[..., object]] = {
            "checkpoint": load_checkpoint, "training": partial(train, small(), progress=False), "result": load_result,
            "garg": load_garg, "texts": lambda folder: load_texts("sst2", "train", source=folder / name),
            "sweep": load_table,
        }  # fmt: skip
        error, outcome = None, Outcome("a named error", False)
        with measured(outcome):
            try:
                openers[kind](path.parent)
            except Exception as raised:
                error = raised
        outcome.text = f"{kind}/{name}: {words} -> {type(error).__name__}: {str(error)[:300]}"
        if (path.parent / MARKER).exists() or Path(MARKER).exists():
            outcome.kind = "IT RAN CODE"
        elif outcome.seconds > SECONDS or outcome.mebibytes > MEBIBYTES:
            outcome.kind = "slow, or too much memory"
        elif error is None:  # a training without its files starts anew
            outcome.kind, outcome.good = "accepted", kind == "training"
        elif not isinstance(error, ValueError | OSError):
            outcome.kind = "a raw error"
        elif str(path.parent) not in str(error):
            outcome.kind = "an error that names no file"
        else:
            outcome.good = True
        return outcome

    def _strange_name(self, name: str, folder: Path) -> Outcome:
        """A checkpoint is saved to a folder of a strange name and loaded from it, or refused."""
        inner, text = folder / "inner" / name, f"a folder named {name!r}"
        try:
            save(inner, build(MODEL).eval())
            load_checkpoint(inner)
        except Exception as error:
            is_named = isinstance(error, ValueError | OSError)
            kind = "a named error" if is_named else "a raw error"
            return Outcome(kind, is_named, f"{text}: {type(error).__name__}: {error}")
        outside = [path for path in folder.iterdir() if path.name != "inner"]
        if name != ".." and outside:
            return Outcome("it wrote elsewhere", False, f"{text}: {outside}")
        return Outcome("saved and loaded", True, text)
