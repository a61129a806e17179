from collections import Counter

import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.tasks.topics import FILLERS, LABELS, TOPICS, WORDS, TopicClassification, topic_tokenizer
from tests.tasks.reference import LEAST_P

TOPIC_OF = {word: topic for topic, words in TOPICS.items() for word in words}
quick = settings(max_examples=20, deadline=None)


def counts_of(text):
    """Number of words of each topic in a text."""
    assert all(word in TOPIC_OF or word in FILLERS for word in text)
    return Counter(TOPIC_OF[word] for word in text if word in TOPIC_OF)


def read(line):
    """The texts and labels of a decoded sequence; its last text, which may be cut, comes apart. Plain python."""
    first, *words = line.split()
    assert first == "[START]"
    texts, labels, text = [], [], []
    rest = iter(words)
    for word in rest:
        if word not in LABELS:
            text.append(word)
            continue
        assert next(rest, ";") == ";"
        texts.append(text)
        labels.append(word)
        text = []
    return texts, labels, text


def lines(sequences):
    return [topic_tokenizer().decode(ids) for ids in sequences.ids]


@st.composite
def distributions(draw):
    n_topical = draw(st.integers(1, 4))
    min_words = draw(st.integers(n_topical, 2 * n_topical))
    min_classes = draw(st.integers(1, len(LABELS)))
    return TopicClassification(
        n_ctx=draw(st.integers(2, 150)),
        min_classes=min_classes,
        max_classes=draw(st.integers(min_classes, len(LABELS))),
        min_words=min_words,
        max_words=draw(st.integers(min_words, 2 * n_topical)),
        n_topical=n_topical,
    )


# ---- the language ----


def test_the_tokenizer_has_one_token_for_each_word_and_returns_the_words():
    assert len(set(WORDS)) == len(WORDS) == TopicClassification().d_vocab == len(topic_tokenizer())
    assert len(LABELS) + len(FILLERS) + sum(map(len, TOPICS.values())) == len(WORDS) - 3
    line = " ".join(WORDS)
    assert topic_tokenizer()(line).input_ids == [0, *range(len(WORDS))]
    assert topic_tokenizer()(line, add_special_tokens=False).input_ids == list(range(len(WORDS)))
    assert topic_tokenizer().decode(list(range(len(WORDS)))) == line


# ---- sequences ----


@given(distributions(), st.integers(0, 2**31))
@quick
def test_a_sequence_reads_as_texts_whose_labels_stand_for_topics(distribution, seed):
    sequences = distribution.sample(5, seed=seed)
    assert sequences.ids.shape == sequences.predictable.shape == (5, distribution.n_ctx + 1)
    for line, ids, predictable in zip(lines(sequences), sequences.ids, sequences.predictable, strict=True):
        assert predictable.tolist() == [WORDS[i] in LABELS for i in ids]
        texts, labels, cut = read(line)
        assert len(cut) <= distribution.max_words
        assert len(set(labels)) <= distribution.max_classes
        possible = {}  # topics that a label can stand for, given all the texts it follows
        for text, label in zip(texts, labels, strict=True):
            assert distribution.min_words <= len(text) <= distribution.max_words
            topics = {topic for topic, count in counts_of(text).items() if count == distribution.n_topical}
            possible[label] = possible.get(label, topics) & topics
        assert all(possible.values())
        if distribution.max_words < 2 * distribution.n_topical:  # a true majority: one topic a text, one label a topic
            known = [topic for topics in possible.values() for topic in topics]
            assert len(known) == len(set(known)) == len(possible)


def test_some_sequences_are_words_over_and_over():
    distribution = TopicClassification(n_ctx=40, share_repeated=0.3)
    repeated = 0
    sequences = distribution.sample(1000, seed=0)
    for ids, predictable in zip(sequences.ids.tolist(), sequences.predictable.tolist(), strict=True):
        periods = [p for p in range(4, 21) if all(a == b for a, b in zip(ids, ids[p:], strict=False))]
        if periods:
            repeated += 1
            assert predictable == [pos > periods[0] for pos in range(41)]
        else:
            assert ids[0] == WORDS.index("[START]")
            assert predictable == [WORDS[i] in LABELS for i in ids]
    assert scipy.stats.binomtest(repeated, 1000, 0.3).pvalue > LEAST_P


def test_what_a_label_means_changes_from_one_sequence_to_the_next():
    meanings = Counter()
    firsts, n_classes, lengths = Counter(), Counter(), Counter()
    distribution = TopicClassification(n_ctx=260, min_words=4, max_words=5, n_topical=3)
    for line in lines(distribution.sample(1500, seed=0)):
        texts, labels, _ = read(line)
        topics = [max(counts_of(text).items(), key=lambda item: item[1])[0] for text in texts]
        meanings[topics[0], labels[0]] += 1
        firsts[labels[0]] += 1
        n_classes[len(set(labels))] += 1
        lengths.update(map(len, texts))
    assert scipy.stats.chisquare([firsts[label] for label in LABELS]).pvalue > LEAST_P
    cells = [meanings[topic, label] for topic in TOPICS for label in LABELS]
    assert scipy.stats.chisquare(cells).pvalue > LEAST_P
    assert set(n_classes) == {2, 3, 4}  # some 37 texts: all classes are seen but for one sequence in ten thousand
    assert scipy.stats.chisquare(list(n_classes.values())).pvalue > LEAST_P
    assert set(lengths) == {4, 5}
    three = TopicClassification(n_ctx=32, min_classes=3, max_classes=3, min_words=3, max_words=3)
    starts = [read(line)[1][:2] for line in lines(three.sample(2000, seed=0))]  # classes are drawn independently
    assert scipy.stats.binomtest(sum(a == b for a, b in starts), 2000, 1 / 3).pvalue > LEAST_P


# ---- texts ----


@given(
    distributions(),
    st.lists(st.sampled_from(list(TOPICS)), min_size=1, max_size=5, unique=True),
    st.integers(0, 30),
    st.integers(0, 2**31),
)
@quick
def test_texts_are_about_their_topics(distribution, topics, n_texts, seed):
    texts, which = distribution.texts(topics, n_texts, seed=seed)
    assert len(texts) == len(which) == n_texts
    for text, index in zip(texts, which, strict=True):
        words = text.split()
        assert " ".join(words) == text
        assert distribution.min_words <= len(words) <= distribution.max_words
        counts = counts_of(words)
        assert counts[topics[index]] == distribution.n_topical
        assert counts[topics[index]] == max(counts.values())
        assert 2 * counts[topics[index]] >= len(words)
    by_class = [which.count(index) for index in range(len(topics))]
    assert max(by_class) - min(by_class) <= 1
    assert (texts, which) == distribution.texts(topics, n_texts, seed=seed)


def test_topics_come_in_random_order_and_all_their_words_are_used():
    texts, which = TopicClassification().texts(["birds", "metals"], 400, seed=0)
    assert which != sorted(which)
    assert which != [index % 2 for index in range(400)]
    assert texts != TopicClassification().texts(["birds", "metals"], 400, seed=1)[0]
    texts, _ = TopicClassification().texts(["birds", "metals"], 4000, seed=0)
    assert {word for text in texts for word in text.split()} == {*TOPIC_OF, *FILLERS}
