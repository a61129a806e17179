"""How OpenMP's threads wait: what is set, where, and that nobody's choice is changed."""

import os
import subprocess
import sys

import pytest

from mechicl.base import waiting
from mechicl.base.waiting import machine_is_idle, settle_waiting, sleep_at_once


@pytest.mark.parametrize("idle", [True, False])
def test_threads_turn_before_they_sleep_on_an_idle_machine_alone(monkeypatch, idle):
    monkeypatch.setattr(waiting, "machine_is_idle", lambda: idle)
    environment = {"HOME": "x"}
    settle_waiting(environment)
    spins = {"GOMP_SPINCOUNT": "2000"} if idle else {}
    assert environment == {"HOME": "x", "OMP_WAIT_POLICY": "passive", **spins}


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_somebody_has_chosen_stays(monkeypatch, chosen):
    monkeypatch.setattr(waiting, "machine_is_idle", lambda: True)
    environment = dict(chosen)
    settle_waiting(environment)
    assert environment == chosen


def test_processes_beside_one_another_sleep():
    environment = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "7", "HOME": "x"}
    sleep_at_once(environment)
    assert environment == {"OMP_WAIT_POLICY": "passive", "HOME": "x"}


@pytest.mark.parametrize(
    ("lines", "idle"),
    [
        ("cpu  1 2 3\nprocs_running 1\nprocs_blocked 0\n", True),
        ("cpu  1 2 3\nprocs_running 2\nprocs_blocked 0\n", False),
        ("cpu  1 2 3\n", False),
        ("procs_running 0\n", False),
        ("ä", False),
        (None, False),
    ],
)
def test_what_the_system_says_of_other_processes(tmp_path, lines, idle):
    if lines is not None:
        (tmp_path / "stat").write_text(lines, "utf-8")
    assert machine_is_idle(tmp_path / "stat") is idle


@pytest.mark.skipif(not waiting.STATISTICS.exists(), reason="only Linux says how many processes run")
def test_a_busy_process_is_seen():
    with subprocess.Popen([sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"], stdout=-1) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        try:
            assert not machine_is_idle()
        finally:
            busy.kill()


@pytest.mark.parametrize(("first", "policy"), [("", "passive"), ("import torch\n", "None")])
def test_nothing_is_set_that_would_be_read_by_nobody(first, policy):
    code = f"{first}import os, mechicl; print(os.environ.get('OMP_WAIT_POLICY'))"
    chosen = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == policy, done.stderr
