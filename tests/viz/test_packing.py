"""Figures and plotly's source as text inside a page: nothing is lost but digits that no picture shows."""

import json
import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

from mechicl.viz.elements import add_line, figure
from mechicl.viz.packing import ALPHABET, packed, packed_figures, packed_plotly, rounded, unpacked


@given(st.text())
def test_text_comes_back_and_cannot_end_a_script(text: str):
    there = packed(text)
    assert unpacked(there) == text
    assert set(there) <= set(ALPHABET)
    assert len(set(ALPHABET)) == 85
    assert not set(ALPHABET) & set("<&\"'\\ \n")


def test_plotlys_source_is_whole_and_small():
    assert unpacked(packed_plotly()) == get_plotlyjs()
    assert len(packed_plotly()) < 1.9e6


def test_figures_share_their_template_and_keep_their_numbers():
    first, second = figure("one"), figure("two")
    add_line(first, range(1000), [math.sin(i) for i in range(1000)], "sine", "#222222")
    add_line(second, [1.5, 2.5], [None, float("nan")], "holes", "#222222")
    there = json.loads(unpacked(packed_figures([first, second])))
    assert len(there["templates"]) == 1
    assert there["templates"][0] == json.loads(str(first.to_json()))["layout"]["template"]
    assert [each["layout"]["title"]["text"] for each in there["figures"]] == ["one", "two"]
    (line,), (holes,) = (each["data"] for each in there["figures"])
    assert line["y"] == pytest.approx([math.sin(i) for i in range(1000)], rel=1e-4)
    assert max(len(str(number)) for number in line["y"]) < 12
    assert line["x"] == list(range(1000))
    assert (holes["x"], holes["y"]) == ([1.5, 2.5], [None, None])


@given(st.lists(st.floats(-1e12, 1e12), min_size=2, max_size=20))
def test_numbers_move_by_less_than_a_pixel_of_any_axis(values: list[float]):
    there = rounded({"y": values})["y"]
    height = 10_000 / 2  # pixels: a line as high as twenty screens, and half a pixel
    spread = max(values) - min(values)
    for before, after in zip(values, there, strict=True):
        assert abs(before - after) <= (spread / height or abs(before) * 1e-8)
        assert abs(before - after) <= abs(before) * 1e-4
    assert rounded(rounded(values)) == rounded(values)


def test_numbers_that_differ_late_stay_apart_and_words_and_whole_numbers_stay():
    assert rounded([1.000000012345, 1.000000012999]) == [1.000000012345, 1.000000012999]
    assert rounded([1.000000012345, 0.0]) == [1.0, 0]
    assert rounded([0.1 + 0.2, 1234567.0, 1234567]) == [0.3, 1234567, 1234567]
    mixed: Any = {
        "text": ["0.123456789", "a"],
        "customdata": [["12.3456789", 0.123456789, 1.5]],
        "opacity": 0.123456789,
    }
    assert rounded(mixed) == mixed | {"customdata": [["12.3456789", 0.12346, 1.5]]}


def test_arrays_that_plotly_writes_as_bytes_are_numbers_again():
    heat = go.Figure(go.Heatmap(z=np.array([[1 / 3, np.nan], [2, 1e300]]), x=np.arange(2)))
    assert '"bdata"' in str(heat.to_json())
    (trace,) = json.loads(unpacked(packed_figures([heat])))["figures"][0]["data"]
    assert trace["z"] == [[0.33333, None], [2, 1e300]]
    assert trace["x"] == [0, 1]
