"""Tables of published and measured values, as printed, saved and shown."""

import json
import math

import pytest

from mechicl.reports import Comparison, Row, published
from mechicl.statistics import Interval

ROWS = [
    Row("cosine", 0.994, Interval(0.95, 0.94, 0.96, 100), "prompts", "step 17"),
    Row("growth", "linear", "linear", "layers 3 to 8"),
    Row("undefined", None, math.nan, ""),
]


def test_the_printed_table_has_every_cell():
    text = str(Comparison("Title", "A lead.", ROWS))
    assert text.startswith("Title\nA lead.\n")
    assert "0.994" in text
    assert "0.9500 ± 0.0100" in text or "0.950 ± 0.010" in text
    assert "95%, 100 prompts" in text
    assert "step 17" in text


def test_saved_data_is_plain_json_without_nan(tmp_path):
    path = Comparison("A <b>", "lead", ROWS, data={"values": (1.0, math.inf)}).write(tmp_path / "new", "name")
    data = json.loads((tmp_path / "new" / "name.json").read_text(), parse_constant=pytest.fail)
    assert data["values"] == [1.0, None]
    assert data["table"][2]["measured"] is None
    assert data["table"][0]["measured"]["n"] == 100
    page = path.read_text()
    assert "A &lt;b&gt;" in page
    assert "0.994" in page


def test_published_numbers_come_by_their_key():
    assert published("fu2024_table1")["lstm"]["ogd"] == 0.831
