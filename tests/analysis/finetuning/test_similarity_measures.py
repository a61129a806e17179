"""The measures against loops over numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from mechicl.analysis.finetuning import (
    attention_rank_correlation,
    random_update_similarity,
    recall_of_gains,
    update_similarity,
)
from mechicl.statistics import interval
from tests.analysis.finetuning.oracles import kendall, update_cosine

quick = settings(max_examples=40, deadline=None)
few = st.sampled_from([-1.5, -1.0, 0.0, 1e-3, 0.5, 2.0, 2.5])


def close(found, expected):
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-9, equal_nan=True)


@quick
@given(st.data(), st.integers(1, 9))
def test_rank_correlation_with_ties(data, n):
    a, b = (data.draw(st.lists(few, min_size=n, max_size=n)) for _ in range(2))
    found = attention_rank_correlation(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
    close(found, kendall(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rank_correlation_of_many(dtype):
    a, b = torch.randn(2, 2, 3, 4, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = attention_rank_correlation(a, b)
    assert found.shape == (2, 3, 4)
    for place in [(0, 0, 0), (1, 2, 3), (0, 1, 2)]:
        close(found[place], kendall(a[place].double(), b[place].double()))
    close(attention_rank_correlation(a, a), [[[1.0] * 4] * 3] * 2)
    close(attention_rank_correlation(a, -a), [[[-1.0] * 4] * 3] * 2)


def test_a_rank_correlation_that_is_not_defined():
    flat = torch.full((5,), 0.2)
    assert attention_rank_correlation(flat, torch.arange(5.0)).isnan()
    assert attention_rank_correlation(torch.arange(5.0), flat).isnan()
    assert attention_rank_correlation(torch.ones(1), torch.ones(1)).isnan()
    some = attention_rank_correlation(torch.stack([flat, torch.arange(5.0)]), torch.arange(5.0).expand(2, 5))
    assert some.isnan().tolist() == [True, False]


@quick
@given(st.data(), st.integers(1, 4))
def test_update_similarity(data, d):
    alone, behind, after = (
        torch.tensor(data.draw(st.lists(few, min_size=d, max_size=d)), dtype=torch.float64) for _ in range(3)
    )
    expected = update_cosine(alone.numpy(), behind.numpy(), after.numpy())
    found = update_similarity(alone, behind, after)
    changes = [torch.nn.functional.normalize(of, dim=-1) - torch.nn.functional.normalize(alone, dim=-1) for of in
               (behind, after)]  # fmt: skip
    if all(change.norm() > 1e-9 or not change.any() for change in changes):  # else it is rounding
        assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-9, equal_nan=True)


def test_a_change_of_nothing_has_no_direction():
    a, b = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    assert update_similarity(a, a, b).isnan().all()
    assert update_similarity(a, b, a).isnan().all()
    assert random_update_similarity(a, a, seed=0).isnan().all()
    assert update_similarity(torch.zeros(3, 6), b, a).isfinite().all()  # an output of 0 has no direction but is a place
    close(update_similarity(a, b, b), [1.0] * 3)
    # lengths do not count
    close(update_similarity(a, b, 3 * b), [1.0] * 3)
    assert update_similarity(a, 2 * a, b).nan_to_num().abs().max() <= 1


def test_the_random_baseline_is_about_0_and_the_same_for_the_same_seed():
    a, b = torch.randn(2, 4, 500, 16, generator=torch.Generator().manual_seed(0))
    found = random_update_similarity(a, b, seed=5)
    assert torch.equal(found, random_update_similarity(a, b, seed=5))
    assert not torch.equal(found, random_update_similarity(a, b, seed=6))
    assert 0.0 in interval(found)
    # cosines with a random direction in d dimensions have the variance 1 / d
    assert found.square().mean().item() == pytest.approx(1 / 16, rel=0.1)


gains = st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, -2.5])] * 3), min_size=1, max_size=12)


@quick
@given(gains)
def test_recall_by_counting(rows):
    found = recall_of_gains(*(torch.tensor(column) for column in zip(*rows, strict=True)))
    gained = [row for row in rows if row[2] > row[0]]
    both = [row for row in gained if row[1] > row[0]]
    if not gained:
        assert all(map(math.isnan, (found.mean, found.low, found.high)))
    else:
        assert found.mean == pytest.approx(len(both) / len(gained))
    assert found.n == len(gained)


def test_the_interval_of_a_recall_holds_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(300):
        gained = torch.rand(80, generator=generator) < 0.5
        both = gained & (torch.rand(80, generator=generator) < 0.7)
        scores = torch.zeros(80), both.float(), gained.float()
        inside += 0.7 in recall_of_gains(*scores)
    assert 0.9 < inside / 300 <= 0.99
