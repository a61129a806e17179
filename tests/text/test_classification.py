import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace

import datasets
import pandas as pd
import pytest
import scipy.stats
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.tasks.topics import TOPICS, topic_tokenizer
from mechicl.text.classification import TEXT_TASKS, LabelledTexts, TextTask, load_texts

LEAST_P = 1e-3  # seeds are fixed: a right sampler fails for about one seed in a thousand
quick = settings(max_examples=60, deadline=None)

OPINIONS = TextTask("opinions", "Say: {text}\nIs:", (" bad", " fine", " good"), hub="somebody/opinions")
ROWS = [("awful", 0), ("so, so", 1), ('a "joy"', 2), ("NA", 0), ("12", 1), ("two\nlines", 2), ("été", 0)]
FILES = {
    "csv": lambda rows, path: write_csv(rows, path, ","),
    "tsv": lambda rows, path: write_csv(rows, path, "\t"),
    "json": lambda rows, path: path.write_text(json.dumps(rows)),
    "jsonl": lambda rows, path: path.write_text("".join(json.dumps(row) + "\n" for row in rows)),
    "parquet": lambda rows, path: pd.DataFrame(rows).to_parquet(path),
}


def write_csv(rows, path, separator):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)


def as_rows(examples, **columns):
    return [{"id": i, "text": text, "label": label, **columns} for i, (text, label) in enumerate(examples)]


def examples_of(labelled):
    return [(text["text"], label) for text, label in zip(labelled.texts, labelled.labels, strict=True)]


def labelled(labels, task=OPINIONS):
    return LabelledTexts(task, tuple({"text": f"text {index}"} for index in range(len(labels))), tuple(labels))


def made_with(**fields):
    return TextTask(**{"name": "mine", "template": "{text}:", "labels": (" a", " b"), "hub": "me/mine", **fields})


# ---- TextTask ----


def test_the_table_has_the_tasks_under_their_names():
    assert list(TEXT_TASKS) == ["sst2", "sst5", "mr", "subj", "agnews", "cb", "farm", "town", "home", "leisure"]
    assert all(task.name == name for name, task in TEXT_TASKS.items())
    hub = {name: (task.hub, task.subset, task.splits) for name, task in TEXT_TASKS.items() if task.hub}
    assert hub == {
        "sst2": ("stanfordnlp/sst2", None, ("train", "validation")),
        "sst5": ("SetFit/sst5", None, ("train", "test")),
        "mr": ("cornell-movie-review-data/rotten_tomatoes", None, ("train", "test")),
        "subj": ("SetFit/subj", None, ("train", "test")),
        "agnews": ("fancyzhx/ag_news", None, ("train", "test")),
        "cb": ("aps/super_glue", "cb", ("train", "validation")),
    }
    assert [task.n_demonstrations for task in TEXT_TASKS.values()] == [32, 32, 32, 32, 22, 19, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("name", "text", "written"),
    [
        ("sst2", {"sentence": "a {joy}"}, "Sentence: a {joy}\nLabel: Positive\n"),
        ("sst5", {"text": "hm"}, "Sentence: hm\nLabel: bad\n"),
        ("mr", {"text": "hm"}, "Review: hm\nSentiment: Positive\n"),
        ("subj", {"text": "hm"}, "Input: hm\nType: subjective\n"),
        (
            "agnews",
            {"text": "Golf."},
            "Classify the news articles into the categories of World, Sports, Business, and Technology.\n\n"
            "Article: Golf.\nAnswer: Sports\n",
        ),
        (
            "cb",
            {"premise": "It rains.", "hypothesis": "It is dry"},
            "It rains.\nQuestion: It is dry. True, False, or Neither?\nAnswer: False\n",
        ),
        ("farm", {"text": "oak the elm"}, "oak the elm blue ; "),
    ],
)
def test_examples_are_written_as_the_task_says(name, text, written):
    task = TEXT_TASKS[name]
    assert task.columns == tuple(text)
    assert task.demonstration(text, 1) == written
    assert written.startswith(task.write(text))
    assert written[len(task.write(text)) :] == task.labels[1] + task.separator
    assert task.write({**text, "other": "column"}) == task.write(text)


def test_a_column_that_the_template_shows_twice_is_one_column():
    assert made_with(template="{b} {a}, {b:.3}:").columns == ("b", "a")
    assert made_with(template="{b} {a}, {b:.3}:").write({"a": "x", "b": "words"}) == "words x, wor:"
    assert made_with(template="{{no}} {a column}").write({"a column": "x"}) == "{no} x"


@pytest.mark.parametrize("label", [-1, 2])
def test_a_demonstration_needs_a_label_that_is_a_class(label):
    with pytest.raises(ValueError, match=f"labels of 'sst2' must be from 0 to 1, got {label}"):
        TEXT_TASKS["sst2"].demonstration({"sentence": ""}, label)
    with pytest.raises(KeyError, match="sentence"):
        TEXT_TASKS["sst2"].demonstration({"text": ""}, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": "Label:"}, r"the template of 'mine' has no \{column\}: 'Label:'"),
        ({"template": "{{text}}"}, r"has no \{column\}"),
        ({"template": "{} {text}"}, "must be names of columns, got '{} {text}'"),
        ({"template": "{0}"}, "must be names of columns"),
        ({"template": "{text.upper}"}, "must be names of columns"),
        ({"template": "{text[0]}"}, "must be names of columns"),
        ({"template": "{text:d}"}, "must be names of columns"),
        ({"template": "{text:{width}}"}, "must be names of columns"),
        ({"template": "{text"}, "expected '}'"),
        ({"labels": (" a",)}, r"at least two labels, none of them blank, got \(' a',\)"),
        ({"labels": (" a", " ")}, "none of them blank"),
        ({"labels": (" a", " b", " a")}, "must differ in more than case and space"),
        ({"labels": (" a", "A")}, "must differ in more than case and space"),
        ({"hub": None}, "'mine' needs a name on the hub or topics, and not both"),
        ({"topics": ("birds", "trees")}, "'mine' needs a name on the hub or topics, and not both"),
        ({"hub": None, "topics": ("birds", "tree")}, r"unknown topics \['tree'\]: there are \['animals'"),
        ({"hub": None, "topics": ("birds", "trees", "body")}, "has 3 topics for 2 labels"),
        ({"hub": None, "topics": ("birds", "trees"), "template": "{a} {b}"}, r"one text, got the columns \('a', 'b'\)"),
        ({"n_demonstrations": -1}, "n_demonstrations must be an int of at least 0, got -1"),
    ],
)
def test_tasks_that_make_no_sense_are_refused_with_the_reason(fields, message):
    with pytest.raises(ValueError, match=message):
        made_with(**fields)


# ---- LabelledTexts ----


def test_examples_are_taken_in_the_order_asked_for():
    examples = labelled([0, 1, 2, 1])
    assert len(examples) == 4
    assert examples_of(examples.take([3, 0, 3])) == [("text 3", 1), ("text 0", 0), ("text 3", 1)]
    assert len(examples.take([])) == 0
    with pytest.raises(IndexError):
        examples.take([4])


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        ([{"text": "a"}], [0, 1], "got 1 texts and 2 labels"),
        ([{"text": "a"}, {"text": "b"}], [0, 3], "labels of 'opinions' must be from 0 to 2, got 3"),
        ([{"text": "a"}], [-1], "must be from 0 to 2, got -1"),
        (
            [{"text": "a"}, {"word": "b"}],
            [0, 1],
            r"text 1 lacks the columns \['text'\] of 'opinions', it has \['word'\]",
        ),
    ],
)
def test_malformed_examples_are_refused_with_the_reason(texts, labels, message):
    with pytest.raises(ValueError, match=message):
        LabelledTexts(OPINIONS, tuple(texts), tuple(labels))


def can_be_balanced(labels, n):
    """Whether there are counts of the classes, all at hand and no two more than one apart, by trying all."""
    at_hand = [labels.count(label) for label in range(3)]
    for counts in itertools.product(*(range(count + 1) for count in at_hand)):
        if sum(counts) == n and max(counts) - min(counts) <= 1:
            return True
    return False


@given(st.lists(st.integers(0, 2), max_size=12), st.data(), st.integers(0, 2**31))
@quick
def test_a_balanced_draw_has_as_equal_counts_as_can_be(labels, data, seed):
    n = data.draw(st.integers(0, len(labels)))
    examples = labelled(labels)
    if not can_be_balanced(labels, n):
        with pytest.raises(ValueError, match=f"a balanced draw of {n} takes .* pass balanced=False"):
            examples.draw(n, seed=seed)
        return
    drawn = examples.draw(n, seed=seed)
    counts = [drawn.labels.count(label) for label in range(3)]
    assert sum(counts) == len(drawn) == n
    assert max(counts) - min(counts) <= 1
    assert len(set(examples_of(drawn))) == n  # without replacement
    assert set(examples_of(drawn)) <= set(examples_of(examples))
    assert drawn == examples.draw(n, seed=seed)


@given(st.lists(st.integers(0, 2), max_size=12), st.data(), st.integers(0, 2**31))
@quick
def test_any_draw_and_both_parts_of_a_split_hold_each_example_once(labels, data, seed):
    n = data.draw(st.integers(0, len(labels)))
    examples = labelled(labels)
    drawn = examples.draw(n, seed=seed, balanced=False)
    assert len(set(examples_of(drawn))) == len(drawn) == n
    assert set(examples_of(drawn)) <= set(examples_of(examples))
    assert drawn == examples.draw(n, seed=seed, balanced=False)
    first, second = examples.split(n, seed=seed)
    assert (len(first), len(second)) == (n, len(labels) - n)
    assert sorted(examples_of(first) + examples_of(second)) == sorted(examples_of(examples))
    assert (first, second) == examples.split(n, seed=seed)


def test_every_example_every_class_and_every_order_is_as_likely():
    examples = labelled([0, 0, 0, 1, 1, 2])
    orders, larger, others = Counter(), Counter(), Counter()
    for seed in range(1200):
        drawn = examples.draw(4, seed=seed)
        orders[drawn.labels.index(2)] += 1 if drawn.labels.count(2) == 1 else 0
        larger[max(range(3), key=drawn.labels.count)] += 1
        others[examples.draw(1, seed=seed, balanced=False).texts[0]["text"]] += 1
    assert scipy.stats.chisquare([orders[place] for place in range(4)]).pvalue > LEAST_P
    assert larger[2] == 0  # has one example only, so another class has the second
    assert scipy.stats.chisquare([larger[0], larger[1]]).pvalue > LEAST_P
    assert len(others) == 6
    assert scipy.stats.chisquare(list(others.values())).pvalue > LEAST_P


@pytest.mark.parametrize(
    ("labels", "n", "message"),
    [
        ([0, 0, 2], 3, r"draw of 3 takes 1 examples of each class, and class 1 \(' fine'\) has 0: draw fewer"),
        ([0, 0, 0, 1, 2], 5, r"draw of 5 takes 1 or 2 examples of each class, and class 1 \(' fine'\) has 1: "),
        ([0, 1, 2], 4, "n must be from 0 to 3, the number of examples, got 4"),
        ([0, 1, 2], -1, "n must be from 0 to 3, the number of examples, got -1"),
    ],
)
def test_a_draw_of_more_than_there_is_is_refused_with_the_reason(labels, n, message):
    with pytest.raises(ValueError, match=message):
        labelled(labels).draw(n, seed=0)


@pytest.mark.parametrize("n_first", [-1, 4])
def test_a_part_larger_than_the_whole_is_refused(n_first):
    with pytest.raises(ValueError, match=f"n_first must be from 0 to 3, the number of examples, got {n_first}"):
        labelled([0, 1, 2]).split(n_first, seed=0)


@given(st.lists(st.integers(0, 2), max_size=12))
@quick
def test_flipped_labels_are_never_the_true_ones_and_come_back_after_a_round(labels):
    examples = labelled(labels)
    flipped = examples.relabelled("flipped")
    assert flipped.texts == examples.texts
    assert all(new == {0: 1, 1: 2, 2: 0}[old] for new, old in zip(flipped.labels, labels, strict=True))
    assert flipped.relabelled("flipped").relabelled("flipped") == examples
    assert examples.relabelled("true") == examples


def test_random_labels_are_uniform_whatever_the_true_ones():
    examples = labelled([0] * 1500 + [2] * 1500)
    random = examples.relabelled("random", seed=3)
    assert random.texts == examples.texts
    for part in (random.labels[:1500], random.labels[1500:]):
        assert scipy.stats.chisquare([part.count(label) for label in range(3)]).pvalue > LEAST_P
    assert random == examples.relabelled("random", seed=3)
    assert random != examples.relabelled("random", seed=4)


# ---- load_texts: files ----


@pytest.mark.parametrize("kind", FILES)
def test_a_file_gives_its_texts_as_they_stand_and_nothing_else(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    path = tmp_path / f"a [1] *.{kind}"  # a path, not a pattern
    FILES[kind](as_rows(ROWS), path)
    (tmp_path / f"a 1 b.{kind}").write_text("not this one")
    examples = load_texts(OPINIONS, "test", source=path)
    assert examples_of(examples) == ROWS
    assert all(list(text) == ["text"] for text in examples.texts)
    assert examples == load_texts(OPINIONS, "test", source=str(path))
    assert list((tmp_path / "cache").iterdir()) == []
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize("kind", FILES)
def test_labels_may_be_words_in_any_case(kind, tmp_path):
    rows = [{"text": text, "label": label} for text, label in [("a", "Bad"), ("b", " GOOD "), ("c", "fine")]]
    FILES[kind](rows, tmp_path / f"words.{kind}")
    assert examples_of(load_texts(OPINIONS, "train", source=tmp_path / f"words.{kind}")) == [
        ("a", 0),
        ("b", 2),
        ("c", 1),
    ]


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_took_the_place_of_another_is_read_anew(kind, tmp_path):
    path = tmp_path / f"same.{kind}"
    for rows in (ROWS, ROWS[::-1]):
        FILES[kind](as_rows(rows), path)
        os.utime(path, ns=(10**18, 10**18))
        assert examples_of(load_texts(OPINIONS, "train", source=path)) == rows


def test_a_file_is_found_from_the_folder_one_is_in(tmp_path, monkeypatch):
    FILES["csv"](as_rows(ROWS), tmp_path / "here.csv")
    monkeypatch.chdir(tmp_path)
    assert examples_of(load_texts(OPINIONS, "train", source="here.csv")) == ROWS


def test_two_text_columns_and_a_label_of_another_name(tmp_path):
    rows = [{"premise": "p", "hypothesis": "h", "gold": "neither"}, {"premise": "q", "hypothesis": "", "gold": "true"}]
    FILES["csv"](rows, tmp_path / "cb.csv")
    task = replace(TEXT_TASKS["cb"], label_column="gold")
    examples = load_texts(task, "train", source=tmp_path / "cb.csv")
    assert examples.texts == ({"premise": "p", "hypothesis": "h"}, {"premise": "q", "hypothesis": ""})
    assert examples.labels == (2, 0)


@pytest.mark.parametrize("format", [None, "torch", "pandas"])
def test_a_saved_data_set_is_read_whatever_format_it_gives_out(format, tmp_path):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "fine", "good"])}
    )
    rows = [{"text": text, "label": label} for text, label in ROWS]
    datasets.Dataset.from_list(rows, features).with_format(format).save_to_disk(str(tmp_path / "saved"))
    assert examples_of(load_texts(OPINIONS, "train", source=tmp_path / "saved")) == ROWS


def test_a_folder_of_splits_gives_the_one_asked_for(tmp_path):
    splits = {"train": ROWS[:3], "test": ROWS[3:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(as_rows(rows)) for name, rows in splits.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    for name, rows in splits.items():
        assert examples_of(load_texts(OPINIONS, name, source=tmp_path / "saved")) == rows
    with pytest.raises(ValueError, match=r"saved has the splits \['train', 'test'\], got 'validation'"):
        load_texts(OPINIONS, "validation", source=tmp_path / "saved")


def test_a_subset_is_random_and_the_same_for_the_same_seed(tmp_path):
    rows = [(f"text {index}", index % 3) for index in range(60)]
    FILES["jsonl"](as_rows(rows), tmp_path / "many.jsonl")
    a, again, b = (load_texts(OPINIONS, "train", source=tmp_path / "many.jsonl", n_texts=20, seed=s) for s in (0, 0, 1))
    assert a == again
    assert set(examples_of(a)) != set(examples_of(b))
    for subset in (a, b):
        assert len(set(examples_of(subset))) == len(subset) == 20
        assert set(examples_of(subset)) <= set(rows)
    everything = load_texts(OPINIONS, "train", source=tmp_path / "many.jsonl", n_texts=60)
    assert sorted(examples_of(everything)) == sorted(rows)
    with pytest.raises(ValueError, match=r"n_texts=61, but .*many.jsonl has 60 texts"):
        load_texts(OPINIONS, "train", source=tmp_path / "many.jsonl", n_texts=61)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"sentence": "a", "label": 0}],
            r"no column 'text' for 'opinions', it has \['sentence', 'label'\]: .*template=",
        ),
        (
            [{"text": "a", "class": 0}],
            r"no column 'label' .*dataclasses.replace\(task, template=..., label_column=...\)",
        ),
        ([{"text": "a", "label": 0}, {"text": "b", "label": 3}], "must be from 0 to 2, got 3"),
        ([{"text": "a", "label": 0}, {"text": "b", "label": -1}], "texts without a label, as test splits often do"),
        ([{"text": "a", "label": 0}, {"text": "b", "label": None}], "texts without a label"),
        ([{"text": "a", "label": "bad"}, {"text": "b", "label": ""}], "texts without a label"),
        ([{"text": "a", "label": "so-so"}], r"the label 'so-so', which is neither .* \[' bad', ' fine', ' good'\]"),
        ([{"text": "a", "label": 0.5}], "the label 0.5, which is neither"),
        ([{"text": "a", "label": True}], "the label True, which is neither"),
    ],
)
@pytest.mark.parametrize("kind", FILES)
def test_files_that_do_not_fit_are_refused_with_the_reason_and_the_cure(kind, rows, message, tmp_path):
    FILES[kind](rows, tmp_path / f"bad.{kind}")
    with pytest.raises(ValueError, match=message):
        load_texts(OPINIONS, "train", source=tmp_path / f"bad.{kind}")


@pytest.mark.parametrize("texts", [[1, 2], ["a", None], [["a"], ["b"]]])
@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_texts_that_are_none_are_refused(kind, texts, tmp_path):
    FILES[kind]([{"text": text, "label": 0} for text in texts], tmp_path / f"bad.{kind}")
    with pytest.raises(ValueError, match=r"column 'text' of .* must hold texts, got"):
        load_texts(OPINIONS, "train", source=tmp_path / f"bad.{kind}")


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"[]", b"text,label\n", b'{"text', b"text,label\na,0\nb,1,2,3\n", b"\xff\xfe\x00\x81"]
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(kind, content, tmp_path):
    path = tmp_path / f"broken.{kind}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"broken.{kind} ") as raised:
        load_texts(OPINIONS, "train", source=path)
    assert len(str(raised.value).splitlines()) == 1


def test_a_source_that_is_none_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nothing.csv"):
        load_texts(OPINIONS, "train", source=tmp_path / "nothing.csv")
    with pytest.raises(FileNotFoundError, match="is not a folder that save_to_disk of datasets wrote"):
        load_texts(OPINIONS, "train", source=tmp_path)
    (tmp_path / "texts.txt").write_text("a")
    with pytest.raises(
        ValueError, match=r"texts.txt must be a folder or a file that ends in .csv, .tsv, .json, .jsonl"
    ):
        load_texts(OPINIONS, "train", source=tmp_path / "texts.txt")


# ---- load_texts: the hub ----


def test_the_hub_is_asked_for_the_data_set_its_subset_and_the_split(monkeypatch, capfd):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        assert datasets.are_progress_bars_disabled()
        return datasets.Dataset.from_list([{"premise": "p", "hypothesis": "h", "idx": 4, "label": 2}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    examples = load_texts("cb", "validation")
    assert examples == LabelledTexts(TEXT_TASKS["cb"], ({"premise": "p", "hypothesis": "h"},), (2,))
    assert asked == [(("aps/super_glue", "cb"), {"split": "validation"})]
    assert not datasets.are_progress_bars_disabled()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach it\nat all"),
        DatasetNotFoundError("no such data set"),
        DatasetGenerationError(),
        OSError("no space left"),
    ],
)
def test_what_goes_wrong_with_the_hub_is_said_in_one_line_with_the_cure(error, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FileNotFoundError, match=r"^stanfordnlp/sst2 cannot be loaded .*: pass source=") as raised:
        load_texts("sst2", "train")
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.__cause__ is error
    assert not datasets.are_progress_bars_disabled()


def test_without_a_network_the_library_itself_ends_in_that_line(tmp_path):
    code = "from mechicl.text.classification import load_texts; load_texts('mr', 'test')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("FileNotFoundError: cornell-movie-review-data/rotten_tomatoes cannot be loaded from the")
    assert "pass source=" in last


def test_the_users_word_on_progress_bars_stands(tmp_path):
    FILES["csv"](as_rows(ROWS), tmp_path / "here.csv")
    code = (
        "import datasets; from mechicl.text.classification import TextTask, load_texts; "
        "task = TextTask('opinions', '{text}', (' bad', ' fine', ' good'), hub='somebody/opinions'); "
        "load_texts(task, 'test', source='here.csv'); "
        "assert not datasets.are_progress_bars_disabled()"
    )
    environment = {**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "0", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "examples" in run.stderr


def test_unknown_tasks_and_impossible_numbers_are_refused():
    with pytest.raises(ValueError, match=r"no task 'sst3': there are sst2, sst5, .*leisure, and TextTask makes others"):
        load_texts("sst3", "train")
    for n_texts in (0, -1):
        with pytest.raises(ValueError, match=f"n_texts must be at least 1, got {n_texts}"):
            load_texts("farm", "train", n_texts=n_texts)


# ---- load_texts: rule-made tasks ----

MADE = [name for name, task in TEXT_TASKS.items() if task.topics]


def most_frequent_topic(text):
    """By a plain loop; a tie would be a mistake of the rule, but for the rare text of two halves."""
    best, most = set(), 0
    for topic, words in TOPICS.items():
        count = sum(word in words for word in text.split())
        if count > most:
            best, most = {topic}, count
        elif count == most:
            best.add(topic)
    return best


@pytest.mark.parametrize("name", MADE)
def test_rule_made_texts_are_labelled_by_their_most_frequent_topic(name):
    task = TEXT_TASKS[name]
    examples = load_texts(name, "train")
    assert examples.task is task
    assert len(examples) == 512
    assert all(
        task.topics[label] in most_frequent_topic(text["text"])
        for text, label in zip(examples.texts, examples.labels, strict=True)
    )
    counts = [examples.labels.count(label) for label in range(task.n_classes)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("name", MADE)
def test_a_written_prompt_is_a_sequence_of_the_language(name):
    task = TEXT_TASKS[name]
    *shown, query = examples_of(load_texts(name, "train", n_texts=9))
    prompt = "".join(task.demonstration({"text": text}, label) for text, label in shown)
    prompt += task.write({"text": query[0]})
    tokenizer = topic_tokenizer()
    expected = ["[START]"]
    for text, label in shown:
        expected += [*text.split(), task.labels[label].strip(), ";"]
    expected += query[0].split()
    assert tokenizer.convert_ids_to_tokens(tokenizer(prompt).input_ids) == expected
    assert tokenizer.unk_token not in expected
    # in pieces too: a label is one token, and so is the separator
    for piece in (*task.labels, task.separator):
        assert len(tokenizer(piece, add_special_tokens=False).input_ids) == 1


def test_no_two_seeds_or_splits_share_their_texts():
    made = {
        (split, seed): load_texts("town", split, n_texts=40, seed=seed)
        for split in ("train", "validation")
        for seed in range(4)
    }
    for (_, a), (_, b) in itertools.combinations(made.items(), 2):
        # texts are short, so that some come twice; of one seed's all would
        assert len({text["text"] for text in a.texts} & {text["text"] for text in b.texts}) < 20
    assert made["train", 1] == load_texts(TEXT_TASKS["town"], "train", n_texts=40, seed=1)


def test_rule_made_tasks_have_their_splits_and_no_source():
    with pytest.raises(ValueError, match=r"'farm' has the splits \('train', 'validation'\), got 'test'"):
        load_texts("farm", "test")
    with pytest.raises(ValueError, match="the texts of 'farm' are made by rule, so it takes no source"):
        load_texts("farm", "train", source="farm.csv")


def test_a_rule_made_task_of_ones_own():
    task = TextTask("sea", "Text: {words}.", (" fish", " bird"), topics=("birds", "metals"), splits=("a", "b"))
    examples = load_texts(task, "b", n_texts=5)
    assert all(list(text) == ["words"] for text in examples.texts)
