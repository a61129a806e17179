"""Learners of token sequences, which count the tokens so far or average over a finite pool of sources.

Each takes sequences, such as `tasks.MarkovChains().sample(8, seed=0)`, whose ids are below `d_vocab`, the number of
different tokens. Log-probabilities are in nats, float64: index i of `read` predicts token i + 1 from tokens 0..i.
"""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, Positive, at_least, checked
from mechicl.prompts import TokenSequences

_AT_ONCE = 2**25  # numbers in the largest tensor

VocabularySize = Annotated[int, at_least(2)]


@checked
def uniform_tokens(sequences: TokenSequences, *, d_vocab: VocabularySize) -> Float[Tensor, "prompt read token"]:
    """Predict all tokens as equally likely, `-log(d_vocab)`, as an untrained model does."""
    return torch.full_like(_one_hot(sequences, d_vocab), -math.log(d_vocab))


@checked
def unigram_bayes(
    sequences: TokenSequences, *, d_vocab: VocabularySize, concentration: Positive = 1.0
) -> Float[Tensor, "prompt read token"]:
    """Predict the next token from how often each token b has occurred so far: `(n_b + a) / (n + k a)`.

    It is the posterior mean if tokens are independent. On Markov chains it is simpler than `bigram_bayes`, and models
    learn it first. Source: Edelman et al. 2024, section 2.

    Args:
        concentration: concentration a of the symmetric Dirichlet prior over tokens; 1 is a uniform prior.
    """
    return _posterior_mean(_one_hot(sequences, d_vocab).cumsum(1), concentration)


@checked
def bigram_bayes(
    sequences: TokenSequences, *, d_vocab: VocabularySize, concentration: Positive = 1.0
) -> Float[Tensor, "prompt read token"]:
    """Predict the next token b from how often it has followed the current token a so far: `(n_ab + c) / (n_a + k c)`.

    It is Bayes-optimal on `tasks.MarkovChains` of the same concentration, if the first state carries no information
    about the chain. An induction head computes the same counts, of the tokens that followed earlier occurrences of a
    token. Source: Edelman et al. 2024, section 2.

    Args:
        concentration: concentration c of the Dirichlet prior over each row of the transition matrix; 1 is uniform.

    Example:
        >>> ids = torch.tensor([[0, 1, 0, 1, 0]])
        >>> seen = TokenSequences(ids, torch.arange(5)[None] > 0)
        >>> bigram_bayes(seen, d_vocab=2)[0, 2].exp()                   # after 0 came 1, once
        tensor([0.3333, 0.6667], dtype=torch.float64)
    """
    return ngram_bayes(sequences, d_vocab=d_vocab, order=1, concentration=concentration)


@checked
def ngram_bayes(
    sequences: TokenSequences, *, d_vocab: VocabularySize, order: Count, concentration: Positive = 1.0
) -> Float[Tensor, "prompt read token"]:
    """Predict the next token from how often each token has followed the last `order` tokens so far.

    On sequences from `tasks.MarkovChains` of this order and concentration it is Bayes-optimal at all positions that the
    task scores. Order 1 is `bigram_bayes`. Before `order` tokens have been read, all tokens are equally likely. Source:
    Edelman et al. 2024, on n-grams.

    Args:
        order: number of last tokens that must be equal.
        concentration: concentration of the Dirichlet prior over the next token; 1 is uniform.
    """
    read, one_hot = sequences.read, _one_hot(sequences, d_vocab)
    equal = read[:, :, None] == read[:, None, :]  # [prompt pos earlier]
    same = torch.zeros_like(equal)
    n = max(read.shape[1] - order + 1, 0)
    same[:, read.shape[1] - n :, read.shape[1] - n :] = torch.stack(
        [equal[:, back : back + n, back : back + n] for back in range(order)]
    ).all(0)
    counts = same.double().tril(-1)[:, :, :-1] @ one_hot[:, 1:]  # of the token after each earlier position
    return _posterior_mean(counts, concentration)


@checked
def pool_bayes(
    sequences: TokenSequences,
    *,
    pool: Float[Tensor, "source token"] | Float[Tensor, "source history token"],
    first: Float[Tensor, "source token"] | None = None,
) -> Float[Tensor, "prompt read token"]:
    """Predict by exact Bayes over a finite pool of equally likely sources: urns, or Markov chains of any order.

    A model near it has memorised the pool. It is optimal on `tasks.BallsAndUrns` and `tasks.MarkovChains` with this
    pool. If a sequence is impossible for all sources, those for which the fewest tokens are impossible count. Before
    a whole history has been read, all tokens are equally likely. Source: Park et al. 2024, retrieval solutions; Wurgaft
    et al. 2025, memorising predictor.

    Args:
        sequences: token sequences; every id is below the pool's number of tokens. `predictable` is not used.
        pool: probabilities of the next token: `[source token]` for independent draws, or `[source history token]` for
            Markov chains, with rows as in `MarkovChains.transitions`; the number of histories gives the order.
        first: probabilities of the first token in each chain (of order 1); None if it is independent of the chain.

    Raises:
        ValueError: probabilities that are negative or do not sum to 1, or a number of histories that is not a power.

    Example:
        >>> task = MarkovChains(d_vocab=3, n_ctx=30, n_chains=4)
        >>> pool_bayes(task.sample(2, seed=0), pool=task.pool).shape
        torch.Size([2, 30, 3])
    """
    tables = pool.double()[:, None] if pool.ndim == 2 else pool.double()
    n_sources, n_histories, d_vocab = tables.shape
    order = next((k for k in range(n_histories) if d_vocab**k >= n_histories), 0)
    if not n_sources or d_vocab**order != n_histories or (first is not None and order != 1):
        raise ValueError(
            f"pool must be [source token] or [source history token] with a power of {d_vocab} histories (of order 1 "
            f"with first=), got shape {tuple(pool.shape)}"
        )
    for table in (tables, tables if first is None else first.double()):
        if (table < 0).any() or (table.sum(-1) - 1).abs().max() > 1e-6:
            raise ValueError("pool and first must be probabilities that sum to 1 over tokens")
    _one_hot(sequences, d_vocab)  # refuses larger ids
    n_read = sequences.read.shape[1]
    size = max(1, _AT_ONCE // max(1, n_read * (n_sources + n_histories * d_vocab)))
    logs, flat = tables.log().clamp(min=-1e9), tables.flatten(1)
    parts = []
    for read in sequences.read.split(size):
        history = torch.zeros_like(read)
        for back in range(order):  # wrong for the first order - 1 positions, which are not used
            history = history + d_vocab**back * F.pad(read, (back, 0))[:, :n_read]
        evidence = torch.zeros(*read.shape, n_sources, dtype=torch.float64)
        before = F.pad(history, (1, 0))[:, order:n_read]
        evidence[:, order:] = logs[:, before, read[:, order:]].movedim(0, -1)
        if first is not None:
            evidence[:, 0] = first.double().log().clamp(min=-1e9)[:, read[:, 0]].T
        posterior = evidence.cumsum(1).softmax(-1)
        every = (posterior @ flat).unflatten(-1, (n_histories, d_vocab))
        predicted = every.gather(2, history[..., None, None].expand(*read.shape, 1, d_vocab))[:, :, 0]
        predicted[:, : max(order - 1, 0)] = 1 / d_vocab
        parts.append(predicted.log())
    return torch.cat(parts) if parts else _one_hot(sequences, d_vocab)


def _posterior_mean(counts: Float[Tensor, "prompt read token"], concentration: float) -> Tensor:
    smoothed = counts + concentration
    return smoothed.log() - smoothed.sum(-1, keepdim=True).log()


def _one_hot(sequences: TokenSequences, d_vocab: int) -> Float[Tensor, "prompt read token"]:
    if sequences.ids.numel() and int(sequences.ids.max()) >= d_vocab:
        raise ValueError(f"ids must be below d_vocab={d_vocab}, got {int(sequences.ids.max())}")
    return F.one_hot(sequences.read, d_vocab).double()
