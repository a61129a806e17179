"""Token sequences against plain loops and the distributions that they claim."""

import itertools
from collections import Counter

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.tasks import BallsAndUrns, GraphTracing, MarkovChains, RepeatedTokens
from mechicl.tasks.sampling import RandomTensors
from mechicl.tasks.token_sequences import stationary_distributions
from mechicl.tasks.topics import FILLERS, LABELS, TOPICS, WORDS, TopicClassification, topic_tokenizer
from tests.tasks.reference import LEAST_P


# ---- token sequences ----
def period_of(predictable):
    """Number of tokens before the second copy, from a sequence's marks."""
    return predictable.index(True) - 1


@st.composite
def repeated_tokens(draw):
    n_ctx = draw(st.integers(2, 20))
    max_period = draw(st.integers(1, n_ctx - 1))
    return RepeatedTokens(draw(st.integers(2, 9)), n_ctx, draw(st.integers(1, max_period)), max_period)


@settings(max_examples=25)
@given(repeated_tokens(), st.integers(0, 5), st.integers(0, 2**40))
def test_every_token_that_can_be_predicted_is_the_one_a_period_before(task, n_prompts, seed):
    batch = task.sample(n_prompts, seed=seed)
    assert batch.ids.shape == batch.predictable.shape == (n_prompts, task.n_ctx + 1)
    assert batch.read.shape == batch.targets().shape == (n_prompts, task.n_ctx)
    for ids, predictable in zip(batch.ids.tolist(), batch.predictable.tolist(), strict=True):
        period = period_of(predictable)
        assert task.min_period <= period <= task.max_period
        for pos, token in enumerate(ids):
            assert 0 <= token < task.d_vocab
            assert predictable[pos] == (pos >= period + 1)
            if pos >= period:
                assert token == ids[pos - period]
            if predictable[pos]:  # by what an induction head does: the last token came before this one last time, too
                assert ids[pos - 1] == ids[pos - 1 - period]


def test_periods_are_uniform_on_their_range_both_ends_included():
    task = RepeatedTokens(d_vocab=4, n_ctx=12, min_period=3, max_period=9)
    counts = [0] * 7
    for predictable in task.sample(3500, seed=0).predictable.tolist():
        counts[period_of(predictable) - 3] += 1
    assert sum(counts) == 3500
    assert scipy.stats.chisquare(counts).pvalue > LEAST_P


@pytest.mark.parametrize("concentration", [0.3, 1.0, 5.0])
def test_rows_are_dirichlet(concentration):
    rows = MarkovChains(d_vocab=4, concentration=concentration).transitions(20_000, seed=0).flatten(0, 1)
    assert rows.dtype == torch.float64
    assert torch.allclose(rows.sum(-1), torch.ones(len(rows)).double())
    assert torch.allclose(rows.mean(0), torch.full((4,), 0.25).double(), atol=0.005)
    variance = 0.25 * 0.75 / (4 * concentration + 1)
    assert torch.allclose(rows.var(0), torch.full((4,), variance).double(), rtol=0.03)


def test_the_first_state_is_uniform_or_stationary():
    task = MarkovChains(d_vocab=2, n_ctx=2, concentration=0.5)
    stationary = task.replace(start="stationary")
    chances = stationary_distributions(stationary.transitions(50_000, seed=0))
    first = stationary.sample(50_000, seed=0).ids[:, 0]
    high = chances[:, 1] > 0.9
    assert abs(first[high].double().mean() - chances[high, 1].mean()) < 0.01
    assert abs(task.sample(50_000, seed=0).ids[:, 0][high].double().mean() - 0.5) < 0.02


@given(st.integers(2, 6), st.integers(0, 1000))
def test_stationary_distributions_stay(k, seed):
    transitions = MarkovChains(d_vocab=k).transitions(5, seed=seed)
    pi = stationary_distributions(transitions)
    assert torch.allclose((pi[:, None] @ transitions)[:, 0], pi, atol=1e-10)
    assert torch.allclose(pi.sum(-1), torch.ones(5).double())


def test_chains_of_several_stationary_distributions_stay_in_one_of_them():
    swap, stay = [[0.0, 1, 0], [1, 0, 0], [0, 0, 1]], [[1.0, 0, 0], [0, 1, 0], [0.5, 0.5, 0]]
    usual = [[0.5, 0.5, 0], [1, 0, 0], [1, 0, 0]]
    found = stationary_distributions(torch.tensor([swap, stay, usual], dtype=torch.float64))
    # a (1/2, 1/2, 0) + (1 - a) (0, 0, 1) has the least norm for a = 2/3
    assert torch.allclose(found, torch.tensor([[1, 1, 1], [1.5, 1.5, 0], [2, 1, 0]]).double() / 3)
    chains = MarkovChains(d_vocab=5, concentration=1e-4, start="stationary")
    transitions = chains.transitions(500, seed=0)
    pi = stationary_distributions(transitions)
    assert torch.allclose((pi[:, None] @ transitions)[:, 0], pi, atol=1e-6)
    assert torch.allclose(pi.sum(-1), torch.ones(500).double())
    assert chains.sample(500, seed=0).ids.shape == (500, 65)


def test_tiny_concentrations_give_deterministic_chains_not_nan():
    transitions = MarkovChains(concentration=1e-4).transitions(100, seed=0)
    assert transitions.isfinite().all()
    assert (transitions.amax(-1) > 0.99).double().mean() > 0.95


# ---- finite pools, higher orders, urns and graphs ----
def test_a_pool_repeats_its_chains_and_new_chains_do_not():
    task = MarkovChains(d_vocab=3, n_ctx=5, n_chains=4, chain_seed=7)
    drawn, pool = task.transitions(400, seed=0), task.pool
    which = (drawn[:, None] == pool).all(-1).all(-1)
    assert (which.sum(1) == 1).all()
    assert scipy.stats.chisquare(which.sum(0).tolist()).pvalue > LEAST_P
    assert not torch.equal(task.replace(chain_seed=8).pool, pool)
    assert task.new_chains == MarkovChains(d_vocab=3, n_ctx=5, chain_seed=7)
    assert len(task.new_chains.transitions(50, seed=0).unique(dim=0)) == 50


@pytest.mark.parametrize(("order", "n_chains"), [(1, None), (2, None), (3, 2), (1, 3)])
def test_sequences_follow_the_transitions_of_their_order(order, n_chains):
    task = MarkovChains(d_vocab=2, n_ctx=6000, order=order, n_chains=n_chains, chain_seed=3)
    batch, transitions = task.sample(3, seed=1), task.transitions(3, seed=1)
    assert (batch.predictable == (torch.arange(6001) >= order)).all()
    for row, matrix in zip(batch.ids.tolist(), transitions, strict=True):
        counts = np.zeros((2**order, 2))
        for t in range(order, len(row)):
            counts[int("".join(map(str, row[t - order : t])), 2), row[t]] += 1
        visits = counts.sum(1, keepdims=True).clip(min=1)
        assert (np.abs(counts / visits - matrix.numpy()) / (0.5 / np.sqrt(visits)))[visits[:, 0] > 20].max() < 4.5


def test_the_first_tokens_of_a_chain_of_order_two_are_uniform_pairs():
    ids = MarkovChains(d_vocab=3, n_ctx=4, order=2, concentration=0.1).sample(9000, seed=0).ids
    counts = Counter(map(tuple, ids[:, :2].tolist()))
    assert len(counts) == 9
    assert scipy.stats.chisquare(list(counts.values())).pvalue > LEAST_P


def test_balls_are_drawn_independently_from_the_urns_of_the_sample():
    task = BallsAndUrns(d_vocab=4, n_ctx=5000, n_urns=3, urn_seed=2)
    ids, urns = task.sample(6, seed=0).ids, task.chains.transitions(6, seed=0)[:, 0]
    assert all(any(torch.equal(urn, each) for each in task.pool) for urn in urns)
    for row, urn in zip(ids, urns, strict=True):
        counts = torch.bincount(row, minlength=4).numpy()
        assert scipy.stats.chisquare(counts, 5001 * urn.numpy()).pvalue > LEAST_P
        pairs = torch.bincount(4 * row[:-1] + row[1:], minlength=16).view(4, 4).numpy()
        assert scipy.stats.chi2_contingency(pairs).pvalue > LEAST_P
    new = task.new_urns.chains.transitions(20_000, seed=0)[:, 0]
    assert len(new.unique(dim=0)) == 20_000
    assert torch.allclose(new.mean(0), torch.full((4,), 0.25).double(), atol=0.006)


@pytest.mark.parametrize(
    ("sides", "periodic"), [((4, 4), False), ((5,), True), ((3, 4), True), ((2, 3, 2), False), ((2,), False)]
)
def test_walks_go_along_the_edges_of_the_lattice(sides, periodic):
    task = GraphTracing(sides=sides, periodic=periodic, n_ctx=600)
    places = list(itertools.product(*map(range, sides)))

    def joined(a, b):
        changed = [(x, y, side) for x, y, side in zip(a, b, sides, strict=True) if x != y]
        if len(changed) != 1:
            return False
        x, y, side = changed[0]
        return abs(x - y) == 1 or (periodic and {x, y} == {0, side - 1})

    expected = [[joined(a, b) for b in places] for a in places]
    assert task.adjacency.tolist() == expected
    batch, tokens = task.sample(20, seed=3), task._tokens(20, RandomTensors(torch.Generator().manual_seed(3)))
    assert (tokens.sort(-1).values == torch.arange(task.d_vocab)).all()
    assert task.d_vocab == 2 or len(tokens.unique(dim=0)) > 1
    visits = np.zeros((len(places), len(places)))
    for ids, row in zip(batch.ids.tolist(), tokens.tolist(), strict=True):
        nodes = [row.index(token) for token in ids]
        for a, b in itertools.pairwise(nodes):
            assert expected[a][b]
            visits[a, b] += 1
    for a, row in enumerate(visits):
        choices = row[expected[a]]
        assert len(choices) == 1 or scipy.stats.chisquare(choices).pvalue > LEAST_P / len(places)


def test_pools_are_refused_where_there_is_none():
    for task in (MarkovChains(), BallsAndUrns()):
        with pytest.raises(ValueError, match="has no pool"):
            task.pool  # noqa: B018


# ---- topics ----
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
    return topic_tokenizer().batch_decode(sequences.ids)


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


def test_the_tokenizer_has_one_token_for_each_word_and_returns_the_words():
    assert len(set(WORDS)) == len(WORDS) == TopicClassification().d_vocab == len(topic_tokenizer())
    assert len(LABELS) + len(FILLERS) + sum(map(len, TOPICS.values())) == len(WORDS) - 3
    line = " ".join(WORDS)
    assert topic_tokenizer()(line).input_ids == [0, *range(len(WORDS))]
    assert topic_tokenizer()(line, add_special_tokens=False).input_ids == list(range(len(WORDS)))
    assert topic_tokenizer().decode(list(range(len(WORDS)))) == line


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
