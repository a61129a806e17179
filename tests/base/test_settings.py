"""Settings by block, thread and process, and in the library's own threads."""

import threading

import pytest

from mechicl.base.arguments import ArgumentError
from mechicl.base.memory import Budget
from mechicl.base.progress import Silent, progress_bar
from mechicl.base.settings import settings
from mechicl.training.data import batches_ahead


def test_the_innermost_block_is_in_force_also_after_an_error():
    before = settings.memory
    with settings(memory=2**20):
        with pytest.raises(ValueError, match="too little"), settings(memory=2**10):
            Budget().rows(2**11)
        assert Budget().memory == 2**20
    assert settings.memory == before


def test_a_block_is_for_its_thread_and_the_default_for_all():
    before, seen = settings.memory, []

    def look():
        seen.append(settings.memory)

    def look_elsewhere():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    with settings(memory=2**20):
        look_elsewhere()
    settings.set_default(memory=2**21)
    try:
        look_elsewhere()
        assert settings.memory == 2**21
    finally:
        settings.set_default(memory=before)
    assert seen == [before, 2**21]


def test_batches_drawn_ahead_see_the_settings_of_the_caller():
    with settings(memory=2**20):
        assert list(batches_ahead(lambda step: settings.memory, 0, 3)) == [2**20] * 3  # type: ignore[arg-type]


def test_progress_bars_are_as_set_unless_the_caller_decides():
    assert not isinstance(progress_bar(unit="step"), Silent)
    with settings(progress=False):
        assert isinstance(progress_bar(unit="step"), Silent)
        assert not isinstance(progress_bar(unit="step", progress=True), Silent)


@pytest.mark.parametrize("memory", [0, -1.0, float("inf"), float("nan"), "1 GiB", None])
def test_a_value_that_is_not_a_number_of_bytes_is_refused(memory):
    with pytest.raises(ArgumentError, match="memory must be"):
        settings.set_default(memory=memory)
    with pytest.raises(ArgumentError, match="memory must be"), settings(memory=memory):
        pass
