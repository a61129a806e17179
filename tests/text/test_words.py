"""Tasks of words and their few-shot prompts."""

import pytest

from mechicl.text import WORD_TASKS, WordTask, read_word_task, word_prompts
from tests.analysis.language.conftest import make_tokenizer

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


def test_answers_that_share_their_first_token():
    task = WordTask("numbers", tuple((str(i), f"{i} q") for i in range(4)), template="{input}:{output}")
    prompts = word_prompts(lambda text, add_special_tokens=True: _Characters(text), task, n_shots=2, n_prompts=3)
    assert sorted({len(row) for row in prompts.ids}) == [len("0:0 q\n\n") * 2 + len("0:")]
    assert {chr(t) for t in prompts.targets} <= set("0123")


class _Characters:
    def __init__(self, text):
        self.input_ids = [ord(letter) for letter in text]


def test_files(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("input,output,note\nup,down,x\nhot, cold ,y\n", encoding="utf-8")
    assert read_word_task(path).pairs == (("up", "down"), ("hot", "cold"))
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="columns input and output"):
        read_word_task(path)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: WordTask("t", (("a", "b"),)), "two pairs"),
        (lambda: WordTask("t", (("a", "b"), ("a", "c"))), "unique"),
        (lambda: WordTask("t", (("a", "b"), ("c", " "))), "blank"),
        (lambda: WordTask("t", (("a", "b"), ("c", "d")), template="{output} {input}"), "template"),
        (lambda: word_prompts(TOKENIZER, "nothing"), "task"),
        (lambda: word_prompts(TOKENIZER, "antonyms", n_shots=500), "n_shots=500"),
        (lambda: word_prompts(TOKENIZER, "antonyms", n_shots=1, labels="shuffled"), "n_shots=1"),
        (lambda: word_prompts(TOKENIZER, "antonyms", other="plural"), "other"),
        (lambda: word_prompts(TOKENIZER, "antonyms", labels="wrong"), "labels"),  # type: ignore[arg-type]
    ],
)
def test_errors(call, named):
    with pytest.raises(ValueError, match=named):
        call()
