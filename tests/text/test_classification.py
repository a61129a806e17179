import itertools
from collections import Counter

import pytest
import scipy.stats

from mechicl.text import TEXT_TASKS, LabelledTexts, TextTask

LEAST_P = 1e-3  # seeds are fixed: a right sampler fails for about one seed in a thousand
OPINIONS = TextTask("opinions", "Say: {text}\nIs:", (" bad", " fine", " good"), hub="somebody/opinions")


def examples_of(labelled):
    return [(text["text"], label) for text, label in zip(labelled.texts, labelled.labels, strict=True)]


def labelled(labels, task=OPINIONS):
    return LabelledTexts(task, tuple({"text": f"text {index}"} for index in range(len(labels))), tuple(labels))


def made_with(**fields):
    return TextTask(**{"name": "mine", "template": "{text}:", "labels": (" a", " b"), "hub": "me/mine", **fields})


# ---- TextTask ----
def test_the_table_has_the_tasks_under_their_names():
    assert list(TEXT_TASKS) == ["sst2", "sst5", "mr", "subj", "agnews", "cb", "farm", "town", "home", "leisure"]
    assert [task.n_demonstrations for task in TEXT_TASKS.values()] == [32, 32, 32, 32, 22, 19, 8, 8, 8, 8]


NEWS = "Classify the news articles into the categories of World, Sports, Business, and Technology.\n\n"
CB = {"premise": "It rains.", "hypothesis": "It is dry"}
WRITTEN = {
    "sst2": ({"sentence": "a {joy}"}, "Sentence: a {joy}\nLabel: Positive\n"),
    "sst5": ({"text": "hm"}, "Sentence: hm\nLabel: bad\n"),
    "mr": ({"text": "hm"}, "Review: hm\nSentiment: Positive\n"),
    "subj": ({"text": "hm"}, "Input: hm\nType: subjective\n"),
    "agnews": ({"text": "Golf."}, NEWS + "Article: Golf.\nAnswer: Sports\n"),
    "cb": (CB, "It rains.\nQuestion: It is dry. True, False, or Neither?\nAnswer: False\n"),
    "farm": ({"text": "oak the elm"}, "oak the elm blue ; "),
}


@pytest.mark.parametrize("name", list(WRITTEN))
def test_examples_are_written_as_the_task_says(name):
    task, (text, written) = TEXT_TASKS[name], WRITTEN[name]
    assert task.columns == tuple(text)
    assert task.demonstration({**text, "other": "column"}, 1) == written


def test_a_column_that_the_template_shows_twice_is_one_column():
    task = made_with(template="{b} {a}, {b:.3}:")
    assert task.columns == ("b", "a")
    assert task.write({"a": "x", "b": "words"}) == "words x, wor:"
    assert made_with(template="{{no}} {a column}").write({"a column": "x"}) == "{no} x"


@pytest.mark.parametrize(("fields", "message"), [
    ({"template": "Label:"}, r"the template of 'mine' has no \{column\}: 'Label:'"),
    *(({"template": f"{{{field}}}"}, "must be names") for field in ("", "0", "text.upper", "text[0]", "text:d")),
    ({"template": "{text"}, "expected '}'"),
    ({"labels": (" a",)}, "labels must be two or more"),
    ({"labels": (" a", "A")}, "labels must be two or more"),
    ({"hub": None}, "'mine' needs a name on the hub or topics, and not both"),
    ({"hub": None, "topics": ("birds", "tree")}, r"unknown topics \['tree'\]: there are \['animals'"),
    ({"hub": None, "topics": ("birds", "trees", "body")}, "3 topics for 2 labels"),
    ({"hub": None, "topics": ("birds", "trees"), "template": "{a} {b}"}, r"the columns \('a', 'b'\)"),
    ({"n_demonstrations": -1}, "n_demonstrations"),
])  # fmt: skip
def test_tasks_that_make_no_sense_are_refused_with_the_reason(fields, message):
    with pytest.raises(ValueError, match=message):
        made_with(**fields)


# ---- LabelledTexts ----
@pytest.mark.parametrize(("call", "message"), [
    (lambda: LabelledTexts(OPINIONS, ({"text": "a"},), (0, 1)), "got 1 texts and 2 labels"),
    (lambda: LabelledTexts(OPINIONS, ({"text": "a"},), (3,)), "labels of 'opinions' must be from 0 to 2, got 3"),
    (lambda: LabelledTexts(OPINIONS, ({"word": "b"},), (0,)), r"text 0 lacks the columns \['text'\] of 'opinions'"),
    (lambda: labelled([0, 0, 2]).draw(3, seed=0), r"takes 1 examples of each class, and class 1 \(' fine'\) has 0"),
    (lambda: labelled([0, 0, 0, 1, 2]).draw(5, seed=0), r"takes 1 or 2 examples .* class 1 \(' fine'\) has 1: "),
    (lambda: labelled([0, 1, 2]).draw(4, seed=0), "n must be from 0 to 3, the number of examples, got 4"),
])  # fmt: skip
def test_refused_examples_and_draws(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def can_be_balanced(labels, n):
    """True if some counts of the classes that differ by one at most add up to n, by trying all."""
    at_hand = [labels.count(label) for label in range(3)]
    every = itertools.product(*(range(count + 1) for count in at_hand))
    return any(sum(counts) == n and max(counts) - min(counts) <= 1 for counts in every)


@pytest.mark.parametrize("labels", [[], [0, 0, 1], [0, 1, 2], [2, 0, 0, 0, 1, 1], [0, 1, 0, 1, 2, 2, 2, 2, 0]])
def test_a_draw_has_different_examples_and_balanced_as_equal_counts_as_can_be(labels):
    examples = labelled(labels)
    for n in range(len(labels) + 1):
        for balanced in (True, False):
            if balanced and not can_be_balanced(labels, n):
                with pytest.raises(ValueError, match=f"a balanced draw of {n} takes .* pass balanced=False"):
                    examples.draw(n, seed=n)
                continue
            drawn = examples.draw(n, seed=n, balanced=balanced)
            counts = [drawn.labels.count(label) for label in range(3)]
            assert sum(counts) == len(drawn) == len(set(examples_of(drawn))) == n
            assert not balanced or max(counts) - min(counts) <= 1
            assert set(examples_of(drawn)) <= set(examples_of(examples))
            assert drawn == examples.draw(n, seed=n, balanced=balanced)


def test_every_example_every_class_and_every_order_is_as_likely():
    examples = labelled([0, 0, 0, 1, 1, 2])
    orders, larger, others = Counter(), Counter(), Counter()
    for seed in range(1000):
        drawn = examples.draw(4, seed=seed)
        orders[drawn.labels.index(2)] += 1 if drawn.labels.count(2) == 1 else 0
        larger[max(range(3), key=drawn.labels.count)] += 1
        others[examples.draw(1, seed=seed, balanced=False).texts[0]["text"]] += 1
    assert scipy.stats.chisquare([orders[place] for place in range(4)]).pvalue > LEAST_P
    assert larger[2] == 0  # has one example only, so another class has the second
    assert scipy.stats.chisquare([larger[0], larger[1]]).pvalue > LEAST_P
    assert len(others) == 6
    assert scipy.stats.chisquare(list(others.values())).pvalue > LEAST_P


def test_other_labels():
    examples = labelled([0] * 1500 + [2] * 1500)
    assert examples.relabelled("true") == examples
    flipped = labelled([0, 1, 2]).relabelled("flipped")
    assert flipped.labels == (1, 2, 0)
    assert flipped.texts == labelled([0, 1, 2]).texts
    assert labelled([0, 1, 2]).relabelled("one") == labelled([0, 0, 0])
    random = examples.relabelled("random", seed=3)
    assert random.texts == examples.texts
    for part in (random.labels[:1500], random.labels[1500:]):  # uniform, whatever the true ones
        assert scipy.stats.chisquare([part.count(label) for label in range(3)]).pvalue > LEAST_P
    assert random == examples.relabelled("random", seed=3)
    assert random != examples.relabelled("random", seed=4)
