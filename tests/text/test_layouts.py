"""The six data sets of Bar Natan, Deutch and Magar, in small files with the layout of their repositories on the hub."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from mechicl.text import TEXT_TASKS, load_texts

TEXT, NUMBER = Value("string"), Value("int32")
PARQUET: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {  # folder of the files, columns, splits
    "sst2": ("data", {"idx": NUMBER, "sentence": TEXT, "label": ClassLabel(names=["negative", "positive"])},
             ("train", "validation", "test")),
    "mr": ("data", {"text": TEXT, "label": ClassLabel(names=["neg", "pos"])}, ("train", "validation", "test")),
    "agnews": ("data", {"text": TEXT, "label": ClassLabel(names=["World", "Sports", "Business", "Sci/Tech"])},
               ("train", "test")),
    "cb": ("cb", {"premise": TEXT, "hypothesis": TEXT, "idx": NUMBER,
                  "label": ClassLabel(names=["entailment", "contradiction", "neutral"])},
           ("train", "validation", "test")),
}  # fmt: skip
JSON_LINES = {  # names of the classes, files
    "sst5": (("very negative", "negative", "neutral", "positive", "very positive"), ("train", "dev", "test")),
    "subj": (("objective", "subjective"), ("train", "test")),
}
UNLABELLED = ("sst2", "cb")  # their test splits have the label -1


def text_of(column: str, split: str, label: int) -> str:
    return f'A "{column}" of {split}, no. {label}: naïve,\tNA '


def write_repository(name: str, folder: Path) -> None:
    if name in JSON_LINES:
        classes, files = JSON_LINES[name]
        for file in files:
            split = "validation" if file == "dev" else file
            rows = [{"text": text_of("text", split, i), "label": i, "label_text": c} for i, c in enumerate(classes)]
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return
    inside, columns, splits = PARQUET[name]
    (folder / inside).mkdir()
    config = TEXT_TASKS[name].subset or "default"
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split in splits:
        labels = range(columns["label"].num_classes)
        rows = [
            {c: text_of(c, split, i) if kind == TEXT else i for c, kind in columns.items()}
            | ({"label": -1} if split == "test" and name in UNLABELLED else {})
            for i in labels
        ]
        file = f"{inside}/{split}-00000-of-00001.parquet"
        Dataset.from_list(rows, features=Features(columns)).to_parquet(folder / file)
        lines += [f"  - split: {split}", f"    path: {inside}/{split}-*"]
    if config != "default":  # the other subsets of the repository
        lines += ["- config_name: axb", "  data_files:", "  - split: test", "    path: axb/test-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


@pytest.mark.parametrize("name", [*PARQUET, *JSON_LINES])
def test_each_data_set_loads_from_a_copy_of_its_repository_and_by_its_name(name: str, tmp_path, monkeypatch):
    folder, task = tmp_path / "copy", TEXT_TASKS[name]
    folder.mkdir()
    write_repository(name, folder)
    from_copy = {split: load_texts(name, split, source=folder) for split in task.splits}
    load = datasets.load_dataset

    def redirected(repository: str, *args: Any, **options: Any) -> Any:
        assert repository == task.hub
        return load(str(folder), *args, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", redirected)
    for split in task.splits:
        texts = load_texts(name, split)
        assert texts == from_copy[split]
        assert texts.labels == tuple(range(task.n_classes))
        assert texts.texts == tuple({c: text_of(c, split, i) for c in task.columns} for i in texts.labels)


def test_labels_mean_what_the_words_of_the_task_say():
    # the order of the classes of the repositories, against the words of the templates
    words = {name: [word.strip() for word in TEXT_TASKS[name].labels] for name in (*PARQUET, *JSON_LINES)}
    assert words == {
        "sst2": ["Negative", "Positive"], "mr": ["Negative", "Positive"],
        "agnews": ["World", "Sports", "Business", "Technology"], "cb": ["True", "False", "Neither"],
        "sst5": ["terrible", "bad", "neutral", "good", "great"], "subj": ["objective", "subjective"],
    }  # fmt: skip


def test_a_test_split_without_labels_and_a_wrong_folder_are_refused(tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "empty").mkdir()
    write_repository("cb", tmp_path / "copy")
    with pytest.raises(ValueError, match="has texts without a label"):
        load_texts("cb", "test", source=tmp_path / "copy")
    with pytest.raises(ValueError, match="nor a copy of the hub's repository aps/super_glue with the split 'train'"):
        load_texts("cb", "train", source=tmp_path / "empty")
    with pytest.raises(ValueError, match="with the split 'dev'"):
        load_texts("cb", "dev", source=tmp_path / "copy")
