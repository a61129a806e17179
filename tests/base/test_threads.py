"""Numbers of threads by work, and restoring the user's number."""

import pytest
import torch

from mechicl.base import threads
from mechicl.base.threads import WORTH_A_THREAD, n_cores, threads_worth, using_threads


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch):
    """A machine with 64 cores, of which torch may use 16."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "n_cores", lambda: 64)
    torch.set_num_threads(16)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("work", "number"), [(0, 1), (1, 1), (1.0, 1), (4, 2), (8.9, 2), (9, 3), (64, 8), (10_000, 16)]
)
def test_threads_grow_with_the_root_of_the_work_up_to_what_torch_has(many, work, number):
    assert threads_worth(work * WORTH_A_THREAD) == number


def test_no_more_threads_than_cores_and_than_torch_may_use(many, monkeypatch):
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
