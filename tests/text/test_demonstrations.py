"""Texts as shots, against tokens and positions worked out by hand."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mechicl.tasks.topics import WORDS, topic_tokenizer
from mechicl.text import TEXT_TASKS, LabelledTexts, TextTask, load_texts
from mechicl.text.demonstrations import label_ids, text_shots

FARM = TEXT_TASKS["farm"]
REVIEWS = TextTask("reviews", "Review: {text}\nMood:", (" good", " bad"), hub="me/reviews")
SENTENCES = ["a good film", "a bad film", "bad, bad and good", "so it goes\non and on", "étonnant"]


def byte_pairs(start=False):
    """A tokenizer as GPT-2's, or as Llama's with a start token, trained on a few words."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words.train_from_iterator([" good bad good bad Review: Mood:" for _ in range(20)], trainer)
    if start:
        words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", words.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<s>")


def labelled(texts, labels, task=REVIEWS):
    return LabelledTexts(task, tuple({"text": text} for text in texts), tuple(labels))


def by_hand(demonstrations, queries, encode, start):
    """Lists of ids: queries alone, in context, examples, and where the examples' tokens stand."""
    task, context, places, examples = queries.task, list(start), [], []
    for text, label in zip(demonstrations.texts, demonstrations.labels, strict=True):
        own = encode(task.template.format(**text))
        examples.append(start + own)
        places.append((len(context), len(own)))
        context += own + encode(task.labels[label]) + encode(task.separator)
    own = [encode(task.template.format(**text)) for text in queries.texts]
    return [start + ids for ids in own], [context + ids for ids in own], examples, places, own


def check(shots, demonstrations, queries, encode, start):
    alone, behind, examples, places, own = by_hand(demonstrations, queries, encode, start)
    assert [of.tolist() for of in shots.zero_shot] == alone
    assert [of.tolist() for of in shots.in_context] == behind
    assert [of.tolist() for of in shots.examples] == examples
    assert list(shots.example_spans) == places
    assert list(shots.query_lengths) == [len(ids) for ids in own]
    labels = [encode(label) for label in queries.task.labels]
    assert shots.choices.tolist() == [id for (id,) in labels]
    assert shots.targets.tolist() == [labels[label][0] for label in queries.labels]
    assert shots.example_targets.tolist() == [labels[label][0] for label in demonstrations.labels]
    for a, b, n in zip(shots.zero_shot, shots.in_context, shots.query_lengths, strict=True):
        assert torch.equal(a[-n:], b[-n:])
    for whole in shots.in_context:
        for example, (first, number) in zip(shots.examples, shots.example_spans, strict=True):
            assert torch.equal(whole[first : first + number], example[-number:])
            assert whole[first + number] in shots.choices


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["farm", "home", "leisure"]), st.integers(1, 8), st.integers(1, 5), st.integers(0, 9))
def test_made_up_texts(name, n_shown, n_asked, seed):
    task = TEXT_TASKS[name]
    shown = load_texts(task, "train", n_texts=n_shown, seed=seed)
    asked = load_texts(task, "validation", n_texts=n_asked, seed=seed)
    shots = text_shots(topic_tokenizer(), shown, asked)
    check(shots, shown, asked, lambda text: [WORDS.index(word) for word in text.split()], [0])
    for sequence in (*shots.zero_shot, *shots.in_context, *shots.examples):
        assert (sequence == 0).nonzero().tolist() == [[0]]  # one start


@pytest.mark.parametrize("start", [False, True])
def test_texts_in_byte_pairs(start):
    tokenizer = byte_pairs(start)
    shown, asked = labelled(SENTENCES[:3], [0, 1, 1]), labelled(SENTENCES[3:], [0, 1])
    shots = text_shots(tokenizer, shown, asked)
    backend = tokenizer.backend_tokenizer
    check(shots, shown, asked, lambda text: backend.encode(text, add_special_tokens=False).ids, [0] if start else [])
    # as the whole prompt reads
    whole = "".join(REVIEWS.demonstration({"text": t}, y) for t, y in zip(SENTENCES[:3], [0, 1, 1], strict=True))
    read = tokenizer.decode(shots.in_context[1].tolist())
    assert read == "<s>" * start + whole + "Review: étonnant\nMood:"


def test_orders_and_labels_are_as_given():
    tokenizer = byte_pairs()
    shown = labelled(SENTENCES[:3], [0, 1, 1])
    asked = labelled(SENTENCES[3:], [0, 1])
    flipped = text_shots(tokenizer, shown.relabelled("flipped"), asked)
    plain = text_shots(tokenizer, shown, asked)
    assert flipped.example_targets.tolist() == [plain.example_targets.tolist()[i] for i in (1, 0, 0)]
    assert all(map(torch.equal, flipped.examples, plain.examples))
    back = text_shots(tokenizer, shown.take([2, 1, 0]), asked)
    assert all(map(torch.equal, back.examples, plain.examples[::-1]))


def test_a_label_of_two_tokens():
    tokenizer = byte_pairs()
    task = replace(REVIEWS, labels=(" good", " goods"))
    message = r"the label ' goods' of 'reviews' is 2 tokens, \['Ġgood', 's'\], and one is needed: choose another word, "
    with pytest.raises(ValueError, match=message + r"dataclasses.replace\(task, labels=...\)"):
        label_ids(tokenizer, task)
    with pytest.raises(ValueError, match="2 tokens"):
        text_shots(tokenizer, labelled(["a"], [0], task), labelled(["b"], [0], task))


def test_a_label_that_the_tokenizer_does_not_know():
    with pytest.raises(ValueError, match=r"does not know the label ' crimson' of 'farm': choose another word"):
        label_ids(topic_tokenizer(), replace(FARM, labels=(" red", " crimson")))


def test_two_labels_of_one_token():
    class Deaf:
        unk_token_id = None

        def __call__(self, text, add_special_tokens=True):
            return type("Encoded", (), {"input_ids": [5]})

    with pytest.raises(ValueError, match=r"two labels of 'farm'.* have the same token.*5"):
        label_ids(Deaf(), FARM)


def test_texts_that_are_refused():
    tokenizer = topic_tokenizer()
    farm, town = (load_texts(name, "train", n_texts=2) for name in ("farm", "town"))
    with pytest.raises(ValueError, match="demonstrations of 'farm' for queries of 'town'"):
        text_shots(tokenizer, farm, town)
    for shown, asked, counts in [(farm.take([]), farm, "2 and 0"), (farm, farm.take([]), "0 and 2")]:
        with pytest.raises(ValueError, match=f"needs queries and demonstrations, got {counts}"):
            text_shots(tokenizer, shown, asked)
