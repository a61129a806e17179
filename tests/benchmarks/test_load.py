import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.scripts import import_script

load = import_script("benchmarks.load")
needs_proc = pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="the system has no /proc/stat")


def test_busy_seconds_are_all_but_idle_and_waiting_ones_and_count_guests_once():
    stat = "cpu  100 20 30 4000 500 6 7 8 90 9\ncpu0 1 1 1 1 1 1 1 1 1 1\n"  # the last two are in the first two
    assert load.busy_seconds(stat, 10) == pytest.approx((100 + 20 + 30 + 6 + 7 + 8) / 10)


@pytest.mark.parametrize(("others", "quiet"), [(0.0, True), (0.1, True), (0.5, False), (None, False)])
def test_a_machine_is_quiet_where_others_are_known_to_take_little(others, quiet):
    assert load.Load(seconds=1.0, others=others, average=0.3, cores=2).is_quiet is quiet


def test_a_load_in_words_and_as_json():
    measured = load.Load(seconds=2.0, others=1.25, average=3.5, cores=2)
    assert str(measured) == "other processes took 1.25 of 2 cores over 2 s, load 3.50"
    assert load.Load(**measured.to_dict()) == measured


@needs_proc
def test_what_this_process_and_its_children_use_is_own():
    spin = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    before = load.own_seconds()
    subprocess.run([sys.executable, "-S", "-c", spin], check=True)
    reaped = load.own_seconds() - before
    assert reaped >= 0.399
    child = subprocess.Popen([sys.executable, "-S", "-c", spin + "\ntime.sleep(600)"])
    try:
        deadline = time.monotonic() + 3000
        while load.own_seconds() - before < reaped + 0.4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()


@needs_proc
def test_what_others_take_is_counted_from_the_start_and_is_not_negative(monkeypatch):
    measured = load.idle_load(0.01)
    assert measured.others >= 0
    assert measured.cores >= 1
    for before, after in ((10.0, 12.0), (10.0, 9.0)):
        seconds = iter((before, after))
        monkeypatch.setattr(load.Watch, "_others_seconds", staticmethod(lambda seconds=seconds: next(seconds)))
        measured = load.idle_load(0.01)
        assert measured.others * measured.seconds == pytest.approx(max(after - before, 0))


SPINS_AND_ENDS = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
FORGETS = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who does so does not wait for children, as Ray's daemon does not
child = subprocess.Popen([sys.executable, "-S", "-c", {SPINS_AND_ENDS + chr(10) + "time.sleep(600)"!r}])
print(child.pid, flush=True)
time.sleep(600)
"""


@needs_proc
def test_what_ends_without_being_waited_for_is_kept(monkeypatch):
    monkeypatch.setattr(load, "_forgotten", 0.0)
    before = load.own_seconds()
    parent = subprocess.Popen([sys.executable, "-c", FORGETS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 300
    while sum(child.cpu_times()[:2]) < 0.25:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with load.counting_what_ends():
        child.kill()
        while child.is_running():
            time.sleep(0.01)
        parent.kill()
        parent.communicate()
    assert load.own_seconds() - before >= 0.25
