"""Learners of tokens: what turns the tokens before a place into probabilities of the next one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY, Budget
from mechicl.prompts import TokenSequences


@runtime_checkable
class TokenLearner(Protocol):
    """Anything that gives the next token probabilities from the tokens before it."""

    def log_probabilities(self, sequences: TokenSequences) -> Float[Tensor, "prompt read token"]:
        """Log-probabilities (nats) of the next token at each position read."""
        ...


@dataclass(frozen=True, eq=False)
class TokenAlgorithmLearner:
    """A function of token sequences, with its hyperparameters, as a learner.

    Attributes:
        algorithm: takes `TokenSequences` and the hyperparameters, and returns log-probabilities of the next token
            `[prompt read token]`.
        hyperparameters: keyword arguments of every call.

    Example:
        >>> bigrams = TokenAlgorithmLearner(algorithms.bigram_bayes, dict(d_vocab=3))
        >>> bigrams.name
        'bigram_bayes(d_vocab=3)'
    """

    algorithm: Callable[..., Tensor]
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The algorithm's name and hyperparameters."""
        settings = ", ".join(f"{k}={v}" for k, v in self.hyperparameters.items())
        return f"{getattr(self.algorithm, '__name__', 'algorithm')}({settings})"

    def log_probabilities(self, sequences: TokenSequences) -> Float[Tensor, "prompt read token"]:
        """What the algorithm returns."""
        return self.algorithm(sequences, **self.hyperparameters)


@dataclass(frozen=True, eq=False)
class LogitsLearner:
    """A network that returns logits for token ids, as a learner: `HookedTransformer`, a bridge, any such module.

    Attributes:
        model: takes ids `[prompt pos]` and returns logits `[prompt pos token]`.
        name: for tables and pictures.
    """

    model: Callable[..., Any]
    name: str = "model"

    def log_probabilities(self, sequences: TokenSequences) -> Float[Tensor, "prompt read token"]:
        """Log-softmax of the logits, float64."""
        cfg = getattr(self.model, "cfg", None)
        return self.model(sequences.read.to(getattr(cfg, "device", None) or "cpu")).double().log_softmax(-1)


@checked
def as_token_learner(learner: Any, name: str = "model") -> TokenLearner:
    """A learner of tokens as it is; a network on token ids as one.

    Raises:
        TypeError: neither `log_probabilities` nor callable.

    Example:
        >>> as_token_learner(load("induction-2l"), "induction-2l").name
        'induction-2l'
    """
    if isinstance(learner, TokenLearner):
        return learner
    if not callable(learner):
        raise TypeError(
            f"{name!r} ({type(learner).__name__}) is no learner of tokens: it needs log_probabilities(sequences), or "
            f"to be a network that returns logits for ids. TokenAlgorithmLearner makes one of a function"
        )
    return LogitsLearner(learner, name)


TokenLearners = Mapping[str, Any] | Sequence[Any]
"""Learners of tokens by name, or named after themselves."""


@checked
def named_token_learners(learners: TokenLearners) -> dict[str, TokenLearner]:
    """Learners of tokens by name: as they are given, or else their `name` or type.

    Raises:
        TypeError: something that is no learner of tokens.
        ValueError: two of one name.
    """
    if not isinstance(learners, Mapping):
        names = [str(getattr(each, "name", None) or type(each).__name__) for each in learners]
        if len(set(names)) < len(names):
            raise ValueError(f"learners of one name among {names}: give them as a mapping from names")
        learners = dict(zip(names, learners, strict=True))
    return {name: as_token_learner(each, name) for name, each in learners.items()}


@checked
def sequence_batches(
    sequences: TokenSequences, d_vocab: int, memory: float = MEMORY, *, copies: float = 1
) -> Iterator[TokenSequences]:
    """Sequences in parts for which `copies` tensors `[prompt read token]` and `[prompt read read]` fit into `memory`.

    Raises:
        ValueError: not enough memory for one sequence.
    """
    n_read = sequences.ids.shape[1] - 1
    size = Budget(memory).rows(8 * copies * n_read * (4 * d_vocab + 4 * n_read + 256), at_most=1024)
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]


@checked
@torch.no_grad()
def token_log_probabilities(learner: TokenLearner, sequences: TokenSequences) -> Float[Tensor, "prompt read token"]:
    """A learner's log-probabilities, checked: float64, on the CPU, of the sequences' shape.

    Raises:
        ValueError: another shape, NaN, or probabilities that do not sum to 1.
    """
    logs = learner.log_probabilities(sequences).cpu().double()
    if logs.ndim != 3 or logs.shape[:2] != sequences.read.shape:
        raise ValueError(
            f"{type(learner).__name__} returned log-probabilities {tuple(logs.shape)} for tokens "
            f"{tuple(sequences.read.shape)}: they are [prompt read token]"
        )
    totals = logs.logsumexp(-1)
    if totals.isnan().any() or (totals.numel() and totals.abs().max() > 1e-4):
        raise ValueError(f"{type(learner).__name__} returned log-probabilities that are not those of a distribution")
    return logs


@checked
def token_losses(learner: TokenLearner, sequences: TokenSequences) -> Float[Tensor, "prompt read"]:
    """Minus the log-probability of each next token, in nats, float64 on the CPU; NaN where it is not scored."""
    targets = sequences.targets().cpu()
    logs = token_log_probabilities(learner, sequences)
    nats = -logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return nats.masked_fill(targets < 0, torch.nan)
