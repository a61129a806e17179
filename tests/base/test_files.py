import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mechicl.base.files import (
    MOST_BYTES,
    MOST_BYTES_OF_WORDS,
    MOST_VALUES,
    check_writable,
    machine_name,
    read_json,
    remove_leftovers,
    write_bytes,
    write_json,
)
from mechicl.base.tensor_files import read_outline, read_tensors, write_tensors
from tests.bounds import bounded, make_no_file


class Crash(Exception):
    """A simulated loss of power."""


def crash(*_):
    raise Crash


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- atomic writes ----


@pytest.mark.parametrize("moment", ["replace", "fsync"])
@pytest.mark.parametrize("write", [write_bytes, write_json, write_tensors])
def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, moment, write):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    data = {write_bytes: b"new", write_json: {"new": 1}, write_tensors: {"new": torch.ones(3)}}[write]
    monkeypatch.setattr(os, moment, crash)
    with pytest.raises(Crash):
        write(path, data)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_new_contents_are_on_disk_before_they_replace_the_old(tmp_path, monkeypatch):
    path, events = tmp_path / "file", []
    path.write_bytes(b"old")
    replace, fsync = os.replace, os.fsync

    def watched(source, target):
        events.append((Path(source).read_bytes(), path.read_bytes()))
        replace(source, target)

    def synced(descriptor):
        events.append("synced")
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", watched)
    monkeypatch.setattr(os, "fsync", synced)
    write_bytes(path, b"new")
    assert events == ["synced", (b"new", b"old"), "synced"]
    assert path.read_bytes() == b"new"


@pytest.fixture
def processes():
    """The ids of a process that has ended and of one that is running."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    running = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield ended.pid, running.pid
    running.communicate()


def test_leftovers_are_removed_except_those_of_running_processes(tmp_path, processes):
    (ended, running), here = processes, machine_name()
    kept = [f".a.{here}.{running}.tmp", "a.tmp", "a"]
    left = [f".a.{here}.{ended}.tmp", f".b.json.{here}.{os.getpid()}.tmp", f".a.another.{running}.tmp", ".a.17.tmp"]
    for name in kept + left:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path, tmp_path / "nowhere")
    assert names(tmp_path) == sorted(kept)


def test_the_next_write_of_a_file_removes_what_killed_processes_left_of_it(tmp_path, processes):
    (ended, running), here = processes, machine_name()
    kept = [f".a.{here}.{running}.tmp", f".a.elsewhere.{ended}.tmp", f".b.{here}.{ended}.tmp", f".a.{here}.x.tmp"]
    for name in (*kept, f".a.{here}.{ended}.tmp", f".a.{here}.{10**30}.tmp"):
        (tmp_path / name).touch()
    write_bytes(tmp_path / "a", b"new")
    assert names(tmp_path) == sorted([*kept, "a"])


def test_a_check_of_a_folder_leaves_nothing(tmp_path):
    check_writable(tmp_path)
    check_writable(tmp_path / "to" / "be" / "made")
    assert names(tmp_path) == []
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(OSError, match=r"nothing can be written there .*file/out"):
        check_writable(tmp_path / "file" / "out")
    assert (tmp_path / "file").read_bytes() == b"mine"


# ---- bounds ----


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
@pytest.mark.parametrize("read", [read_json, read_tensors, read_outline])
def test_pipes_devices_and_endless_files_are_refused_before_they_are_opened(tmp_path, read, kind):
    path = tmp_path / "data"
    make_no_file(path, kind)
    with bounded(), pytest.raises(ValueError, match=f"{path} (is a pipe, a device|has 3,221|is not a readable)"):
        read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": [' + "[]," * (MOST_VALUES // 2) + "[]]}", "more than 4,000,000 values"),
        ("{" + '"":0,' * (MOST_VALUES // 2) + '"b":0}', "more than 4,000,000 values"),
        ('{"a": "\U0001f600' + "x" * MOST_BYTES_OF_WORDS + '"}', "not all of them ASCII"),
        ('{"a": "' + "x" * MOST_BYTES + '"}', f"has {MOST_BYTES + 9:,} bytes; a file of its kind is read up to"),
    ],
    ids=["lists", "names", "letters", "size"],
)  # fmt: skip
def test_json_that_would_fill_the_memory_is_refused(tmp_path, text, message):
    path = tmp_path / "data.json"
    path.write_text(text, encoding="utf-8")
    del text
    with bounded(), pytest.raises(ValueError, match=f"data.json .*{message}"):
        read_json(path)


# ---- JSON ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_and_the_old_file_stays(tmp_path, value):
    path = tmp_path / "data.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": [1.0, value]})
    assert read_json(path) == {"old": 1}


@pytest.mark.parametrize(
    "text",
    ["", "{", "{'a': 1}", '{"a": 1} x', "[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}", "\ufeff{}"],
    ids=["empty", "cut", "quotes", "more", "deep list", "deep object", "long number", "byte order mark"],
)
def test_invalid_json_is_refused(tmp_path, text):
    path = tmp_path / "data.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.json is not valid JSON"):
        read_json(path)


# ---- tensors ----

TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
    "expanded": torch.ones(1, 3).expand(4, 3),
    "slice": torch.arange(10.0)[3:5],
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "half": torch.tensor([0.1], dtype=torch.bfloat16),
    "whole": torch.tensor([2**62]),
    "learned": torch.nn.Parameter(torch.tensor([math.nan, -0.0, math.inf])),
}


def test_tensors_come_back_with_their_values_types_and_metadata(tmp_path):
    path = tmp_path / "data.safetensors"
    write_tensors(path, TENSORS, {"steps": "1,2"})
    tensors, metadata = read_tensors(path)
    assert metadata == {"steps": "1,2"}
    assert set(tensors) == set(TENSORS)
    for name, tensor in tensors.items():
        assert not tensor.requires_grad
        torch.testing.assert_close(tensor, TENSORS[name].detach(), rtol=0, atol=0, equal_nan=True)
    outline, same = read_outline(path)  # everything but the numbers
    assert metadata == same
    assert {name: (t.shape, t.dtype) for name, t in outline.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }
    assert {tensor.device.type for tensor in outline.values()} == {"meta"}


def test_a_long_header_is_not_read(tmp_path):
    path = tmp_path / "data.safetensors"
    header = b'{"__metadata__":{"a":"' + b"x" * 2**23 + b'"}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b" ")
    with pytest.raises(ValueError, match="header has more than 8,388,608 bytes"):
        read_tensors(path)


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "data.safetensors"
    write_tensors(path, {"a": torch.randn(3, 4), "b": torch.randn(2)}, {"steps": "1"})
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated or damaged"):
            read_tensors(path)


class Bomb:
    """Leaves a marker when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("kind", [2, 5, "torch", "torch before 1.6"])
def test_a_pickle_is_called_one_and_never_opened(tmp_path, kind):
    path, marker = tmp_path / "weights.safetensors", tmp_path / "executed"
    if isinstance(kind, int):
        path.write_bytes(pickle.dumps(Bomb(marker), protocol=kind))
    else:
        torch.save({"a": Bomb(marker)}, path, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(ValueError, match="it looks like a pickle, which is never loaded"):
        read_tensors(path)
    assert not marker.exists()
