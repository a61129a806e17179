"""Locks on folders, bounds on memory, numbers of threads, progress bars."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from tqdm.auto import tqdm

from mechicl.base import threads
from mechicl.base.locks import FolderInUseError, is_locked, locked
from mechicl.base.memory import SET_ASIDE, Budget, TooLittleMemory
from mechicl.base.progress import progress_bar
from mechicl.base.threads import WORTH_A_THREAD, n_cores, threads_worth, using_threads
from tests.bounds import bounded, make_no_file

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
    patch(model, prompts, corrupted, "z", ("layer", "head"), memory=bound, progress=False)
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
        assert counting.n == 3
    assert list(progress_bar(None, unit="run", progress=False)) == []
