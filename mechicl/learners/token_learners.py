"""Learners of tokens: anything that turns the tokens before a place into probabilities of the next one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.annotations import described
from mechicl.base.arguments import ArgumentError, calling, check_fields, checked
from mechicl.base.memory import Budget
from mechicl.learners.learners import Learners, by_name, call_as_text, name_of
from mechicl.prompts import TokenSequences


@runtime_checkable
class TokenLearner(Protocol):
    """Interface of a learner of tokens: it predicts the next token's probabilities from the tokens before it."""

    def log_probabilities(self, sequences: TokenSequences) -> Float[Tensor, "prompt read token"]:
        """Return log-probabilities (nats): index i of `read` predicts token i + 1 from tokens 0..i."""
        ...


@dataclass(frozen=True, eq=False)
class TokenAlgorithmLearner:
    """A function of token sequences, with its hyperparameters, as a learner.

    Attributes:
        algorithm: takes `TokenSequences` and the hyperparameters, and returns log-probabilities in nats
            `[prompt read token]`: index i of `read` predicts token i + 1 from tokens 0..i.
        hyperparameters: keyword arguments of every call.

    Example:
        >>> bigrams = TokenAlgorithmLearner(algorithms.bigram_bayes, dict(d_vocab=3))
        >>> bigrams.name
        'bigram_bayes(d_vocab=3)'
    """

    algorithm: Callable[..., Tensor]
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)

    @property
    def name(self) -> str:
        """The algorithm's name and hyperparameters."""
        return call_as_text(self.algorithm, self.hyperparameters)

    @checked
    def log_probabilities(self, sequences: TokenSequences) -> Float[Tensor, "prompt read token"]:
        """Return the algorithm's log-probabilities in nats: index i of `read` predicts token i + 1."""
        return self.algorithm(sequences, **self.hyperparameters)


@dataclass(frozen=True, eq=False)
class LogitsLearner:
    """A network that returns logits for token ids, as a learner: `HookedTransformer`, a bridge, any such module."""

    model: Callable[..., Any]  # takes ids `[prompt pos]` and returns logits `[prompt pos token]`
    name: str = "model"  # name in tables and pictures

    def log_probabilities(self, sequences: TokenSequences) -> Float[Tensor, "prompt read token"]:
        """Return the log-softmax of the logits, float64."""
        cfg = getattr(self.model, "cfg", None)
        return self.model(sequences.read.to(getattr(cfg, "device", None) or "cpu")).double().log_softmax(-1)


def as_token_learner(learner: Any, name: str = "model") -> TokenLearner:
    """Make a learner of tokens from a network on token ids; return learners of tokens unchanged.

    Example:
        >>> as_token_learner(load("induction-2l"), "induction-2l").name
        'induction-2l'
    """
    if isinstance(learner, TokenLearner):
        return learner
    if not callable(learner):
        raise TypeError(
            f"{name!r} ({type(learner).__name__}) must have log_probabilities(sequences), or be a network from ids to "
            f"logits. TokenAlgorithmLearner makes a learner of a function"
        )
    return LogitsLearner(learner, name)


def named_token_learners(learners: Learners) -> dict[str, TokenLearner]:
    """Return learners of tokens by name, or else by their `name` or type, numbered where several share one."""
    return {name: as_token_learner(each, name) for name, each in by_name(learners).items()}


def sequence_batches(sequences: TokenSequences, d_vocab: int, *, copies: float = 1) -> Iterator[TokenSequences]:
    """Yield sequences in parts for which `copies` tensors `[prompt read token]` and `[prompt read read]` fit."""
    n_read = sequences.ids.shape[1] - 1
    size = Budget().rows(8 * copies * n_read * (4 * d_vocab + 4 * n_read + 256), at_most=1024)
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]


@checked
@torch.no_grad()
def token_log_probabilities(learner: TokenLearner, sequences: TokenSequences) -> Float[Tensor, "prompt read token"]:
    """Return a learner's log-probabilities of the next token, after a check of their shape and sum.

    Args:
        learner: a `TokenLearner`, such as `TokenAlgorithmLearner`.
        sequences: sequences to predict.

    Returns:
        Log-probabilities in nats, float64 on the CPU: index i of `read` predicts token i + 1 from tokens 0..i.

    Raises:
        ValueError: the learner returns another shape, or probabilities that do not sum to 1.
    """
    kind, shape = name_of(learner), tuple(sequences.read.shape)
    with calling(f"learner {kind!r}"):
        logs = learner.log_probabilities(sequences)
    if not isinstance(logs, Tensor) or logs.ndim != 3 or logs.shape[:2] != sequences.read.shape:
        raise ArgumentError(f"{kind} must return [prompt read token] for tokens {shape}, got {described(logs)}")
    logs = logs.cpu().double()
    totals = logs.logsumexp(-1)
    if totals.isnan().any() or (totals.numel() and totals.abs().max() > 1e-4):
        raise ValueError(f"{kind} must return log-probabilities of a distribution: they do not sum to 1")
    return logs


@checked
def token_losses(learner: TokenLearner, sequences: TokenSequences) -> Float[Tensor, "prompt read"]:
    """Return a learner's loss at each next token: minus its log-probability, in nats.

    Args:
        learner: a `TokenLearner`, such as `TokenAlgorithmLearner`.
        sequences: sequences to predict; tokens where `predictable` is False are not scored.

    Returns:
        Losses, float64 on the CPU, NaN where a token is not scored; index i of `read` is the loss of token i + 1.
    """
    targets = sequences.targets().cpu()
    logs = token_log_probabilities(learner, sequences)
    nats = -logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return nats.masked_fill(targets < 0, torch.nan)
