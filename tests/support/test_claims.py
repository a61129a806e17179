"""Claims of papers on measured rows: checks, verdicts, and comparison with saved rows."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import mechicl
from analyses.support.checks import (
    above,
    at_least,
    at_most,
    below,
    between,
    both,
    by_value,
    count_is,
    covers,
    equal,
    every,
    falls,
    far,
    named_check,
    near,
    numbers,
    reads,
    rises,
    together,
    within,
)  # fmt: skip
from analyses.support.claims import Claim, judge, state_claim
from analyses.support.moved import apart, moved_claims, moved_rows
from mechicl.reports import Row
from mechicl.reports.published import authors_and_year, read_sources
from mechicl.reports.rows import NoNumberError
from mechicl.statistics import Interval


def row(low, mean, high, published=None):
    return Row("quantity", published, Interval(mean, low, high, 5), "seeds")


ONE, WIDE, LOW, HIGH = row(0.98, 0.99, 1.0), row(0.5, 0.99, 1.48), row(0.1, 0.2, 0.3), row(0.7, 0.8, 0.9)


def outcomes(check, *rows, **lines):
    return check(list((lines or {"": rows}).values()))


@pytest.mark.parametrize(("measured", "agrees"), [
    (row(0.9, 1.1, 1.3, published=1.0), True),  # inside
    (row(0.2, 1.1, 2.0, published=1.0), False),  # inside a wide one
    (row(2.07, 2.08, 2.09, published=2.0), True),  # within 5%
    (row(2.11, 2.12, 2.13, published=2.0), False),
    (Row("quantity", 0.5, 0.51), True),
    (row(0.0, 0.0, 0.0, published=0), True),
    (row(math.nan, math.nan, math.nan, published=1.0), False),
])  # fmt: skip
def test_numbers_agree_within_an_interval_or_5_percent(measured, agrees):
    assert judge({"": [measured]}) == [agrees]
    assert outcomes(every(equal, measured.published), measured) == [agrees]
    assert measured.verdict == ("agrees" if agrees else "differs")


@pytest.mark.parametrize(("check", "rows", "expected"), [
    (every(near, 1), [ONE, WIDE, LOW], [True, False, False]),
    (every(far, 1), [ONE, LOW], [False, True]),
    (every(near, 0), [row(-0.01, 0.04, 0.09), row(-0.01, 0.05, 0.1)], [True, False]),
    (every(below, 0.5), [LOW, HIGH, WIDE], [True, False, False]),
    (every(between, 0.5, 0.95), [LOW, HIGH, ONE], [False, True, False]),
    (every(at_least, 0.98), [ONE, HIGH], [True, False]),
    (every(at_most, 1), [ONE, WIDE], [True, False]),
    (together(lambda _, b, c: above(b, 0.6) and below(b, c)), [LOW, HIGH, ONE], [True]),
    (together(above), [HIGH, LOW], [True]),
    (together(rises), [LOW, HIGH, ONE], [True]),
    (together(falls), [LOW, HIGH], [False]),
    (both(together(rises), every(far, 1)), [LOW, HIGH, ONE], [True, True, False]),
    (every(covers, 0.8), [HIGH, LOW, WIDE], [True, False, False]),
    (every(within, 0.1, 1), [ONE, HIGH, WIDE], [True, False, False]),
    (every(reads, "linear"), [Row("", None, "linear"), Row("", None, "exponential")], [True, False]),
    (every(count_is, "all"), [Row("", None, "5 of 5 seeds"), Row("", None, "4 of 5 seeds")], [True, False]),
    (every(count_is, "none"), [Row("", None, "0 of 5 seeds")], [True]),
    (every(below, math.inf), [LOW, row(math.nan, math.nan, math.nan)], [True, False]),
])  # fmt: skip
def test_a_check(check, rows, expected):
    assert outcomes(check, *rows) == expected


def test_lines_are_compared_value_by_value():
    lines = {"low": [LOW, LOW], "high": [HIGH, row(0.2, 0.3, 0.4)], "one": [ONE]}
    assert outcomes(by_value(lambda a, b, _: below(a, b)), **lines) == [True, False]
    assert outcomes(by_value(lambda a, b, c: below(a, b) and below(a, c)), **lines) == [True, False]
    assert outcomes(by_value(lambda _, b, c: within(b, 0.25, c)), **lines) == [True, False]
    printed = [row(1.0, 1.1, 1.2, published=1.05), row(1.0, 1.1, 1.2, published=2.0)]
    assert outcomes(every(lambda row: within(row, 0.05, row.published)), *printed) == [True, False]


@pytest.mark.parametrize(("lines", "check", "published", "verdict"), [
    ({"": [LOW]}, "below 1", "", "agrees"),
    ({"": [LOW, HIGH]}, "below 0.5", "", "agrees in part"),
    ({"": [LOW]}, "above 1", "", "differs"),
    ({"": [LOW]}, "", "", "not printed"),
    ({}, "", "it falls", "open"),
    ({}, "", "", "not printed"),
])  # fmt: skip
def test_verdicts(lines, check, published, verdict):
    assert Claim("fu2024", "Fig. 1", "it", lines, judge(lines, check), check, published).verdict == verdict


@pytest.mark.parametrize(("row", "untrained", "trained", "standing"), [
    (LOW, "agrees", True, "no evidence"), (LOW, "differs", True, "agrees"), (LOW, "", True, "agrees"),
    (LOW, "agrees in part", True, "agrees"), (LOW, "agrees", False, "agrees"), (HIGH, "agrees", True, "unresolved"),
])  # fmt: skip
def test_claims_that_untrained_models_agree_with_are_no_evidence(row, untrained, trained, standing):
    lines = {"": [row]}
    outcomes = judge(lines, "below 0.5")
    claim = Claim("fu2024", "Fig. 1", "it", lines, outcomes, untrained_verdict=untrained, trained=trained)
    assert claim.standing == standing
    assert claim.verdict == ("agrees" if row is LOW else "differs")


def test_checks_of_texts_need_numbers():
    words = Row("loss", None, "linear")
    lines = {"": [words]}
    assert Claim("fu2024", "Fig. 1", "it", lines, judge(lines, "below 1")).verdict == "differs"
    with pytest.raises(NoNumberError, match=r"Fig\. 1: a check needs a number, and words were measured: linear"):
        state_claim("fu2024", {"item": "Fig. 1", "what": "it", "rows": ["loss"], "check": "below 1"}, [words])


def test_claims_are_stated_on_rows_by_quantity_or_pattern():
    table = [Row(f"loss, layer {i}", None, float(i)) for i in (1, 2)]
    table[1] = replace(table[1], note="of 2; 5 seeds")
    why = "ends at {loss, layer 2}, {loss, layer 2 : first note}, {loss, layer 2 : note}"
    entry = {"item": "Fig. 1", "what": "loss", "rows": ["loss, layer *"], "check": "rises", "why": why}
    claim = state_claim("fu2024", entry, table)
    assert (claim.rows, claim.verdict, claim.why) == (table, "agrees", "ends at 2, of 2, of 2; 5 seeds")
    printed = state_claim("fu2024", {"item": "Fig. 1", "what": "loss", "rows": ["loss, *"], "printed": [1, 9]}, table)
    assert printed.outcomes == [True, False]
    with pytest.raises(ValueError, match="a claim needs a row 'gain'"):
        state_claim("fu2024", {**entry, "rows": ["gain"]}, table)


@pytest.mark.parametrize(("name", "same"), [
    ("near 1", every(near, 1)), ("within 0.1 1", every(within, 0.1, 1)), ("rises", together(rises)),
    ("rises and far 1", both(together(rises), every(far, 1))), ("at least 0.98", every(at_least, 0.98)),
])  # fmt: skip
def test_a_check_is_found_by_its_name(name, same):
    for rows in ([LOW, HIGH, ONE], [ONE, LOW], [HIGH, WIDE]):
        assert named_check(name)([rows]) == same([rows])


def test_a_check_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="no check is named 'nearly 1'"):
        named_check("nearly 1")


def test_numbers_in_a_text():
    assert numbers("10 of 1,000, from -2 to 2.5e+03") == [10, 1000, -2, 2500]


def test_every_paper_that_is_cited_has_an_entry():
    known = {authors_and_year(entry).lower() for entry in read_sources().values()}
    one_author = {name.split(" ")[-2] + " " + name.split(" ")[-1] for name in known if name[-4:].isdigit()}
    name = r"(?:von |Von )?[A-Z][\w-]+"
    cited = {
        " ".join(match.replace("(", "").replace("&", "and").split()).lower()
        for path in Path(mechicl.__file__).parent.rglob("*.py")
        for match in re.findall(rf"({name}(?: et al\.| (?:and|&) {name})? \(?(?:19|20)\d\d)\b", path.read_text("utf-8"))
    }
    venues = re.compile(r"(icml|iclr|neurips|emnlp) ")
    unknown = {citation for citation in cited if not venues.match(citation)} - known - one_author
    assert unknown == set()


# ---- comparison of measured rows with saved ones ----
def moved_row(measured, quantity="loss") -> Row:
    return Row(quantity, None, measured)


def over(mean: float, half: float, n: int = 9) -> Interval:
    return Interval(mean, mean - half, mean + half, n)


@pytest.mark.parametrize(("written", "measured"), [
    (1.0, 1.0), (1.0, 1.0 + 5e-7), (1e-12, -3e-11), (math.nan, math.nan), (math.inf, math.inf),
    ("diverges", "diverges"), (over(1.0, 0.1), over(1.09, 0.2)), (over(1.0, 0.0), over(1.0 + 5e-7, 0.0)),
    (over(1.0, math.nan, 1), over(1.0 + 5e-7, math.nan, 1)), (over(1e-12, 1e-13), over(5e-12, 1e-13)),
    (Interval(160.0, 120.0, 1400.0, 5, 0.95, "median"), Interval(900.0, 100.0, 1000.0, 5, 0.95, "median")),
])  # fmt: skip
def test_equal_rows(written, measured):
    assert apart(moved_row(written), moved_row(measured)) == ""


@pytest.mark.parametrize(("written", "measured", "words"), [
    (1.0, 1.00001, "1.0e-05"), ("diverges", "falls", "words"), ("diverges", 1.0, "words"), (1.0, "gone", "words"),
    (over(1.0, 0.1), over(1.2, 0.1), "2.0 half-widths"), (over(1.0, 0.1), 1.0, "no interval"),
    (1.0, over(1.0, 0.1), "an interval"), (1.0, math.nan, "not finite"), (math.inf, 1.0, "not finite"),
    (over(1.0, 0.0), over(1.1, 0.0), "9.1e-02"), (over(1.0, math.nan, 1), over(1.1, math.nan, 1), "9.1e-02"),
    (0.0, 1e-8, "1.0e+00"),
])  # fmt: skip
def test_rows_that_moved(written, measured, words):
    assert apart(moved_row(written), moved_row(measured)) == words


def test_rows_that_are_gone_new_or_moved_are_named():
    written = [moved_row(1.0, "a"), moved_row(2.0, "a"), moved_row(3.0, "b"), moved_row(4.0, "c")]
    assert moved_rows(written, written, "table") == []
    moved = moved_rows(
        written, [moved_row(1.0, "a"), moved_row(2.5, "a"), moved_row(4.0, "c"), moved_row(5.0, "d")], "table"
    )
    assert [(each.quantity, each.written, each.measured, each.apart) for each in moved] == [
        ("a", "2", "2.5", "2.0e-01"), ("b", "3", "nothing", "gone"), ("d", "nothing", "5", "new"),
    ]  # fmt: skip


def moved_claim(measured, check="below 1.5", **others) -> Claim:
    lines = {"": [moved_row(measured)]}
    return Claim("fu2024", "Fig. 1", "loss", lines, judge(lines, check), published="small", **others)


def test_entries_that_moved():
    claims = [moved_claim(1.0), replace(moved_claim(1.0), item="Fig. 3")]
    assert moved_claims(claims, claims) == []
    changes = moved_claims(claims, [claims[0], replace(moved_claim(1.4), item="Fig. 3")])
    assert [(each.entry, each.apart) for each in changes] == [("fu2024, Fig. 3, loss", "2.9e-01")]


def test_an_entry_that_is_gone_has_other_rows_or_another_verdict():
    claim = moved_claim(over(1.0, 0.4))
    (gone,) = moved_claims([claim], [])
    assert gone.apart == "gone"
    (other,) = moved_claims([claim], [replace(claim, lines={"": [moved_row(1.0), moved_row(2.0)]})])
    assert other.apart == "other rows"
    (verdict,) = moved_claims([claim], [moved_claim(over(1.3, 0.4))])
    assert (verdict.written, verdict.measured, verdict.apart) == ("agrees", "differs", "within the intervals")
