"""What is wrong with a picture: faults of figures, of the words over them, and of pages as a browser draws them.

Every function returns faults as sentences; none is fine.
"""

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from playwright.sync_api import Page
from plotly.colors import hex_to_rgb

from mechicl.viz.html import Html
from mechicl.viz.page import Section

SAME = {  # words for one thing, which share a colour
    "each seed": "trained", "opened seed": "trained", "trained layer": "trained", "in context": "trained",
    "before fine-tuning": "zero-shot", "OLS": "closed form", "ridge": "closed form", "least squares": "closed form",
}  # fmt: skip


# ---- figures


def figure_faults(figure: Any) -> list[str]:
    """Traces without a visible mark."""
    layout = json.loads(str(figure.to_json()))["layout"]
    faults, traces = [], _traces(figure)
    for i, trace in enumerate(traces):
        reason = "" if _names_others(trace, traces) else _why_invisible(trace, layout)
        if reason:
            name = trace.get("name") or trace.get("type")
            faults.append(f"trace {i} ({name}) shows nothing: {reason}")
    if not figure.data:
        faults.append("the figure has no traces")
    return faults


def _names_others(trace: dict[str, Any], traces: Sequence[dict[str, Any]]) -> bool:
    """Whether a trace without a point is the entry of the legend for others, of its colour, that are drawn."""
    if trace.get("x") != [None] or not trace.get("name"):
        return False
    color = trace.get("line", {}).get("color")
    return any(other.get("x") != [None] and other.get("line", {}).get("color") == color for other in traces)


def _traces(figure: Any) -> list[dict[str, Any]]:
    """The figure's data as plain lists."""
    return _plain(figure.to_plotly_json()["data"])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if isinstance(value, np.ndarray | np.generic) else value


def _why_invisible(trace: dict[str, Any], layout: dict[str, Any]) -> str:
    kind = trace.get("type", "scatter")
    if trace.get("opacity", 1) == 0 or trace.get("visible", True) is not True:
        return "it is invisible"
    if kind == "heatmap":
        cells = [value for row in trace["z"] for value in row]
        return "" if any(map(_is_number, cells)) else "no cell has a value"
    if kind == "bar":
        heights = [value for value in trace["y"] if _is_number(value)]
        return "" if any(heights) else "no bar has a height"
    if kind == "violin":
        return "" if len({value for value in trace["y"] if _is_number(value)}) > 1 else "no spread"
    if kind != "scatter":
        return f"unknown kind of trace {kind}: teach tests/pictures.py what it shows"
    inside = [_is_inside(x, y, trace, layout) for x, y in zip(trace["x"], trace["y"], strict=True)]
    if not any(inside):
        return "no point has a place on the axes"
    mode, errors = trace.get("mode", "lines+markers"), trace.get("error_y") or trace.get("error_x")
    if "markers" in mode:
        sizes = trace.get("marker", {}).get("size", 6)
        sizes = sizes if isinstance(sizes, list) else [sizes] * len(inside)
        if any(there and size > 0 for there, size in zip(inside, sizes, strict=True)):
            return ""
    if "text" in mode and any(trace.get("text", ())):
        return ""
    if "lines" in mode and (trace.get("line", {}).get("width", 2) > 0 or trace.get("fill")):
        if any(a and b for a, b in itertools.pairwise(inside)):
            return ""
        return "a line needs two neighbouring points"
    return "" if errors and errors.get("visible", True) and "array" in errors else "nothing is drawn at its points"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_inside(x: Any, y: Any, trace: dict[str, Any], layout: dict[str, Any]) -> bool:
    for value, letter in ((x, "x"), (y, "y")):
        axis = layout.get(f"{letter}axis{trace.get(f'{letter}axis', letter)[1:]}", {})
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return False
        if not _is_number(value):
            continue  # a name on an axis of names
        if axis.get("type") == "log":
            if value <= 0:
                return False
            value = math.log10(value)
        if "range" in axis and axis.get("type") != "category" and None not in axis["range"]:
            low, high = sorted(axis["range"])
            if not low - 1e-9 <= value <= high + 1e-9:
                return False
    return True


# ---- words


def _dashes(figure: Any) -> set[str]:
    lines = [trace.line.dash for trace in figure.data if trace.type == "scatter"]
    return {dash for dash in (*lines, *(shape.line.dash for shape in figure.layout.shapes)) if dash}  # type: ignore[attr-defined]


def _symbols(figure: Any) -> set[str]:
    symbols: set[str] = set()
    for trace in figure.data:
        if trace.type == "scatter" and "markers" in (trace.mode or "markers"):
            each = trace.marker.symbol
            symbols |= set(each) if isinstance(each, list | tuple) else {each or "circle"}
    return symbols


def _has_bars(figure: Any) -> bool:
    return any(t.type == "bar" or (t.type == "scatter" and (t.error_y.array or t.error_x.array)) for t in figure.data)


def _has_bands(figure: Any) -> bool:
    rectangles = any(shape.type == "rect" for shape in figure.layout.shapes)  # type: ignore[attr-defined]
    return rectangles or any(trace.type == "scatter" and trace.fill for trace in figure.data)


def _hues(figure: Any) -> set[str]:
    """Names of the colours of marks."""
    hues = set()
    for trace in figure.data:
        if trace.type == "heatmap":
            hues |= _hues_of_cells(trace, figure)
        else:
            color = _color(trace)
            hues |= {_hue(color)} if color else set()
    return hues


def _hues_of_cells(trace: Any, figure: Any) -> set[str]:
    """Which of red and blue a heatmap shows: the colours at the ends that its values go to."""
    axis: Any = figure.layout[trace.coloraxis] if trace.coloraxis else trace
    scale, cells = axis.colorscale, [v for row in trace.z for v in row if v is not None and math.isfinite(v)]
    if not scale or isinstance(scale, str) or not cells:
        return set()
    low, high = (axis.cmin, axis.cmax) if trace.coloraxis else (axis.zmin, axis.zmax)
    middle, reach = (low + high) / 2, (high - low) / 2
    signed = low < 0 < high
    hues = {_hue(scale[-1][1])} if max(cells) > (middle if signed else low) + 0.05 * reach else set()
    return hues | ({_hue(scale[0][1])} if signed and min(cells) < middle - 0.05 * reach else set())


def _color(trace: Any) -> str | None:
    for part in (trace.line if trace.type == "scatter" and "lines" in (trace.mode or "") else None, trace.marker):
        if part is not None and isinstance(part.color, str):
            return part.color
    return None


def _hue(color: str) -> str:
    if not color.startswith("#"):
        numbers = re.findall(r"[\d.]+", color)
        if len(numbers) < 3:
            return color
        r, g, b = (float(number) for number in numbers[:3])
    else:
        full = color if len(color) == 7 else "#" + "".join(2 * digit for digit in color[1:])
        r, g, b = hex_to_rgb(full)
    spread = max(r, g, b) - min(r, g, b)
    if spread < 40:
        return "black" if max(r, g, b) < 80 else "white" if min(r, g, b) > 235 else "grey"
    return "blue" if b == max(r, g, b) else "red" if r == max(r, g, b) and r > 1.4 * max(g, b) else "other"


CLAIMS: dict[str, Callable[[Any], bool]] = {
    r"open circles?": lambda figure: any("circle-open" in str(symbol) for symbol in _symbols(figure)),
    r"white squares?": lambda figure: any("square" in str(symbol) for symbol in _symbols(figure)),
    r"diamonds?": lambda figure: any("diamond" in str(symbol) for symbol in _symbols(figure)),
    r"stars?": lambda figure: any("star" in str(symbol) for symbol in _symbols(figure)),
    r"dashed": lambda figure: "dash" in _dashes(figure),
    r"dotted": lambda figure: "dot" in _dashes(figure),
    r"bands?": _has_bands,
    r"shaded": _has_bands,
    r"bars?": _has_bars,
    r"lines?": lambda figure: any(t.type == "scatter" and "lines" in (t.mode or "") for t in figure.data),
    r"(red|blue|black)(?= cells?| lines?|:|;| \()": lambda figure: True,  # by hue, below
}
"""Words of a caption, and whether a figure has what they say."""
ABSTRACT = r"(straight|piecewise|weight|learning|error|any|of|off the|on) (line|bar|band)s?"  # no marks


def caption_faults(words: str, figures: Sequence[Any]) -> list[str]:
    """Words of marks and colours that no figure under them has, and open circles that they do not explain."""
    faults = []
    spoken = re.sub(ABSTRACT, "", words.lower())
    for pattern, holds in CLAIMS.items():
        for said in re.finditer(rf"\b{pattern}\b", spoken):
            hue = said.group() if said.group() in ("red", "blue", "black") else None
            shown = [hue in _hues(figure) if hue else holds(figure) for figure in figures]
            if figures and not any(shown):
                faults.append(f"the words say {said.group()!r}, and nothing drawn is")
    if "open circle" not in spoken and any("circle-open" in str(s) for figure in figures for s in _symbols(figure)):
        faults.append("there are open circles, and the words do not say what they are")
    return sorted(set(faults))


# ---- pages


def figures_of(section: Section) -> list[Any]:
    """The figures of a section, those that stand in for attention pictures too."""
    return [part for part in section.parts if isinstance(part, go.Figure)]


def color_faults(figures: Sequence[Any]) -> list[str]:
    """Colours with two meanings among the names of legends, names with two colours, and scales with two directions."""
    meanings: dict[str, set[str]] = defaultdict(set)
    colors: dict[str, set[str]] = defaultdict(set)
    positive: set[str] = set()
    for figure in figures:
        for name, color in _named_colors(figure):
            meanings[color].add(_meaning(name))
            colors[_meaning(name)].add(color)
        for trace in figure.data:
            if trace.type == "heatmap":
                axis: Any = figure.layout[trace.coloraxis] if trace.coloraxis else trace
                low = axis.cmin if trace.coloraxis else axis.zmin
                if low is not None and low < 0 and axis.colorscale:
                    positive.add(_hue(axis.colorscale[-1][1]))
    faults = [f"{color} means {' and '.join(sorted(names))}" for color, names in meanings.items() if len(names) > 1]
    faults += [f"{name} is {' and '.join(sorted(each))}" for name, each in colors.items() if len(each) > 1]
    if len(positive) > 1:
        faults.append(f"positive is {' and '.join(sorted(positive))}")
    return faults


def _named_colors(figure: Any) -> Iterator[tuple[str, str]]:
    for trace in figure.data:
        named = trace.name and trace.showlegend is not False and figure.layout.showlegend is not False  # type: ignore[attr-defined]
        color = _color(trace) if trace.type in ("scatter", "bar") else None
        if named and color:
            yield trace.name, color


def _meaning(name: str) -> str:
    """What a name in a legend is about: "gradient descent, tuned" and "gradient descent: linear fit" are one."""
    whole = re.split(r"[,:]", name)[0].strip()
    return SAME.get(whole, re.sub(r"^seed \d+$", "trained", whole))


def section_faults(sections: Sequence[Section]) -> list[str]:
    """Faults of all figures of a page's sections, of the words over them, and of colours across them."""
    faults = []
    for section in sections:
        figures = figures_of(section)
        each = [fault for figure in figures for fault in figure_faults(figure)]
        faults += [f"{section.title}: {fault}" for fault in (*each, *caption_faults(section.words, figures))]
        if any(isinstance(part, Html) and part.script for part in section.parts):
            faults.append(f"{section.title}: a picture with a script of its own on a page")
    return faults + color_faults([figure for section in sections for figure in figures_of(section)])


# ---- what a browser draws

_LOOK = """() => [...document.querySelectorAll('.js-plotly-plot')].map((plot, number) => {
  const corners = (text) => {  // of the box around a text, turned as the text is
    const box = text.getBBox(), matrix = text.getScreenCTM();
    return [[0, 0], [1, 0], [1, 1], [0, 1]].map(([i, j]) => {
      const p = new DOMPoint(box.x + i * box.width, box.y + j * box.height).matrixTransform(matrix);
      return [p.x, p.y];
    });
  };
  const rectangle = (element) => {
    const { left, top, right, bottom } = element.getBoundingClientRect();
    return { left, top, right, bottom };
  };
  const shown = (text) => text.textContent.trim() && text.getBoundingClientRect().width > 0
    && getComputedStyle(text).visibility !== 'hidden' && getComputedStyle(text).opacity !== '0';
  const CELLS = '.heatmap-label, .textpoint, .bartext';
  const texts = [...plot.querySelectorAll('svg.main-svg text')].filter((text) => shown(text) && !text.closest(CELLS));
  const legend = [...plot.querySelectorAll('.legend .bg')].map(rectangle).filter((r) => r.right > r.left);
  const covered = legend.length === 0 ? 0 : [...plot.querySelectorAll('.trace path.js-line, .trace path.point')]
    .filter((path) => !path.closest('.legend')).filter((path) => {
      const matrix = path.getScreenCTM(), length = path.getTotalLength();
      return Array.from({ length: 60 }, (_, i) => path.getPointAtLength((length * i) / 59))
        .map((point) => new DOMPoint(point.x, point.y).matrixTransform(matrix))
        .some((p) => legend.some((r) => p.x > r.left && p.x < r.right && p.y > r.top && p.y < r.bottom));
    }).length;
  return {
    title: plot.closest('section')?.querySelector('h2')?.textContent ?? `figure ${number}`,
    place: rectangle(plot.querySelector('.main-svg')),
    texts: texts.map((text) => ({ words: text.textContent, corners: corners(text) })),
    covered,
    bars: [...plot.querySelectorAll('.colorbar')].map(
      (bar) => new Set([...bar.querySelectorAll('.cbaxis text')].map((text) => text.textContent)).size),
  };
})"""
TOUCH = 2.0  # pixels that boxes of text may overlap: they are higher than the letters in them


def drawn(tab: Page) -> int:
    """How many figures plotly has drawn on a loaded page of `viz.page`; every one that the page has.

    Raises:
        AssertionError: a figure is not drawn.
    """
    figures = tab.locator(".figure")
    sizes = figures.evaluate_all("""figures => figures.map((figure) => {
        const drawing = figure.querySelector(".main-svg");
        return drawing === null ? 0 : drawing.querySelectorAll("path, image, text").length;
    })""")
    assert all(sizes), f"{sizes.count(0)} of {len(sizes)} figures are not drawn"
    return len(sizes)


def drawn_faults(tab: Page) -> list[str]:
    """Faults of a page with all its figures drawn: labels over each other or cut off, legends over marks, empty scales.

    Args:
        tab: a page of `viz.page`, loaded.
    """
    faults = []
    for plot in tab.evaluate(_LOOK):
        texts, place = plot["texts"], plot["place"]
        found = []
        for i, text in enumerate(texts):
            xs, ys = zip(*text["corners"], strict=True)
            out = max(
                place["left"] - min(xs), max(xs) - place["right"], place["top"] - min(ys), max(ys) - place["bottom"]
            )
            if out > TOUCH:
                found.append(f"{text['words']!r} is cut off")
            over = [other["words"] for other in texts[i + 1 :] if _overlap(text["corners"], other["corners"]) > TOUCH]
            found += [f"{text['words']!r} lies over {words!r}" for words in over]
        if plot["covered"]:
            found.append(f"the legend covers {plot['covered']} marks")
        found += [f"a colour bar has {n} ticks" for n in plot["bars"] if n < 2]
        faults += [f"{plot['title']}: {fault}" for fault in found]
    return faults


def _overlap(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    """How deep two boxes, however turned, lie in each other; 0 or less where a line separates them."""
    depth = math.inf
    for box in (a, b):
        for (x0, y0), (x1, y1) in ((box[0], box[1]), (box[1], box[2])):
            length = math.hypot(x1 - x0, y1 - y0)
            if not length:
                return 0.0
            across = ((x1 - x0) / length, (y1 - y0) / length)
            one, other = ([x * across[0] + y * across[1] for x, y in corners] for corners in (a, b))
            depth = min(depth, min(max(one), max(other)) - max(min(one), min(other)))
    return depth
