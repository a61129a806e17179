import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mechicl.base import locks
from mechicl.base.files import machine_name
from mechicl.base.locks import HELD_FILE, FolderInUseError, is_locked, locked

HOLDER = """
import sys, time
from mechicl.base.locks import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_second_is_told_who_is_first(tmp_path):
    with (
        locked(tmp_path / "run"),
        pytest.raises(FolderInUseError, match=rf"in use by process {os.getpid()} on "),
        locked(tmp_path / "run"),
    ):
        pass
    with locked(tmp_path / "run"):  # free again
        assert is_locked(tmp_path / "run")
    assert not is_locked(tmp_path / "run")


def test_a_lock_ends_with_its_holder_however_that_ends(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert is_locked(tmp_path)
    with pytest.raises(FolderInUseError, match=f"process {process.pid} on"), locked(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
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


def test_an_error_inside_lets_go(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


def test_what_is_no_lock_file_of_ours_is_no_trouble(tmp_path):
    (tmp_path / ".lock").write_text("{nonsense")
    with locked(tmp_path):
        pass
    assert not is_locked(tmp_path / "nowhere")


# ---- file systems without locks ----


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    assert locks.fcntl is not None
    monkeypatch.setattr(locks.fcntl, "flock", refuse)


def test_without_locks_a_file_stands_for_one(tmp_path, no_locks):
    with locked(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(FolderInUseError, match=rf"process {os.getpid()} on .*has no locks.*remove .*held"):  # noqa: SIM117
            with locked(tmp_path):
                pass
        assert is_locked(tmp_path)  # who was refused takes nothing away
    assert not is_locked(tmp_path)
    assert not (tmp_path / HELD_FILE).exists()
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert not is_locked(tmp_path)


def test_without_locks_waiting_takes_turns(tmp_path, no_locks):
    test_waiting_takes_turns(tmp_path)


def dead_process():
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_without_locks_a_holder_that_was_killed_here_is_noticed(tmp_path, no_locks):
    words = {"process": dead_process(), "machine": machine_name(), "command": "x"}
    (tmp_path / HELD_FILE).write_text(json.dumps(words))
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_without_locks_a_process_of_another_machine_is_not_taken_for_dead(tmp_path, no_locks, monkeypatch):
    held = tmp_path / HELD_FILE
    held.write_text(json.dumps({"process": dead_process(), "machine": "elsewhere", "command": "x"}))
    (tmp_path / ".lock").touch()
    assert is_locked(tmp_path)
    with pytest.raises(FolderInUseError, match="on elsewhere"), locked(tmp_path):
        pass
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    removal = threading.Timer(0.5, held.unlink)
    removal.start()
    with pytest.warns(UserWarning, match=r"on elsewhere.*remove "), locked(tmp_path, wait=True):
        pass
    removal.join()
