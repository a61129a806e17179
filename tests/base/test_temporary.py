"""Changes are undone whenever an interrupt comes."""

import pytest

from mechicl.base.temporary import Temporary, together
from tests.interrupts import interrupt, run_interrupted


def keys_of(kept: dict[str, int], *names: str) -> Temporary:
    def put() -> None:
        for name in names:
            kept[name] = 1

    def take_out() -> None:
        for name in names:
            kept.pop(name, None)

    return Temporary(put, take_out, kept)


def test_the_change_lasts_as_long_as_the_context():
    kept: dict[str, int] = {}
    with keys_of(kept, "a", "b") as value:
        assert value is kept
        assert kept == {"a": 1, "b": 1}
    assert kept == {}
    with pytest.raises(ZeroDivisionError), keys_of(kept, "a"):
        raise ZeroDivisionError
    assert kept == {}
    with together(keys_of(kept, "a"), keys_of(kept, "b")):
        assert kept == {"a": 1, "b": 1}
    assert kept == {}


def test_a_change_that_fails_is_undone():
    kept = {"x": 0}

    def fail() -> None:
        kept["a"] = 1
        raise OSError("no")

    with pytest.raises(OSError, match="no"), Temporary(fail, lambda: kept.pop("a", None)):
        pytest.fail("not entered")
    assert kept == {"x": 0}


def test_nothing_is_left_wherever_it_is_interrupted():
    kept: dict[str, int] = {}

    def work() -> None:
        with keys_of(kept, "a", "b"), together(keys_of(kept, "c"), keys_of(kept, "d")):
            for number in range(3):
                assert len(kept) == 4, number

    work()
    looks, n_interrupted = run_interrupted(work), 0
    assert looks > 30
    for at in range(0, looks, 2):
        n_interrupted += interrupt(work, at)
        assert kept == {}, at
    assert n_interrupted == len(range(0, looks, 2))
