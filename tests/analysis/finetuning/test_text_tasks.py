"""One model on one task: which texts are drawn, what is chosen on which of them, and accuracy by demonstrations."""

import csv
from pathlib import Path

import pytest
import torch

from mechicl.analysis import FineTuning, compare_with_finetuning, draw_texts, measure_accuracy, study_task
from mechicl.text import TEXT_TASKS, TextTask, text_shots, topic_tokenizer
from tests.text.models import reader

FARM = TEXT_TASKS["farm"]
OPINIONS = TextTask(
    "opinions", "{text}", (" red", " blue"), separator=" ; ", hub="somebody/opinions", n_demonstrations=4
)


def shown(texts):
    return [text["text"] for text in texts.texts]


def test_no_query_is_a_demonstration_and_demonstrations_are_balanced():
    for seed in range(5):
        texts = draw_texts(FARM, n_demonstrations=8, n_held_out=30, n_queries=40, seed=seed)
        known = set(shown(texts.demonstrations))
        assert not known & set(shown(texts.held_out))
        assert not known & set(shown(texts.queries))
        assert (len(texts.held_out), len(texts.queries)) == (30, 40)
        assert sorted(texts.demonstrations.labels) == [0] * 4 + [1] * 4


def test_a_seed_gives_the_same_texts_and_another_one_others():
    a, again, b = (draw_texts(FARM, seed=seed) for seed in (0, 0, 1))
    assert shown(a.demonstrations) == shown(again.demonstrations) != shown(b.demonstrations)
    assert shown(a.queries) == shown(again.queries) != shown(b.queries)
    assert len(a.demonstrations) == FARM.n_demonstrations


def write(path: Path, rows) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def test_texts_from_two_files(tmp_path):
    first = write(
        tmp_path / "a.csv",
        [(f"cat {word}", i % 2) for i, word in enumerate(["oak", "pine", "elm", "ash", "fox", "dog"])],
    )
    second = write(tmp_path / "b.csv", [("oak oak", 1), ("cat oak", 0), ("cow cow", 0)])
    texts = draw_texts(OPINIONS, n_held_out=50, n_queries=50, seed=0, source=(first, second))
    assert len(texts.demonstrations) == 4
    assert len(texts.held_out) == 2  # all that are left
    assert set(shown(texts.queries)) <= {"oak oak", "cat oak", "cow cow"}
    assert set(shown(texts.held_out)) | set(shown(texts.demonstrations)) == {
        f"cat {w}" for w in ["oak", "pine", "elm", "ash", "fox", "dog"]
    }


def test_an_empty_class_is_named(tmp_path):
    path = write(tmp_path / "a.csv", [("cat", 0), ("dog", 0), ("cow", 0), ("fox", 0)])
    with pytest.raises(ValueError, match=r"class 1 \(' blue'\) has 0"):
        draw_texts(OPINIONS, seed=0, source=(path, path))


def test_nothing_left_to_choose_by_is_said(tmp_path):
    path = write(tmp_path / "a.csv", [("cat", 0), ("dog", 1), ("cow", 0), ("fox", 1)])
    with pytest.raises(ValueError, match="'opinions' has 0 texts to choose by and 0 to measure on"):
        draw_texts(OPINIONS, seed=0, source=(path, path))


def test_fine_tuning_is_chosen_on_held_out_queries_and_measured_on_the_others():
    model, tokenizer = reader(), topic_tokenizer()
    texts = draw_texts(FARM, n_demonstrations=4, n_held_out=6, n_queries=5, seed=0)
    options = {"learning_rates": (0.1, 0.5), "epochs": (1, 2), "seed": 3}
    study = study_task(model, tokenizer, texts, methods=("plain", "per_layer"), other_labels=("flipped",), **options)
    held_out = text_shots(tokenizer, texts.demonstrations, texts.held_out)
    shots = text_shots(tokenizer, texts.demonstrations, texts.queries)
    for method in ("plain", "per_layer"):
        found = {}  # by a loop over the settings
        for rate in (0.1, 0.5):
            for epochs in (1, 2):
                tuning = FineTuning(rate, epochs, method=method)
                of = compare_with_finetuning(model, held_out, tuning)
                found[tuning] = (of.finetuned_score.mean().item(), -of.finetuned_loss.mean().item())
        assert study.tunings[method] == max(found, key=lambda tuning: found[tuning])
        expected = compare_with_finetuning(model, shots, study.tunings[method], seed=3)
        torch.testing.assert_close(study.comparisons[method].update_similarity, expected.update_similarity)
        assert len(study.comparisons[method].finetuned_score) == 5
    wrong = text_shots(tokenizer, texts.demonstrations.relabelled("flipped"), texts.queries)
    expected = compare_with_finetuning(model, wrong, study.tunings["plain"], seed=3)
    torch.testing.assert_close(study.with_other_labels["flipped"].finetuned_loss, expected.finetuned_loss)
    assert (study.task, study.seed, study.n_demonstrations) == ("farm", 3, 4)


def test_accuracy_by_demonstrations_is_that_of_prompts_written_by_hand():
    model, tokenizer = reader(), topic_tokenizer()
    texts = draw_texts(FARM, n_demonstrations=6, n_held_out=2, n_queries=12, seed=1)
    found = measure_accuracy(model, tokenizer, texts, (0, 1, 6))
    choices = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in FARM.labels]
    for number in (0, 1, 6):
        for i, (text, label) in enumerate(zip(texts.queries.texts, texts.queries.labels, strict=True)):
            pairs = zip(texts.demonstrations.texts[:number], texts.demonstrations.labels[:number], strict=True)
            prompt = "".join(FARM.demonstration(of, its) for of, its in pairs) + FARM.write(text)
            logits = model(torch.tensor([tokenizer(prompt).input_ids]))[0, -1, choices]
            assert found.accuracy[found.n_demonstrations.index(number), i] == (logits.argmax() == label)
    with pytest.raises(ValueError, match="there are 6 demonstrations, got 7"):
        measure_accuracy(model, tokenizer, texts, (7,))
