"""Repeated tokens and Markov chains against plain loops and the distributions that they claim."""

import itertools

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.tasks import MarkovChains, RepeatedTokens
from mechicl.tasks.token_sequences import stationary_distributions
from tests.tasks.reference import LEAST_P


def period_of(predictable):
    """Number of tokens before the second copy, from a sequence's marks."""
    return predictable.index(True) - 1


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


def test_transitions_are_those_of_the_sample_and_it_follows_them():
    task = MarkovChains(d_vocab=3, n_ctx=4000)
    ids, transitions = task.sample(4, seed=1).ids, task.transitions(4, seed=1)
    for row, matrix in zip(ids.tolist(), transitions, strict=True):
        counts = np.zeros((3, 3))
        for a, b in itertools.pairwise(row):
            counts[a, b] += 1
        visits = counts.sum(1, keepdims=True)
        errors = np.abs(counts / visits - matrix.numpy()) / (0.5 / np.sqrt(visits))
        assert errors.max() < 4.5


@pytest.mark.parametrize("concentration", [0.3, 1.0, 5.0])
def test_rows_are_dirichlet(concentration):
    rows = MarkovChains(d_vocab=4, concentration=concentration).transitions(20_000, seed=0).flatten(0, 1)
    assert rows.dtype == torch.float64
    assert torch.allclose(rows.sum(-1), torch.ones(len(rows)).double())
    assert torch.allclose(rows.mean(0), torch.full((4,), 0.25).double(), atol=0.005)
    variance = 0.25 * 0.75 / (4 * concentration + 1)
    assert torch.allclose(rows.var(0), torch.full((4,), variance).double(), rtol=0.03)


def test_the_first_state_is_uniform_or_stationary():
    task = MarkovChains(d_vocab=2, n_ctx=2, concentration=0.5)
    stationary = task.replace(start="stationary")
    chances = stationary_distributions(stationary.transitions(50_000, seed=0))
    first = stationary.sample(50_000, seed=0).ids[:, 0]
    high = chances[:, 1] > 0.9
    assert abs(first[high].double().mean() - chances[high, 1].mean()) < 0.01
    assert abs(task.sample(50_000, seed=0).ids[:, 0][high].double().mean() - 0.5) < 0.02


@given(st.integers(2, 6), st.integers(0, 1000))
def test_stationary_distributions_stay(k, seed):
    transitions = MarkovChains(d_vocab=k).transitions(5, seed=seed)
    pi = stationary_distributions(transitions)
    assert torch.allclose((pi[:, None] @ transitions)[:, 0], pi, atol=1e-10)
    assert torch.allclose(pi.sum(-1), torch.ones(5).double())


def test_every_token_but_the_first_is_scored():
    sequences = MarkovChains(d_vocab=5, n_ctx=7).sample(3, seed=0)
    assert sequences.ids.max() < 5
    assert torch.equal(sequences.predictable, (torch.arange(8) > 0).expand(3, 8))


def test_tiny_concentrations_give_deterministic_chains_not_nan():
    transitions = MarkovChains(concentration=1e-4).transitions(100, seed=0)
    assert transitions.isfinite().all()
    assert (transitions.amax(-1) > 0.99).double().mean() > 0.95
