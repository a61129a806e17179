"""Claims of papers on measured rows: checks and verdicts."""

import math
import re
from pathlib import Path

import pytest

import mechicl
from mechicl.reports import Row
from mechicl.reports.published import authors_and_year, read_sources
from mechicl.reports.rows import NoNumberError
from mechicl.statistics import Interval
from support.checks import (
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
    near,
    numbers,
    reads,
    rises,
    together,
    within,
)  # fmt: skip
from support.claims import Claim, Claims


def row(low, mean, high, published=None):
    return Row("quantity", published, Interval(mean, low, high, 5), "seeds")


ONE, WIDE, LOW, HIGH = row(0.98, 0.99, 1.0), row(0.5, 0.99, 1.48), row(0.1, 0.2, 0.3), row(0.7, 0.8, 0.9)


def outcomes(check, *rows, **lines):
    return Claim("fu2024", "Fig. 1", "it", lines or {"": rows}, check).outcomes


@pytest.mark.parametrize(
    ("measured", "agrees"),
    [
        (row(0.9, 1.1, 1.3, published=1.0), True),  # inside
        (row(0.2, 1.1, 2.0, published=1.0), False),  # inside a wide one
        (row(2.07, 2.08, 2.09, published=2.0), True),  # within 5%
        (row(2.11, 2.12, 2.13, published=2.0), False),
        (Row("quantity", 0.5, 0.51), True),
        (row(0.0, 0.0, 0.0, published=0), True),
        (row(math.nan, math.nan, math.nan, published=1.0), False),
    ],
)
def test_numbers_agree_within_an_interval_or_5_percent(measured, agrees):
    assert outcomes(None, measured) == [agrees]
    assert outcomes(every(equal, measured.published), measured) == [agrees]
    assert measured.verdict == ("agrees" if agrees else "differs")


@pytest.mark.parametrize(
    ("check", "rows", "expected"),
    [
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
        (every(covers, 0.25), [LOW, HIGH], [True, False]),
        (every(within, 0.1, 1), [ONE, HIGH], [True, False]),
        (every(reads, "linear"), [Row("", None, "linear"), Row("", None, "exponential")], [True, False]),
        (every(count_is, "all"), [Row("", None, "5 of 5 seeds"), Row("", None, "4 of 5 seeds")], [True, False]),
        (every(count_is, "none"), [Row("", None, "0 of 5 seeds")], [True]),
        (every(below, math.inf), [LOW, row(math.nan, math.nan, math.nan)], [True, False]),
    ],
)
def test_a_check(check, rows, expected):
    assert outcomes(check, *rows) == expected


def test_lines_are_compared_value_by_value():
    lines = {"low": [LOW, LOW], "high": [HIGH, row(0.2, 0.3, 0.4)], "one": [ONE]}
    assert outcomes(by_value(lambda a, b, _: below(a, b)), **lines) == [True, False]
    assert outcomes(by_value(lambda a, b, c: below(a, b) and below(a, c)), **lines) == [True, False]
    assert outcomes(by_value(lambda _, b, c: within(b, 0.25, c)), **lines) == [True, False]
    printed = [row(1.0, 1.1, 1.2, published=1.05), row(1.0, 1.1, 1.2, published=2.0)]
    assert outcomes(every(lambda row: within(row, 0.05, row.published)), *printed) == [True, False]


@pytest.mark.parametrize(
    ("lines", "check", "published", "verdict"),
    [
        ({"": [LOW]}, every(below, 1), "", "agrees"),
        ({"": [LOW, HIGH]}, every(below, 0.5), "", "agrees in part"),
        ({"": [LOW]}, every(above, 1), "", "differs"),
        ({"": [LOW]}, None, "", "not printed"),
        ({}, None, "it falls", "open"),
        ({}, None, "", "not printed"),
    ],
)
def test_verdicts(lines, check, published, verdict):
    assert Claim("fu2024", "Fig. 1", "it", lines, check, published).verdict == verdict


@pytest.mark.parametrize(
    ("row", "untrained", "trained", "standing"),
    [
        (LOW, "agrees", True, "no evidence"), (LOW, "differs", True, "agrees"), (LOW, None, True, "agrees"),
        (LOW, "agrees in part", True, "agrees"), (LOW, "agrees", False, "agrees"), (HIGH, "agrees", True, "differs"),
    ],
)  # fmt: skip
def test_claims_that_untrained_models_agree_with_are_no_evidence(row, untrained, trained, standing):
    verdicts = {"untrained": untrained} if untrained else {}
    claim = Claim("fu2024", "Fig. 1", "it", {"": [row]}, every(below, 0.5), control_verdicts=verdicts, trained=trained)
    assert claim.standing == standing
    assert claim.verdict == ("agrees" if row is LOW else "differs")


def test_checks_of_texts_need_numbers():
    words = Row("loss", None, "linear")
    assert Claim("fu2024", "Fig. 1", "it", {"": [words]}, every(below, 1)).verdict == "differs"
    with pytest.raises(NoNumberError, match=r"Fig\. 1: a check needs a number, and words were measured: linear"):
        Claims("fu2024", [words]).add("Fig. 1", "it", "loss", check=every(below, 1))


def test_a_saved_claim_has_the_outcomes_of_its_check():
    claim = Claim("fu2024", "Fig. 1", "it", {"": [LOW, HIGH]}, every(below, 0.5))
    again = Claim.from_json(claim.to_json())
    assert (again.outcomes, again.verdict) == ([True, False], "agrees in part")


def test_claims_are_stated_on_rows_by_quantity_or_pattern():
    table = [Row(f"loss, layer {i}", None, float(i)) for i in (1, 2)]
    paper = Claims("fu2024", table)
    paper.add("Fig. 1", "loss", "loss, layer *", check=together(rises), why=f"it ends at {paper['loss, layer 2']}")
    assert [(claim.rows, claim.verdict, claim.why) for claim in paper.stated] == [(table, "agrees", "it ends at 2")]
    with pytest.raises(ValueError, match="a claim needs a row 'gain'"):
        paper.add("Fig. 1", "gain", "gain")
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
