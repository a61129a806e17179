"""What papers say of measured rows: every condition that a claim may be checked by."""

import math
import re
from pathlib import Path

import pytest

import mechicl
from mechicl.reports import Claim, Claims, Row
from mechicl.reports.claims import numbers, outcomes
from mechicl.reports.sources import authors_and_year, read_sources
from mechicl.statistics import Interval


def row(low, mean, high, published=None):
    return Row("quantity", published, Interval(mean, low, high, 5), "seeds")


ONE, WIDE, LOW, HIGH = row(0.98, 0.99, 1.0), row(0.5, 0.99, 1.48), row(0.1, 0.2, 0.3), row(0.7, 0.8, 0.9)


def check(condition, *rows, **lines):
    return outcomes(Claim("fu2024", "Fig. 1", "it", lines or {"": rows}, condition))


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
    assert check("", measured) == [agrees]
    assert check(f"= {measured.published}", measured) == [agrees]


@pytest.mark.parametrize(
    ("condition", "rows", "expected"),
    [
        ("near 1", [ONE, WIDE, LOW], [True, False, False]),
        ("not near 1", [ONE, LOW], [False, True]),
        ("near 0", [row(-0.01, 0.04, 0.09), row(-0.01, 0.05, 0.1)], [True, False]),
        ("< 0.5", [LOW, HIGH, WIDE], [True, False, False]),
        ("> 0.5 and < 0.95", [LOW, HIGH, ONE], [False, True, False]),
        (">= 0.98", [ONE, HIGH], [True, False]),
        ("<= 1", [ONE, WIDE], [True, False]),
        ("0.6 < b < c", [LOW, HIGH, ONE], [True]),
        ("a > b", [HIGH, LOW], [True]),
        ("a < b and b near 1", [LOW, HIGH], [False]),
        ("rises", [LOW, HIGH, ONE], [True]),
        ("falls", [LOW, HIGH], [False]),
        ("covers 0.25", [LOW, HIGH], [True, False]),
        ("within 10% of 1", [ONE, HIGH], [True, False]),
        ("7 = 8", [LOW], [False]),
        ("is linear", [Row("", None, "linear"), Row("", None, "exponential")], [True, False]),
        ("all", [Row("", None, "5 of 5 seeds"), Row("", None, "4 of 5 seeds")], [True, False]),
        ("none", [Row("", None, "0 of 5 seeds")], [True]),
        ("< inf", [LOW, row(math.nan, math.nan, math.nan)], [True, False]),
    ],
)
def test_a_condition(condition, rows, expected):
    assert check(condition, *rows) == expected


def test_lines_are_compared_value_by_value():
    lines = {"low": [LOW, LOW], "high": [HIGH, row(0.2, 0.3, 0.4)], "one": [ONE]}
    assert check("A < B", **lines) == [True, False]
    assert check("A < B and A < C", **lines) == [True, False]
    assert check("B within 25% of C", **lines) == [True, False]
    printed = {"a": [row(1.0, 1.1, 1.2, published=1.05), row(1.0, 1.1, 1.2, published=2.0)], "b": [ONE]}
    assert check("A within 5% of printed", **printed) == [True, False]


@pytest.mark.parametrize(
    ("lines", "condition", "published", "verdict"),
    [
        ({"": [LOW]}, "< 1", "", "agrees"),
        ({"": [LOW, HIGH]}, "< 0.5", "", "agrees in part"),
        ({"": [LOW]}, "> 1", "", "differs"),
        ({"": [LOW]}, "", "", "not printed"),
        ({}, "", "it falls", "open"),
        ({}, "", "", "not printed"),
    ],
)
def test_verdicts(lines, condition, published, verdict):
    assert Claim("fu2024", "Fig. 1", "it", lines, condition, published).verdict == verdict


@pytest.mark.parametrize(
    ("row", "untrained", "trained", "standing"),
    [
        (LOW, "agrees", True, "no evidence"), (LOW, "differs", True, "agrees"), (LOW, None, True, "agrees"),
        (LOW, "agrees in part", True, "agrees"), (LOW, "agrees", False, "agrees"), (HIGH, "agrees", True, "differs"),
    ],
)  # fmt: skip
def test_what_untrained_models_agree_with_too_is_no_evidence(row, untrained, trained, standing):
    verdicts = {"untrained": untrained} if untrained else {}
    claim = Claim("fu2024", "Fig. 1", "it", {"": [row]}, "< 0.5", control_verdicts=verdicts, trained=trained)
    assert claim.standing == standing
    assert claim.verdict == ("agrees" if row is LOW else "differs")


def test_what_cannot_be_checked_is_an_error():
    with pytest.raises(ValueError, match="cannot be checked by 'quite large'"):
        check("quite large", LOW)
    with pytest.raises(TypeError, match="'' needs a number to be checked, and 'linear' was measured"):
        check("< 1", Row("", None, "linear"))


def test_claims_are_stated_on_rows_by_quantity_or_pattern():
    table = [Row(f"loss, layer {i}", None, float(i)) for i in (1, 2)]
    paper = Claims("fu2024", table)
    paper.add("Fig. 1", "loss", "loss, layer *", check="rises", why=f"it ends at {paper['loss, layer 2']}")
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
