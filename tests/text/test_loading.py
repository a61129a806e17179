import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import datasets
import pandas as pd
import pytest
from datasets.exceptions import DatasetGenerationError

from mechicl.tasks.topics import TOPICS, topic_tokenizer
from mechicl.text import TEXT_TASKS, load_texts
from tests.text.test_classification import OPINIONS, examples_of

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


def as_rows(examples):
    return [{"id": i, "text": text, "label": label} for i, (text, label) in enumerate(examples)]


# ---- files ----
@pytest.mark.parametrize("kind", FILES)
def test_a_file_gives_its_texts_unchanged_and_nothing_else(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    path = tmp_path / f"a [1] *.{kind}"  # a path, not a pattern
    (tmp_path / f"a 1 b.{kind}").write_text("not this one")
    for rows in (ROWS, ROWS[::-1]):  # a file that took the place of another, with its time, is read anew
        FILES[kind](as_rows(rows), path)
        os.utime(path, ns=(10**18, 10**18))
        examples = load_texts(OPINIONS, "test", source=path)
        assert examples_of(examples) == rows
    assert all(list(text) == ["text"] for text in examples.texts)
    assert examples == load_texts(OPINIONS, "test", source=path.name)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("kind", FILES)
def test_two_text_columns_and_labels_as_words_in_any_case(kind, tmp_path):
    rows = [{"premise": "p", "hypothesis": "h", "gold": " NEITHER"}, {"premise": "q", "hypothesis": "", "gold": "true"}]
    FILES[kind](rows, tmp_path / f"cb.{kind}")
    examples = load_texts(replace(TEXT_TASKS["cb"], label_column="gold"), "train", source=tmp_path / f"cb.{kind}")
    assert examples.texts == ({"premise": "p", "hypothesis": "h"}, {"premise": "q", "hypothesis": ""})
    assert examples.labels == (2, 0)


@pytest.mark.parametrize("kind", FILES)
def test_label_words_that_are_numbers_or_truth_values(kind, tmp_path):
    path = tmp_path / f"rows.{kind}"
    stars = replace(OPINIONS, labels=(" 1", " 2", " 3"))
    FILES[kind](as_rows([("bad", "1"), ("good", "3"), ("fine", " 2")]), path)
    assert load_texts(stars, "train", source=path).labels == (0, 2, 1)
    assert load_texts(replace(stars, labels=(" 3", " 2", " 1")), "train", source=path).labels == (2, 0, 1)
    FILES[kind](as_rows([("right", True), ("wrong", False)]), path)
    assert load_texts(replace(TEXT_TASKS["cb"], template="{text}"), "train", source=path).labels == (0, 1)
    FILES[kind](as_rows([("bad", 3), ("good", 1)]), path)
    if kind in ("csv", "tsv"):
        assert load_texts(stars, "train", source=path).labels == (2, 0)
    else:
        with pytest.raises(ValueError, match=r"label 1, which is a class index of 'opinions' and the word of another"):
            load_texts(stars, "train", source=path)


@pytest.mark.parametrize("row", ["a,0,9", "a,0,,"])
def test_rows_longer_than_the_header_are_refused(row, tmp_path):
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        path = tmp_path / f"long.{kind}"
        path.write_text(f"text,label\n{row}\n{row}\n".replace(",", separator))
        with pytest.raises(ValueError, match=rf"long.{kind} has no .*rows have more fields than the header"):
            load_texts(OPINIONS, "train", source=path)


@pytest.mark.parametrize("format", [None, "torch", "pandas"])
def test_a_saved_data_set_is_read_whatever_format_it_gives_out(format, tmp_path):
    names = datasets.ClassLabel(names=["bad", "fine", "good"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    rows = [{"text": text, "label": label} for text, label in ROWS]
    saved: dict[Any, datasets.Dataset] = {
        "train": datasets.Dataset.from_list(rows, features).with_format(format),
        "test": datasets.Dataset.from_list(rows[:3], features),
    }
    saved["train"].save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(saved).save_to_disk(str(tmp_path / "several"))
    assert examples_of(load_texts(OPINIONS, "test", source=tmp_path / "one")) == ROWS
    for split, expected in (("train", ROWS), ("test", ROWS[:3])):
        assert examples_of(load_texts(OPINIONS, split, source=tmp_path / "several")) == expected
    with pytest.raises(ValueError, match=r"several has the splits \['train', 'test'\], got 'validation'"):
        load_texts(OPINIONS, "validation", source=tmp_path / "several")


@pytest.mark.parametrize(
    ("names", "expected"), [(["Good", "bad ", "FINE"], (2, 0, 1)), (["a", "bad", "good"], (0, 1, 2))]
)
def test_saved_class_names_are_read_if_all_are_label_words(names, expected, tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    rows = [{"text": name, "label": index} for index, name in enumerate(names)]
    datasets.Dataset.from_list(rows, features).save_to_disk(str(tmp_path / "saved"))
    assert load_texts(OPINIONS, "test", source=tmp_path / "saved").labels == expected


def test_a_subset_is_random_and_the_same_for_the_same_seed(tmp_path):
    rows = [(f"text {index}", index % 3) for index in range(60)]
    path = tmp_path / "many.jsonl"
    FILES["jsonl"](as_rows(rows), path)
    a, again, b = (load_texts(OPINIONS, "train", source=path, n_texts=20, seed=seed) for seed in (0, 0, 1))
    assert a == again
    assert set(examples_of(a)) != set(examples_of(b))
    assert len(set(examples_of(a))) == len(a) == 20
    assert set(examples_of(a)) <= set(rows)
    assert sorted(examples_of(load_texts(OPINIONS, "train", source=path, n_texts=60))) == sorted(rows)
    with pytest.raises(ValueError, match=r"n_texts=61, but .*many.jsonl has 60 texts"):
        load_texts(OPINIONS, "train", source=path, n_texts=61)


BAD = [
    ([{"sentence": "a", "label": 0}], r"no column 'text' for 'opinions', it has \['sentence', 'label'\]: .*template="),
    ([{"text": "a", "class": 0}], r"no column 'label' .*dataclasses.replace\(task, template=..., label_column=...\)"),
    ([{"text": "a", "label": 0}, {"text": "b", "label": -1}], "texts without a label, as test splits often do"),
    ([{"text": "a", "label": 0}, {"text": "b", "label": None}], "texts without a label"),
    ([{"text": "a", "label": "so-so"}], r"the label 'so-so', which is neither .* \[' bad', ' fine', ' good'\]"),
    ([{"text": "a", "label": True}], "the label '?True'?, which is neither"),
]
NO_TEXTS = [
    ([{"text": text, "label": 0} for text in texts], r"column 'text' of .* must contain texts, got")
    for texts in ([1, 2], ["a", None], [["a"], ["b"]])
]


@pytest.mark.parametrize(
    ("kind", "rows", "message"), [("csv", *bad) for bad in BAD] + [("jsonl", *bad) for bad in (*BAD, *NO_TEXTS)]
)
def test_files_that_do_not_fit_are_refused_with_reason_and_advice(kind, rows, message, tmp_path):
    FILES[kind](rows, tmp_path / f"bad.{kind}")
    with pytest.raises(ValueError, match=message):
        load_texts(OPINIONS, "train", source=tmp_path / f"bad.{kind}")


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("content", [b"", b"[]", b'{"text', b"text,label\na,0\nb,1,2,3\n", b"\xff\xfe\x00\x81"])
def test_a_file_that_cannot_be_read_is_named_in_one_line(kind, content, tmp_path):
    path = tmp_path / f"broken.{kind}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"broken.{kind} ") as raised:
        load_texts(OPINIONS, "train", source=path)
    assert len(str(raised.value).splitlines()) == 1


# ---- the hub ----
@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach it\nat all"), DatasetGenerationError()])
def test_errors_of_the_hub_are_one_line_with_advice(error, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FileNotFoundError, match=r"^stanfordnlp/sst2 cannot be loaded .*: pass source=") as raised:
        load_texts("sst2", "train")
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.__cause__ is error


def test_without_a_network_the_error_is_the_last_line(tmp_path):
    FILES["csv"](as_rows(ROWS), tmp_path / "here.csv")
    code = (
        "from mechicl.text import TextTask, load_texts; "
        "task = TextTask('opinions', '{text}', (' bad', ' fine', ' good'), hub='me/opinions'); "
        "load_texts(task, 'test', source='here.csv'); "
        "load_texts('mr', 'test')"
    )
    settings = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    run = subprocess.run(command, env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("FileNotFoundError: cornell-movie-review-data/rotten_tomatoes cannot be loaded from the")
    assert "pass source=" in last


@pytest.mark.parametrize(("args", "options", "message"), [
    (("sst3", "train"), {}, r"no task 'sst3': task must be one of sst2, .*leisure"),
    (("farm", "train"), {"n_texts": 0}, "n_texts"),
    (("farm", "test"), {}, r"'farm' has the splits \('train', 'validation'\), got 'test'"),
    (("farm", "train"), {"source": "farm.csv"}, "the texts of 'farm' are made by rule, so it takes no source"),
    ((OPINIONS, "train"), {"source": "nothing.csv"}, "no file or folder nothing.csv"),
    ((OPINIONS, "train"), {"source": "."}, "is neither a folder that save_to_disk of datasets wrote, nor"),
    ((OPINIONS, "train"), {"source": "texts.txt"}, r"texts.txt must be a folder or a file that ends in .csv, .tsv"),
])  # fmt: skip
def test_refused_arguments(args, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("a")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_texts(*args, **options)


# ---- rule-made tasks ----
MADE = [name for name, task in TEXT_TASKS.items() if task.topics]


def most_frequent_topics(text):
    """By a plain loop; several for the rare text of two halves."""
    counts = {topic: sum(word in words for word in text.split()) for topic, words in TOPICS.items()}
    return {topic for topic, count in counts.items() if count == max(counts.values())}


@pytest.mark.parametrize("name", MADE)
def test_rule_made_texts_are_labelled_by_their_most_frequent_topic(name):
    task, examples = TEXT_TASKS[name], load_texts(name, "train")
    assert examples.task is task
    assert len(examples) == 512
    for text, label in examples_of(examples):
        assert task.topics[label] in most_frequent_topics(text)
    counts = [examples.labels.count(label) for label in range(task.n_classes)]
    assert max(counts) - min(counts) <= 1
    # a written prompt is a sequence of the language
    tokenizer = topic_tokenizer()
    shown, expected = examples_of(examples)[:9], ["[START]"]
    for text, label in shown:
        expected += [*text.split(), task.labels[label].strip(), ";"]
    prompt = "".join(task.demonstration({"text": text}, label) for text, label in shown)
    assert tokenizer.convert_ids_to_tokens(tokenizer(prompt).input_ids) == expected
    assert tokenizer.unk_token not in expected


def test_no_two_seeds_or_splits_share_their_texts():
    made = [load_texts("town", split, n_texts=40, seed=seed) for split in ("train", "validation") for seed in range(4)]
    for a, b in itertools.combinations(made, 2):
        # texts are short, so that some come twice; of one seed's all would
        assert len({text["text"] for text in a.texts} & {text["text"] for text in b.texts}) < 20
    assert made[1] == load_texts(TEXT_TASKS["town"], "train", n_texts=40, seed=1)
