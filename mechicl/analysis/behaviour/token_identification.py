"""Which learner a network on tokens behaves like: divergences of its predictions from each reference's."""

from dataclasses import dataclass
from typing import Annotated, Any

import pandas as pd
import torch
from jaxtyping import Float

from mechicl.analysis.behaviour.identification import references_of
from mechicl.analysis.behaviour.losses import scored_places
from mechicl.base.arguments import at_least, checked
from mechicl.base.progress import progress_bar
from mechicl.checkpoints.study import takes_study
from mechicl.learners import Learners, token_log_probabilities
from mechicl.learners.token_learners import as_token_learner, named_token_learners, sequence_batches
from mechicl.statistics import UNBOUNDED, Interval, Result, interval
from mechicl.statistics.results import index_of
from mechicl.tasks.sampling import TokenDistribution


@dataclass(frozen=True, eq=False)
class TokenIdentification(Result):
    """Divergences of learners from a network's next-token probabilities, nearest first; see `identify_on_tokens`."""

    points: tuple[int, ...]
    divergences: dict[str, Float[torch.Tensor, "point prompt"]]

    @property
    def best(self) -> str:
        """Name of the nearest learner."""
        return next(iter(self.divergences))

    def divergence(self, name: str, level: float = 0.95) -> Interval:
        """Return the mean divergence of a learner over all points, in nats, with an interval over prompts."""
        return interval(self._named(name).mean(0), level, within=UNBOUNDED)

    def gap(self, name: str, level: float = 0.95) -> Interval:
        """Return the mean divergence of a learner minus that of `best`, with an interval over the same prompts."""
        return interval((self._named(name) - self._named(self.best)).mean(0), level, within=UNBOUNDED)

    def curve(self, name: str, level: float = 0.95) -> list[Interval]:
        """Return a learner's mean divergence after each number of tokens (`points`), with intervals over prompts."""
        return [interval(at_point, level, within=UNBOUNDED) for at_point in self._named(name)]

    def to_dataframe(self, level: float = 0.95) -> pd.DataFrame:
        """Return one row per learner, ranked: its divergence, and that minus the nearest's, with intervals (nats)."""
        rows = []
        for rank, name in enumerate(self.divergences, start=1):
            divergence, gap = self.divergence(name, level), self.gap(name, level)
            rows.append({"rank": rank, "name": name} | divergence.columns("divergence") | gap.columns("gap", "gap_"))
        return pd.DataFrame(rows)

    def _named(self, name: str) -> Float[torch.Tensor, "point prompt"]:
        index_of("learner", name, self.divergences)
        return self.divergences[name]

    def _lines(self) -> list[tuple[str, str]]:
        lines = [("learner", f"{'KL in nats':>20} {f'after {self.points[-1]} tokens':>20}")]
        for name in self.divergences:
            lines.append((name, f"{self.divergence(name)!s:>20} {self.curve(name)[-1]!s:>20}"))
        return lines


@takes_study
@checked
@torch.no_grad()
def identify_on_tokens(
    model: Any,
    task: TokenDistribution,
    *,
    also: Learners = (),
    n_prompts: Annotated[int, at_least(2)] = 1000,
    seed: int = 0,
    progress: bool | None = None,
) -> TokenIdentification:
    """Rank token predictors by how near their predictions are to a network's: `identify` for tasks of tokens.

    Args:
        model: a model on token ids, or anything with `log_probabilities(sequences)`.
        task: a task of tokens, such as `MarkovChains`; its reference learners (`algorithms.references(task)`, such as
            in-context unigram and bigram counts) are ranked.
        also: your own learners to rank too: a mapping from names, or a sequence of learners with names.
        n_prompts: number of sequences to draw from the task, with `seed`.

    Returns:
        A `TokenIdentification`: `divergences[name]` `[point prompt]` is the Kullback-Leibler divergence
        KL(network ‖ learner) of next-token distributions in nats, nearest learner first, `divergence(name)` its mean
        over points, and `points` the number of tokens before each prediction.

    Source: Edelman et al. 2024, who compare transformers with uniform, unigram and bigram predictions over training.

    Example:
        >>> from mechicl.tasks import MarkovChains
        >>> unigrams = algorithms.references(MarkovChains())["unigram"]
        >>> print(identify_on_tokens(unigrams, MarkovChains(), n_prompts=50))
        TokenIdentification...
    """
    learners = {**references_of(task), **named_token_learners(also)}
    if not learners:
        raise ValueError(f"{type(task).__name__} has no reference learners: pass some as also=")
    network = as_token_learner(model)
    sequences = task.sample(n_prompts, seed=seed)
    scored = scored_places(sequences, task)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in learners}
    batches = list(sequence_batches(sequences, getattr(task, "d_vocab", 2), copies=2))
    for part in progress_bar(batches, unit="batch", progress=progress, desc="identify"):
        logs = token_log_probabilities(network, part)[:, scored]
        for name, learner in learners.items():
            others = token_log_probabilities(learner, part)[:, scored]
            if others.shape != logs.shape:
                raise ValueError(f"{name!r} predicts {others.shape[-1]} tokens, and the network {logs.shape[-1]}")
            # a token of probability 0 contributes nothing, whatever its probability under the other learner
            parts[name].append(torch.where(logs == -torch.inf, 0.0, logs.exp() * (logs - others)).sum(-1))
    divergences = {name: torch.cat(tensors).T for name, tensors in parts.items()}
    means = {name: each.mean().nan_to_num(nan=torch.inf).item() for name, each in divergences.items()}
    ranked = sorted(divergences, key=means.__getitem__)
    return TokenIdentification(tuple((scored + 1).tolist()), {name: divergences[name] for name in ranked})
