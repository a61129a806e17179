"""One model on one task: the texts drawn, the fine-tuning chosen on them, accuracy, and results in files."""

import csv
from pathlib import Path

import pytest
import torch

from mechicl.analysis.finetuning import (
    FineTuning,
    compare_with_finetuning,
    draw_texts,
    measure_accuracy,
    study_task,
)
from mechicl.analysis.finetuning.text_tasks import TaskStudy
from mechicl.statistics import load_result
from mechicl.statistics.storage import encode
from mechicl.text import TEXT_TASKS, TextTask, text_shots, topic_tokenizer
from tests.text.models import reader

FARM = TEXT_TASKS["farm"]
OPINIONS = TextTask(
    "opinions", "{text}", (" red", " blue"), separator=" ; ", hub="somebody/opinions", n_demonstrations=4
)
RATES, EPOCHS = (0.1, 0.5), (1, 2)


def shown(texts):
    return [text["text"] for text in texts.texts]


def test_no_query_is_a_demonstration_and_demonstrations_are_balanced():
    for seed in range(5):
        texts = draw_texts(FARM, n_demonstrations=8, n_held_out=30, n_queries=40, seed=seed)
        known = set(shown(texts.demonstrations))
        assert not known & set(shown(texts.held_out))
        assert not (known | set(shown(texts.held_out))) & set(shown(texts.queries))
        assert len(set(shown(texts.held_out))) == len(texts.held_out) == 30
        assert len(set(shown(texts.queries))) == len(texts.queries) == 40
        assert sorted(texts.demonstrations.labels) == [0] * 4 + [1] * 4


def write(path: Path, rows) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def test_texts_from_two_files(tmp_path):
    words = ["oak", "pine", "elm", "ash", "fox", "dog"]
    first = write(tmp_path / "a.csv", [(f"cat {word}", i % 2) for i, word in enumerate(words)])
    second = write(tmp_path / "b.csv", [("oak oak", 1), ("cat oak", 0), ("cow cow", 0)])
    texts = draw_texts(OPINIONS, n_held_out=50, n_queries=50, seed=0, source=(first, second))
    assert len(texts.demonstrations) == 4
    assert len(texts.held_out) == 2  # all others
    assert set(shown(texts.queries)) == {"oak oak", "cow cow"}
    assert set(shown(texts.held_out)) | set(shown(texts.demonstrations)) == {f"cat {word}" for word in words}


@pytest.mark.parametrize(("labels", "message"), [
    ([0, 0, 0, 0], r"class 1 \(' blue'\) has 0"),
    ([0, 1, 0, 1], "'opinions' has 0 held-out texts and 0 to measure on"),
])  # fmt: skip
def test_too_few_texts(labels, message, tmp_path):
    path = write(tmp_path / "a.csv", zip(("cat", "dog", "cow", "fox"), labels, strict=True))
    with pytest.raises(ValueError, match=message):
        draw_texts(OPINIONS, seed=0, source=(path, path))


@pytest.fixture(scope="module")
def texts():
    return draw_texts(FARM, n_demonstrations=4, n_held_out=6, n_queries=5, seed=0)


@pytest.fixture(scope="module")
def study(texts) -> TaskStudy:
    return study_task(
        reader(), topic_tokenizer(), texts, methods=("plain", "per_layer"),
        search={"learning_rates": RATES, "epochs": EPOCHS}, seed=3,
    )  # fmt: skip


def test_fine_tuning_is_chosen_on_held_out_queries_and_measured_on_others(texts, study):
    model, tokenizer = reader(), topic_tokenizer()
    held_out = text_shots(tokenizer, texts.demonstrations, texts.held_out)
    shots = text_shots(tokenizer, texts.demonstrations, texts.queries)
    for method in ("plain", "per_layer"):
        means = {}  # by a loop over the settings
        for tuning in [FineTuning(rate, epochs, method=method) for rate in RATES for epochs in EPOCHS]:
            comparison = compare_with_finetuning(model, held_out, tuning)
            means[tuning] = (comparison.finetuned_score.mean().item(), -comparison.finetuned_loss.mean().item())
        assert study.tunings[method] == max(means, key=lambda tuning: means[tuning])
        expected = compare_with_finetuning(model, shots, study.tunings[method], seed=3)
        torch.testing.assert_close(study.comparisons[method].update_similarity, expected.update_similarity)
        torch.testing.assert_close(study.samples()[f"{method}_score"], expected.finetuned_score)
    assert (study.task, study.seed, study.n_demonstrations) == ("farm", 3, 4)


def test_accuracy_by_demonstrations_is_that_of_prompts_written_by_hand():
    model, tokenizer = reader(), topic_tokenizer()
    texts = draw_texts(FARM, n_demonstrations=6, n_held_out=2, n_queries=12, seed=1)
    measured = measure_accuracy(model, tokenizer, texts, (0, 1, 6))
    choices = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in FARM.labels]
    assert (measured.tasks, measured.labels, measured.shots) == (("farm",), ("true",), (0, 1, 6))
    for n, number in enumerate((0, 1, 6)):
        for i, (text, label) in enumerate(zip(texts.queries.texts, texts.queries.labels, strict=True)):
            pairs = zip(texts.demonstrations.texts[:number], texts.demonstrations.labels[:number], strict=True)
            prompt = "".join(FARM.demonstration(*pair) for pair in pairs) + FARM.write(text)
            logits = model(torch.tensor([tokenizer(prompt).input_ids]))[0, -1, choices]
            assert measured.accuracy[0, 0, n, i] == (logits.argmax() == label)
            log_probability = logits.double().log_softmax(-1)[label]
            assert measured.log_probability[0, 0, n, i] == pytest.approx(log_probability.item(), abs=1e-5)


def test_drawn_texts_in_files(texts, tmp_path):
    loaded = load_result(texts.save(tmp_path))
    assert encode(loaded, "", {}) == encode(texts, "", {})
    assert str(loaded) == str(texts)
