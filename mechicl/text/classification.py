"""Text classification tasks: a table of data sets, how prompts write their examples, and labelled examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from string import Formatter
from typing import Literal

import torch

from mechicl.base.arguments import Natural, check_fields, checked
from mechicl.statistics import storable
from mechicl.tasks.topics import TOPICS

Labels = Literal["true", "flipped", "random", "one"]
"""Labels that demonstrations show."""


@storable
@dataclass(frozen=True)
class TextTask:
    """A text classification data set: its source, the template of an example, and the word for each class.

    Attributes:
        name: name in `TEXT_TASKS`.
        template: text of an example up to its label, with a `{column}` for each text column.
        labels: word of each class, in the order of class indices, as it follows the template: `" Negative"`, with the
            space.
        separator: text after the label of a demonstration.
        hub: name of the data set on the Hugging Face hub; None for a rule-made task.
        subset: name of the subset on the hub, if the data set has several.
        label_column: column of the labels.
        splits: the split for demonstrations and the split for queries.
        n_demonstrations: number of demonstrations before a query, as in the paper.
        topics: topic of each class of a rule-made task, a name of `mechicl.tasks.topics`; empty otherwise.

    Source: the templates, labels and numbers of demonstrations of `TEXT_TASKS` follow Dai et al. 2023 ("Why Can GPT
    Learn In-Context?"), appendix.

    Example:
        >>> from mechicl.text import TEXT_TASKS
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
    n_demonstrations: Natural = 32
    topics: tuple[str, ...] = ()

    def __post_init__(self):
        check_fields(self)
        if not self.columns:
            raise ValueError(f"the template of {self.name!r} has no {{column}}: {self.template!r}")
        try:
            self.write(dict.fromkeys(self.columns, ""))
        except (KeyError, ValueError) as error:  # {}, {0}, {a.b}, {a[0]}, {a:{b}} or a format that is not for text
            raise ValueError(f"the fields of a template must be names of columns, got {self.template!r}") from error
        if self.n_classes < 2 or "" in self.class_words or len(self.class_words) < self.n_classes:
            words = "labels must be two or more, none of them blank, that differ in more than case and space"
            raise ValueError(f"{words}, got {self.labels}")
        if bool(self.hub) == bool(self.topics):
            raise ValueError(f"{self.name!r} needs a name on the hub or topics, and not both")
        if self.topics:
            if unknown := [topic for topic in self.topics if topic not in TOPICS]:
                raise ValueError(f"{self.name!r} has unknown topics {unknown}: there are {list(TOPICS)}")
            if len(self.topics) != self.n_classes or len(self.columns) != 1:
                counts = f"{len(self.topics)} topics for {self.n_classes} labels, and the columns {self.columns}"
                raise ValueError(f"{self.name!r} needs a topic for each label, and one column; it has {counts}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The text columns of the template, in its order."""
        fields = (field for _, field, _, _ in Formatter().parse(self.template) if field is not None)
        return tuple(dict.fromkeys(fields))

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    @property
    def class_words(self) -> dict[str, int]:
        """The classes by their labels, in lower case and without outer spaces."""
        return {label.strip().casefold(): index for index, label in enumerate(self.labels)}

    @checked
    def write(self, text: Mapping[str, str]) -> str:
        """Write an example without its label: the template filled with the example's text columns."""
        if missing := [name for name in self.columns if name not in text]:
            raise KeyError(f"text has no column {missing[0]!r}; it has {', '.join(map(repr, text))}")
        return self.template.format_map(text)

    @checked
    def demonstration(self, text: Mapping[str, str], label: int) -> str:
        """Write an example with the word of its label (a class index) and the separator; errors as for `write`."""
        require_classes(self, [label])
        return self.write(text) + self.labels[label] + self.separator


_NEWS = "Classify the news articles into the categories of World, Sports, Business, and Technology.\n\n"
_made = partial(TextTask, template="{text}", separator=" ; ", n_demonstrations=8)
_test = ("train", "test")

# fmt: off
TEXT_TASKS: dict[str, TextTask] = {task.name: task for task in (
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
)}
"""Templates and labels of every text task, by name."""
# fmt: on


@storable
@dataclass(frozen=True)
class LabelledTexts:
    """Examples of a task.

    Attributes:
        task: the task, with its template and label words.
        texts: for each example, a mapping of column to text.
        labels: class index of each example.

    Example:
        >>> from mechicl.text import load_texts
        >>> examples = load_texts("farm", "train", n_texts=100)
        >>> examples.draw(8, seed=0).labels.count(0)
        4
    """

    task: TextTask
    texts: tuple[Mapping[str, str], ...]
    labels: tuple[int, ...]

    def __post_init__(self):
        check_fields(self)
        if len(self.texts) != len(self.labels):
            raise ValueError(f"every text needs a label, got {len(self.texts)} texts and {len(self.labels)} labels")
        require_classes(self.task, self.labels)
        for index, text in enumerate(self.texts):
            if absent := [column for column in self.task.columns if column not in text]:
                raise ValueError(f"text {index} lacks the columns {absent} of {self.task.name!r}, it has {list(text)}")

    def __len__(self) -> int:
        return len(self.labels)

    @checked
    def take(self, indices: Sequence[int]) -> "LabelledTexts":
        """Return the examples with these indices, in this order."""
        return LabelledTexts(self.task, tuple(self.texts[i] for i in indices), tuple(self.labels[i] for i in indices))

    @checked
    def draw(self, n: int, *, seed: int, balanced: bool = True) -> "LabelledTexts":
        """Draw different examples at random, in random order.

        Args:
            n: number of examples.
            balanced: draw the same number of examples of each class, up to a difference of one; if False, all examples
                are equally likely.

        Raises:
            ValueError: more examples than there are, or a class with too few.
        """
        if not 0 <= n <= len(self):
            raise ValueError(f"n must be from 0 to {len(self)}, the number of examples, got {n}")
        generator = torch.Generator().manual_seed(seed)
        order = shuffled(range(len(self)), generator)
        if not balanced:
            return self.take(order[:n])
        # equal numbers of each class, and one more of some classes that have one more
        members: list[list[int]] = [[] for _ in self.task.labels]
        for index in order:
            members[self.labels[index]].append(index)
        least, n_larger = divmod(n, len(members))
        can_be_larger = [label for label, indices in enumerate(members) if len(indices) > least]
        smallest = min(range(len(members)), key=lambda label: len(members[label]))
        if len(members[smallest]) < least or len(can_be_larger) < n_larger:
            counts = f"{least}" if n_larger == 0 else f"{least} or {least + 1}"
            raise ValueError(
                f"a balanced draw of {n} takes {counts} examples of each class, and class {smallest} "
                f"({self.task.labels[smallest]!r}) has {len(members[smallest])}: draw fewer, load more texts, or pass "
                "balanced=False"
            )
        larger = shuffled(can_be_larger, generator)[:n_larger]
        drawn = [i for label, indices in enumerate(members) for i in indices[: least + (label in larger)]]
        return self.take(shuffled(drawn, generator))

    @checked
    def relabelled(self, labels: Labels, *, seed: int = 0) -> "LabelledTexts":
        """Return the same texts with other labels, for demonstrations whose labels carry other information.

        Args:
            labels: "true" keeps the labels, "flipped" takes the next class (cyclic), "random" draws uniform classes,
                "one" gives all texts the first class.
        """
        n, generator = self.task.n_classes, torch.Generator().manual_seed(seed)
        classes = {
            "true": self.labels,
            "flipped": [(label + 1) % n for label in self.labels],
            "random": torch.randint(n, (len(self),), generator=generator).tolist(),
            "one": [0] * len(self),
        }[labels]
        return LabelledTexts(self.task, self.texts, tuple(classes))


def require_classes(task: TextTask, labels: Sequence[int]) -> None:
    """Refuse labels that are not classes of a task."""
    for label in labels:
        if not 0 <= label < task.n_classes:
            raise ValueError(f"labels of {task.name!r} must be from 0 to {task.n_classes - 1}, got {label}")


def shuffled(indices: Sequence[int], generator: torch.Generator) -> list[int]:
    """Return indices in random order."""
    return [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
