"""What a page holds of its figures: their numbers as precise as they are drawn, compressed, as text."""

import base64
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

DIGITS = 5  # that a number keeps, more than a picture shows, and more where numbers differ only in later ones
ALONE = 9  # digits of numbers in lists of equal ones, which may differ from those of another list only there
_RFC_1924 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_SAFE = _RFC_1924.replace(b"<", b",").replace(b"&", b".")  # nothing that HTML could take for a tag or an entity
ALPHABET = _SAFE.decode()
"""The digits of base 85 as pages use them."""


def packed(text: str) -> str:
    """Text compressed (zlib), in base 85: what stands in a page, between the tags of a script that is not run."""
    return base64.b85encode(zlib.compress(text.encode(), 9)).translate(bytes.maketrans(_RFC_1924, _SAFE)).decode()


def unpacked(text: str) -> str:
    """The text that was `packed`."""
    return zlib.decompress(base64.b85decode(text.encode().translate(bytes.maketrans(_SAFE, _RFC_1924)))).decode()


@cache
def packed_plotly() -> str:
    """plotly's source, packed."""
    return packed(get_plotlyjs())


def packed_figures(figures: Sequence[go.Figure]) -> str:
    """Figures as JSON, packed: `{"figures": [{"data", "layout", "template"}], "templates"}`.

    Numbers of the data are rounded; a template that several figures share is there once, and a figure has its number.
    """
    templates: list[Any] = []
    each: list[dict[str, Any]] = []
    for figure in figures:
        parts = json.loads(str(figure.to_json()))
        template = parts["layout"].pop("template", None)
        if template not in templates:
            templates.append(template)
        each.append({"data": rounded(parts["data"]), "layout": parts["layout"], "template": templates.index(template)})
    return packed(json.dumps({"figures": each, "templates": templates}, separators=(",", ":"), allow_nan=False))


def rounded(data: Any) -> Any:
    """Plotly's data with the numbers in its lists rounded; whole numbers, text and lone numbers stay as they are.

    A number keeps `DIGITS` digits, and as many decimals as tell those of its list apart: a line through 1.00000001 and
    1.00000003 is no horizontal one.
    """
    if isinstance(data, dict):
        if {"dtype", "bdata"} <= data.keys():
            return rounded(_decoded(data))
        return {key: rounded(value) for key, value in data.items()}
    if not isinstance(data, list):
        return data
    if any(isinstance(item, dict) for item in data):
        return [rounded(item) for item in data]
    numbers = list(_numbers(data))
    if not numbers:
        return data
    spread = max(numbers) - min(numbers)
    if not spread:
        return _round_all(data, ALONE)
    return _round_all(data, DIGITS, DIGITS - 1 - math.floor(math.log10(spread)))


def _decoded(array: dict[str, str]) -> list[Any]:
    """A list from plotly's way to write an array of numbers; what is not finite is None."""
    values = np.frombuffer(base64.b64decode(array["bdata"]), dtype=np.dtype(array["dtype"]))
    if "shape" in array:
        values = values.reshape([int(n) for n in str(array["shape"]).split(",")])
    exact = values.astype(object)
    if values.dtype.kind == "f":
        exact[~np.isfinite(values)] = None
    return exact.tolist()


def _numbers(data: Any) -> Iterator[float]:
    if isinstance(data, list):
        for item in data:
            yield from _numbers(item)
    elif isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data):
        yield data


def _round_all(data: Any, digits: int, decimals: int = 0) -> Any:
    """Nested lists with that many digits and at least that many decimals."""
    if isinstance(data, list):
        return [_round_all(item, digits, decimals) for item in data]
    if not isinstance(data, float) or not math.isfinite(data):
        return data
    if data.is_integer() and abs(data) < 2**53:
        return int(data)
    return round(data, max(decimals, digits - 1 - math.floor(math.log10(abs(data)))))
