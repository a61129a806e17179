"""Faults of figures, and of pages as a browser draws them.

Every function returns faults as sentences; a correct picture has none.
"""

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from playwright.sync_api import Page
from plotly.colors import hex_to_rgb

from mechicl.viz.elements import ALIASES
from mechicl.viz.export import Html
from mechicl.viz.page import Section

# ---- figures


def figure_faults(figure: Any) -> list[str]:
    """Return the traces without a visible mark."""
    layout, traces = json.loads(str(figure.to_json()))["layout"], _plain(figure.to_plotly_json()["data"])
    faults = [] if traces else ["the figure has no traces"]
    for i, trace in enumerate(traces):
        reason = "" if _names_others(trace, traces) else _why_invisible(trace, layout)
        if reason:
            faults.append(f"trace {i} ({trace.get('name') or trace.get('type')}) shows nothing: {reason}")
    return faults


def _names_others(trace: dict[str, Any], traces: Sequence[dict[str, Any]]) -> bool:
    """Return True if a trace without a point is the legend's entry for drawn lines of its colour."""
    if trace.get("x") != [None] or not trace.get("name"):
        return False
    color = trace.get("line", {}).get("color")
    return any(other.get("x") != [None] and other.get("line", {}).get("color") == color for other in traces)


def _plain(value: Any) -> Any:
    """Convert nested arrays to lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if isinstance(value, np.ndarray | np.generic) else value


def _why_invisible(trace: dict[str, Any], layout: dict[str, Any]) -> str:
    kind = trace.get("type", "scatter")
    if trace.get("opacity", 1) == 0 or trace.get("visible", True) is not True:
        return "it is invisible"
    numbers = {value for value in trace["y"] if _is_number(value)} if kind in ("bar", "violin") else set()
    if kind == "heatmap":
        return "" if any(_is_number(value) for row in trace["z"] for value in row) else "no cell has a value"
    if kind in ("bar", "violin"):
        return "" if (any(numbers) if kind == "bar" else len(numbers) > 1) else f"no {kind} has a height"
    if kind != "scatter":
        return f"unknown kind of trace {kind}: add it to tests/pictures.py"
    inside = [_is_inside(x, y, trace, layout) for x, y in zip(trace["x"], trace["y"], strict=True)]
    if not any(inside):
        return "no point has a place on the axes"
    mode, errors = trace.get("mode", "lines+markers"), trace.get("error_y") or trace.get("error_x")
    if "markers" in mode:
        sizes = trace.get("marker", {}).get("size", 6)
        sizes = sizes if isinstance(sizes, list) else [sizes] * len(inside)
        if any(one and size > 0 for one, size in zip(inside, sizes, strict=True)):
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


# ---- colours


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


# ---- pages


def figures_of(section: Section) -> list[Any]:
    """Return the figures of a section, including those of attention pictures."""
    return [part for part in section.parts if isinstance(part, go.Figure)]


def color_faults(figures: Sequence[Any]) -> list[str]:
    """Return colours with two meanings in legends, names with two colours, and scales with two directions."""
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
    """Return the subject of a name in a legend: the same for "gradient descent, tuned" and "gradient descent: fit"."""
    subject = re.sub(r"^seed \d+$", "seed", re.split(r"[,:]", name)[0].strip())
    return {**ALIASES, "trained layer": "trained", "Bayes": "Bayes"}.get(subject, subject)


def section_faults(sections: Sequence[Section]) -> list[str]:
    """Return faults of all figures of a page's sections, and of colours across them."""
    faults = []
    for section in sections:
        figures = figures_of(section)
        each = [fault for figure in figures for fault in figure_faults(figure)]
        faults += [f"{section.title}: {fault}" for fault in each]
        if any(isinstance(part, Html) and part.script for part in section.parts):
            faults.append(f"{section.title}: a picture on a page needs a second script")
    return faults + color_faults([figure for section in sections for figure in figures_of(section)])


# ---- pages in a browser

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
  const labels = [...plot.querySelectorAll('.annotation text, .textpoint text')].filter(shown);
  const marks = [...plot.querySelectorAll('.scatterlayer path.point')].map(rectangle);
  const hidden = labels.filter((label) => {  // over a mark that it is not written in
    const a = rectangle(label), x = (a.left + a.right) / 2, y = (a.top + a.bottom) / 2;
    return marks.some((b) => !(x > b.left && x < b.right && y > b.top && y < b.bottom)
      && Math.min(a.right - b.left, b.right - a.left, a.bottom - b.top, b.bottom - a.top) > 4);
  });
  return {
    title: plot.closest('section')?.querySelector('h2')?.textContent ?? `figure ${number}`,
    place: rectangle(plot.querySelector('.main-svg')),
    texts: texts.map((text) => ({ words: text.textContent, corners: corners(text) })),
    covered,
    over: hidden.map((label) => label.textContent),
    bars: [...plot.querySelectorAll('.colorbar')].map(
      (bar) => new Set([...bar.querySelectorAll('.cbaxis text')].map((text) => text.textContent)).size),
  };
})"""
_PANELS = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) =>
  Object.values(plot._fullLayout._plots).map(
    (panel) => [plot.closest('section').querySelector('h1, h2').textContent, panel.xaxis._length]))"""
WIDTHS = (390, 600, 768, 1300)
LEAST = 240  # pixels of a panel's width
TOUCH = 2.0  # pixels that boxes of text may overlap: they are higher than the letters in them


def drawn(tab: Page) -> int:
    """Assert that plotly has drawn all figures on a loaded page, and return their number."""
    figures = tab.locator(".figure")
    sizes = figures.evaluate_all("""figures => figures.map((figure) => {
        const drawing = figure.querySelector(".main-svg");
        return drawing === null ? 0 : drawing.querySelectorAll("path, image, text").length;
    })""")
    assert all(sizes), f"{sizes.count(0)} of {len(sizes)} figures are not drawn"
    return len(sizes)


def width_faults(tab: Page, path: Path, widths: Sequence[int] = WIDTHS) -> list[str]:
    """Open a page at several widths; return sideways scrolling, narrow panels, and what `drawn_faults` finds."""
    faults = []
    for width in widths:
        tab.set_viewport_size({"width": width, "height": 900})
        tab.goto(path.as_uri())
        wide = tab.evaluate("document.documentElement.scrollWidth")
        found = [f"the page is {wide} pixels wide"] if wide > width else []
        panels = tab.evaluate(_PANELS)
        found += [f"{title}: a panel of {size:.0f} pixels" for title, size in panels if size < LEAST]
        faults += [f"at {width} pixels: {fault}" for fault in [*found, *drawn_faults(tab)]]
    return faults


def drawn_faults(tab: Page) -> list[str]:
    """Return overlapping and cut labels, marks covered by labels or legends, and empty scales on a loaded page."""
    faults = []
    for plot in tab.evaluate(_LOOK):
        texts, place = plot["texts"], plot["place"]
        found = []
        for i, text in enumerate(texts):
            xs, ys = zip(*text["corners"], strict=True)
            sideways = max(place["left"] - min(xs), max(xs) - place["right"])
            if max(sideways, place["top"] - min(ys), max(ys) - place["bottom"]) > TOUCH:
                found.append(f"{text['words']!r} is cut off")
            over = [other["words"] for other in texts[i + 1 :] if _overlap(text["corners"], other["corners"]) > TOUCH]
            found += [f"{text['words']!r} overlaps {words!r}" for words in over]
        if plot["covered"]:
            found.append(f"the legend covers {plot['covered']} marks")
        found += [f"{words!r} covers a mark" for words in plot["over"]]
        found += [f"a colour bar has {n} ticks" for n in plot["bars"] if n < 2]
        faults += [f"{plot['title']}: {fault}" for fault in found]
    return faults


def _overlap(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    """Return the depth in pixels to which two rotated boxes overlap; 0 or less if a line separates them."""
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
