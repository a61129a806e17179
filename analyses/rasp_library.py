"""RASP programs and what each computes, in plain Python: the list that `rasp_programs.py` compiles and verifies."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

rasp: Any = importlib.import_module("tracr.rasp.rasp")  # whose values may be anything, which annotations doubt
tokens, indices = rasp.tokens, rasp.indices
Sop = Any  # a sequence operation of RASP: a value at each position


@dataclass(frozen=True)
class Program:
    """A program, what it computes, and what it is to be compiled for.

    Attributes:
        name: which `compile_program` takes.
        words: that it reads.
        length: largest number of words.
        build: makes the RASP expression.
        compute: the same in plain Python: words to values, None where the program has no value.
        causal: whether it is compiled with causal attention.
    """

    name: str
    words: tuple[Any, ...]
    length: int
    build: Callable[[], Sop]
    compute: Callable[[Sequence[Any]], list[Any]]
    causal: bool = False

    @property
    def text(self) -> str:
        """A description of the program."""
        return (self.build.__doc__ or "").strip()


PROGRAMS: dict[str, Program] = {}


def program(words: Sequence[Any], length: int, compute: Callable[[Any], list[Any]], *, causal: bool = False) -> Any:
    """Enter a function that builds a program into the list, under its name."""

    def enter(build: Callable[[], Sop]) -> Callable[[], Sop]:
        PROGRAMS[build.__name__] = Program(build.__name__, tuple(words), length, build, compute, causal)
        return build

    return enter


# ---- what programs are made of ----


def select(keys: Sop, queries: Sop, predicate: Callable[[Any, Any], bool]) -> Any:
    """Which keys each query selects, by a predicate of key and query."""
    return rasp.Select(keys, queries, predicate)


def width(keys: Sop, queries: Sop, predicate: Callable[[Any, Any], bool]) -> Sop:
    """How many keys each query selects."""
    return rasp.SelectorWidth(select(keys, queries, predicate))


def fetch(keys: Sop, queries: Sop, predicate: Callable[[Any, Any], bool], values: Sop) -> Sop:
    """The value at the one key that each query selects."""
    return rasp.Aggregate(select(keys, queries, predicate), values)


def share(keys: Sop, queries: Sop, predicate: Callable[[Any, Any], bool], flags: Sop) -> Sop:
    """The mean of numerical zeros and ones over the keys that each query selects; 0 where there are none."""
    return rasp.numerical(rasp.Aggregate(select(keys, queries, predicate), flags, default=0))


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


def equal(key: Any, query: Any) -> bool:
    return key == query


def less(key: Any, query: Any) -> bool:
    return key < query


def up_to(key: Any, query: Any) -> bool:
    return key <= query


def length() -> Sop:
    return width(tokens, tokens, always)


def shifted(by: int, values: Sop = tokens) -> Sop:
    """The value n positions before."""
    return fetch(indices, indices, lambda key, query: key == query - by, values)


def placed() -> Sop:
    """Token and position as one value."""
    return combine(lambda token, index: (token, index), tokens, indices)


def stable_rank() -> Sop:
    """The position of each token in sorted order, equal ones in the order in which they stand."""
    pairs = placed()
    return width(pairs, pairs, less)


def so_far(words: Sequence[Any], count: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """Apply a function to the words up to each position."""
    return [count(words[: i + 1]) for i in range(len(words))]


def mean(flags: Sequence[Any]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def everywhere(value: Any, words: Sequence[Any]) -> list[Any]:
    return [value] * len(words)


# ---- counting ----


@program("abc", 5, lambda w: [w.count(x) for x in w])
def histogram() -> Sop:
    """How often the token at each position occurs."""
    return width(tokens, tokens, equal)


@program("abc", 5, lambda w: everywhere(len(w), w))
def count_all() -> Sop:
    """How many tokens there are: a selector as wide as the input."""
    return length()


@program("abc", 5, lambda w: everywhere(w.count("a"), w))
def count_a() -> Sop:
    """How often "a" occurs."""
    return width(tokens, tokens, lambda key, query: key == "a")


@program("abc", 5, lambda w: everywhere(w.count("a") % 2 == 1, w))
def parity_of_a() -> Sop:
    """Whether "a" occurs an odd number of times."""
    return apply(lambda n: n % 2 == 1, width(tokens, tokens, lambda key, query: key == "a"))


@program("abcd", 5, lambda w: [w.count(x) == 1 for x in w])
def is_unique() -> Sop:
    """Whether the token occurs nowhere else."""
    return apply(lambda n: n == 1, width(tokens, tokens, equal))


@program("ab", 4, lambda w: so_far(w, lambda v: v.count(v[-1])))
def occurrences_so_far() -> Sop:
    """How often the token has occurred up to here, by pairs of token and position."""
    pairs = placed()
    return width(pairs, pairs, lambda key, query: key[0] == query[0] and key[1] <= query[1])


@program("abc", 6, lambda w: so_far(w, lambda v: v.count(v[-1])), causal=True)
def occurrences_so_far_causal() -> Sop:
    """How often the token has occurred up to here, by causal attention."""
    return width(tokens, tokens, equal)


@program("ab", 4, lambda w: everywhere(len(set(w)), w))
def count_distinct() -> Sop:
    """How many different tokens there are: those that occur for the first time."""
    pairs = placed()
    seen = width(pairs, pairs, lambda key, query: key[0] == query[0] and key[1] <= query[1])
    first = apply(lambda n: n == 1, seen)
    return width(first, first, lambda key, query: key)


@program("abc", 5, lambda w: everywhere("ab"[w.count("b") > w.count("a")], w))
def majority() -> Sop:
    """Which of "a" and "b" occurs more often; "a" if neither does."""
    counts = [width(tokens, tokens, lambda key, query, word=word: key == word) for word in "ab"]
    return combine(lambda a, b: "ab"[b > a], *counts)


@program((1, 2, 3, 4), 5, lambda w: [sum(x < y for x in w) for y in w])
def count_smaller() -> Sop:
    """How many tokens are smaller."""
    return width(tokens, tokens, less)


@program((0, 1, 2), 5, lambda w: [float(w.count(x)) for x in w])
def histogram_as_number() -> Sop:
    """How often each token occurs, as a number."""
    return rasp.numerical(width(tokens, tokens, equal))


@program("abc", 5, lambda w: [2.0 * w.count(x) - 0.5 * len(w) for x in w])
def surplus() -> Sop:
    """Twice the count of the token less half the length, as a number."""
    return add(rasp.numerical(width(tokens, tokens, equal)), rasp.numerical(length()), 2.0, -0.5)


# ---- sorting ----


@program((1, 2, 3), 4, lambda w: [sorted(range(len(w)), key=lambda i: (w[i], i)).index(i) for i in range(len(w))])
def ranks() -> Sop:
    """The place of each token in sorted order."""
    return stable_rank()


@program((1, 2, 3), 4, sorted)
def sort() -> Sop:
    """The tokens in order."""
    return fetch(stable_rank(), indices, equal, tokens)


@program((1, 2, 3), 4, lambda w: sorted(w, reverse=True))
def sort_downwards() -> Sop:
    """The tokens from the largest to the smallest."""
    pairs = placed()
    return fetch(width(pairs, pairs, lambda key, query: key > query), indices, equal, tokens)


@program((1, 2), 4, lambda w: sorted(range(len(w)), key=lambda i: (w[i], i)))
def argsort() -> Sop:
    """Where the tokens in order come from."""
    return fetch(stable_rank(), indices, equal, indices)


@program("abc", 4, lambda w: [w[i] for i in sorted(range(len(w)), key=lambda i: (-w.count(w[i]), i))])
def sort_by_frequency() -> Sop:
    """The tokens from the most to the least frequent, equally frequent ones as they stand."""
    keys = combine(lambda n, i: (-n, i), width(tokens, tokens, equal), indices)
    return fetch(width(keys, keys, less), indices, equal, tokens)


@program((1, 2, 3, 4), 5, lambda w: everywhere(max(w), w))
def maximum() -> Sop:
    """The largest token: that with none above it, which may stand at several positions."""
    above = width(tokens, tokens, lambda key, query: key > query)
    return fetch(above, tokens, lambda key, query: key == 0, tokens)


@program((1, 2, 3, 4), 5, lambda w: everywhere(max(w) - min(w), w))
def spread() -> Sop:
    """The largest token less the smallest."""
    above = width(tokens, tokens, lambda key, query: key > query)
    below = width(tokens, tokens, less)
    ends = [fetch(n, tokens, lambda key, query: key == 0, tokens) for n in (above, below)]
    return combine(lambda high, low: high - low, *ends)


@program((1, 2, 3), 4, lambda w: everywhere(sorted(w)[len(w) // 2], w))
def median() -> Sop:
    """The token in the middle of the sorted order."""
    return fetch(stable_rank(), apply(lambda n: n // 2, length()), equal, tokens)


@program((1, 2, 3), 4, lambda w: everywhere(sorted(w)[1] if len(w) > 1 else None, w))
def second_smallest() -> Sop:
    """The second token of the sorted order; nothing for a single one."""
    return fetch(stable_rank(), indices, lambda key, query: key == 1, tokens)


@program((1, 2, 3), 5, lambda w: [i == 0 or w[i - 1] <= x for i, x in enumerate(w)])
def in_order() -> Sop:
    """Whether the token is not smaller than the one before."""
    pairs = placed()
    descents = width(pairs, pairs, lambda key, query: key[1] == query[1] - 1 and key[0] > query[0])
    return apply(lambda n: n == 0, descents)


# ---- reversing and moving ----


@program("abc", 5, lambda w: list(reversed(w)))
def reverse() -> Sop:
    """The tokens from the last to the first."""
    return fetch(indices, combine(lambda n, i: n - 1 - i, length(), indices), equal, tokens)


@program("abc", 5, lambda w: [w[(i + 1) % len(w)] for i in range(len(w))])
def rotate_left() -> Sop:
    """Each token's successor, the first after the last."""
    return fetch(indices, combine(lambda n, i: (i + 1) % n if n else 0, length(), indices), equal, tokens)


@program("abc", 6, lambda w: [w[i ^ 1] if i ^ 1 < len(w) else None for i in range(len(w))])
def swap_neighbours() -> Sop:
    """Each pair of neighbours in the other order; nothing where the last one is alone."""
    return fetch(indices, indices, lambda key, query: key == query ^ 1, tokens)


@program("abc", 4, lambda w: [x == y for x, y in zip(w, reversed(w), strict=True)])
def mirrored() -> Sop:
    """Whether the token is that at the same distance from the other end."""
    return combine(lambda x, y: x == y, tokens, reverse())


@program("abc", 4, lambda w: everywhere(w == w[::-1], w))
def is_palindrome() -> Sop:
    """Whether the input reads the same from both ends."""
    wrong = apply(lambda same: not same, mirrored())
    return apply(lambda n: n == 0, width(wrong, wrong, lambda key, query: key))


@program("abc", 4, lambda w: list(w))
def reverse_twice() -> Sop:
    """The input, reversed and reversed again."""
    mirror = combine(lambda n, i: n - 1 - i, length(), indices)
    return fetch(indices, mirror, equal, fetch(indices, mirror, equal, tokens))


@program("abc", 5, lambda w: everywhere(w[-1], w))
def last_token() -> Sop:
    """The last token."""
    return fetch(indices, apply(lambda n: n - 1, length()), equal, tokens)


@program("abc", 6, lambda w: everywhere(w[0], w), causal=True)
def first_token() -> Sop:
    """The first token, by causal attention."""
    return fetch(indices, indices, lambda key, query: key == 0, tokens)


# ---- brackets ----


@program("()", 6, lambda w: so_far(w, lambda v: v.count("(") - v.count(")")), causal=True)
def depth() -> Sop:
    """How many brackets are open."""
    opened, closed = (width(tokens, tokens, lambda key, query, word=word: key == word) for word in "()")
    return combine(lambda x, y: x - y, opened, closed)


@program("()", 5, lambda w: so_far(w, lambda v: mean([x == "(" for x in v]) - mean([x == ")" for x in v])))
def open_share() -> Sop:
    """The share of opening less that of closing brackets up to here."""
    left, right = (share(indices, indices, up_to, flag(lambda x, word=word: x == word, tokens)) for word in "()")
    return add(left, right, 1.0, -1.0)


def never_below(words: Sequence[str]) -> bool:
    return all(words[: i + 1].count("(") >= words[: i + 1].count(")") for i in range(len(words)))


@program("()", 4, lambda w: so_far(w, never_below), causal=True)
def never_negative() -> Sop:
    """Whether no bracket has been closed that was not open."""
    wrong = apply(lambda d: d < 0, depth())
    return apply(lambda n: n == 0, width(wrong, wrong, lambda key, query: key))


@program("()x", 4, lambda w: so_far(w, lambda v: never_below(v) and v.count("(") == v.count(")")), causal=True)
def balanced() -> Sop:
    """True if the brackets up to here match; other tokens are ignored."""
    level = depth()
    wrong = apply(lambda d: d < 0, level)
    n_wrong = width(wrong, wrong, lambda key, query: key)
    return combine(lambda n, d: n == 0 and d == 0, n_wrong, level)


@program(
    "([)]", 4, lambda w: so_far(w, lambda v: (v.count("(") - v.count(")")) * (v.count("[") - v.count("]"))), causal=True
)
def two_kinds() -> Sop:
    """The depth in round brackets times that in square ones."""
    counts = [width(tokens, tokens, lambda key, query, word=word: key == word) for word in "()[]"]
    depths = [combine(lambda x, y: x - y, *counts[i : i + 2]) for i in (0, 2)]
    return combine(lambda x, y: x * y, *depths)


# ---- previous tokens and induction ----


@program("abc", 6, lambda w: [None, *w[:-1]])
def previous() -> Sop:
    """The token before; nothing at the first."""
    return shifted(1)


@program("abc", 5, lambda w: [*w[1:], None])
def following() -> Sop:
    """The token after; nothing at the last."""
    return shifted(-1)


@program("abc", 6, lambda w: ([None, None, *w])[: len(w)])
def two_back() -> Sop:
    """The token two positions before, in two steps."""
    return shifted(1, shifted(1))


@program("ab", 6, lambda w: ([None, None, None, *w])[: len(w)], causal=True)
def three_back() -> Sop:
    """The token three positions before, in three steps of causal attention."""
    return shifted(1, shifted(1, shifted(1)))


@program("abc", 5, lambda w: [None, *(x == y for x, y in pairwise(w))])
def repeats_previous() -> Sop:
    """Whether the token is the one before again."""
    return combine(lambda x, y: x == y, tokens, shifted(1))


@program("abc", 5, lambda w: [None, *(x + y for x, y in pairwise(w))])
def bigram() -> Sop:
    """The token before and this one."""
    return combine(lambda x, y: x + y, shifted(1), tokens)


def followers(words: Sequence[Any], i: int) -> list[Any]:
    return [words[j] for j in range(1, i + 1) if words[j - 1] == words[i]]


@program("abc", 6, lambda w: [mean([x == "a" for x in followers(w, i)]) for i in range(len(w))], causal=True)
def induction_share() -> Sop:
    """The share of "a" among tokens that have followed this one."""
    return share(shifted(1), tokens, equal, flag(lambda x: x == "a", tokens))


@program(
    "abc", 5,
    lambda w: [f[0] if len(set(f := followers(w, i))) == 1 or len(f) == 1 else None for i in range(len(w))],
    causal=True,
)  # fmt: skip
def induction() -> Sop:
    """The token that has followed this one, where it was always the same."""
    return fetch(shifted(1), tokens, equal, tokens)


@program("abc", 6, lambda w: so_far(w, lambda v: v[-1] == "b" and "a" in v[:-1]), causal=True)
def skip_bigram() -> Sop:
    """Whether this is "b" and "a" came before."""
    n_a = width(tokens, tokens, lambda key, query: key == "a")
    return combine(lambda n, token: n > 0 and token == "b", n_a, tokens)


def hop(words: Sequence[int], times: int) -> list[Any]:
    places = list(range(len(words)))
    for _ in range(times):
        places = [None if p is None or words[p] >= len(words) else words[p] for p in places]
    return [None if p is None else words[p] for p in places]


@program((0, 1, 2, 3), 4, lambda w: hop(w, 1))
def pointer() -> Sop:
    """The token at the position that this token names."""
    return fetch(indices, tokens, equal, tokens)


@program((0, 1, 2, 3), 4, lambda w: hop(w, 3))
def pointer_three_times() -> Sop:
    """The token after following positions three times: three layers of queries from the layer before."""
    return fetch(indices, fetch(indices, fetch(indices, tokens, equal, tokens), equal, tokens), equal, tokens)


@program((0, 1, 2), 3, lambda w: hop(w, 7))
def seven_hops() -> Sop:
    """The token after following positions seven times, in seven layers."""
    place = tokens
    for _ in range(7):
        place = fetch(indices, place, equal, tokens)
    return place


# ---- shares of a class ----


@program("abcd", 5, lambda w: everywhere(mean([x in "ad" for x in w]), w))
def share_of_class() -> Sop:
    """Which part of the input is "a" or "d"."""
    return share(tokens, tokens, always, flag(lambda x: x in "ad", tokens))


@program("abc", 6, lambda w: so_far(w, lambda v: mean([x == "a" for x in v])))
def share_so_far() -> Sop:
    """Which part of the input up to here is "a"."""
    return share(indices, indices, up_to, flag(lambda x: x == "a", tokens))


@program("abc", 6, lambda w: so_far(w, lambda v: mean([x == "a" for x in v])), causal=True)
def share_so_far_causal() -> Sop:
    """Which part of the input up to here is "a", by causal attention."""
    return share(tokens, tokens, always, flag(lambda x: x == "a", tokens))


@program((1, 2, 3), 5, lambda w: [mean([x == 3 for x in w if x > y]) for y in w])
def share_above() -> Sop:
    """The share of 3 among the larger tokens; 0 if there are none."""
    return share(tokens, tokens, lambda key, query: key > query, flag(lambda x: x == 3, tokens))


@program("abc", 4, lambda w: everywhere(0.5 * mean([x == "a" for x in w]) + mean([x == "b" for x in w]) / 4, w))
def weighted_shares() -> Sop:
    """Half the share of "a" and a quarter of that of "b"."""
    first, second = (share(tokens, tokens, always, flag(lambda x, word=word: x == word, tokens)) for word in "ab")
    return add(first, second, 0.5, 0.25)


@program("abc", 5, lambda w: everywhere(mean([i % 2 == 0 for i in range(len(w))]), w))
def share_of_even_positions() -> Sop:
    """Which part of the positions is even; tokens decide nothing."""
    return share(tokens, tokens, always, flag(lambda i: i % 2 == 0, indices))


@program("abc", 5, lambda w: [mean([x == y for x in w[: i + 1]]) for i, y in enumerate(w)])
def share_of_this() -> Sop:
    """The share of the token itself up to here: the count of pairs as a part of the position."""
    pairs = placed()
    counts = width(pairs, pairs, lambda key, query: key[0] == query[0] and key[1] <= query[1])
    return rasp.numerical(apply(lambda x: x, combine(lambda n, i: n / (i + 1), counts, indices)))


# ---- arithmetic on positions ----


@program("abc", 6, lambda w: [i % 3 for i in range(len(w))])
def position_modulo_3() -> Sop:
    """The position modulo 3."""
    return combine(lambda i, token: i % 3, indices, tokens)


@program((0, 1, 2), 5, lambda w: [(x + i) % 3 for i, x in enumerate(w)])
def shift_by_position() -> Sop:
    """The token plus the position, modulo 3."""
    return combine(lambda x, i: (x + i) % 3, tokens, indices)


@program("ab", 6, lambda w: [len(w) - 1 - i for i in range(len(w))])
def positions_left() -> Sop:
    """How many positions come after."""
    return combine(lambda n, i: n - 1 - i, length(), indices)


@program("ab", 6, lambda w: [2 * i > len(w) for i in range(len(w))])
def second_half() -> Sop:
    """Whether the position is beyond the middle."""
    return combine(lambda n, i: 2 * i > n, length(), indices)


@program("ab", 4, lambda w: everywhere(sum(i for i, x in enumerate(w) if x == "a"), w))
def sum_of_positions() -> Sop:
    """The sum of the positions of "a": as many pairs of token and place as there are smaller places."""
    pairs = combine(lambda token, i: i if token == "a" else -1, tokens, indices)
    # of "a" at i there are i places below it, counted one place after the other
    parts = [width(pairs, tokens, lambda key, query, i=i: key > i) for i in range(3)]
    return combine(lambda x, y: x + y, combine(lambda x, y: x + y, *parts[:2]), parts[2])


@program("abc", 5, lambda w: everywhere(w.index("a") if "a" in w else None, w))
def first_a() -> Sop:
    """The position of the first "a"; no value if there is none."""
    pairs = combine(lambda token, i: i if token == "a" else 9, tokens, indices)
    smaller = width(pairs, pairs, less)
    place = combine(lambda n, i: i if n == 0 and i < 9 else 9, smaller, pairs)
    return fetch(place, tokens, lambda key, query: key < 9, indices)


# ---- selectors of width 0 and n, several heads in a layer, many edges ----


@program("abc", 4, lambda w: everywhere(0, w))
def count_nothing() -> Sop:
    """How many keys a selector without any selects."""
    return width(tokens, tokens, lambda key, query: False)


@program("abc", 4, lambda w: [len(w) + (x == "a") for x in w])
def length_and_token() -> Sop:
    """The length, and one more at "a"."""
    return combine(lambda n, x: n + (x == "a"), length(), tokens)


@program(
    "abc", 5, lambda w: [(w[i - 1] if i else None) == w[i + 1] if 0 < i < len(w) - 1 else None for i in range(len(w))]
)
def same_neighbours() -> Sop:
    """Whether the tokens before and after are the same."""
    return combine(lambda x, y: x == y, shifted(1), shifted(-1))


@program("abc", 4, lambda w: everywhere(100 * w.count("a") + 10 * w.count("b") + w.count("c"), w))
def counts_of_each() -> Sop:
    """The counts of the three tokens as the digits of one number: three heads in a layer."""
    a, b, c = (width(tokens, tokens, lambda key, query, word=word: key == word) for word in "abc")
    return combine(lambda x, n: 10 * x + n, combine(lambda x, n: 10 * x + n, a, b), c)


@program(
    "ab", 6, lambda w: [sum(w[j] == "a" for j in range(i - 2, i + 3) if 0 <= j < len(w)) / 4 for i in range(len(w))]
)
def window() -> Sop:
    """A quarter of the number of "a" within two positions: five heads in a layer."""
    is_a = flag(lambda x: x == "a", tokens)
    near = [share(indices, indices, lambda key, query, by=by: key == query + by, is_a) for by in range(-2, 3)]
    sums = [add(near[0], near[1], 0.25, 0.25), add(near[2], near[3], 0.25, 0.25)]
    return add(add(*sums), near[4], 1.0, 0.25)


@program((0, 1, 2, 3, 4, 5), 4, lambda w: everywhere(float(sum(w)), w))
def sum_of_tokens() -> Sop:
    """The sum of the tokens: a counter for each, six heads in a layer, and their weighted sums in three layers."""
    counts = [rasp.numerical(width(tokens, tokens, lambda key, query, word=word: key == word)) for word in range(6)]
    pairs = [add(counts[i], counts[i + 1], i, i + 1) for i in (0, 2, 4)]
    return add(add(*pairs[:2]), pairs[2])


def automaton(words: Sequence[int], steps: int) -> list[Any]:
    cells: list[Any] = list(words)
    for _ in range(steps):
        sides = zip([None, *cells], [*cells[1:], None], strict=False)
        cells = [None if left is None or right is None else left ^ right for left, right in sides]
    return cells


@program((0, 1), 6, lambda w: automaton(w, 2))
def two_steps_of_an_automaton() -> Sop:
    """Each cell becomes whether its neighbours differ, twice; nothing where one is missing."""
    cells = tokens
    for _ in range(2):
        cells = combine(lambda x, y: x ^ y, shifted(1, cells), shifted(-1, cells))
    return cells


@program((0, 1), 5, lambda w: so_far(w, lambda v: sum(v) % 2), causal=True)
def running_parity() -> Sop:
    """Whether the number of ones up to here is odd."""
    return apply(lambda n: n % 2, width(tokens, tokens, lambda key, query: key == 1))


@program("ab", 5, lambda w: [None if i < 2 else x == w[i - 2] for i, x in enumerate(w)])
def alternates() -> Sop:
    """Whether the token is the one two positions before."""
    return combine(lambda x, y: x == y, tokens, shifted(1, shifted(1)))


@program((0, 1, 2), 4, lambda w: [(x + w[0]) % 3 for x in w])
def add_the_first() -> Sop:
    """The token plus the first one, modulo 3."""
    return combine(lambda x, y: (x + y) % 3, tokens, fetch(indices, indices, lambda key, query: key == 0, tokens))


@program("abc", 4, lambda w: [sum(w.count(x) == w.count(y) for x in w) for y in w])
def as_frequent() -> Sop:
    """How many tokens are as frequent as this one: a histogram of the histogram."""
    counts = width(tokens, tokens, equal)
    return width(counts, counts, equal)


@program((1, 2, 3), 4, lambda w: [sum(w[j] > x for j in range(i)) for i, x in enumerate(w)])
def inversions() -> Sop:
    """How many larger tokens stand before."""
    pairs = placed()
    return width(pairs, pairs, lambda key, query: key[1] < query[1] and key[0] > query[0])


@program((1, 2, 3), 4, lambda w: everywhere(list(w) == sorted(w), w))
def is_sorted() -> Sop:
    """Whether all tokens stand in order."""
    pairs = placed()
    larger = width(pairs, pairs, lambda key, query: key[1] < query[1] and key[0] > query[0])
    return apply(lambda n: n == 0, width(larger, larger, lambda key, query: key > 0))


@program("abc", 4, lambda w: everywhere(min(w, key=lambda x: (-w.count(x), w.index(x))), w))
def mode() -> Sop:
    """The most frequent token, of several the first."""
    keys = combine(lambda n, i: (-n, i), width(tokens, tokens, equal), indices)
    return fetch(width(keys, keys, less), tokens, lambda key, query: key == 0, tokens)


@program((1, 2, 3), 4, lambda w: sorted(w)[::-1])
def sort_and_reverse() -> Sop:
    """The tokens in order, then from the other end: six layers."""
    mirror = combine(lambda n, i: n - 1 - i, length(), indices)
    return fetch(indices, mirror, equal, fetch(stable_rank(), indices, equal, tokens))


# ---- programs that are hard to search: what they have, they hardly use ----


@program("abc", 5, lambda w: everywhere(w.count("a") >= 2, w))
def at_least_two() -> Sop:
    """Whether "a" occurs twice or more often: a threshold on a number, which saturates."""
    return apply(lambda n: n >= 2, rasp.numerical(width(tokens, tokens, lambda key, query: key == "a")))


@program("abc", 4, lambda w: everywhere("a" in w, w))
def asked_twice() -> Sop:
    """Whether "a" occurs, by two heads that say the same, of which either would do."""
    shares = [share(tokens, tokens, always, flag(lambda x: x == "a", tokens)) for _ in range(2)]
    return apply(lambda x: x > 0, add(*shares))


@program("abc", 4, lambda w: [w.count(x) for x in w])
def counted_twice() -> Sop:
    """How often the token occurs, if two heads that count it agree."""
    return combine(lambda x, y: x if x == y else -1, *(width(tokens, tokens, equal) for _ in range(2)))


@program("abc", 4, lambda w: list(w))
def ignores_a_count() -> Sop:
    """The token, by an MLP that reads a count too and makes nothing of it."""
    return combine(lambda token, n: token, tokens, width(tokens, tokens, equal))


@program("abc", 5, lambda w: everywhere(1.0, w))
def mean_of_ones() -> Sop:
    """The mean of ones, whatever the pattern is."""
    return share(tokens, tokens, equal, flag(lambda x: True, tokens))


@program("abc", 5, lambda w: everywhere(0.0, w))
def mean_of_nothing() -> Sop:
    """The mean over a selector that selects nothing."""
    return share(tokens, tokens, lambda key, query: False, flag(lambda x: x == "a", tokens))


@program("abc", 5, lambda w: everywhere("yes", w))
def one_answer() -> Sop:
    """The same word whatever the count is."""
    return apply(lambda n: "yes", width(tokens, tokens, equal))


@program("ab", 5, lambda w: [mean([x == "a" for x in w[:i]]) for i in range(len(w))])
def share_before() -> Sop:
    """The share of "a" before here: 0 at the first position, where nothing is selected."""
    return share(indices, indices, less, flag(lambda x: x == "a", tokens))


@program("abc", 4, lambda w: [float(x == "a") + float(i == 0) for i, x in enumerate(w)])
def two_flags() -> Sop:
    """Whether the token is "a", plus whether it is the first: no attention at all."""
    return add(flag(lambda x: x == "a", tokens), flag(lambda i: i == 0, indices))


@program((1, 2, 3), 4, lambda w: [min(w.count(x), 2) for x in w])
def clipped_histogram() -> Sop:
    """How often the token occurs, but not more than 2."""
    return apply(lambda n: min(int(n), 2), rasp.numerical(width(tokens, tokens, equal)))
