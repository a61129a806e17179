"""Files that were made to hang, to fill the memory or to run code: a named error, quickly, and nothing else."""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from mechicl.analysis import align
from mechicl.checkpoints import load_checkpoint, save
from mechicl.interop import load_garg
from mechicl.models import TransformerConfig, build
from mechicl.statistics import load_result
from mechicl.sweeps import load_table
from mechicl.tasks import LinearRegression
from mechicl.text import load_texts
from mechicl.training import train
from tests.faults.part import MIB, Outcome, Part, forget_highest, highest, resident
from tests.faults.runs import interrupt, small

SECONDS, MEMORY = 2.0, 500 * MIB
GARG = {"n_dims": 5, "n_positions": 11, "n_embd": 32, "n_layer": 2, "n_head": 4, "family": "gpt2"}
NAMES = ("a\nb", "..", "x" * 250, "<script>", "\udcff", "-rf", "a;b", " ")
MARKER = "EXECUTED"
STRIDE = 37


class _Attack:
    """What a pickle that runs code is made from."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))


def _written(path: Path, data: bytes) -> None:
    _removed(path)
    path.write_bytes(data)


def _removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _fifo(path: Path) -> None:
    _removed(path)
    os.mkfifo(path)


def _link(target: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        _removed(path)
        path.symlink_to(target)

    return make


def _sparse(start: bytes, size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        _written(path, start)
        with open(path, "r+b") as file:
            file.truncate(size)

    return make


def _text(words: str) -> Callable[[Path], None]:
    return lambda path: _written(path, words.encode())


def _folder(path: Path) -> None:
    _removed(path)
    path.mkdir()


def _json(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _pickle(path: Path) -> None:
    _written(path, pickle.dumps(_Attack(str(path.parent / MARKER))))


def _torch_pickle(path: Path) -> None:
    torch.save({"model_state_dict": _Attack(str(path.parent / MARKER))}, path)


def _zip_bomb(path: Path) -> None:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("archive/data.pkl", "w") as entry,
    ):
        for _ in range(1024):
            entry.write(bytes(MIB))
    _written(path, buffer.getvalue())


def _bomb_of_tensors(path: Path) -> None:
    with open(path, "rb") as file:
        state = torch.load(file, weights_only=True)
    state["model_state_dict"]["_read_in.weight"] = torch.zeros(1).expand(2**34, 5)
    torch.save(state, path)


def _header(**fields: Any) -> Callable[[Path], None]:
    """A safetensors file whose header says what is not there."""

    def make(path: Path) -> None:
        data = json.dumps(
            {"w": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42], **fields}}
        ).encode()
        _written(path, len(data).to_bytes(8, "little") + data)

    return make


def _long_header(path: Path) -> None:
    _written(path, (2**62).to_bytes(8, "little") + b"{}")


YAML = {
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
    ),
    "merges": "a0: &a0 {x: 1}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}], k{i}: 1}}\n" for i in range(1, 12)
    ),
    "itself": "a: &a [*a]\nmodel: *a\n",
    "deep": "[" * 20_000,
    "an object": "!!python/object/apply:os.system ['touch EXECUTED']",
    "sixty": "x: " + ":".join(["59"] * 3000),
    "zeros": "\0" * 100,
}  # fmt: skip

FIELDS: dict[str, Any] = {
    "n_layers": 10**6, "d_model": 20_000, "n_heads": 10**5, "d_head": 10**6, "n_context": 10**9, "d_mlp": 10**8,
    "x_dim": 10**7, "d_vocab": 10**9,
}  # fmt: skip


class Hostile(Part):
    """Files in folders that are opened."""

    name = "hostile"
    bar = "hostile files: a named error in under 2 s and 500 MB"
    n = 120
    sample = 30
    seconds = 12.0

    def prepare(self) -> None:
        self.sound = self.folder / "sound"
        self.sound.mkdir()
        config = TransformerConfig(x_dim=3, n_context=4, n_layers=1)
        save(self.sound / "checkpoint", build(config).eval(), {"seeds": [0], "name": "x"})
        interrupt(small(), self.sound / "run", 9)
        task = LinearRegression(x_dim=3, n_context=4)
        model = build(config).eval()
        align(model, model, task.sample(8, seed=0)).save(self.sound / "result")
        garg = self.sound / "garg"
        garg.mkdir()
        (garg / "config.yaml").write_text(yaml.safe_dump({"model": GARG}))
        torch.save({"model_state_dict": {"_read_in.weight": torch.zeros(32, 5)}}, garg / "state.pt")
        texts = self.sound / "texts"
        texts.mkdir()
        (texts / "train.jsonl").write_text('{"text": "a", "label": 0}\n')
        (self.sound / "sweep").mkdir()
        (self.sound / "sweep" / "sweep.json").write_text("{}")
        self.cases = self._cases()

    def _cases(self) -> list[tuple[str, str, str, Callable[[Path], None]]]:
        """Kind of folder, its file, words, and what happens to the file."""
        cases: list[tuple[str, str, str, Callable[[Path], None]]] = []
        files = {
            "checkpoint": ("record.json", "config.json", "weights.safetensors"),
            "run": ("state.safetensors", "metrics.jsonl"), "result": ("result.json", "tensors.safetensors"),
            "garg": ("config.yaml", "state.pt"), "texts": ("train.jsonl",), "sweep": ("sweep.json",),
        }  # fmt: skip
        kinds: dict[str, Callable[[Path], None]] = {
            "a FIFO": _fifo, "a link to /dev/zero": _link("/dev/zero"),
            "a link to itself": lambda path: _link(path.name)(path),
            "3 GiB that are not there": _sparse(b'{"a": "', 3 * 2**30), "a folder": _folder, "a pickle": _pickle,
        }  # fmt: skip
        for kind, names in files.items():
            cases += [(kind, name, words, make) for name in names for words, make in kinds.items()]
        tensors = [
            ("checkpoint", "weights.safetensors"),
            ("run", "state.safetensors"),
            ("result", "tensors.safetensors"),
        ]
        for kind, name in tensors:
            cases += [
                (kind, name, "a header that says 4 TB", _header()),
                (kind, name, "a header of 2^62", _long_header),
            ]
        for kind in ("checkpoint", "result"):
            name = {"checkpoint": "config.json", "result": "result.json"}[kind]
            cases += [(kind, name, "endless nesting", lambda path: _written(path, b"[" * 10**6)),
                      (kind, name, "a long number", lambda path: _written(path, b'{"a": ' + b"1" * 10**6 + b"}")),
                      (kind, name, "bytes that are no text", lambda path: _written(path, b"\xff\xfe{"))]  # fmt: skip
        for name, value in FIELDS.items():
            cases.append(("checkpoint", "config.json", f"{name} of {value}", _signed_config(name, value)))
        for words, text in YAML.items():
            cases.append(("garg", "config.yaml", f"YAML, {words}", _text(text)))
        for name, value in (("n_layer", 10**6), ("n_embd", 40_000), ("n_positions", 10**8)):
            data = yaml.safe_dump({"model": {**GARG, name: value}})
            cases.append(("garg", "config.yaml", f"{name} of {value}", _text(data)))
        bombs = {"a pickle of torch": _torch_pickle, "a zip bomb": _zip_bomb, "an expanded tensor": _bomb_of_tensors}
        cases += [("garg", "state.pt", words, make) for words, make in bombs.items()]
        return cases

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        number = number * STRIDE % self.n  # so that a few are of all kinds
        if number >= len(self.cases):
            return self._name(NAMES[number % len(NAMES)], folder)
        kind, name, words, spoil = self.cases[number]
        there = folder / kind
        shutil.copytree(self.sound / kind, there)
        spoil(there / name)
        return self._opened(kind, there, name, f"{kind}/{name}: {words}")

    def _opened(self, kind: str, there: Path, name: str, words: str) -> Outcome:
        openers: dict[str, Callable[[], object]] = {
            "checkpoint": lambda: load_checkpoint(there),
            "run": lambda: train(small(), there, progress=False),
            "result": lambda: load_result(there),
            "garg": lambda: load_garg(there),
            "texts": lambda: load_texts("sst2", "train", source=there / name),
            "sweep": lambda: load_table(there),
        }
        forget_highest()
        begins, started = resident(), time.monotonic()
        error: Exception | None = None
        try:
            openers[kind]()
        except Exception as caught:
            error = caught
        seconds, grown = time.monotonic() - started, highest() - begins

        def outcome(what: str, good: bool) -> Outcome:
            said = f"{words} -> {type(error).__name__ if error else 'no error'}: {str(error)[:300]}"
            return Outcome(what, good, said, seconds=seconds, mebibytes=grown / MIB)

        if (there / MARKER).exists() or Path(MARKER).exists():
            return outcome("IT RAN CODE", False)
        if seconds > SECONDS:
            return outcome("slow", False)
        if grown > MEMORY:
            return outcome("too much memory", False)
        if error is None:
            return outcome("accepted", kind == "run")  # a run without its files starts over
        if not isinstance(error, ValueError | OSError):
            return outcome("a raw error", False)
        return (
            outcome("a named error", True)
            if str(there) in str(error)
            else outcome("an error that names no file", False)
        )

    def _name(self, name: str, folder: Path) -> Outcome:
        """A folder of a strange name: saved into and loaded from, or refused."""
        there = folder / "inner" / name
        model = build(TransformerConfig(x_dim=3, n_context=4, n_layers=1)).eval()
        words = f"a folder named {name!r}"
        try:
            save(there, model)
            loaded = load_checkpoint(there)
        except (ValueError, OSError) as error:
            return Outcome("a named error", True, f"{words}: {type(error).__name__}: {error}")
        except Exception as error:
            return Outcome("a raw error", False, f"{words}: {type(error).__name__}: {error}")
        outside = [path for path in folder.iterdir() if path.name != "inner"]
        if name != ".." and outside:
            return Outcome("it wrote elsewhere", False, f"{words}: {outside}")
        return Outcome("saved and loaded", len(loaded.models) == 1, words)


def _signed_config(name: str, value: Any) -> Callable[[Path], None]:
    """A config with another field, whose digest the record has."""

    def make(path: Path) -> None:

        _json(path, lambda data: {**data, name: value})
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        _json(path.with_name("record.json"), lambda data: {**data, "sha256": {**data["sha256"], path.name: digest}})

    return make
