"""Figures as files at the sizes of a paper: PNG, SVG and PDF, drawn by the system's Chromium, and HTML."""

import asyncio
import re
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from mechicl.base.arguments import checked
from mechicl.viz.html import Html

WIDTHS = {"column": 3.25, "page": 6.75}  # inches
SUFFIXES = (".png", ".svg", ".pdf", ".html")
CSS_DPI = 96  # pixels of a browser in an inch
POINT = CSS_DPI / 72  # pixels of a browser in a point
NATURAL_HEIGHT = 450  # plotly's, of a figure without a height
PAGE_WIDTH = 1100  # pixels of a figure without a width on a page of ours
LETTER = 0.58  # width of a common letter, relative to the font's size
NO_KALEIDO = "PNG, SVG and PDF need plotly's kaleido: pip install 'mechicl[figures]' (.html needs nothing)"
NO_BROWSER = (
    "PNG, SVG and PDF are drawn by Chromium or Chrome, and there is none here: install one (Debian: apt-get install "
    "chromium), or name it in the environment variable BROWSER_PATH (.html needs none)"
)


@checked
def save(
    picture: go.Figure | Html,
    path: str | Path,
    *,
    width: str | float = "page",
    height: float | None = None,
    font_size: float = 7.0,
    dpi: int = 300,
    title: bool = True,
) -> Path:
    """Write a figure at its size on paper, so that it is not scaled there and its words can be read.

    A figure is laid out anew for its width: a narrow one has letters of the same size and less room. The path's suffix
    selects the format: .png, .svg, .pdf, or .html, which stays interactive, fits its window and has no size.

    Args:
        picture: a plotly figure, a picture of attention, or a widget's `picture()` (only as .html).
        path: of the file; its folder exists.
        width: in inches, or "column" (3.25) or "page" (6.75).
        height: in inches; by default the figure's own height in letters of this size, or its aspect ratio if it has a
            width of its own.
        font_size: of the figure's common words, in points. Letters get smaller than that in a figure whose own width
            would not fit.
        dpi: pixels per inch of a .png.
        title: draw the figure's title.

    Returns:
        The path.

    Raises:
        ValueError: an unknown suffix or width, a size that is not positive, or a widget in another format than .html.
        ImportError: kaleido is not installed.
        RuntimeError: there is no Chromium or Chrome.

    Example:
        >>> viz.save(viz.plot(alignment), "alignment.pdf", width="column")
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: figures are written as {', '.join(SUFFIXES)}, not as {suffix or 'no suffix'!r}")
    if isinstance(width, str) and width not in WIDTHS:
        raise ValueError(f"width {width!r} is not one of {', '.join(map(repr, WIDTHS))}, or a number of inches")
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    for name, size in {"width": inches, "height": height, "font_size": font_size, "dpi": dpi}.items():
        if size is not None and not size > 0:
            raise ValueError(f"{name}={size}: a size is positive")
    if suffix == ".html":
        (picture.write_html if isinstance(picture, go.Figure) else picture.save)(path)
        return path
    figure = picture if isinstance(picture, go.Figure) else picture.still
    if figure is None:
        raise ValueError(f"{path.name}: a picture made of HTML is written as .html only")
    if not title:
        figure = _untitled(figure)
    (image,) = draw([(figure, Paper(inches, height, font_size, dpi))], suffix[1:])
    path.write_bytes(image)
    return path


@dataclass(frozen=True)
class Paper:
    """The sizes of a figure on paper, in inches, and of its letters, in points."""

    width: float
    height: float | None = None
    font_size: float = 7.0
    dpi: float = 300


def draw(figures: Sequence[tuple[go.Figure, Paper]], kind: str) -> list[bytes]:
    """Files of several figures, each at its size, drawn by one browser: "png", "svg" or "pdf".

    Raises:
        ImportError: kaleido is not installed.
        RuntimeError: there is no Chromium or Chrome.
    """
    jobs = []
    for figure, paper in figures:
        fig, width, height, scale = laid_out(figure, paper)
        more = paper.dpi / CSS_DPI if kind == "png" else 1.0
        jobs.append((fig, {"format": kind, "width": width, "height": height, "scale": scale * more}))
    images = _draw_all(jobs)
    if kind == "png":
        images = [with_dpi(image, paper.dpi) for image, (_, paper) in zip(images, figures, strict=True)]
    return images


def still_svgs(figures: Sequence[go.Figure]) -> list[str]:
    """Figures as a page of ours shows them, as SVG; empty strings where nothing here can draw them."""
    jobs: list[tuple[go.Figure, dict[str, Any]]] = []
    for figure in figures:
        layout: Any = figure.layout
        sizes = {"width": layout.width or PAGE_WIDTH, "height": layout.height or NATURAL_HEIGHT}
        jobs.append((figure, {"format": "svg", **sizes}))
    try:
        return [image.decode() for image in _draw_all(jobs)] if jobs else []
    except Exception:  # no kaleido, no browser, or one that fails: the page's script draws its figures anyway
        return [""] * len(jobs)


def _draw_all(jobs: Sequence[tuple[go.Figure, dict[str, Any]]]) -> list[bytes]:
    """Images of figures, with kaleido's options for each."""
    try:
        import kaleido  # an optional extra
        from choreographer.errors import ChromeNotFoundError
    except ImportError as error:
        raise ImportError(NO_KALEIDO) from error

    async def drawn() -> list[bytes]:
        try:
            browser = kaleido.Kaleido(mathjax=False)  # by default it fetches MathJax from a server
        except ChromeNotFoundError as error:
            raise RuntimeError(NO_BROWSER) from error
        async with browser:
            return [await browser.calc_fig(figure, options) for figure, options in jobs]  # type: ignore[arg-type]

    with ThreadPoolExecutor(1) as pool:  # in its own thread: a notebook's has a running event loop
        return pool.submit(asyncio.run, drawn()).result()


def laid_out(fig: go.Figure, paper: Paper) -> tuple[go.Figure, float, float, float]:
    """A figure for a paper, its width and height in the pixels in which it is laid out, and their size on paper.

    The last number is the size of such a pixel in a browser's pixels (1/96 inch).
    """
    fig = go.Figure(fig)
    layout: Any = fig.layout
    letters = layout.font.size or layout.template.layout.font.size or 12
    inner, outer = layout.width, paper.width * CSS_DPI
    width = max(outer / (paper.font_size * POINT / letters), inner or 0)
    scale = outer / width
    _wrap_titles(fig, width)
    if paper.height is not None:
        height = paper.height * CSS_DPI / scale
    else:
        height = layout.height * (width / inner if inner else 1)
    return fig, width, height, scale


def _wrap_titles(fig: go.Figure, width: float) -> None:
    """Break the titles of the figure and of its panels into lines, and make the figure higher by as much."""
    layout: Any = fig.layout
    top, sides = layout.margin.t or 100, (layout.margin.l or 80) + (layout.margin.r or 80)
    if layout.title.text:
        size = layout.title.font.size or 17
        words, more = _in_lines(layout.title.text, width - 20, size)
        fig.update_layout(title_text=words)
        top += 1.3 * size * more
    titles = [a for a in layout.annotations if a.xref == a.yref == "paper" and not a.showarrow]
    places = sorted({a.x for a in titles})
    room = min((b - a for a, b in pairwise(places)), default=1.0) * (width - sides)
    size = min((a.font.size or 12 for a in titles), default=12)
    longest = max((len(_plain(word)) for a in titles for word in re.split(" |<br>", a.text)), default=1)
    size = min(size, room / (LETTER * longest))  # a word that does not fit gets smaller
    most = 0
    for annotation in titles:
        words, more = _in_lines(annotation.text, room, size)
        annotation.update(text=words, font_size=size)
        most = max(most, round(1.3 * size * more))
    fig.update_layout(margin_t=top + most, height=(layout.height or NATURAL_HEIGHT) + most)


def _in_lines(words: str, width: float, size: float) -> tuple[str, int]:
    """Words in lines of that many pixels, and the number of added lines; tags stay whole."""
    at_once, lines = width / (LETTER * size), []
    for part in words.split("<br>"):
        lines.append("")
        for word in part.split(" "):
            if lines[-1] and len(_plain(f"{lines[-1]} {word}")) > at_once:
                lines.append(word)
            else:
                lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines), len(lines) - words.count("<br>") - 1


def _plain(words: str) -> str:
    """Words without their tags."""
    return re.sub("<[^>]*>", "", words)


def _untitled(fig: go.Figure) -> go.Figure:
    fig = go.Figure(fig)
    layout: Any = fig.layout
    if layout.title.text:
        size = layout.title.font.size or 17
        fig.update_layout(title_text=None, margin_t=max((layout.margin.t or 100) - 2 * size, 12))
    return fig


def with_dpi(png: bytes, dpi: float) -> bytes:
    """A PNG with its size on paper (its chunk pHYs, in pixels per metre)."""
    per_metre = round(dpi / 0.0254)
    body = b"pHYs" + struct.pack(">IIB", per_metre, per_metre, 1)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    end = 8 + 4 + 4 + 13 + 4  # the signature and the header chunk
    return png[:end] + chunk + png[end:]
