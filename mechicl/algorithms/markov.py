"""Learners of Markov chains, from counts of the tokens so far. Log-probabilities are in nats, float64."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Positive, at_least, checked
from mechicl.prompts import TokenSequences

VocabularySize = Annotated[int, at_least(2)]


@checked
def uniform_tokens(sequences: TokenSequences, *, d_vocab: VocabularySize) -> Float[Tensor, "prompt read token"]:
    """Predict all tokens as equally likely, as an untrained model does."""
    return torch.full_like(_one_hot(sequences, d_vocab), -math.log(d_vocab))


@checked
def unigram_bayes(
    sequences: TokenSequences, *, d_vocab: VocabularySize, concentration: Positive = 1.0
) -> Float[Tensor, "prompt read token"]:
    """Predict by how often each token occurred so far: `(n_b + a) / (n + k a)`.

    It is the posterior mean if tokens are independent. On Markov chains it is the simpler solution, which models learn
    first.

    Args:
        sequences: of ids below `d_vocab`.
        d_vocab: number of tokens, k.
        concentration: of the Dirichlet prior, a.

    Source: Edelman et al. 2024, section 2.
    """
    return _posterior_mean(_one_hot(sequences, d_vocab).cumsum(1), concentration)


@checked
def bigram_bayes(
    sequences: TokenSequences, *, d_vocab: VocabularySize, concentration: Positive = 1.0
) -> Float[Tensor, "prompt read token"]:
    """Predict by how often each token followed the present one so far: `(n_ab + a) / (n_a + k a)`.

    It is the posterior mean for a Markov chain with a Dirichlet prior: no learner is better on `tasks.MarkovChains` of
    this concentration, if the first state carries no information. An induction head computes the same counts, of the
    tokens that followed earlier occurrences of the present one.

    Args:
        sequences: of ids below `d_vocab`.
        d_vocab: number of tokens, k.
        concentration: of the Dirichlet prior of each row, a.

    Source: Edelman et al. 2024, section 2.

    Example:
        >>> ids = torch.tensor([[0, 1, 0, 1, 0]])
        >>> seen = TokenSequences(ids, torch.arange(5)[None] > 0)
        >>> bigram_bayes(seen, d_vocab=2)[0, 2].exp()                   # after 0 came 1, once
        tensor([0.3333, 0.6667], dtype=torch.float64)
    """
    read, one_hot = sequences.read, _one_hot(sequences, d_vocab)
    same = (read[:, :, None] == read[:, None, :]).double().tril(-1)  # [prompt pos earlier]
    counts = same[:, :, :-1] @ one_hot[:, 1:]  # of the token after each earlier position
    return _posterior_mean(counts, concentration)


def _posterior_mean(counts: Float[Tensor, "prompt read token"], concentration: float) -> Tensor:
    smoothed = counts + concentration
    return smoothed.log() - smoothed.sum(-1, keepdim=True).log()


def _one_hot(sequences: TokenSequences, d_vocab: int) -> Float[Tensor, "prompt read token"]:
    if sequences.ids.numel() and int(sequences.ids.max()) >= d_vocab:
        raise ValueError(f"ids must be below d_vocab={d_vocab}, got {int(sequences.ids.max())}")
    return F.one_hot(sequences.read, d_vocab).double()
