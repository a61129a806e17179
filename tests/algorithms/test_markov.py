import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl import algorithms
from mechicl.learners import TokenAlgorithmLearner, token_losses
from mechicl.prompts import TokenSequences
from mechicl.tasks import MarkovChains


def sequences_of(rows):
    ids = torch.tensor(rows)
    return TokenSequences(ids, (torch.arange(ids.shape[1]) > 0).expand_as(ids).clone())


@given(st.integers(2, 5), st.integers(2, 9), st.floats(0.05, 5), st.integers(0, 10**6))
def test_counts_by_a_plain_loop(k, length, a, seed):
    rows = torch.randint(k, (3, length), generator=torch.Generator().manual_seed(seed)).tolist()
    seen = sequences_of(rows)
    bigram = algorithms.bigram_bayes(seen, d_vocab=k, concentration=a)
    unigram = algorithms.unigram_bayes(seen, d_vocab=k, concentration=a)
    for i, row in enumerate(rows):
        for t in range(length - 1):
            past = row[: t + 1]
            for b in range(k):
                n_b = sum(token == b for token in past)
                follows = [past[s + 1] for s in range(t) if past[s] == past[t]]
                n_ab = sum(token == b for token in follows)
                assert math.isclose(unigram[i, t, b].exp(), (n_b + a) / (t + 1 + k * a), rel_tol=1e-12)
                assert math.isclose(bigram[i, t, b].exp(), (n_ab + a) / (len(follows) + k * a), rel_tol=1e-12)


def test_bigram_bayes_is_the_posterior_mean_over_chains():
    """By importance: chains from the prior, weighed by how likely they make what was read."""
    row = [0, 1, 1, 0, 1, 0, 0]
    chains = MarkovChains(d_vocab=2).transitions(400_000, seed=3)
    likelihood = torch.ones(len(chains)).double()
    for a, b in itertools.pairwise(row[:-1]):
        likelihood *= chains[:, a, b]
    expected = (likelihood[:, None] * chains[:, row[-2]]).sum(0) / likelihood.sum()
    got = algorithms.bigram_bayes(sequences_of([row]), d_vocab=2)[0, -1].exp()
    assert torch.allclose(got, expected, atol=3e-3)


def test_who_knows_more_loses_less():
    task = MarkovChains(d_vocab=3, n_ctx=60)
    seen, chains = task.sample(2000, seed=0), task.transitions(2000, seed=0)
    learners = [
        TokenAlgorithmLearner(lambda s: chains.gather(1, s.read[..., None].expand(-1, -1, 3)).log()),
        TokenAlgorithmLearner(algorithms.bigram_bayes, {"d_vocab": 3}),
        TokenAlgorithmLearner(algorithms.unigram_bayes, {"d_vocab": 3}),
        TokenAlgorithmLearner(algorithms.uniform_tokens, {"d_vocab": 3}),
    ]
    losses = [token_losses(learner, seen).mean().item() for learner in learners]
    assert losses == sorted(losses)
    assert math.isclose(losses[3], math.log(3))
    # a chain's mean loss is its entropy rate
    read = torch.nn.functional.one_hot(seen.read, 3).double()
    entropies = -(chains * chains.log()).sum(-1)
    assert abs(losses[0] - (read @ entropies[..., None]).mean()) < 0.01
