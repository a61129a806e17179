"""Study one language model on one text task: draw demonstrations, search for fine-tuning, compare the settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mechicl.analysis.finetuning.context_comparison import BeforeFineTuning, FineTuningComparison
from mechicl.analysis.finetuning.forward_passes import check_lengths, predict_sequences
from mechicl.analysis.finetuning.hyperparameter_search import TuningSearch, search_tuning
from mechicl.analysis.finetuning.sgd import METHODS, FineTuning, Method, fine_tune
from mechicl.base.arguments import checked
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.statistics import Result
from mechicl.text import LabelledTexts, TextTask, load_texts, text_shots
from mechicl.text.scores import FewShotScores, Scored, scores_and_losses

Columns = tuple[tuple[str, str], ...]  # a text by its columns, hashable


@dataclass(frozen=True, eq=False)
class TaskTexts(Result):
    """The texts of one trial: demonstrations that every context shows, and queries to tune and to measure on."""

    demonstrations: LabelledTexts
    held_out: LabelledTexts
    queries: LabelledTexts


@dataclass(frozen=True, eq=False)
class TaskStudy(Scored, Result):
    """Reading demonstrations and fine-tuning on them, compared on one text task; see `study_task`."""

    task: str
    seed: int
    n_demonstrations: int
    searches: dict[str, TuningSearch]
    comparisons: dict[str, FineTuningComparison]

    @property
    def tunings(self) -> dict[str, FineTuning]:
        """The fine-tuning that was best on held-out queries, by method."""
        return {method: search.best for method, search in self.searches.items()}

    def samples(self) -> dict[str, Tensor]:
        """Return the scores of the queries in each setting; the other measures are in `comparisons`."""
        if not self.comparisons:
            return {}
        first = next(iter(self.comparisons.values()))
        scores = {"zero_shot_score": first.zero_shot_score, "in_context_score": first.in_context_score}
        return scores | {f"{method}_score": part.finetuned_score for method, part in self.comparisons.items()}


@checked
def draw_texts(
    task: TextTask,
    *,
    n_demonstrations: int | None = None,
    n_held_out: int = 50,
    n_queries: int = 100,
    seed: int = 0,
    source: Sequence[str | Path] | None = None,
) -> TaskTexts:
    """Draw the texts of one trial: demonstrations, held-out queries to tune on, and queries to measure on.

    Demonstrations and held-out queries come from the task's first split, queries from its second. No text occurs in two
    of them, or twice among the queries.

    Args:
        task: a text classification task, such as `mechicl.text.TEXT_TASKS["sst2"]`, or your own `TextTask`.
        n_demonstrations: number of demonstrations, balanced over classes; by default the number that the task defines.
        n_held_out: number of queries to tune on; fewer if the split has fewer.
        n_queries: number of queries to measure on; fewer if the split has fewer.
        source: two files or folders, one for each split, in place of the Hugging Face hub; for a task whose texts are
            made by rule ("farm", ...) leave it out.

    Returns:
        A `TaskTexts`: `demonstrations`, `held_out` and `queries`, each with `texts` and `labels` (class indices).

    Example:
        >>> from mechicl.text import TEXT_TASKS
        >>> draw_texts(TEXT_TASKS["farm"], seed=0).demonstrations.texts[0]
    """
    n = task.n_demonstrations if n_demonstrations is None else n_demonstrations
    first, second = task.splits
    sources = (None, None) if source is None else tuple(source)
    # texts made by rule repeat: enough of them for this many different ones
    sizes = (4 * n + 4 * n_held_out, 4 * n_queries) if task.topics else (None, None)
    seen = load_texts(task, first, source=sources[0], n_texts=sizes[0], seed=seed)
    measured = load_texts(task, second, source=sources[1], n_texts=sizes[1], seed=seed)
    demonstrations = seen.draw(n, seed=seed)
    shown = set(map(_columns, demonstrations.texts))
    held_out = _unseen(seen, shown)
    held_out = held_out.draw(min(n_held_out, len(held_out)), seed=seed + 1, balanced=False)
    queries = _unseen(measured, shown | set(map(_columns, held_out.texts)))
    if not len(held_out) or not len(queries):
        raise ValueError(f"{task.name!r} has {len(held_out)} held-out texts and {len(queries)} to measure on")
    return TaskTexts(
        demonstrations, held_out, queries.draw(min(n_queries, len(queries)), seed=seed + 2, balanced=False)
    )


def _columns(text: Mapping[str, str]) -> Columns:
    return tuple(sorted(text.items()))


def _unseen(texts: LabelledTexts, known: set[Columns]) -> LabelledTexts:
    first = {_columns(text): i for i, text in reversed(list(enumerate(texts.texts)))}
    return texts.take(sorted(i for text, i in first.items() if text not in known))


@checked(locks=True)
def study_task(
    model: Any,
    tokenizer: Any,
    texts: TaskTexts,
    *,
    methods: Sequence[Method] = METHODS,
    tuning: FineTuning | None = None,
    search: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> TaskStudy:
    """Search for the best fine-tuning on held-out queries, then compare it with reading the same demonstrations.

    Args:
        model: a mechicl model on token ids, or a `TransformerBridge`, in eval mode.
        tokenizer: the model's tokenizer, with the interface of `transformers`.
        texts: demonstrations and queries, the result of `draw_texts`.
        methods: kinds of fine-tuning, by default all (see `FineTuning`).
        tuning: settings other than learning rate, epochs and method (`FineTuning`).
        search: the settings to try and how to choose: `learning_rates`, `epochs`, `choose_by` and `widen` of
            `search_tuning`.

    Returns:
        A `TaskStudy`: `tunings`, the best settings of each method (from its `TuningSearch` in `searches`);
        `comparisons`, a `FineTuningComparison` by method; `intervals()`, the accuracy in each setting with 95%
        intervals over queries.

    Source: Dai et al. 2023, section 4; Bar Natan, Deutch & Magar, section 3.

    Example:
        >>> from mechicl.text import TEXT_TASKS, topic_tokenizer
        >>> texts = draw_texts(TEXT_TASKS["farm"], n_held_out=4, n_queries=8)
        >>> options = {"methods": ("plain",), "search": {"learning_rates": (0.1, 0.3), "epochs": (1,)}}
        >>> study_task(load("topics-3l"), topic_tokenizer(), texts, **options).comparisons["plain"].recall()
    """
    shots = text_shots(tokenizer, texts.demonstrations, texts.queries)
    held_out = text_shots(tokenizer, texts.demonstrations, texts.held_out)
    check_lengths(model, (*shots.in_context, *held_out.zero_shot))  # before anything that takes long
    settings, searches, comparisons = tuning or FineTuning(), {}, {}
    before = BeforeFineTuning(model, shots, seed=seed, progress=progress)
    for method in methods:
        by_method = replace(settings, method=method)
        searches[method] = search_tuning(model, held_out, by_method, progress=progress, **(search or {}))
        comparisons[method] = before.compare_with(fine_tune(model, shots, searches[method].best, progress=progress))
    return TaskStudy(texts.queries.task.name, seed, len(texts.demonstrations), searches, comparisons)


@checked(locks=True)
def measure_accuracy(model: Any, tokenizer: Any, texts: TaskTexts, n_demonstrations: Iterable[int]) -> FewShotScores:
    """Measure a language model's few-shot accuracy on a text task, by number of demonstrations.

    Args:
        model: a mechicl model on token ids, or a `TransformerBridge`, in eval mode.
        tokenizer: the model's tokenizer, with the interface of `transformers`.
        texts: demonstrations and queries, the result of `draw_texts`; the first few demonstrations are shown.
        n_demonstrations: the numbers of demonstrations to show; 0 for none.

    Returns:
        A `FewShotScores` of one task and its true labels, by number of demonstrations; `to_dataframe()` has the means
        with 95% intervals over queries.

    Example:
        >>> from mechicl.text import TEXT_TASKS, topic_tokenizer
        >>> print(measure_accuracy(load("topics-3l"), topic_tokenizer(), draw_texts(TEXT_TASKS["farm"]), (0, 2, 8)))
    """
    adapter, numbers = ModelAdapter(model), tuple(n_demonstrations)
    shots, scores = text_shots(tokenizer, texts.demonstrations, texts.queries), []
    for prompts in map(shots.after, numbers):
        check_lengths(model, prompts)
        scores.append(torch.stack(scores_and_losses(predict_sequences(adapter, prompts), shots)))
    accuracy, losses = torch.stack(scores, 1)[:, None, None]
    return FewShotScores((texts.queries.task.name,), ("true",), numbers, accuracy, -losses)
