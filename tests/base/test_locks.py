import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mechicl.base.locks import FolderInUseError, is_locked, locked
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
    with locked(tmp_path / "run"):  # free again
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


def test_an_error_releases_the_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


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
