"""Measures of models of Markov chains: when they count tokens, and when pairs of tokens."""

import math

from torch import Tensor

from mechicl.algorithms import references
from mechicl.checkpoints import Checkpoint, CheckpointError
from mechicl.learners import as_token_learner, token_log_probabilities
from mechicl.sweeps.measures.general import HELD_OUT, Measured
from mechicl.tasks import MarkovChains


def markov_phases(checkpoint: Checkpoint, *, n_prompts: int = 500) -> Measured:
    """When a model of Markov chains counts tokens, and when it counts pairs of tokens: divergences at its snapshots.

    At each snapshot the Kullback-Leibler divergence is measured from each simple learner to the model: "uniform" (all
    tokens alike), "unigram" (counts of tokens) and "bigram" (counts of what followed the present one), mean over
    positions, in nats. The model is in the phase of the learner that it is nearest to.

    Args:
        checkpoint: with one model, trained on `MarkovChains`, with snapshots.
        n_prompts: held-out sequences.

    Returns:
        `unigram_from` and `bigram_from`, the first snapshots' steps in each phase (NaN for never), `unigram_snapshots`,
        how many are in that phase; `least_to_unigram`, the least divergence from the unigram learner, and the learners'
        own distance there, `apart` (unigram to bigram); `final_to_unigram`, `final_to_bigram`; and `order`: 1 where the
        unigram phase comes before the bigram one, 0 where only the latter comes, NaN where there is no bigram phase.

    Raises:
        CheckpointError: no snapshots.
        ValueError: another task.

    Source: Edelman et al. 2024, section 3 and Fig. 2.
    """
    task = checkpoint.task
    if not isinstance(task, MarkovChains):
        raise ValueError(f"markov_phases is of models of MarkovChains; this one was trained on {type(task).__name__}")
    if checkpoint.snapshots is None:
        raise CheckpointError(f"{checkpoint.name} was saved without snapshots: set n_snapshots in its training")
    sequences = task.sample(n_prompts, seed=HELD_OUT)
    counted = sequences.predictable[:, 1:]
    known = {name: references(task)[name] for name in ("uniform", "unigram", "bigram")}
    logs = {name: token_log_probabilities(learner, sequences) for name, learner in known.items()}

    def divergence(model_logs: Tensor, name: str) -> float:
        each = (logs[name].exp() * (logs[name] - model_logs)).sum(-1)
        return each[counted].mean().item()

    steps = checkpoint.snapshots.steps
    divergences = []
    for index in range(len(steps)):
        (model,) = checkpoint.models_at(index)
        model_logs = token_log_probabilities(as_token_learner(model, checkpoint.name), sequences)
        divergences.append({name: divergence(model_logs, name) for name in known})
    return _phases(steps, divergences) | {"apart": divergence(logs["unigram"], "bigram")}


def _phases(steps: tuple[int, ...], divergences: list[dict[str, float]]) -> Measured:
    """When a model is nearest to which learner."""
    nearest = [min(each, key=each.__getitem__) for each in divergences]
    first = {name: next((float(s) for s, n in zip(steps, nearest, strict=True) if n == name), math.nan)
             for name in ("unigram", "bigram")}  # fmt: skip
    order = math.nan if math.isnan(first["bigram"]) else float(first["unigram"] < first["bigram"])
    return {
        "unigram_from": first["unigram"],
        "bigram_from": first["bigram"],
        "unigram_snapshots": float(nearest.count("unigram")),
        "least_to_unigram": min(each["unigram"] for each in divergences),
        "final_to_unigram": divergences[-1]["unigram"],
        "final_to_bigram": divergences[-1]["bigram"],
        "order": order,
    }
