"""Atomic writes and safe reads; locks on folders, bounds on memory, numbers of threads, progress bars."""

import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tqdm.auto import tqdm

from mechicl.base import threads
from mechicl.base.files import (
    check_writable,
    machine_name,
    read_json,
    remove_leftovers,
    write_bytes,
    write_json,
)
from mechicl.base.locks import FolderInUseError, is_locked, locked
from mechicl.base.memory import SET_ASIDE, Budget, TooLittleMemory
from mechicl.base.progress import progress_bar
from mechicl.base.tensor_files import read_outline, read_tensors, write_tensors
from mechicl.base.threads import WORTH_A_THREAD, n_cores, threads_worth, using_threads
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


HOLDER = """
import sys, time
from mechicl.base.locks import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_the_error_names_the_process_that_has_the_lock(tmp_path):
    with (
        locked(tmp_path / "run"),
        pytest.raises(FolderInUseError, match=rf"run is in use by process {os.getpid()} on "),
        locked(tmp_path / "run"),
    ):
        pass
    with locked(tmp_path / "run"):  # free again, though an error ended the block
        assert is_locked(tmp_path / "run")
    assert not is_locked(tmp_path / "run")


def test_a_killed_process_releases_its_lock(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    assert is_locked(tmp_path)
    with pytest.raises(FolderInUseError, match=f"process {process.pid} on"), locked(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        pass


def test_waiting_takes_turns(tmp_path):
    order = []

    def second():
        with locked(tmp_path, wait=True):
            order.append("second")

    with locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_lock_file_with_other_contents_is_locked(tmp_path):
    (tmp_path / ".lock").write_text("{nonsense")
    with locked(tmp_path):
        pass
    assert not is_locked(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_lock_that_is_no_file_is_refused(tmp_path, kind):
    make_no_file(tmp_path / ".lock", kind)
    with bounded(), pytest.raises(ValueError, match="not a regular file"), locked(tmp_path):
        pass
    assert not is_locked(tmp_path)


@pytest.mark.parametrize(
    ("memory", "for_tensors"),
    [(1000, 1000), (SET_ASIDE, SET_ASIDE), (3 * 2**24, SET_ASIDE), (2**26, SET_ASIDE), (2**30, 31 * 2**25)],
)  # fmt: skip
def test_part_of_a_large_bound_is_set_aside(memory, for_tensors):
    assert Budget(memory).for_tensors == for_tensors
    assert Budget(memory, kept=500).rows(100) == (for_tensors - 500) // 100


@pytest.mark.parametrize("per_row", [10, SET_ASIDE - 7, SET_ASIDE + 1, 5 * SET_ASIDE])
def test_what_is_said_to_be_enough_is_enough(per_row):
    with pytest.raises(TooLittleMemory, match="is too little") as refused:
        Budget(9, kept=7).rows(per_row)
    assert Budget(refused.value.needed, kept=7).rows(per_row) == 1
    with pytest.raises(TooLittleMemory):
        Budget(refused.value.needed - 1, kept=7).rows(per_row)
    with pytest.raises(TooLittleMemory):
        Budget(float("nan")).rows(1)


MEASURE = """
import gc, sys
import mechicl
from mechicl.analysis import corrupt, patch
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

cfg = TransformerConfig(x_dim=5, n_context=20, prompt_format="interleaved", n_layers=4, n_heads=4, d_model=64,
                        d_head=16, d_mlp=256, attention="softmax", normalization_type="LN")
model, bound = HookedTransformer(cfg), float(sys.argv[1])
prompts = LinearRegression(x_dim=5, n_context=20).sample(200, seed=0)
corrupted = corrupt(prompts, "labels")
for _ in range(3):  # the first time is cold
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmRSS:")
    with mechicl.settings(memory=bound):
        patch(model, prompts, corrupted, "z", ("layer", "head"), progress=False)
    print(1024 * (kilobytes("VmHWM:") - before) / bound)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("bound", [2**26, 2**27])
def test_a_sweep_stays_within_its_bound_also_when_it_is_the_first(bound):
    ran = subprocess.run([sys.executable, "-c", MEASURE, str(bound)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    ratios = [float(line) for line in ran.stdout.split()]
    assert len(ratios) == 3
    assert max(ratios) <= 1.1, ratios


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch):
    """A machine with 64 cores, of which torch may use 16."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "n_cores", lambda: 64)
    torch.set_num_threads(16)
    yield
    torch.set_num_threads(before)


def test_threads_grow_with_the_root_of_the_work_up_to_the_cores_and_what_torch_may_use(many, monkeypatch):
    work = {0: 1, 1: 1, 4: 2, 8.9: 2, 9: 3, 64: 8, 10_000: 16}
    assert [threads_worth(each * WORTH_A_THREAD) for each in work] == list(work.values())
    monkeypatch.setattr(threads, "n_cores", lambda: 2)
    assert threads_worth(1e15) == 2
    torch.set_num_threads(1)
    assert threads_worth(1e15) == 1
    assert n_cores() >= 1


def test_the_users_number_comes_back_whatever_was_set_in_between(many):
    with using_threads(3):
        assert torch.get_num_threads() == 3
        torch.set_num_threads(5)
    assert torch.get_num_threads() == 16
    with using_threads():
        assert torch.get_num_threads() == 16
        torch.set_num_threads(2)
    assert torch.get_num_threads() == 16
    with pytest.raises(RuntimeError), using_threads(4):
        torch.set_num_threads(-1)
    assert torch.get_num_threads() == 16


def test_a_silent_bar_needs_no_lock():
    """While another thread has tqdm's lock, as after Ctrl-C while it was taken."""
    counted = []

    def count() -> None:
        with progress_bar(range(3), unit="run", progress=False) as bar:
            for each in bar:
                bar.update(1)
                bar.set_postfix(loss=1.0)
                counted.append(each)
        bar.close()

    with tqdm.get_lock():
        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        thread.join(60)
    assert counted == [0, 1, 2]


def test_a_bar_iterates_and_counts(capsys):
    bar = progress_bar("abc", unit="letter")
    assert list(bar) == ["a", "b", "c"]
    with progress_bar(total=4, initial=1, unit="step") as counting:
        counting.update(2)
        assert isinstance(counting, tqdm)
        assert counting.n == 3
    assert list(progress_bar(None, unit="run", progress=False)) == []
