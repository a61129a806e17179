import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.tasks import RepeatedTokens
from tests.tasks.reference import LEAST_P


def period_of(predictable):
    """Number of tokens before the second copy, by a plain loop over a sequence's marks."""
    for pos, marked in enumerate(predictable):
        if marked:
            return pos - 1
    raise AssertionError("nothing can be predicted")


@st.composite
def tasks(draw):
    n_ctx = draw(st.integers(2, 20))
    max_period = draw(st.integers(1, n_ctx - 1))
    return RepeatedTokens(draw(st.integers(2, 9)), n_ctx, draw(st.integers(1, max_period)), max_period)


@settings(max_examples=25)
@given(tasks(), st.integers(0, 5), st.integers(0, 2**40))
def test_every_token_that_can_be_predicted_is_the_one_a_period_before(task, n_prompts, seed):
    batch = task.sample(n_prompts, seed=seed)
    assert batch.ids.shape == batch.predictable.shape == (n_prompts, task.n_ctx + 1)
    assert batch.read.shape == batch.targets().shape == (n_prompts, task.n_ctx)
    for ids, predictable in zip(batch.ids.tolist(), batch.predictable.tolist(), strict=True):
        period = period_of(predictable)
        assert task.min_period <= period <= task.max_period
        for pos, token in enumerate(ids):
            assert 0 <= token < task.d_vocab
            assert predictable[pos] == (pos >= period + 1)
            if pos >= period:
                assert token == ids[pos - period]
            if predictable[pos]:  # by what an induction head does: the last token came before this one last time, too
                assert ids[pos - 1] == ids[pos - 1 - period]


def test_periods_are_uniform_on_their_range_both_ends_included():
    task = RepeatedTokens(d_vocab=4, n_ctx=12, min_period=3, max_period=9)
    counts = [0] * 7
    for predictable in task.sample(3500, seed=0).predictable.tolist():
        counts[period_of(predictable) - 3] += 1
    assert sum(counts) == 3500
    assert scipy.stats.chisquare(counts).pvalue > LEAST_P


def test_tokens_are_uniform_at_every_place_of_the_segment_and_independent_of_their_neighbours():
    task = RepeatedTokens(d_vocab=5, n_ctx=9, min_period=4, max_period=4)
    ids = task.sample(4000, seed=1).ids
    for place in range(4):
        assert scipy.stats.chisquare(torch.bincount(ids[:, place], minlength=5)).pvalue > LEAST_P
    for place in range(3):
        pairs = torch.bincount(5 * ids[:, place] + ids[:, place + 1], minlength=25)
        assert scipy.stats.chisquare(pairs).pvalue > LEAST_P


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_vocab": 1}, "d_vocab must be an int of at least 2, got 1"),
        ({"n_ctx": 1}, "n_ctx must be an int of at least 2"),
        ({"min_period": 0}, "min_period must be an int of at least 1"),
        ({"max_period": 0}, "max_period must be an int of at least 1"),
        ({"min_period": 5, "max_period": 4}, "min_period <= max_period < n_ctx=64, got 5 to 4"),
        ({"n_ctx": 32}, "max_period < n_ctx=32, got 4 to 32"),
    ],
)
def test_fields_out_of_range_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        RepeatedTokens(**fields)
