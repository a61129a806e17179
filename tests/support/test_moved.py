"""Comparison of measured rows with saved ones."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mechicl.reports import Row
from mechicl.statistics import Interval
from support.checks import above, below, every
from support.claims import Claim
from support.moved import apart, moved_claims, moved_rows


def row(measured, quantity="loss") -> Row:
    return Row(quantity, None, measured)


def over(mean: float, half: float, n: int = 9) -> Interval:
    return Interval(mean, mean - half, mean + half, n)


@pytest.mark.parametrize(
    ("written", "measured"),
    [
        (1.0, 1.0), (1.0, 1.0 + 5e-7), (1e-12, -3e-11), (math.nan, math.nan), (math.inf, math.inf),
        ("diverges", "diverges"), (over(1.0, 0.1), over(1.09, 0.2)), (over(1.0, 0.0), over(1.0 + 5e-7, 0.0)),
        (over(1.0, math.nan, 1), over(1.0 + 5e-7, math.nan, 1)), (over(1e-12, 1e-13), over(5e-12, 1e-13)),
        (Interval(160.0, 120.0, 1400.0, 5, 0.95, "median"), Interval(900.0, 100.0, 1000.0, 5, 0.95, "median")),
    ],
)  # fmt: skip
def test_equal_rows(written, measured):
    assert apart(row(written), row(measured)) == ""


@pytest.mark.parametrize(
    ("written", "measured", "words"),
    [
        (1.0, 1.00001, "1.0e-05"), ("diverges", "falls", "words"), ("diverges", 1.0, "words"), (1.0, "gone", "words"),
        (over(1.0, 0.1), over(1.2, 0.1), "2.0 half-widths"), (over(1.0, 0.1), 1.0, "no interval"),
        (1.0, over(1.0, 0.1), "an interval"), (1.0, math.nan, "not finite"), (math.inf, 1.0, "not finite"),
        (over(1.0, 0.0), over(1.1, 0.0), "9.1e-02"), (over(1.0, math.nan, 1), over(1.1, math.nan, 1), "9.1e-02"),
        (0.0, 1e-8, "1.0e+00"),
    ],
)  # fmt: skip
def test_rows_that_moved(written, measured, words):
    assert apart(row(written), row(measured)) == words


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e3), st.floats(-3, 3))
def test_a_sampled_quantity_may_move_within_its_own_interval(mean, half, by):
    written, measured = over(mean, half), over(mean + by * half, half)
    inside = written.low <= measured.mean <= written.high
    near = abs(mean - measured.mean) <= 1e-6 * max(abs(mean), abs(measured.mean))
    assert (apart(row(written), row(measured)) == "") == (inside or near or max(map(abs, (mean, measured.mean))) < 1e-9)


def test_rows_that_are_gone_new_or_moved_are_named():
    written = [row(1.0, "a"), row(2.0, "a"), row(3.0, "b"), row(4.0, "c")]
    assert moved_rows(written, written, "table") == []
    moved = moved_rows(written, [row(1.0, "a"), row(2.5, "a"), row(4.0, "c"), row(5.0, "d")], "table")
    assert [(each.quantity, each.written, each.measured, each.apart) for each in moved] == [
        ("a", "2", "2.5", "2.0e-01"), ("b", "3", "nothing", "gone"), ("d", "nothing", "5", "new"),
    ]  # fmt: skip


def test_entries_that_moved_and_those_on_training_that_did_not():
    first = Claim("fu2024", "Fig. 1", "loss", {"": [row(1.0)]}, check=every(below, 2), published="small")
    by_hand = replace(first, item="Fig. 2", trained=False)
    moved = replace(first, item="Fig. 3")
    now = [first, by_hand, replace(moved, lines={"": [row(1.5)]})]
    changes, unmoved = moved_claims([first, by_hand, moved], now)
    assert [(each.entry, each.apart) for each in changes] == [("fu2024, Fig. 3, loss", "3.3e-01")]
    assert unmoved == ["fu2024, Fig. 1, loss"]
    nothing_said = [
        replace(first, control_verdicts={"untrained": "agrees"}), replace(first, check=None, published=""),
        replace(first, check=every(above, 2)),
    ]  # fmt: skip
    assert moved_claims(nothing_said, nothing_said) == ([], [])


def test_an_entry_that_is_gone_has_other_rows_or_another_verdict():
    claim = Claim("fu2024", "Fig. 1", "loss", {"": [row(over(1.0, 0.4))]}, check=every(below, 1.5), published="small")
    (gone,), _ = moved_claims([claim], [None])
    assert gone.apart == "gone"
    (other,), _ = moved_claims([claim], [replace(claim, lines={"": [row(1.0), row(2.0)]})])
    assert other.apart == "other rows"
    (verdict,), unmoved = moved_claims([claim], [replace(claim, lines={"": [row(over(1.3, 0.4))]})])
    assert (verdict.written, verdict.measured, verdict.apart) == ("agrees", "differs", "within the intervals")
    assert unmoved == []
