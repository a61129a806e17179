"""Text classification tasks: a table of data sets, how prompts write their examples, and how they are loaded."""

import glob
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, Literal, assert_never

import datasets
import torch
from datasets.config import HF_DATASETS_DISABLE_PROGRESS_BARS
from datasets.exceptions import DatasetsError

from mechicl.checks import is_whole, require_whole
from mechicl.tasks.topics import TOPICS, TopicClassification

Labels = Literal["true", "flipped", "random"]


@dataclass(frozen=True)
class TextTask:
    """A text classification data set: where it is, how an example is written, and the word for each class.

    Attributes:
        name: what it is called here.
        template: with a `{column}` for each text column; ends where the label is to follow.
        labels: one for each class index, as they follow the template: `" Negative"`, with the space.
        separator: what is written behind the label of a demonstration.
        hub: name on the Hugging Face hub.
        subset: of the data set on the hub, where it has several.
        label_column: where the labels are.
        splits: where demonstrations and queries come from.
        n_demonstrations: how many stand before a query.
        topics: classes of a rule-made task, in the language of `mechicl.tasks.topics`; it has no hub name.

    Raises:
        ValueError: a template without columns or with nameless ones; labels that are blank, alike, or fewer than two;
            both a hub name and topics, or neither; topics that are unknown or not as many as the labels.

    Source: the templates, labels and numbers of demonstrations of `TEXT_TASKS` follow Dai et al. 2023 ("Why Can GPT
    Learn In-Context?"), appendix.

    Example:
        >>> TEXT_TASKS["sst2"].demonstration({"sentence": "a joy"}, 1)
        'Sentence: a joy\\nLabel: Positive\\n'
    """

    name: str
    template: str
    labels: tuple[str, ...]
    separator: str = "\n"
    hub: str | None = None
    subset: str | None = None
    label_column: str = "label"
    splits: tuple[str, str] = ("train", "validation")
    n_demonstrations: int = 32
    topics: tuple[str, ...] = ()

    def __post_init__(self):
        require_whole(self, n_demonstrations=0)
        if not self.columns:
            raise ValueError(f"the template of {self.name!r} has no {{column}}: {self.template!r}")
        try:
            self.write(dict.fromkeys(self.columns, ""))
        except (KeyError, ValueError) as error:  # {}, {0}, {a.b}, {a[0]}, {a:{b}} or a format that is not for text
            raise ValueError(f"the fields of a template must be names of columns, got {self.template!r}") from error
        if self.n_classes < 2 or not all(label.strip() for label in self.labels):
            raise ValueError(f"{self.name!r} needs at least two labels, none of them blank, got {self.labels}")
        if len(self.class_words) < self.n_classes:  # one that differs in case only could not be told apart in a file
            raise ValueError(f"the labels of {self.name!r} must differ in more than case and space, got {self.labels}")
        if bool(self.hub) == bool(self.topics):
            raise ValueError(f"{self.name!r} needs a name on the hub or topics, and not both")
        if unknown := [topic for topic in self.topics if topic not in TOPICS]:
            raise ValueError(f"{self.name!r} has unknown topics {unknown}: there are {list(TOPICS)}")
        if self.topics and len(self.topics) != self.n_classes:
            raise ValueError(f"{self.name!r} has {len(self.topics)} topics for {self.n_classes} labels")
        if self.topics and len(self.columns) != 1:
            raise ValueError(f"{self.name!r} is made by rule and has one text, got the columns {self.columns}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The text columns that the template shows, in its order."""
        fields = (field for _, field, _, _ in Formatter().parse(self.template) if field is not None)
        return tuple(dict.fromkeys(fields))

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    @property
    def class_words(self) -> dict[str, int]:
        """The classes by their labels, without regard to case and outer space."""
        return {label.strip().casefold(): index for index, label in enumerate(self.labels)}

    def write(self, text: Mapping[str, str]) -> str:
        """The template filled with an example's columns, up to where its label is to follow.

        Raises:
            KeyError: a column is missing.
        """
        return self.template.format_map(text)

    def demonstration(self, text: Mapping[str, str], label: int) -> str:
        """An example with its label and the separator behind it.

        Raises:
            ValueError: a label that is no class.
            KeyError: a column is missing.
        """
        _require_classes(self, [label])
        return self.write(text) + self.labels[label] + self.separator


def _table(*tasks: TextTask) -> dict[str, TextTask]:
    return {task.name: task for task in tasks}


_NEWS = "Classify the news articles into the categories of World, Sports, Business, and Technology.\n\n"
_made = partial(TextTask, template="{text}", separator=" ; ", n_demonstrations=8)
_test = ("train", "test")

# fmt: off
TEXT_TASKS: dict[str, TextTask] = _table(
    TextTask("sst2", "Sentence: {sentence}\nLabel:", (" Negative", " Positive"), hub="stanfordnlp/sst2"),
    TextTask("sst5", "Sentence: {text}\nLabel:", (" terrible", " bad", " neutral", " good", " great"),
             hub="SetFit/sst5", splits=_test),
    TextTask("mr", "Review: {text}\nSentiment:", (" Negative", " Positive"),
             hub="cornell-movie-review-data/rotten_tomatoes", splits=_test),
    TextTask("subj", "Input: {text}\nType:", (" objective", " subjective"), hub="SetFit/subj", splits=_test),
    TextTask("agnews", _NEWS + "Article: {text}\nAnswer:", (" World", " Sports", " Business", " Technology"),
             hub="fancyzhx/ag_news", splits=_test, n_demonstrations=22),
    TextTask("cb", "{premise}\nQuestion: {hypothesis}. True, False, or Neither?\nAnswer:",
             (" True", " False", " Neither"), hub="aps/super_glue", subset="cb", n_demonstrations=19),
    _made("farm", labels=(" red", " blue"), topics=("animals", "trees")),
    _made("town", labels=(" green", " pink"), topics=("vehicles", "jobs")),
    _made("home", labels=(" white", " black", " brown"), topics=("house", "clothes", "kitchen")),
    _made("leisure", labels=(" yellow", " grey", " purple", " orange"),
          topics=("sports", "music", "weather", "shapes")),
)
# fmt: on


@dataclass(frozen=True)
class LabelledTexts:
    """Examples of a task.

    Attributes:
        task: how they are written.
        texts: one mapping of column to text an example.
        labels: their classes.

    Raises:
        ValueError: numbers of texts and labels that differ, a label that is no class, or a text without a column that
            the template shows.

    Example:
        >>> examples = load_texts("farm", "train", n_texts=100)
        >>> examples.draw(8, seed=0).labels.count(0)
        4
    """

    task: TextTask
    texts: tuple[Mapping[str, str], ...]
    labels: tuple[int, ...]

    def __post_init__(self):
        if len(self.texts) != len(self.labels):
            raise ValueError(f"every text needs a label, got {len(self.texts)} texts and {len(self.labels)} labels")
        _require_classes(self.task, self.labels)
        for index, text in enumerate(self.texts):
            if absent := [column for column in self.task.columns if column not in text]:
                raise ValueError(f"text {index} lacks the columns {absent} of {self.task.name!r}, it has {list(text)}")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Sequence[int]) -> "LabelledTexts":
        """Those at the indices, in their order.

        Raises:
            IndexError: an index out of range.
        """
        return LabelledTexts(self.task, tuple(self.texts[i] for i in indices), tuple(self.labels[i] for i in indices))

    def draw(self, n: int, *, seed: int, balanced: bool = True) -> "LabelledTexts":
        """Different examples at random, in random order; the same seed gives the same ones.

        Args:
            n: how many.
            seed: of the draw.
            balanced: numbers of examples of any two classes differ by one at most. Else each example is as likely.

        Raises:
            ValueError: more examples than there are, or a class with too few.
        """
        if not 0 <= n <= len(self):
            raise ValueError(f"n must be from 0 to {len(self)}, the number of examples, got {n}")
        generator = torch.Generator().manual_seed(seed)
        order = _shuffled(range(len(self)), generator)
        if not balanced:
            return self.take(order[:n])
        members: list[list[int]] = [[] for _ in self.task.labels]
        for index in order:
            members[self.labels[index]].append(index)
        least, n_larger = divmod(n, len(members))
        can_be_larger = [label for label, of_label in enumerate(members) if len(of_label) > least]
        smallest = min(range(len(members)), key=lambda label: len(members[label]))
        if len(members[smallest]) < least or len(can_be_larger) < n_larger:
            counts = f"{least}" if n_larger == 0 else f"{least} or {least + 1}"
            raise ValueError(
                f"a balanced draw of {n} takes {counts} examples of each class, and class {smallest} "
                f"({self.task.labels[smallest]!r}) has {len(members[smallest])}: draw fewer, load more texts, or pass "
                "balanced=False"
            )
        larger = _shuffled(can_be_larger, generator)[:n_larger]
        drawn = [i for label, of_label in enumerate(members) for i in of_label[: least + (label in larger)]]
        return self.take(_shuffled(drawn, generator))

    def split(self, n_first: int, *, seed: int) -> "tuple[LabelledTexts, LabelledTexts]":
        """Two random parts that share no example, the first with `n_first` of them.

        Raises:
            ValueError: more than there are, or a negative number.
        """
        if not 0 <= n_first <= len(self):
            raise ValueError(f"n_first must be from 0 to {len(self)}, the number of examples, got {n_first}")
        order = _shuffled(range(len(self)), torch.Generator().manual_seed(seed))
        return self.take(order[:n_first]), self.take(order[n_first:])

    def relabelled(self, how: Labels, *, seed: int = 0) -> "LabelledTexts":
        """The same texts with their own labels, with those of the next class (cyclic), or with random ones.

        Args:
            how: `"random"` labels are uniform over the classes, each drawn by itself.
            seed: of the random ones.
        """
        n_classes = self.task.n_classes
        match how:
            case "true":
                return self
            case "flipped":
                labels = tuple((label + 1) % n_classes for label in self.labels)
            case "random":
                generator = torch.Generator().manual_seed(seed)
                labels = tuple(torch.randint(n_classes, (len(self),), generator=generator).tolist())
            case _:
                assert_never(how)
        return LabelledTexts(self.task, self.texts, labels)


def load_texts(
    task: TextTask | str,
    split: str,
    *,
    source: str | Path | None = None,
    n_texts: int | None = None,
    seed: int = 0,
) -> LabelledTexts:
    """A split of a task's data set: from the Hugging Face hub, from a file, or made by rule.

    Args:
        task: or the name of one of `TEXT_TASKS`.
        split: of the data set. A file is one split, whichever is asked for; so is a folder that holds one data set.
        source: instead of the hub, a file (.csv, .tsv, .json, .jsonl, .parquet) or a folder that `save_to_disk` of
            `datasets` wrote. Labels are class indices, or the labels as words, in any case. In .csv and .tsv a quoted
            field may hold the separator, and a text is taken as it stands, "NA" too.
        n_texts: a random subset of so many; all by default. For a rule-made task how many to make, 512 by default.
        seed: of the subset, or of the rule-made texts. No seed gives two splits the same ones.

    Raises:
        ValueError: an unknown task, split or kind of file; a column that the data set lacks; a missing or unknown
            label; a text that is none; more texts than there are; a source for a rule-made task.
        FileNotFoundError: no such source, or no answer from the hub.

    Example:
        >>> load_texts("farm", "train", n_texts=1).texts
        ({'text': 'a bear cat cat fencing a'},)
    """
    if isinstance(task, str):
        if task not in TEXT_TASKS:
            raise ValueError(f"no task {task!r}: there are {', '.join(TEXT_TASKS)}, and TextTask makes others")
        task = TEXT_TASKS[task]
    if n_texts is not None and n_texts < 1:
        raise ValueError(f"n_texts must be at least 1, got {n_texts}")
    if task.topics:
        if source is not None:
            raise ValueError(f"the texts of {task.name!r} are made by rule, so it takes no source")
        return _rule_made(task, split, 512 if n_texts is None else n_texts, seed)
    with _no_progress_bars():
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


def _from_hub(task: TextTask, split: str) -> datasets.Dataset:
    assert task.hub is not None
    try:
        return datasets.load_dataset(task.hub, task.subset, split=split)
    except (OSError, DatasetsError) as error:
        raise FileNotFoundError(
            f"{task.hub} cannot be loaded from the Hugging Face hub ({_first_line(error)}): pass source=, a file or "
            "folder that holds it"
        ) from error


def _from_source(task: TextTask, split: str, source: Path) -> datasets.Dataset:
    if not source.exists():
        raise FileNotFoundError(f"no file or folder {source}")
    if source.is_dir():
        return _from_folder(split, source)
    # a text that reads "NA" or "12" is a text, and only an empty label is none
    csv: dict[str, Any] = {
        "converters": dict.fromkeys(task.columns, str),
        "keep_default_na": False,
        "na_values": {task.label_column: [""]},
    }
    readers = {
        ".csv": partial(datasets.Dataset.from_csv, **csv),
        ".tsv": partial(datasets.Dataset.from_csv, sep="\t", **csv),
        ".json": datasets.Dataset.from_json,
        ".jsonl": datasets.Dataset.from_json,
        ".parquet": datasets.Dataset.from_parquet,
    }
    if source.suffix.lower() not in readers:
        raise ValueError(f"{source} must be a folder or a file that ends in {', '.join(readers)}")
    read = readers[source.suffix.lower()]
    # The library knows a file it has read by path and time of change: a copy that keeps the time of another would be
    # taken for it. So nothing is kept. And it reads a path as a pattern, hence the escape.
    with tempfile.TemporaryDirectory() as cache:
        try:
            return read(glob.escape(str(source.resolve())), cache_dir=cache, keep_in_memory=True)
        except (DatasetsError, ValueError, StopIteration) as error:  # the last for an empty .json
            reason = _first_line(error.__cause__ or error)
            raise ValueError(f"{source} holds no examples that can be read ({reason})") from error


def _from_folder(split: str, folder: Path) -> datasets.Dataset:
    try:
        saved = datasets.load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} is not a folder that save_to_disk of datasets wrote") from error
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise ValueError(f"{folder} has the splits {list(saved)}, got {split!r}")
    return saved[split]


def _examples(task: TextTask, dataset: datasets.Dataset, origin: str, n_texts: int | None, seed: int) -> LabelledTexts:
    columns = [*task.columns, task.label_column]
    if absent := [column for column in columns if column not in dataset.column_names]:
        raise ValueError(
            f"{origin} has no column {absent[0]!r} for {task.name!r}, it has {dataset.column_names}: say which to read "
            "with dataclasses.replace(task, template=..., label_column=...)"
        )
    if n_texts is not None:
        if n_texts > len(dataset):
            raise ValueError(f"n_texts={n_texts}, but {origin} has {len(dataset)} texts")
        dataset = dataset.select(_shuffled(range(len(dataset)), torch.Generator().manual_seed(seed))[:n_texts])
    rows = dataset.select_columns(list(dict.fromkeys(columns)))[:]
    for column in task.columns:
        if wrong := [value for value in rows[column] if not isinstance(value, str)]:
            raise ValueError(f"column {column!r} of {origin} must hold texts, got {wrong[0]!r}")
    labels = rows[task.label_column]
    if any(label is None or label in (-1, "") for label in labels):  # before all others: one makes a csv's ints floats
        raise ValueError(f"{origin} has texts without a label, as test splits often do: load a split that has them all")
    texts = zip(*(rows[column] for column in task.columns), strict=True)
    return LabelledTexts(
        task,
        tuple(dict(zip(task.columns, text, strict=True)) for text in texts),
        tuple(_class_index(task, label, origin) for label in labels),
    )


def _class_index(task: TextTask, label: Any, origin: str) -> int:
    if is_whole(label):
        return label  # LabelledTexts refuses those that are no class
    if isinstance(label, str) and label.strip().casefold() in task.class_words:
        return task.class_words[label.strip().casefold()]
    raise ValueError(
        f"{origin} has the label {label!r}, which is neither a class index of {task.name!r} nor one of the words "
        f"{list(task.labels)}"
    )


def _require_classes(task: TextTask, labels: Sequence[int]) -> None:
    for label in labels:
        if not 0 <= label < task.n_classes:
            raise ValueError(f"labels of {task.name!r} must be from 0 to {task.n_classes - 1}, got {label}")


def _shuffled(indices: Sequence[int], generator: torch.Generator) -> list[int]:
    return [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    # the library warns when told otherwise than its environment variable says
    told = HF_DATASETS_DISABLE_PROGRESS_BARS is not None
    if told or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
