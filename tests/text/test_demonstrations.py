"""Texts as shots, against tokens and positions worked out by hand."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mechicl.tasks.topics import WORDS
from mechicl.text import TEXT_TASKS, LabelledTexts, TextTask, load_texts, text_shots, topic_tokenizer

FARM = TEXT_TASKS["farm"]
REVIEWS = TextTask("reviews", "Review: {text}\nMood:", (" good", " bad"), hub="me/reviews")
SENTENCES = ["a good film", "a bad film", "bad, bad and good", "so it goes\non and on", "étonnant"]


def byte_pairs(start=False):
    """A tokenizer as GPT-2's, or as Llama's with a start token, trained on a few words."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<s>"], initial_alphabet=alphabet
    )
    words.train_from_iterator([" good bad good bad Review: Mood:" for _ in range(20)], trainer)
    if start:
        words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", words.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<s>")


def labelled(texts, labels, task=REVIEWS):
    return LabelledTexts(task, tuple({"text": text} for text in texts), tuple(labels))


def two_texts(task):
    """A demonstration and a query."""
    return labelled(["a"], [0], task), labelled(["b"], [0], task)


def check(shots, demonstrations, queries, encode, start):
    """All fields of the shots, from lists of ids."""
    task, context, spans, examples = queries.task, list(start), [], []
    labels = [encode(label) for label in task.labels]
    for text, label in zip(demonstrations.texts, demonstrations.labels, strict=True):
        ids = encode(task.template.format(**text))
        examples.append(start + ids)
        spans.append((len(context), len(ids)))
        context += ids + labels[label] + encode(task.separator)
    texts = [encode(task.template.format(**text)) for text in queries.texts]
    assert [ids.tolist() for ids in shots.zero_shot] == [start + ids for ids in texts]
    assert [ids.tolist() for ids in shots.in_context] == [context + ids for ids in texts]
    assert [ids.tolist() for ids in shots.examples] == examples
    assert shots.example_spans == tuple(spans)
    assert shots.query_lengths == tuple(map(len, texts))
    assert shots.choices.tolist() == [token for (token,) in labels]
    assert shots.targets.tolist() == [labels[label][0] for label in queries.labels]
    assert shots.example_targets.tolist() == [labels[label][0] for label in demonstrations.labels]


@pytest.mark.parametrize(("name", "n_shown", "n_queries"), [("farm", 1, 3), ("home", 8, 5), ("leisure", 4, 1)])
def test_made_up_texts(name, n_shown, n_queries):
    shown = load_texts(name, "train", n_texts=n_shown)
    for demonstrations in (shown, shown.relabelled("flipped")):
        queries = load_texts(name, "validation", n_texts=n_queries)
        shots = text_shots(topic_tokenizer(), demonstrations, queries)
        check(shots, demonstrations, queries, lambda text: [WORDS.index(word) for word in text.split()], [0])


@pytest.mark.parametrize("start", [False, True])
def test_texts_in_byte_pairs(start):
    tokenizer = byte_pairs(start)
    shown, queries = labelled(SENTENCES[:3], [0, 1, 1]), labelled(SENTENCES[3:], [0, 1])
    shots = text_shots(tokenizer, shown, queries)
    backend = tokenizer.backend_tokenizer
    check(shots, shown, queries, lambda text: backend.encode(text, add_special_tokens=False).ids, [0] if start else [])


def test_labels_that_are_no_choices():
    tokenizer, task = byte_pairs(), replace(REVIEWS, labels=(" good", " goods"))
    message = r"the label ' goods' of 'reviews' is 2 tokens, \['Ġgood', 's'\], and one is needed: choose another word, "
    with pytest.raises(ValueError, match=message + r"dataclasses.replace\(task, labels=...\)"):
        text_shots(tokenizer, *two_texts(task))
    with pytest.raises(ValueError, match=r"does not know the label ' crimson' of 'farm': choose another word"):
        text_shots(topic_tokenizer(), *two_texts(replace(FARM, labels=(" red", " crimson"))))

    class Deaf:
        unk_token_id = None

        def __call__(self, text, add_special_tokens=True):
            return type("Encoded", (), {"input_ids": [5]})

    with pytest.raises(ValueError, match=r"two labels of 'farm'.* have the same token.*5"):
        text_shots(Deaf(), *two_texts(FARM))

    farm, town = (load_texts(name, "train", n_texts=2) for name in ("farm", "town"))
    with pytest.raises(ValueError, match="demonstrations of 'farm' for queries of 'town'"):
        text_shots(topic_tokenizer(), farm, town)
