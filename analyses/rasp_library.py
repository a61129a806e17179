"""RASP programs and what each computes, in plain Python: the list that `rasp_programs.py` compiles and verifies."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import eq as equal
from operator import gt as greater
from operator import le as up_to
from operator import lt as less
from operator import mul as times
from operator import not_ as is_none
from operator import sub as minus
from typing import Any

rasp: Any = importlib.import_module("tracr.rasp.rasp")  # whose values may be anything, which annotations doubt
tokens, indices = rasp.tokens, rasp.indices
Sop = Any  # a sequence operation of RASP: a value at each position
Predicate = Callable[[Any, Any], bool]  # of key and query


@dataclass(frozen=True)
class Program:
    """A program, what it computes, and what it is to be compiled for."""

    name: str  # which `compile_program` takes
    words: Sequence[Any]  # that it reads
    length: int  # largest number of words
    text: str  # a description of the program
    # the same in plain Python: words to values, None where the program has no value
    compute: Callable[[Any], list[Any]]
    build: Callable[[], Sop]  # makes the RASP expression
    causal: bool = False  # whether it is compiled with causal attention


# ---- operations of RASP ----


def width(keys: Sop, queries: Sop, predicate: Predicate) -> Sop:
    """How many keys each query selects."""
    return rasp.SelectorWidth(rasp.Select(keys, queries, predicate))


def fetch(keys: Sop, queries: Sop, predicate: Predicate, values: Sop) -> Sop:
    """The value at the one key that each query selects."""
    return rasp.Aggregate(rasp.Select(keys, queries, predicate), values)


def share(keys: Sop, queries: Sop, predicate: Predicate, flags: Sop) -> Sop:
    """The mean of numerical zeros and ones over the keys that each query selects; 0 where there are none."""
    return rasp.numerical(rasp.Aggregate(rasp.Select(keys, queries, predicate), flags, default=0))


def apply(function: Callable[[Any], Any], values: Sop) -> Sop:
    return rasp.Map(function, values)


def combine(function: Callable[[Any, Any], Any], left: Sop, right: Sop) -> Sop:
    return rasp.SequenceMap(function, left, right)


def flag(test: Callable[[Any], bool], values: Sop) -> Sop:
    """1.0 or 0.0, as a number in the stream."""
    return rasp.numerical(rasp.Map(lambda x: float(test(x)), values))


def add(left: Sop, right: Sop, by_left: float = 1.0, by_right: float = 1.0) -> Sop:
    """A weighted sum of two numbers."""
    return rasp.numerical(rasp.LinearSequenceMap(left, right, by_left, by_right))


def always(key: Any, query: Any) -> bool:
    return True


def is_0(key: Any, query: Any) -> bool:
    return key == 0


def is_(word: Any) -> Callable[[Any], bool]:
    return lambda token: token == word


# ---- parts that several programs share ----


def length() -> Sop:
    return width(tokens, tokens, always)


def count(word: Any) -> Sop:
    """How often a word occurs."""
    return width(tokens, tokens, lambda key, query: key == word)


def histogram(values: Sop = tokens) -> Sop:
    return width(values, values, equal)


def number_of(flags: Sop, test: Callable[[Any], bool] = bool) -> Sop:
    """How many values pass a test."""
    return width(flags, flags, lambda key, query: test(key))


def share_of(word: Any) -> Sop:
    """Which part of the tokens is a word."""
    return share(tokens, tokens, always, flag(is_(word), tokens))


def shifted(by: int, values: Sop = tokens) -> Sop:
    """The value n positions before."""
    return fetch(indices, indices, lambda key, query: key == query - by, values)


def pairs_with(predicate: Predicate) -> Sop:
    """How many pairs of token and position each pair selects."""
    pairs = combine(lambda token, index: (token, index), tokens, indices)
    return width(pairs, pairs, predicate)


def stable_rank() -> Sop:
    """The position of each token in sorted order, equal ones in the order in which they stand."""
    return pairs_with(less)


def rank_by_frequency() -> Sop:
    """The position of each token from the most to the least frequent, equally frequent ones as they stand."""
    keys = combine(lambda n, i: (-n, i), histogram(), indices)
    return width(keys, keys, less)


def seen() -> Sop:
    """How often the token has occurred up to here."""
    return pairs_with(lambda key, query: key[0] == query[0] and key[1] <= query[1])


def larger_before() -> Sop:
    """How many larger tokens stand before."""
    return pairs_with(lambda key, query: key[1] < query[1] and key[0] > query[0])


def farthest(beyond: Predicate) -> Sop:
    """The token that no other one is beyond."""
    return fetch(width(tokens, tokens, beyond), tokens, is_0, tokens)


def from_the_end(values: Sop) -> Sop:
    return fetch(indices, combine(lambda n, i: n - 1 - i, length(), indices), equal, values)


def mirrored() -> Sop:
    """Whether the token is that at the same distance from the other end."""
    return combine(equal, tokens, from_the_end(tokens))


def depth() -> Sop:
    """How many brackets are open."""
    return combine(minus, count("("), count(")"))


def wrongly_closed(level: Sop) -> Sop:
    """How often the depth is below 0."""
    return number_of(apply(lambda d: d < 0, level))


def follow(hops: int) -> Sop:
    place = tokens
    for _ in range(hops):
        place = fetch(indices, place, equal, tokens)
    return place


def differing(cells: Sop) -> Sop:
    """Whether a cell's neighbours differ; nothing where one is missing."""
    return combine(lambda x, y: x ^ y, shifted(1, cells), shifted(-1, cells))


def append(number: int, digit: int) -> int:
    return 10 * number + digit


# ---- programs that use an operation twice ----


def reverse_twice() -> Sop:
    mirror = combine(lambda n, i: n - 1 - i, length(), indices)
    return fetch(indices, mirror, equal, fetch(indices, mirror, equal, tokens))


def balanced() -> Sop:
    level = depth()
    return combine(lambda n, d: n == 0 and d == 0, wrongly_closed(level), level)


def sum_of_positions() -> Sop:
    pairs = combine(lambda token, i: i if token == "a" else -1, tokens, indices)
    # of "a" at i there are i places below it, counted one place after the other
    parts = [width(pairs, tokens, lambda key, query, i=i: key > i) for i in range(3)]
    return combine(lambda x, y: x + y, combine(lambda x, y: x + y, *parts[:2]), parts[2])


def first_a() -> Sop:
    pairs = combine(lambda token, i: i if token == "a" else 9, tokens, indices)
    place = combine(lambda n, i: i if n == 0 and i < 9 else 9, width(pairs, pairs, less), pairs)
    return fetch(place, tokens, lambda key, query: key < 9, indices)


def window() -> Sop:
    is_a = flag(is_("a"), tokens)
    near = [share(indices, indices, lambda key, query, by=by: key == query + by, is_a) for by in range(-2, 3)]
    sums = [add(near[0], near[1], 0.25, 0.25), add(near[2], near[3], 0.25, 0.25)]
    return add(add(*sums), near[4], 1.0, 0.25)


def sum_of_tokens() -> Sop:
    counts = [rasp.numerical(count(word)) for word in range(6)]
    pairs = [add(counts[i], counts[i + 1], i, i + 1) for i in (0, 2, 4)]
    return add(add(*pairs[:2]), pairs[2])


# ---- what programs compute, in plain Python ----


def so_far(words: Sequence[Any], count: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """Apply a function to the words up to each position."""
    return [count(words[: i + 1]) for i in range(len(words))]


def mean(flags: Sequence[Any]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def everywhere(value: Any, words: Sequence[Any]) -> list[Any]:
    return [value] * len(words)


def never_below(words: Sequence[str]) -> bool:
    return all(words[: i + 1].count("(") >= words[: i + 1].count(")") for i in range(len(words)))


def followers(words: Sequence[Any], i: int) -> list[Any]:
    return [words[j] for j in range(1, i + 1) if words[j - 1] == words[i]]


def hop(words: Sequence[int], times: int) -> list[Any]:
    places = list(range(len(words)))
    for _ in range(times):
        places = [None if p is None or words[p] >= len(words) else words[p] for p in places]
    return [None if p is None else words[p] for p in places]


def automaton(words: Sequence[int], steps: int) -> list[Any]:
    cells: list[Any] = list(words)
    for _ in range(steps):
        sides = zip([None, *cells], [*cells[1:], None], strict=False)
        cells = [None if left is None or right is None else left ^ right for left, right in sides]
    return cells


TABLE = (
    # ---- counting ----
    Program("histogram", "abc", 5, "How often the token at each position occurs.",
            lambda w: [w.count(x) for x in w], histogram),
    Program("count_all", "abc", 5, "How many tokens there are: a selector as wide as the input.",
            lambda w: everywhere(len(w), w), length),
    Program("count_a", "abc", 5, 'How often "a" occurs.',
            lambda w: everywhere(w.count("a"), w), lambda: count("a")),
    Program("parity_of_a", "abc", 5, 'Whether "a" occurs an odd number of times.',
            lambda w: everywhere(w.count("a") % 2 == 1, w), lambda: apply(lambda n: n % 2 == 1, count("a"))),
    Program("is_unique", "abcd", 5, "Whether the token occurs nowhere else.",
            lambda w: [w.count(x) == 1 for x in w], lambda: apply(lambda n: n == 1, histogram())),
    Program("occurrences_so_far", "ab", 4,
            "How often the token has occurred up to here, by pairs of token and position.",
            lambda w: so_far(w, lambda v: v.count(v[-1])), seen),
    Program("occurrences_so_far_causal", "abc", 6, "How often the token has occurred up to here, by causal attention.",
            lambda w: so_far(w, lambda v: v.count(v[-1])), histogram, causal=True),
    Program("count_distinct", "ab", 4, "How many different tokens there are: those that occur for the first time.",
            lambda w: everywhere(len(set(w)), w), lambda: number_of(apply(lambda n: n == 1, seen()))),
    Program("majority", "abc", 5, 'Which of "a" and "b" occurs more often; "a" if neither does.',
            lambda w: everywhere("ab"[w.count("b") > w.count("a")], w),
            lambda: combine(lambda a, b: "ab"[b > a], count("a"), count("b"))),
    Program("count_smaller", (1, 2, 3, 4), 5, "How many tokens are smaller.",
            lambda w: [sum(x < y for x in w) for y in w], lambda: width(tokens, tokens, less)),
    Program("histogram_as_number", (0, 1, 2), 5, "How often each token occurs, as a number.",
            lambda w: [float(w.count(x)) for x in w], lambda: rasp.numerical(histogram())),
    Program("surplus", "abc", 5, "Twice the count of the token less half the length, as a number.",
            lambda w: [2.0 * w.count(x) - 0.5 * len(w) for x in w],
            lambda: add(rasp.numerical(histogram()), rasp.numerical(length()), 2.0, -0.5)),
    # ---- sorting ----
    Program("ranks", (1, 2, 3), 4, "The place of each token in sorted order.",
            lambda w: [sorted(range(len(w)), key=lambda i: (w[i], i)).index(i) for i in range(len(w))], stable_rank),
    Program("sort", (1, 2, 3), 4, "The tokens in order.",
            sorted, lambda: fetch(stable_rank(), indices, equal, tokens)),
    Program("sort_downwards", (1, 2, 3), 4, "The tokens from the largest to the smallest.",
            lambda w: sorted(w, reverse=True), lambda: fetch(pairs_with(greater), indices, equal, tokens)),
    Program("argsort", (1, 2), 4, "Where the tokens in order come from.",
            lambda w: sorted(range(len(w)), key=lambda i: (w[i], i)),
            lambda: fetch(stable_rank(), indices, equal, indices)),
    Program("sort_by_frequency", "abc", 4,
            "The tokens from the most to the least frequent, equally frequent ones as they stand.",
            lambda w: [w[i] for i in sorted(range(len(w)), key=lambda i: (-w.count(w[i]), i))],
            lambda: fetch(rank_by_frequency(), indices, equal, tokens)),
    Program("maximum", (1, 2, 3, 4), 5,
            "The largest token: that with none above it, which may stand at several positions.",
            lambda w: everywhere(max(w), w), lambda: farthest(greater)),
    Program("spread", (1, 2, 3, 4), 5, "The largest token less the smallest.",
            lambda w: everywhere(max(w) - min(w), w), lambda: combine(minus, farthest(greater), farthest(less))),
    Program("median", (1, 2, 3), 4, "The token in the middle of the sorted order.",
            lambda w: everywhere(sorted(w)[len(w) // 2], w),
            lambda: fetch(stable_rank(), apply(lambda n: n // 2, length()), equal, tokens)),
    Program("second_smallest", (1, 2, 3), 4, "The second token of the sorted order; nothing for a single one.",
            lambda w: everywhere(sorted(w)[1] if len(w) > 1 else None, w),
            lambda: fetch(stable_rank(), indices, lambda key, query: key == 1, tokens)),
    Program("in_order", (1, 2, 3), 5, "Whether the token is not smaller than the one before.",
            lambda w: [i == 0 or w[i - 1] <= x for i, x in enumerate(w)],
            lambda: apply(is_none, pairs_with(lambda key, query: key[1] == query[1] - 1 and key[0] > query[0]))),
    # ---- reversing and moving ----
    Program("reverse", "abc", 5, "The tokens from the last to the first.",
            lambda w: list(reversed(w)), lambda: from_the_end(tokens)),
    Program("rotate_left", "abc", 5, "Each token's successor, the first after the last.",
            lambda w: [w[(i + 1) % len(w)] for i in range(len(w))],
            lambda: fetch(indices, combine(lambda n, i: (i + 1) % n if n else 0, length(), indices), equal, tokens)),
    Program("swap_neighbours", "abc", 6,
            "Each pair of neighbours in the other order; nothing where the last one is alone.",
            lambda w: [w[i ^ 1] if i ^ 1 < len(w) else None for i in range(len(w))],
            lambda: fetch(indices, indices, lambda key, query: key == query ^ 1, tokens)),
    Program("mirrored", "abc", 4, "Whether the token is that at the same distance from the other end.",
            lambda w: [x == y for x, y in zip(w, reversed(w), strict=True)], mirrored),
    Program("is_palindrome", "abc", 4, "Whether the input reads the same from both ends.",
            lambda w: everywhere(w == w[::-1], w),
            lambda: apply(is_none, number_of(apply(lambda same: not same, mirrored())))),
    Program("reverse_twice", "abc", 4, "The input, reversed and reversed again.",
            list, reverse_twice),
    Program("last_token", "abc", 5, "The last token.",
            lambda w: everywhere(w[-1], w), lambda: fetch(indices, apply(lambda n: n - 1, length()), equal, tokens)),
    Program("first_token", "abc", 6, "The first token, by causal attention.",
            lambda w: everywhere(w[0], w), lambda: fetch(indices, indices, is_0, tokens), causal=True),
    # ---- brackets ----
    Program("depth", "()", 6, "How many brackets are open.",
            lambda w: so_far(w, lambda v: v.count("(") - v.count(")")), depth, causal=True),
    Program("open_share", "()", 5, "The share of opening less that of closing brackets up to here.",
            lambda w: so_far(w, lambda v: mean([x == "(" for x in v]) - mean([x == ")" for x in v])),
            lambda: add(*(share(indices, indices, up_to, flag(is_(word), tokens)) for word in "()"), by_right=-1.0)),
    Program("never_negative", "()", 4, "Whether no bracket has been closed that was not open.",
            lambda w: so_far(w, never_below), lambda: apply(is_none, wrongly_closed(depth())), causal=True),
    Program("balanced", "()x", 4, "True if the brackets up to here match; other tokens are ignored.",
            lambda w: so_far(w, lambda v: never_below(v) and v.count("(") == v.count(")")), balanced, causal=True),
    Program("two_kinds", "([)]", 4, "The depth in round brackets times that in square ones.",
            lambda w: so_far(w, lambda v: (v.count("(") - v.count(")")) * (v.count("[") - v.count("]"))),
            lambda: combine(times, *(combine(minus, count(left), count(right)) for left, right in ("()", "[]"))),
            causal=True),
    # ---- previous tokens and induction ----
    Program("previous", "abc", 6, "The token before; nothing at the first.",
            lambda w: [None, *w[:-1]], lambda: shifted(1)),
    Program("following", "abc", 5, "The token after; nothing at the last.",
            lambda w: [*w[1:], None], lambda: shifted(-1)),
    Program("two_back", "abc", 6, "The token two positions before, in two steps.",
            lambda w: ([None, None, *w])[: len(w)], lambda: shifted(1, shifted(1))),
    Program("three_back", "ab", 6, "The token three positions before, in three steps of causal attention.",
            lambda w: ([None, None, None, *w])[: len(w)], lambda: shifted(1, shifted(1, shifted(1))), causal=True),
    Program("repeats_previous", "abc", 5, "Whether the token is the one before again.",
            lambda w: [None, *(x == y for x, y in pairwise(w))], lambda: combine(equal, tokens, shifted(1))),
    Program("bigram", "abc", 5, "The token before and this one.",
            lambda w: [None, *(x + y for x, y in pairwise(w))],
            lambda: combine(lambda x, y: x + y, shifted(1), tokens)),
    Program("induction_share", "abc", 6, 'The share of "a" among tokens that have followed this one.',
            lambda w: [mean([x == "a" for x in followers(w, i)]) for i in range(len(w))],
            lambda: share(shifted(1), tokens, equal, flag(is_("a"), tokens)), causal=True),
    Program("induction", "abc", 5, "The token that has followed this one, where it was always the same.",
            lambda w: [f[0] if len(set(f := followers(w, i))) == 1 or len(f) == 1 else None for i in range(len(w))],
            lambda: fetch(shifted(1), tokens, equal, tokens), causal=True),
    Program("skip_bigram", "abc", 6, 'Whether this is "b" and "a" came before.',
            lambda w: so_far(w, lambda v: v[-1] == "b" and "a" in v[:-1]),
            lambda: combine(lambda n, token: n > 0 and token == "b", count("a"), tokens), causal=True),
    Program("pointer", (0, 1, 2, 3), 4, "The token at the position that this token names.",
            lambda w: hop(w, 1), lambda: follow(1)),
    Program("pointer_three_times", (0, 1, 2, 3), 4,
            "The token after following positions three times: three layers of queries from the layer before.",
            lambda w: hop(w, 3), lambda: follow(3)),
    Program("seven_hops", (0, 1, 2), 3, "The token after following positions seven times, in seven layers.",
            lambda w: hop(w, 7), lambda: follow(7)),
    # ---- shares of a class ----
    Program("share_of_class", "abcd", 5, 'Which part of the input is "a" or "d".',
            lambda w: everywhere(mean([x in "ad" for x in w]), w),
            lambda: share(tokens, tokens, always, flag(lambda x: x in "ad", tokens))),
    Program("share_so_far", "abc", 6, 'Which part of the input up to here is "a".',
            lambda w: so_far(w, lambda v: mean([x == "a" for x in v])),
            lambda: share(indices, indices, up_to, flag(is_("a"), tokens))),
    Program("share_so_far_causal", "abc", 6, 'Which part of the input up to here is "a", by causal attention.',
            lambda w: so_far(w, lambda v: mean([x == "a" for x in v])), lambda: share_of("a"), causal=True),
    Program("share_above", (1, 2, 3), 5, "The share of 3 among the larger tokens; 0 if there are none.",
            lambda w: [mean([x == 3 for x in w if x > y]) for y in w],
            lambda: share(tokens, tokens, greater, flag(lambda x: x == 3, tokens))),
    Program("weighted_shares", "abc", 4, 'Half the share of "a" and a quarter of that of "b".',
            lambda w: everywhere(0.5 * mean([x == "a" for x in w]) + mean([x == "b" for x in w]) / 4, w),
            lambda: add(share_of("a"), share_of("b"), 0.5, 0.25)),
    Program("share_of_even_positions", "abc", 5, "Which part of the positions is even; tokens decide nothing.",
            lambda w: everywhere(mean([i % 2 == 0 for i in range(len(w))]), w),
            lambda: share(tokens, tokens, always, flag(lambda i: i % 2 == 0, indices))),
    Program("share_of_this", "abc", 5,
            "The share of the token itself up to here: the count of pairs as a part of the position.",
            lambda w: [mean([x == y for x in w[: i + 1]]) for i, y in enumerate(w)],
            lambda: rasp.numerical(apply(lambda x: x, combine(lambda n, i: n / (i + 1), seen(), indices)))),
    # ---- arithmetic on positions ----
    Program("position_modulo_3", "abc", 6, "The position modulo 3.",
            lambda w: [i % 3 for i in range(len(w))], lambda: combine(lambda i, token: i % 3, indices, tokens)),
    Program("shift_by_position", (0, 1, 2), 5, "The token plus the position, modulo 3.",
            lambda w: [(x + i) % 3 for i, x in enumerate(w)],
            lambda: combine(lambda x, i: (x + i) % 3, tokens, indices)),
    Program("positions_left", "ab", 6, "How many positions come after.",
            lambda w: [len(w) - 1 - i for i in range(len(w))],
            lambda: combine(lambda n, i: n - 1 - i, length(), indices)),
    Program("second_half", "ab", 6, "Whether the position is beyond the middle.",
            lambda w: [2 * i > len(w) for i in range(len(w))],
            lambda: combine(lambda n, i: 2 * i > n, length(), indices)),
    Program("sum_of_positions", "ab", 4,
            'The sum of the positions of "a": as many pairs of token and place as there are smaller places.',
            lambda w: everywhere(sum(i for i, x in enumerate(w) if x == "a"), w), sum_of_positions),
    Program("first_a", "abc", 5, 'The position of the first "a"; no value if there is none.',
            lambda w: everywhere(w.index("a") if "a" in w else None, w), first_a),
    # ---- selectors of width 0 and n, several heads in a layer, many edges ----
    Program("count_nothing", "abc", 4, "How many keys a selector without any selects.",
            lambda w: everywhere(0, w), lambda: width(tokens, tokens, lambda key, query: False)),
    Program("length_and_token", "abc", 4, 'The length, and one more at "a".',
            lambda w: [len(w) + (x == "a") for x in w], lambda: combine(lambda n, x: n + (x == "a"), length(), tokens)),
    Program("same_neighbours", "abc", 5, "Whether the tokens before and after are the same.",
            lambda w: [(w[i - 1] if i else None) == w[i + 1] if 0 < i < len(w) - 1 else None for i in range(len(w))],
            lambda: combine(equal, shifted(1), shifted(-1))),
    Program("counts_of_each", "abc", 4,
            "The counts of the three tokens as the digits of one number: three heads in a layer.",
            lambda w: everywhere(100 * w.count("a") + 10 * w.count("b") + w.count("c"), w),
            lambda: combine(append, combine(append, count("a"), count("b")), count("c"))),
    Program("window", "ab", 6, 'A quarter of the number of "a" within two positions: five heads in a layer.',
            lambda w: [sum(w[j] == "a" for j in range(i - 2, i + 3) if 0 <= j < len(w)) / 4 for i in range(len(w))],
            window),
    Program("sum_of_tokens", (0, 1, 2, 3, 4, 5), 4,
            "The sum of the tokens: a counter for each, six heads in a layer, and their weighted sums in three layers.",
            lambda w: everywhere(float(sum(w)), w), sum_of_tokens),
    Program("two_steps_of_an_automaton", (0, 1), 6,
            "Each cell becomes whether its neighbours differ, twice; nothing where one is missing.",
            lambda w: automaton(w, 2), lambda: differing(differing(tokens))),
    Program("running_parity", (0, 1), 5, "Whether the number of ones up to here is odd.",
            lambda w: so_far(w, lambda v: sum(v) % 2), lambda: apply(lambda n: n % 2, count(1)), causal=True),
    Program("alternates", "ab", 5, "Whether the token is the one two positions before.",
            lambda w: [None if i < 2 else x == w[i - 2] for i, x in enumerate(w)],
            lambda: combine(equal, tokens, shifted(1, shifted(1)))),
    Program("add_the_first", (0, 1, 2), 4, "The token plus the first one, modulo 3.",
            lambda w: [(x + w[0]) % 3 for x in w],
            lambda: combine(lambda x, y: (x + y) % 3, tokens, fetch(indices, indices, is_0, tokens))),
    Program("as_frequent", "abc", 4, "How many tokens are as frequent as this one: a histogram of the histogram.",
            lambda w: [sum(w.count(x) == w.count(y) for x in w) for y in w], lambda: histogram(histogram(tokens))),
    Program("inversions", (1, 2, 3), 4, "How many larger tokens stand before.",
            lambda w: [sum(w[j] > x for j in range(i)) for i, x in enumerate(w)], larger_before),
    Program("is_sorted", (1, 2, 3), 4, "Whether all tokens stand in order.",
            lambda w: everywhere(list(w) == sorted(w), w),
            lambda: apply(is_none, number_of(larger_before(), lambda n: n > 0))),
    Program("mode", "abc", 4, "The most frequent token, of several the first.",
            lambda w: everywhere(min(w, key=lambda x: (-w.count(x), w.index(x))), w),
            lambda: fetch(rank_by_frequency(), tokens, is_0, tokens)),
    Program("sort_and_reverse", (1, 2, 3), 4, "The tokens in order, then from the other end: six layers.",
            lambda w: sorted(w)[::-1], lambda: from_the_end(fetch(stable_rank(), indices, equal, tokens))),
    # ---- programs that are hard to search: what they have, they hardly use ----
    Program("at_least_two", "abc", 5,
            'Whether "a" occurs twice or more often: a threshold on a number, which saturates.',
            lambda w: everywhere(w.count("a") >= 2, w), lambda: apply(lambda n: n >= 2, rasp.numerical(count("a")))),
    Program("asked_twice", "abc", 4, 'Whether "a" occurs, by two heads that say the same, of which either would do.',
            lambda w: everywhere("a" in w, w), lambda: apply(lambda x: x > 0, add(share_of("a"), share_of("a")))),
    Program("counted_twice", "abc", 4, "How often the token occurs, if two heads that count it agree.",
            lambda w: [w.count(x) for x in w],
            lambda: combine(lambda x, y: x if x == y else -1, *(histogram() for _ in range(2)))),
    Program("ignores_a_count", "abc", 4, "The token, by an MLP that reads a count too and makes nothing of it.",
            list, lambda: combine(lambda token, n: token, tokens, histogram())),
    Program("mean_of_ones", "abc", 5, "The mean of ones, whatever the pattern is.",
            lambda w: everywhere(1.0, w), lambda: share(tokens, tokens, equal, flag(lambda x: True, tokens))),
    Program("mean_of_nothing", "abc", 5, "The mean over a selector that selects nothing.",
            lambda w: everywhere(0.0, w),
            lambda: share(tokens, tokens, lambda key, query: False, flag(is_("a"), tokens))),
    Program("one_answer", "abc", 5, "The same word whatever the count is.",
            lambda w: everywhere("yes", w), lambda: apply(lambda n: "yes", histogram())),
    Program("share_before", "ab", 5,
            'The share of "a" before here: 0 at the first position, where nothing is selected.',
            lambda w: [mean([x == "a" for x in w[:i]]) for i in range(len(w))],
            lambda: share(indices, indices, less, flag(is_("a"), tokens))),
    Program("two_flags", "abc", 4, 'Whether the token is "a", plus whether it is the first: no attention at all.',
            lambda w: [float(x == "a") + float(i == 0) for i, x in enumerate(w)],
            lambda: add(flag(is_("a"), tokens), flag(lambda i: i == 0, indices))),
    Program("clipped_histogram", (1, 2, 3), 4, "How often the token occurs, but not more than 2.",
            lambda w: [min(w.count(x), 2) for x in w],
            lambda: apply(lambda n: min(int(n), 2), rasp.numerical(histogram()))),
)  # fmt: skip
PROGRAMS = {program.name: program for program in TABLE}
"""Programs by name."""
