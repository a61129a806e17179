"""Texts of a task: from the Hugging Face hub, from a file or folder, or made by rule."""

import glob
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mechicl.base.arguments import Count, checked
from mechicl.base.files import check_file, check_text, read_csv
from mechicl.tasks.topics import TopicClassification
from mechicl.text.classification import TEXT_TASKS, LabelledTexts, TextTask, shuffled

if TYPE_CHECKING:
    import datasets

_MOST_BYTES = 2**30
"""Largest file of texts that is read."""
KINDS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""Suffixes of files of texts."""


@checked
def load_texts(
    task: TextTask | str,
    split: str,
    *,
    source: str | Path | None = None,
    n_texts: Count | None = None,
    seed: int = 0,
) -> LabelledTexts:
    """Load the labelled texts of a classification task: from the Hugging Face hub, from a file, or made by rule.

    Args:
        task: task, or the name of one in `TEXT_TASKS`. Rule-made tasks ("farm", "town", "home", "leisure") generate
            their texts; the others are downloaded.
        split: split of the data set, such as "train"; ignored for a file, or a folder with one data set.
        source: where to read the texts instead of the hub: a file (.csv, .tsv, .json, .jsonl, .parquet) or a folder
            written by `save_to_disk` of `datasets`, or a copy of the data set's repository on the hub. Labels are the
            label words in any case, or class indices; a text such as "1" is an index unless it is a label word. The
            names of a `ClassLabel` are read if all are label words. In .csv and .tsv a quoted field may contain the
            separator, and texts such as "NA" stay texts.
        n_texts: number of texts, a random subset; all by default. A rule-made task makes this many, by default 512.
        seed: seed of the random subset, or of rule-made texts, which differ between splits for every seed.

    Returns:
        A `LabelledTexts`. Its `draw(n, seed=0)` selects random examples, for instance as demonstrations.

    Raises:
        ValueError: an unknown task, split or kind of file; a file of more than 1 GiB; a missing column; a missing,
            unknown or ambiguous label; a value that is not a text; more texts than there are; a source for a rule-made
            task.
        FileNotFoundError: no such source, or no answer from the hub.

    Example:
        >>> from mechicl.text import load_texts
        >>> load_texts("farm", "train", n_texts=1).texts
        ({'text': 'a bear cat cat fencing a'},)
    """
    if isinstance(task, str):
        if task not in TEXT_TASKS:
            raise ValueError(f"no task {task!r}: task must be one of {', '.join(TEXT_TASKS)}, or a TextTask")
        task = TEXT_TASKS[task]
    if task.topics:
        if source is not None:
            raise ValueError(f"the texts of {task.name!r} are made by rule, so it takes no source")
        return _rule_made(task, split, 512 if n_texts is None else n_texts, seed)
    dataset = _from_hub(task, split) if source is None else _from_source(task, split, Path(source))
    origin = f"{task.hub}, split {split!r}" if source is None else str(source)
    return _examples(task, dataset.with_format(None), origin, n_texts, seed)  # a saved one may give out tensors


def _rule_made(task: TextTask, split: str, n_texts: int, seed: int) -> LabelledTexts:
    if split not in task.splits:
        raise ValueError(f"{task.name!r} has the splits {task.splits}, got {split!r}")
    # a seed for each pair of seed and split, so that no split with one seed repeats another with the next
    seed = len(task.splits) * seed + task.splits.index(split)
    texts, labels = TopicClassification().texts(task.topics, n_texts, seed=seed)
    (column,) = task.columns
    return LabelledTexts(task, tuple({column: text} for text in texts), tuple(labels))


def _from_hub(task: TextTask, split: str) -> "datasets.Dataset":
    import datasets
    from datasets.exceptions import DatasetsError

    assert task.hub is not None
    try:
        return datasets.load_dataset(task.hub, task.subset, split=split)
    except (OSError, DatasetsError) as error:
        raise FileNotFoundError(
            f"{task.hub} cannot be loaded from the Hugging Face hub ({_first_line(error)}): pass source=, a file or "
            "folder with it"
        ) from error


def _from_source(task: TextTask, split: str, source: Path) -> "datasets.Dataset":
    import datasets
    from datasets.exceptions import DatasetsError

    if not source.exists():
        raise FileNotFoundError(f"no file or folder {source}")
    if source.is_dir():
        return _from_folder(task, split, source)
    kind = source.suffix.lower()
    if kind not in KINDS:
        raise ValueError(f"{source} must be a folder or a file that ends in {', '.join(KINDS)}")
    (check_file if kind == ".parquet" else check_text)(source, _MOST_BYTES)
    try:
        if kind in (".csv", ".tsv"):  # texts such as "NA" or "12" stay texts, and labels too
            table = read_csv(source, sep="," if kind == ".csv" else "\t", dtype=str, keep_default_na=False)
            if table.empty:
                raise ValueError("no rows")
            return datasets.Dataset.from_pandas(table)
        read = datasets.Dataset.from_parquet if kind == ".parquet" else datasets.Dataset.from_json
        # The library caches files by path and time of change, and would confuse a file with one that it replaced: hence
        # the temporary cache. It reads a path as a pattern: hence the escape.
        with tempfile.TemporaryDirectory() as cache:
            return read(glob.escape(str(source.resolve())), cache_dir=cache, keep_in_memory=True)
    except (DatasetsError, ValueError, StopIteration) as error:  # the last for an empty .json
        reason = _first_line(error.__cause__ or error)
        raise ValueError(f"{source} has no examples that can be read ({reason})") from error


def _from_folder(task: TextTask, split: str, folder: Path) -> "datasets.Dataset":
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        saved = datasets.load_from_disk(str(folder))
    except FileNotFoundError:  # a copy of the hub's repository
        with tempfile.TemporaryDirectory() as cache:
            options = {"split": split, "cache_dir": cache, "keep_in_memory": True}
            try:
                return datasets.load_dataset(str(folder), task.subset, **options)
            except (DatasetsError, OSError, ValueError) as error:
                raise ValueError(
                    f"{folder} is neither a folder that save_to_disk of datasets wrote, nor a copy of the hub's "
                    f"repository {task.hub} with the split {split!r} ({_first_line(error)})"
                ) from error
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise ValueError(f"{folder} has the splits {list(saved)}, got {split!r}")
    return saved[split]


def _examples(
    task: TextTask, dataset: "datasets.Dataset", origin: str, n_texts: int | None, seed: int
) -> LabelledTexts:
    columns = [*task.columns, task.label_column]
    if absent := [column for column in columns if column not in dataset.column_names]:
        raise ValueError(
            f"{origin} has no column {absent[0]!r} for {task.name!r}, it has {dataset.column_names}: choose others "
            "with dataclasses.replace(task, template=..., label_column=...)"
        )
    if n_texts is not None:
        if n_texts > len(dataset):
            raise ValueError(f"n_texts={n_texts}, but {origin} has {len(dataset)} texts")
        dataset = dataset.select(shuffled(range(len(dataset)), torch.Generator().manual_seed(seed))[:n_texts])
    rows = dataset.select_columns(list(dict.fromkeys(columns)))[:]
    for column in task.columns:
        if wrong := [value for value in rows[column] if not isinstance(value, str)]:
            raise ValueError(f"column {column!r} of {origin} must contain texts, got {wrong[0]!r}")
    labels = rows[task.label_column]
    if any(label is None or str(label).strip() in {"-1", ""} - task.class_words.keys() for label in labels):
        raise ValueError(f"{origin} has texts without a label, as test splits often do: load a split that has them all")
    names = getattr(dataset.features[task.label_column], "names", ())  # of a ClassLabel
    if names and all(name.strip().casefold() in task.class_words for name in names):
        labels = [names[label] for label in labels]
    texts = zip(*(rows[column] for column in task.columns), strict=True)
    return LabelledTexts(
        task,
        tuple(dict(zip(task.columns, text, strict=True)) for text in texts),
        tuple(_class_index(task, label, origin) for label in labels),
    )


def _class_index(task: TextTask, label: Any, origin: str) -> int:
    word, is_index = str(label).strip().casefold(), isinstance(label, int) and not isinstance(label, bool)
    of_word = task.class_words.get(word)
    if is_index and of_word not in (None, label) and label in range(task.n_classes):
        raise ValueError(
            f"{origin} has the label {label}, which is a class index of {task.name!r} and the word of another class: "
            f"give labels as text ({word!r}), which is read as the word"
        )
    if of_word is not None:
        return of_word
    if is_index or (isinstance(label, str) and word.isdecimal()):
        return int(word)  # LabelledTexts refuses those that are not classes
    raise ValueError(
        f"{origin} has the label {label!r}, which is neither a class index of {task.name!r} nor one of the words "
        f"{list(task.labels)}"
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
