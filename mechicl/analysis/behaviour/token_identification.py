"""Which learner does a network on tokens behave like? Divergences of its predictions from each reference's."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float

from mechicl.algorithms.references import references
from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY
from mechicl.base.progress import progress_bar
from mechicl.learners import (
    TokenLearners,
    as_token_learner,
    named_token_learners,
    sequence_batches,
    token_log_probabilities,
)
from mechicl.statistics import Interval, Result, interval
from mechicl.tasks.sampling import TokenDistribution


@dataclass(frozen=True, eq=False)
class TokenIdentification(Result):
    """How far a network's probabilities of the next token are from those of learners, the nearest learner first.

    Attributes:
        points: how many tokens came before each prediction.
        divergences: Kullback-Leibler divergence of each learner's distribution from the network's, by name:
            KL(network ‖ learner) in nats, `[point prompt]`.
    """

    points: tuple[int, ...]
    divergences: dict[str, Float[torch.Tensor, "point prompt"]]

    @property
    def best(self) -> str:
        """Name of the nearest learner."""
        return next(iter(self.divergences))

    def divergence(self, name: str, level: float = 0.95) -> Interval:
        """The mean over all points, with an interval over prompts."""
        return interval(self._of(name).mean(0), level)

    def gap(self, name: str, level: float = 0.95) -> Interval:
        """How much farther than the nearest, on the same prompts; errors as for `divergence`."""
        return interval((self._of(name) - self._of(self.best)).mean(0), level)

    def curve(self, name: str, level: float = 0.95) -> list[Interval]:
        """The mean divergence after each number of tokens; errors as for `divergence`."""
        return [interval(at_point, level) for at_point in self._of(name)]

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """One row a learner, ranked: its divergence, and how much farther than the nearest, with intervals (nats)."""
        rows = []
        for rank, name in enumerate(self.divergences, start=1):
            divergence, gap = self.divergence(name, level), self.gap(name, level)
            rows.append({
                "rank": rank, "name": name, "divergence": divergence.mean, "low": divergence.low,
                "high": divergence.high, "gap": gap.mean, "gap_low": gap.low, "gap_high": gap.high,
            })  # fmt: skip
        return pd.DataFrame(rows)

    def _of(self, name: str) -> Float[torch.Tensor, "point prompt"]:
        if name not in self.divergences:
            raise KeyError(f"no learner has the name {name!r}, only {', '.join(map(repr, self.divergences))}")
        return self.divergences[name]

    def _lines(self) -> list[tuple[str, str]]:
        lines = [("learner", f"{'KL in nats':>20} {f'after {self.points[-1]} tokens':>20}")]
        for name in self.divergences:
            lines.append((name, f"{self.divergence(name)!s:>20} {self.curve(name)[-1]!s:>20}"))
        return lines


@checked
@torch.no_grad()
def identify_on_tokens(
    model: Any,
    task: TokenDistribution,
    *,
    also: TokenLearners = (),
    n_prompts: int = 1000,
    seed: int = 0,
    memory: float = MEMORY,
    progress: bool = True,
) -> TokenIdentification:
    """Which learner of tokens does a network behave like? The counterpart of `identify` for tasks of tokens.

    Args:
        model: a network on token ids, or any learner of tokens.
        task: of tokens; its reference learners (`algorithms.references`) are ranked.
        also: learners of your own to rank with them.
        n_prompts: how many sequences, at least 2.
        seed: of the sequences.

    Source: Edelman et al. 2024, who compare transformers with uniform, unigram and bigram predictions over training.

    Example:
        >>> from mechicl.tasks import MarkovChains
        >>> unigrams = algorithms.references(MarkovChains())["unigram"]
        >>> print(identify_on_tokens(unigrams, MarkovChains(), n_prompts=50))
        TokenIdentification...
    """
    if not isinstance(task, TokenDistribution):
        raise TypeError(f"{type(task).__name__} is no task of tokens: take identify()")
    if n_prompts < 2:
        raise ValueError(f"n_prompts must be at least 2, got {n_prompts}")
    given = named_token_learners(also)
    try:
        known = references(task)
    except TypeError:
        known = {}
    learners = {**known, **given}
    if not learners:
        raise ValueError(f"{type(task).__name__} has no reference learners: give some in also=")
    network = as_token_learner(model)
    sequences = task.sample(n_prompts, seed=seed)
    scored = sequences.predictable[:, 1:].all(0).nonzero().flatten()
    if not len(scored):
        raise ValueError(f"no position is to be predicted in every sequence of {task}")
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in learners}
    batches = list(sequence_batches(sequences, getattr(task, "d_vocab", 2), memory, copies=2))
    for part in progress_bar(batches, unit="batch", progress=progress, desc="identify"):
        logs = token_log_probabilities(network, part)[:, scored]
        for name, learner in learners.items():
            others = token_log_probabilities(learner, part)[:, scored]
            if others.shape != logs.shape:
                raise ValueError(f"{name!r} predicts {others.shape[-1]} tokens, and the network {logs.shape[-1]}")
            # a token that the network never predicts takes no part, whatever the other says of it
            parts[name].append(torch.where(logs == -torch.inf, 0.0, logs.exp() * (logs - others)).sum(-1))
    divergences = {name: torch.cat(tensors).T for name, tensors in parts.items()}
    ranked = sorted(divergences, key=lambda name: divergences[name].mean().item())
    return TokenIdentification(tuple((scored + 1).tolist()), {name: divergences[name] for name in ranked})
