"""Peers live in processes of their own, with the variables of threads that a user has: none."""

import os

import pytest

from tests.scripts import import_script

apart = import_script("benchmarks.apart")


class Probe:
    """Says what it sees of its process."""

    def __init__(self, number: int):
        self.number = number

    def sees(self, more: int) -> dict:
        print("this is no answer")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "XLA_FLAGS")
        return {"sum": self.number + more, "cores": cores, **{name: os.environ.get(name) for name in names}}

    def fail(self) -> None:
        raise ArithmeticError("too large")


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")


def probe(**options):
    return apart.Apart("tests.benchmarks.test_apart:Probe", number=3, **options)


def test_a_peer_does_not_see_what_is_set_here_and_ours_sets_its_own():
    with apart.peers({"theirs": probe, "ours": lambda: probe(ours=True)}) as both:
        theirs, ours = (both[name].call("sees", 4) for name in ("theirs", "ours"))
    assert (theirs["sum"], theirs["OMP_NUM_THREADS"], theirs["OMP_WAIT_POLICY"]) == (7, None, None)
    assert (ours["OMP_NUM_THREADS"], ours["OMP_WAIT_POLICY"]) == (None, "passive")


def test_one_core_is_one_core_for_every_library():
    with apart.peers({"one": lambda: probe(one_core=True)}) as alone:
        seen = alone["one"].call("sees", 0)
    assert (seen["cores"] or 1, seen["OMP_NUM_THREADS"]) == (1, "1")
    assert "multi_thread_eigen=false" in seen["XLA_FLAGS"]


def test_what_is_not_installed_is_left_out_with_a_sentence_and_errors_have_words(capsys):
    with apart.peers({"nobody": lambda: apart.Apart("no_such_twin:Twin"), "theirs": probe}) as made:
        assert list(made) == ["theirs"]
        with pytest.raises(RuntimeError, match="ArithmeticError: too large"):
            made["theirs"].call("fail")
    assert "left out: nobody: no_such_twin:Twin cannot be measured here: No module named" in capsys.readouterr().out
