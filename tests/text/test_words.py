"""Tasks of words and few-shot prompts; texts as shots, against tokens and positions worked out by hand."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mechicl.prompts.tokens import start_ids
from mechicl.tasks.topics import WORDS
from mechicl.text import (
    TEXT_TASKS,
    WORD_TASKS,
    LabelledTexts,
    TextTask,
    WordTask,
    load_texts,
    read_word_task,
    text_shots,
    topic_tokenizer,
    word_prompts,
)
from mechicl.text.scores import score_answers
from tests.analysis.language.conftest import make_tokenizer

FARM = TEXT_TASKS["farm"]
REVIEWS = TextTask("reviews", "Review: {text}\nMood:", (" good", " bad"), hub="me/reviews")
SENTENCES = ["a good film", "a bad film", "bad, bad and good", "so it goes\non and on", "étonnant"]


TEMPLATES = {
    "$A": [], "<s> $A": [0], "<s> $A </s>": [0], "$A </s>": [], "<s> </s> $A": [0, 1], "<s> $A </s> </s>": [0],
    "<s> <s> $A <s>": [0, 0],
}  # fmt: skip
"""Templates of tokenizers, and the ids before a text's own."""


def whole_words(template):
    """A tokenizer with a token for each of a few words and characters, in which the unknown token begins texts."""
    vocab = {"<s>": 0, "</s>": 1} | {word: i for i, word in enumerate(["Q", "A", ":", "up", "down", "hot", "cold"], 2)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<s>")


def spaces_first():
    """A tokenizer as Llama's: texts begin with a space, which is a part of their first token."""
    vocab = ["<s>", *"▁▁abcdefghilmnoprtuwMRS:\n", "▁good", "▁bad", "▁Review:", "Mood:", "▁a", "▁b"]
    vocab = list(dict.fromkeys(vocab))
    merges = [("▁", "a"), ("▁", "b")]
    words = Tokenizer(models.BPE({word: i for i, word in enumerate(vocab)}, merges, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<s>")


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


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_begin_with_what_the_tokenizer_puts_before_a_text(template):
    tokenizer, start = whole_words(template), TEMPLATES[template]
    assert start_ids(tokenizer) == start
    task = WordTask(
        "t", (("up", "down"), ("hot", "cold"), ("down", "up"), ("cold", "hot")), "Q {input} A {output}", " "
    )
    prompts = word_prompts(tokenizer, task, n_prompts=4, n_shots=2)
    for row, query in zip(prompts.ids.tolist(), prompts.queries, strict=True):
        assert row[: len(start)] == start
        assert str(tokenizer.decode(row[len(start) :])).endswith(f"Q {query} A")
        assert len(row) == len(start) + 4 + 4 + 3
    review = replace(REVIEWS, template="Q: {text} A", labels=(" up", " down"))
    shown, queries = labelled(["hot", "cold"], [0, 1], review), labelled(["up"], [0], review)
    shots = text_shots(tokenizer, shown, queries)
    check(shots, shown, queries, lambda text: tokenizer(text, add_special_tokens=False).input_ids, start)


def test_labels_and_separators_continue_the_text_before_them():
    """A tokenizer that begins texts with a space gives a label the token that it has within a text."""
    tokenizer = spaces_first()
    task = replace(REVIEWS, template="{text}:", labels=(" a", " b"), separator=":")
    shots = text_shots(tokenizer, labelled(["a"], [1], task), labelled(["b"], [0], task))
    whole = tokenizer("a: b:").input_ids
    assert shots.in_context is not None
    assert shots.in_context[0][: len(whole)].tolist() == whole
    assert shots.choices is not None
    assert shots.choices.tolist() == tokenizer.convert_tokens_to_ids(["▁a", "▁b"])


def test_special_tokens_that_cannot_be_found():
    class Reversed:
        def __call__(self, text, add_special_tokens=True):
            ids = [ord(letter) for letter in text]
            return type("Encoded", (), {"input_ids": ids if not add_special_tokens else [0]})

    with pytest.raises(ValueError, match="tokenizer must add its special tokens before and after"):
        start_ids(Reversed())


def test_errors_of_a_tokenizer_name_it():
    class Broken:
        def __call__(self, text, add_special_tokens=True):
            raise KeyError("vocabulary")

    with pytest.raises(ValueError, match="tokenizer Broken failed: KeyError: 'vocabulary'"):
        start_ids(Broken())


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


TOKENIZER = make_tokenizer()


def examples(prompts, row):
    text = str(TOKENIZER.decode(prompts.ids[row].tolist())).replace(" \n", "\n").replace("\n ", "\n")
    lines = [line.split(":")[-1].strip() for line in text.splitlines() if ":" in line]
    return list(zip(lines[:-2:2], lines[1:-2:2], strict=True)), lines[-2]


@pytest.mark.parametrize("labels", ["true", "shuffled", "random", "other task"])
def test_prompts(labels):
    other = "plural" if labels == "other task" else None
    prompts = word_prompts(TOKENIZER, "antonyms", n_prompts=20, n_shots=5, labels=labels, other=other, seed=4)
    true = word_prompts(TOKENIZER, "antonyms", n_prompts=20, n_shots=5, seed=4)
    assert prompts.ids.shape == true.ids.shape
    assert prompts.queries == true.queries
    pairs = dict(WORD_TASKS["antonyms"].pairs)
    for row in range(20):
        shown, query = examples(prompts, row)
        assert query == prompts.queries[row]
        assert prompts.answers[row] == pairs[query]
        assert str(TOKENIZER.decode(prompts.targets[row : row + 1].tolist())).strip() == pairs[query]
        assert query not in [word for word, _ in shown]
        if labels == "other task":
            assert set(shown) <= set(WORD_TASKS["plural"].pairs)
            continue
        assert [word for word, _ in shown] == [word for word, _ in examples(true, row)[0]]
        right = [pairs[word] == output for word, output in shown]
        outputs = sorted(output for _, output in shown)
        assert all(right) if labels == "true" else not any(right)
        assert (outputs == sorted(pairs[word] for word, _ in shown)) == (labels != "random")


def test_logits_that_are_no_numbers_have_no_score():
    logits = torch.tensor([[0.0, 1.0, 2.0], [torch.nan, 1.0, 2.0]])
    for right, log_probabilities in (score_answers(logits, torch.tensor([2, 0])),
                                     score_answers(logits, torch.tensor([2, 0]), torch.tensor([0, 2]))):  # fmt: skip
        assert right[0] == 1
        assert right[1].isnan()
        assert log_probabilities[1].isnan()


def test_answers_that_share_their_first_token():
    task = WordTask("numbers", tuple((str(i), f"{i} q") for i in range(4)), template="{input}:{output}")
    prompts = word_prompts(lambda text, add_special_tokens=True: _Characters(text), task, n_shots=2, n_prompts=3)
    assert sorted({len(row) for row in prompts.ids}) == [len("0:0 q\n\n") * 2 + len("0:")]
    assert {chr(t) for t in prompts.targets} <= set("0123")


class _Characters:
    def __init__(self, text):
        self.input_ids = [ord(letter) for letter in text]


@pytest.mark.parametrize(("call", "named"), [
    (lambda: WordTask("t", (("a", "b"),)), "two pairs"),
    (lambda: WordTask("t", (("a", "b"), ("a", "c"))), "unique"),
    (lambda: WordTask("t", (("a", "b"), ("c", " "))), "blank"),
    (lambda: WordTask("t", (("a", "b"), ("c", "d")), template="{output} {input}"), "template"),
    (lambda: word_prompts(TOKENIZER, "nothing"), "task"),
    (lambda: word_prompts(TOKENIZER, "antonyms", n_shots=500), "n_shots=500"),
    (lambda: word_prompts(TOKENIZER, "antonyms", n_shots=1, labels="shuffled"), "n_shots=1"),
    (lambda: word_prompts(TOKENIZER, "antonyms", other="plural"), "other"),
    (lambda: word_prompts(TOKENIZER, "antonyms", labels="wrong"), "labels"),  # type: ignore[arg-type]
])  # fmt: skip
def test_errors(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize(("contents", "encoding"), [
    ("input,output\nup,down\nhot,cold\n", "utf-8-sig"), ("input,output,note\nup,down,x\nhot, cold ,y\n", "utf-8"),
])  # fmt: skip
def test_files(contents, encoding, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(contents, encoding=encoding)
    assert read_word_task(path).pairs == (("up", "down"), ("hot", "cold"))


@pytest.mark.parametrize(("contents", "message"), [
    (b"a,b\n1,2\n", "columns input and output"),
    (b"input,output\nFrance,Paris, a city\nItaly,Rome\n", "line 2, has more cells"),
    (b"output,input\nParis,France\nRome\n", "blank word"),
    ("input,output\ncafé,thé\nup,down\n".encode("cp1252"), r"mine.csv is not UTF-8 \(byte 0xe9 in line 2\): save it"),
    ("input,output\nup,down\n".encode("utf-16"), r"mine.csv is not UTF-8 \(byte 0xff in line 1\)"),
    ("input,output\nup,down\n".encode("utf-16-le"), r"mine.csv is not UTF-8 \(byte 0x00 in line 1\)"),
    (b"input,output\nup,down\na\0,b\n", r"mine.csv is not UTF-8 \(byte 0x00 in line 3\)"),
    (b"input,output\nup,down\n\n" + b"a" * 200_000 + b",b\n", "mine.csv, line 4, cannot be read: field larger than"),
    (b'input,output\nup,down\n"a,b\nc,d\n', "mine.csv, line 3, cannot be read: unexpected end"),
])  # fmt: skip
def test_files_that_cannot_be_read_are_named(contents, message, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        read_word_task(path)


@pytest.mark.parametrize("outputs", ["ab", "abbc", "abcdefg"])
def test_shuffled_outputs_are_never_the_own_ones(outputs):
    task = WordTask(
        "letters", tuple((f"{i:02d}", outputs[i % len(outputs)]) for i in range(28)), "{input}:{output}", ";"
    )
    tokenizer = _CHARACTERS
    prompts = word_prompts(tokenizer, task, n_shots=27, n_prompts=10, labels="shuffled")
    for row, query in zip(prompts.ids.tolist(), prompts.queries, strict=True):
        shown = dict(each.split(":") for each in "".join(map(chr, row)).split(";")[:-1])
        right = {word: output for word, output in task.pairs if word != query}
        assert shown.keys() == right.keys()
        assert sorted(shown.values()) == sorted(right.values())
        n_most = max(Counter(right.values()).values())
        assert sum(shown[word] == right[word] for word in right) == max(0, 2 * n_most - 27)


def test_pairs_that_the_tokenizer_cannot_write():
    pairs = tuple((f"{i}", f"{'?' if i < 6 else i} q") for i in range(10))
    with pytest.warns(UserWarning, match="4 of 10 pairs of task 't' are used; the others .* does not know$"):
        known = word_prompts(_CHARACTERS, WordTask("t", pairs, "{input}:{output}"), n_shots=3, n_prompts=30)
    assert set(known.queries) == set("6789")  # the other six have an unknown token
    assert known.n_pairs == 4
    with pytest.raises(ValueError, match="cannot write task"):
        word_prompts(_CHARACTERS, WordTask("t", pairs[:6], "{input}:{output}"), n_shots=1)
    long = WordTask("t", tuple((f"{i}", f"{i}" * 80) for i in range(10)), "{input}:{output}")
    with pytest.raises(ValueError, match=r"n_shots=2 need 2 outputs of other tasks .*, got 0"):
        word_prompts(_CHARACTERS, long, n_shots=2, labels="random")


class _Tokenizer:
    unk_token_id = ord("?")

    def __call__(self, text, add_special_tokens=True):
        return _Characters(text)


_CHARACTERS = _Tokenizer()


LETTERS = tuple((chr(97 + i), chr(65 + i)) for i in range(5))
MIXED = WordTask("mixed", LETTERS + tuple((f"{i}", "x" * i) for i in range(2, 9)), "{input}:{output}", ";")


def test_pairs_that_are_left_out_are_counted():
    with pytest.warns(UserWarning, match="^5 of 12 pairs of task 'mixed' are used; the others have other") as caught:
        prompts = word_prompts(_CHARACTERS, MIXED, n_prompts=5, n_shots=2)
    assert len(caught) == 1
    assert prompts.n_pairs == 5
    assert Path(caught[0].filename).name == "test_words.py" or sys.version_info < (3, 12)


@pytest.mark.parametrize(("seed", "n_shots"), [(0, 0), (0, 4), (1, 2), (2, 2)])
def test_no_query_repeats_before_all_have_been_asked(seed, n_shots):
    task = replace(MIXED, pairs=LETTERS)
    prompts = word_prompts(_CHARACTERS, task, n_prompts=12, n_shots=n_shots, seed=seed)
    for start in (0, 5):
        assert sorted(prompts.queries[start : start + 5]) == list("abcde")
    for row, query in zip(prompts.ids.tolist(), prompts.queries, strict=True):
        shown = [part[0] for part in "".join(map(chr, row)).split(";")]
        assert shown[-1] == query
        assert len(set(shown)) == n_shots + 1
    fewer = word_prompts(_CHARACTERS, task, n_prompts=4, n_shots=n_shots, seed=seed)
    assert fewer.queries == prompts.queries[:4]
    values = torch.arange(24.0).reshape(2, 12)
    by_query = {query: [i for i in range(12) if prompts.queries[i] == query] for query in prompts.queries}
    expected = torch.stack([values[:, rows].mean(1) for rows in by_query.values()], 1)
    torch.testing.assert_close(prompts.by_query(values), expected)
    assert torch.equal(fewer.by_query(values[:, :4]), values[:, :4])
