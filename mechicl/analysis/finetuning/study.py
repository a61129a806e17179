"""One language model on one text task: demonstrations drawn, fine-tuning searched for, the settings compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mechicl.analysis.finetuning.comparison import FineTuningComparison, compare_with_finetuning, comparer
from mechicl.analysis.finetuning.search import EPOCHS, LEARNING_RATES, TuningSearch, search_tuning
from mechicl.analysis.finetuning.sequences import check_lengths, predictions, scores_and_losses
from mechicl.analysis.finetuning.tuning import FineTuning, How, fine_tune
from mechicl.models.adapter import ModelAdapter
from mechicl.text.classification import LabelledTexts, Labels, TextTask, load_texts
from mechicl.text.demonstrations import text_shots

HOW_NAMES: dict[How, str] = {"plain": "fine-tuned", "linearized": "linearised", "per_layer": "layer by layer"}
"""Kinds of fine-tuning, and what tables and pictures call them."""
HOWS: tuple[How, ...] = tuple(HOW_NAMES)


@dataclass(frozen=True, eq=False)
class TaskTexts:
    """The texts of one trial: demonstrations, queries to choose fine-tuning by, and queries to measure on.

    Attributes:
        demonstrations: in the order in which they are shown.
        held_out: queries that are not measured on.
        queries: to measure on.
    """

    demonstrations: LabelledTexts
    held_out: LabelledTexts
    queries: LabelledTexts


@dataclass(frozen=True, eq=False)
class TaskStudy:
    """What reading demonstrations and fine-tuning on them do on one text task.

    Attributes:
        task: its name.
        seed: of the texts and the baselines.
        n_demonstrations: how many there were.
        searches: fine-tuning on held-out queries, by how; the best of each was taken.
        comparisons: on the queries, by how.
        switched: with other labels of the demonstrations, in context and for plain fine-tuning, by kind of label.
        crossed: with other labels for plain fine-tuning only, the true ones in context.
    """

    task: str
    seed: int
    n_demonstrations: int
    searches: dict[str, TuningSearch]
    comparisons: dict[str, FineTuningComparison]
    switched: dict[str, FineTuningComparison] = field(default_factory=dict)
    crossed: dict[str, FineTuningComparison] = field(default_factory=dict)

    @property
    def tunings(self) -> dict[str, FineTuning]:
        """The fine-tuning that was best on held-out queries, by how."""
        return {how: search.best for how, search in self.searches.items()}


def draw_texts(
    task: TextTask,
    *,
    n_demonstrations: int | None = None,
    n_held_out: int = 50,
    n_queries: int = 100,
    seed: int = 0,
    source: Sequence[str | Path] | None = None,
) -> TaskTexts:
    """Demonstrations, balanced over the classes, and held-out queries from the first split, queries from the second.

    No text is in two of them, word for word, nor twice among the queries.

    Args:
        task: whose texts.
        n_demonstrations: as many as the paper takes by default.
        n_held_out: queries to choose fine-tuning by; fewer if the split has fewer.
        n_queries: queries to measure on; fewer if the split has fewer.
        seed: of the draw.
        source: two files or folders, one for each split; by default the hub, or the rule.

    Raises:
        ValueError: a class without enough texts, or no text that is left; else as `load_texts`.
        FileNotFoundError: as `load_texts`.
    """
    n = task.n_demonstrations if n_demonstrations is None else n_demonstrations
    made = bool(task.topics)
    first, second = task.splits
    sources = (None, None) if source is None else tuple(source)
    sizes = (4 * n + 4 * n_held_out, 4 * n_queries) if made else (None, None)
    seen = load_texts(task, first, source=sources[0], n_texts=sizes[0], seed=seed)
    measured = load_texts(task, second, source=sources[1], n_texts=sizes[1], seed=seed)
    demonstrations = seen.draw(n, seed=seed)
    shown = _distinct(demonstrations.texts)
    held_out = _others(seen, shown)
    chosen_by = held_out.draw(min(n_held_out, len(held_out)), seed=seed + 1, balanced=False)
    queries = _others(measured, shown | _distinct(chosen_by.texts))
    if not len(chosen_by) or not len(queries):
        raise ValueError(f"{task.name!r} has {len(chosen_by)} texts to choose by and {len(queries)} to measure on")
    return TaskTexts(
        demonstrations, chosen_by, queries.draw(min(n_queries, len(queries)), seed=seed + 2, balanced=False)
    )


def _distinct(texts: Iterable[Mapping[str, str]]) -> set[tuple[tuple[str, str], ...]]:
    return set(map(_words, texts))


def _words(text: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(text.items()))


def _others(texts: LabelledTexts, known: set[tuple[tuple[str, str], ...]]) -> LabelledTexts:
    """Those that are not known, word for word, each once."""
    first = {_words(text): i for i, text in reversed(list(enumerate(texts.texts)))}
    return texts.take(sorted(i for text, i in first.items() if text not in known))


def study_task(
    model: Any,
    tokenizer: Any,
    texts: TaskTexts,
    *,
    hows: Sequence[How] = HOWS,
    switched: Sequence[Labels] = (),
    tuning: FineTuning | None = None,
    learning_rates: Sequence[float] = LEARNING_RATES,
    epochs: Sequence[int] = EPOCHS,
    seed: int = 0,
    batch_size: int = 16,
    progress: bool = False,
) -> TaskStudy:
    """Search for the best fine-tuning on held-out queries, then compare it with reading the same demonstrations.

    Args:
        model: ours on token ids, or a `TransformerBridge`, in eval mode.
        tokenizer: its tokenizer.
        texts: demonstrations and queries; see `draw_texts`.
        hows: kinds of fine-tuning.
        switched: other labels for the demonstrations, for plain fine-tuning and, in turn, in context too: "flipped",
            "random".
        tuning: settings other than learning rate, epochs and how.
        learning_rates: to search.
        epochs: to search.
        seed: of random baselines and labels.
        batch_size: queries in memory at a time.
        progress: show progress bars.

    Raises:
        ValueError: labels that are not one token each, prompts longer than the context, a model without hooks.

    Source: Dai et al. 2023, section 4; Bar Natan, Deutch & Magar, section 3.

    Example:
        >>> study = study_task(load("topics-3l"), topic_tokenizer(), draw_texts(TEXT_TASKS["farm"]))
        >>> study.comparisons["plain"].recall()
    """
    shots, held_out = (text_shots(tokenizer, texts.demonstrations, of) for of in (texts.queries, texts.held_out))
    check_lengths(model, (*shots.in_context, *held_out.zero_shot))  # before anything that takes long
    base, searches, comparisons = tuning or FineTuning(), {}, {}
    options: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    with_tuned = comparer(model, shots, seed=seed, **options)
    for how in hows:
        searches[how] = search_tuning(
            model, held_out, base.replace(how=how), learning_rates=learning_rates, epochs=epochs, **options
        )
        comparisons[how] = with_tuned(fine_tune(model, shots, searches[how].best, progress=progress))
    others, crossed = {}, {}
    for labels in switched:
        wrong = texts.demonstrations.relabelled(labels, seed=seed)
        other = text_shots(tokenizer, wrong, texts.queries)
        best = searches["plain"].best if "plain" in searches else base
        tuned = fine_tune(model, other, best, progress=progress)
        others[labels] = compare_with_finetuning(model, other, tuned, seed=seed, **options)
        crossed[labels] = with_tuned(tuned)
    n = len(texts.demonstrations)
    return TaskStudy(texts.queries.task.name, seed, n, searches, comparisons, others, crossed)


def accuracy_by_shots(
    model: Any, tokenizer: Any, texts: TaskTexts, numbers: Iterable[int], *, batch_size: int = 16
) -> dict[int, Float[Tensor, "query"]]:
    """Right (1) or wrong (0) for each query behind the first so many demonstrations, by their number.

    Args:
        model: as for `study_task`.
        tokenizer: its tokenizer.
        texts: demonstrations and queries.
        numbers: of demonstrations; 0 for none.
        batch_size: queries in memory at a time.

    Raises:
        ValueError: more demonstrations than there are, or as for `study_task`.
    """
    adapter, found = ModelAdapter(model), {}
    for number in numbers:
        if not 0 <= number <= len(texts.demonstrations):
            raise ValueError(f"there are {len(texts.demonstrations)} demonstrations, got {number}")
        shown = texts.demonstrations.take(range(max(number, 1)))
        shots = text_shots(tokenizer, shown, texts.queries)
        prompts = shots.in_context if number else shots.zero_shot
        check_lengths(model, prompts)
        outputs = predictions(adapter, prompts, batch_size=batch_size)
        found[number], _ = scores_and_losses(outputs, shots.targets, shots.choices)
    return found
