"""Learners of Markov chains: what can be counted in the tokens so far. Log-probabilities in nats, float64."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.base.checks import check_positive, check_whole
from mechicl.prompts import TokenSequences


@checked
def uniform_tokens(sequences: TokenSequences, *, d_vocab: int) -> Float[Tensor, "prompt read token"]:
    """All tokens equally likely: what a model says before it has learned anything.

    Args:
        sequences: of any length.
        d_vocab: number of tokens.
    """
    one_hot = _one_hot(sequences, d_vocab)
    return torch.full_like(one_hot, -math.log(d_vocab))


@checked
def unigram_bayes(
    sequences: TokenSequences, *, d_vocab: int, concentration: float = 1.0
) -> Float[Tensor, "prompt read token"]:
    """How often each token came so far: `(n_b + a) / (n + k a)`.

    It is the posterior mean if tokens are independent, with probabilities from a Dirichlet distribution. On Markov
    chains it is the simpler solution that comes first in training.

    Args:
        sequences: of ids below `d_vocab`.
        d_vocab: number of tokens, k.
        concentration: of the Dirichlet prior, a.

    Source: Edelman et al. 2024, section 2.
    """
    check_positive(concentration=concentration)
    return _posterior_mean(_one_hot(sequences, d_vocab).cumsum(1), concentration)


@checked
def bigram_bayes(
    sequences: TokenSequences, *, d_vocab: int, concentration: float = 1.0
) -> Float[Tensor, "prompt read token"]:
    """How often each token followed the present one so far: `(n_ab + a) / (n_a + k a)`.

    The posterior mean for a Markov chain whose transition probabilities have a Dirichlet prior, so the best that can be
    done on `tasks.MarkovChains` of this concentration, if the first state tells nothing. Its sums are those of an
    induction head: over the earlier positions that hold the present token, of the tokens after them.

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
    check_positive(concentration=concentration)
    read, one_hot = sequences.read, _one_hot(sequences, d_vocab)
    same = (read[:, :, None] == read[:, None, :]).double().tril(-1)  # [prompt pos earlier]
    counts = same[:, :, :-1] @ one_hot[:, 1:]  # of the token after each earlier position
    return _posterior_mean(counts, concentration)


def known_chain(
    sequences: TokenSequences, *, transitions: Float[Tensor, "prompt state next_state"]
) -> Float[Tensor, "prompt read token"]:
    """The next token's probabilities for who knows each sequence's chain: the bound on all learners.

    Args:
        sequences: of chains.
        transitions: their transition matrices (`MarkovChains.transitions` with the same seed).
    """
    if len(transitions) != len(sequences):
        raise ValueError(f"{len(transitions)} transition matrices for {len(sequences)} sequences")
    _one_hot(sequences, transitions.shape[-1])
    index = sequences.read.to(transitions.device)[..., None].expand(-1, -1, transitions.shape[-1])
    return transitions.double().gather(1, index).log()


def _posterior_mean(counts: Float[Tensor, "prompt read token"], concentration: float) -> Tensor:
    smoothed = counts + concentration
    return smoothed.log() - smoothed.sum(-1, keepdim=True).log()


def _one_hot(sequences: TokenSequences, d_vocab: int) -> Float[Tensor, "prompt read token"]:
    check_whole(2, d_vocab=d_vocab)
    if sequences.ids.numel() and int(sequences.ids.max()) >= d_vocab:
        raise ValueError(f"ids must be below d_vocab={d_vocab}, got {int(sequences.ids.max())}")
    return F.one_hot(sequences.read, d_vocab).double()
