import threading

import pytest
from tqdm.auto import tqdm

from mechicl.base.progress import progress_bar


@pytest.fixture
def lock_of_another_thread():
    """Another thread has tqdm's lock, as after Ctrl-C while it was taken."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with tqdm.get_lock():
            taken.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    yield
    done.set()
    thread.join()


def test_a_silent_bar_needs_no_lock(lock_of_another_thread):
    counted = []

    def count() -> None:
        with progress_bar(range(3), unit="run", progress=False) as bar:
            for each in bar:
                bar.update(1)
                bar.set_postfix(loss=1.0)
                counted.append(each)
        bar.close()

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    thread.join(5)
    assert counted == [0, 1, 2]


def test_a_bar_iterates_and_counts(capsys):
    bar = progress_bar("abc", unit="letter")
    assert list(bar) == ["a", "b", "c"]
    with progress_bar(total=4, initial=1, unit="step") as counting:
        counting.update(2)
        assert counting.n == 3
    assert list(progress_bar(None, unit="run", progress=False)) == []
