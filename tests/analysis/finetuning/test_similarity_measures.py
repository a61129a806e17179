"""The measures against loops over numbers."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.finetuning.similarity_measures import (
    attention_rank_correlation,
    random_update_similarity,
    recall_if_independent,
    recall_of_gains,
    update_similarity,
)
from mechicl.statistics import interval
from tests.analysis.finetuning.oracles import kendall, update_cosine


def close(measured, expected):
    assert_close(measured, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-9, equal_nan=True)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rank_correlation(n, dtype):
    generator = torch.Generator().manual_seed(n)
    numbers = torch.randn(2, 2, 3, n, generator=generator)
    ties = torch.randint(4, (2, 2, 3, n), generator=generator)  # of few values: many ties, and some rows are flat
    for a, b in (numbers.to(dtype), ties.to(dtype)):
        correlation = attention_rank_correlation(a, b)
        for place in itertools.product(range(2), range(3)):
            close(correlation[place], kendall(a[place].double(), b[place].double()))
    flat, rising = torch.full((5,), 0.2), torch.arange(5.0)
    assert attention_rank_correlation(flat, rising).isnan()
    close(attention_rank_correlation(torch.stack([rising, flat]), -torch.stack([rising, rising])), [-1.0, math.nan])


def test_update_similarity():
    alone, in_context, after = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone[0] = 0  # an output of 0 has no direction but is a place
    expected = [
        update_cosine(*rows) for rows in zip(*(part.numpy() for part in (alone, in_context, after)), strict=True)
    ]
    close(update_similarity(alone, in_context, after), expected)
    close(update_similarity(alone, in_context, 3 * in_context), [1.0] * 4)  # lengths do not count
    for same in ((alone, alone, after), (alone, after, alone)):  # a change of nothing has no direction
        assert update_similarity(*same).isnan().all()
    assert random_update_similarity(alone, alone, seed=0).isnan().all()


def test_the_random_baseline_is_about_0_and_the_same_for_the_same_seed():
    a, b = torch.randn(2, 4, 500, 16, generator=torch.Generator().manual_seed(0))
    baseline = random_update_similarity(a, b, seed=5)
    assert torch.equal(baseline, random_update_similarity(a, b, seed=5))
    assert not torch.equal(baseline, random_update_similarity(a, b, seed=6))
    assert 0.0 in interval(baseline)
    # cosines with a random direction in d dimensions have the variance 1 / d
    assert baseline.square().mean().item() == pytest.approx(1 / 16, rel=0.1)


def test_recall_by_counting_and_the_coverage_of_its_interval():
    every = list(itertools.product([0.0, 1.0, -2.5], repeat=3))
    recall = recall_of_gains(*(torch.tensor(column) for column in zip(*every, strict=True)))
    gained = [row for row in every if row[2] > row[0]]
    assert recall.mean == pytest.approx(sum(row[1] > row[0] for row in gained) / len(gained))
    assert recall.n == len(gained)
    none = recall_of_gains(torch.ones(3), torch.ones(3), torch.ones(3))
    assert (math.isnan(none.mean), math.isnan(none.low), math.isnan(none.high), none.n) == (True, True, True, 0)
    generator, inside = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        gained = torch.rand(80, generator=generator) < 0.5
        both = gained & (torch.rand(80, generator=generator) < 0.7)
        inside += 0.7 in recall_of_gains(torch.zeros(80), both.float(), gained.float())
    assert 0.9 < inside / 300 <= 0.99


def test_recall_where_gains_are_independent():
    """Demonstrations correct 70% of the wrong answers, whatever fine-tuning does: Rec2FTP is 70% too."""
    generator = torch.Generator().manual_seed(0)
    wrong, reads, tuned = (torch.rand(200_000, generator=generator) < share for share in (0.6, 0.7, 0.4))
    zero_shot, in_context, finetuned = (~wrong).double(), reads.double(), tuned.double()
    baseline = recall_if_independent(zero_shot, in_context)
    assert baseline.n == int(wrong.sum())
    assert baseline.mean == pytest.approx((wrong & reads).sum().item() / wrong.sum().item())
    assert recall_of_gains(zero_shot, in_context, finetuned).mean == pytest.approx(baseline.mean, abs=0.01)
    losses = -torch.rand(2, 50, generator=generator, dtype=torch.float64)  # of a regression every query can improve
    assert recall_if_independent(*losses).mean == pytest.approx((losses[1] > losses[0]).double().mean().item())
    assert math.isnan(recall_if_independent(torch.ones(3), torch.ones(3)).mean)
