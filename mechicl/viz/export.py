"""Pictures as HTML; figures as files at the sizes of a paper: PNG, SVG and PDF, drawn by the system's Chromium."""

import asyncio
import html
import re
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import plotly.graph_objects as go

from mechicl.base.arguments import Count, Positive, checked

WIDTHS = {"column": 3.25, "page": 6.75}  # inches
CSS_DPI = 96  # pixels of a browser in an inch
PIXELS_A_POINT = CSS_DPI / 72  # pixels of a browser in a point
NATURAL_HEIGHT = 450  # plotly's, of a figure without a height
PAGE_WIDTH = 1100  # pixels of a figure without a width on a page of ours
OPENING_WIDTH = 720  # of the picture of a report's first screen, and of the gallery
LETTER = 0.58  # width of a common letter, relative to the font's size
NO_KALEIDO = "PNG, SVG and PDF need plotly's kaleido: pip install 'mechicl[figures]' (.html needs nothing)"
NO_BROWSER = (
    "PNG, SVG and PDF need Chromium or Chrome, and none was found: install one (Debian: apt-get install chromium), or "
    "set the environment variable BROWSER_PATH to its path (.html needs none)"
)


_shown: set[str] = set()  # scripts that this kernel's notebook has


@dataclass(frozen=True)
class Html:
    """A picture as HTML; a notebook shows it, `save` writes it to a file, `page` puts it on a page.

    Attributes:
        body: the picture. An element that a script has not drawn yet has the attribute `data-waiting`.
        script: source of the library that the picture needs, the same for all such pictures; empty if it needs none.
        still: the same picture as a figure for paper and pages, if there is one.
    """

    body: str = field(repr=False)
    script: str = field(default="", repr=False)
    still: go.Figure | None = field(default=None, repr=False, compare=False)

    def _repr_html_(self) -> str:
        return self.body if self.script in _shown else f"{libraries([self])}{self.body}"

    def save(self, path: str | Path) -> Path:
        """Write a file that needs nothing else, and return its path."""
        path = Path(path)
        path.write_text(f"<!doctype html><html>{self.document()}</html>", encoding="utf-8")
        return path

    def document(self) -> str:
        """Return head and body of a document that needs nothing else."""
        return f'<head><meta charset="utf-8">{libraries([self])}</head><body>{self.body}</body>'


def libraries(pictures: Sequence[Html]) -> str:
    """Return the scripts that pictures need, each once, as HTML."""
    scripts = dict.fromkeys(picture.script for picture in pictures if picture.script)
    return "".join(f"<script>{script}</script>" for script in scripts)


@cache
def circuitsvis_source() -> str:
    """Return the script of circuitsvis from its package, fit for use inside a page: no network, no telemetry."""
    source = files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    source = "\n".join(line for line in source.splitlines() if not line.startswith("//# sourceMappingURL="))
    return source.replace("</script", "<\\/script")  # in a string of the source


@checked
def init_notebook() -> None:
    """Put the JavaScript of attention pictures (1.3 MB) into the notebook once, to keep its file small.

    Pictures shown after it contain only their own data and need the output of the cell that called this; without this
    call, each picture contains the script.

    Example:
        >>> viz.init_notebook()
        >>> viz.prompt_attention(model, prompts[:1])
    """
    source = circuitsvis_source()
    note = "The attention pictures below use the script in this cell's output."
    from IPython.display import HTML, display  # every notebook has it

    display(HTML(f"<script>{source}</script><small>{note}</small>"))
    _shown.add(source)


@checked
def save(
    picture: go.Figure | Html,
    path: str | Path,
    *,
    width: Literal["column", "page"] | Positive = "page",
    height: Positive | None = None,
    font_size: Positive = 7.0,
    dpi: Count = 300,
    title: bool = True,
) -> Path:
    """Save a figure to a file, at its size on paper, so that a document need not scale it.

    The figure is laid out again for its width: a narrow one has letters of the same size and less space. The path's
    suffix selects the format: .png, .svg, .pdf, or .html, which stays interactive, fits its window and has no size.

    Args:
        picture: a plotly figure, a picture of `prompt_attention`, or a widget's `picture()` (only as .html).
        path: path of the file, in a folder that exists; it is returned.
        width: width in inches, or "column" (3.25) or "page" (6.75).
        height: height in inches; by default the figure's own height in letters of this size, or its aspect ratio if it
            has a fixed width.
        font_size: size of the figure's common text, in points. Letters are smaller in a figure whose fixed width would
            not fit otherwise.
        dpi: pixels per inch of a .png.
        title: draw the figure's title; False leaves it to the document's caption.

    Raises:
        ImportError: kaleido is not installed.
        RuntimeError: there is no Chromium or Chrome.

    Example:
        >>> viz.save(viz.plot(alignment), "alignment.pdf", width="column")
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg", ".pdf", ".html"):
        raise ValueError(f"path must end in .png, .svg, .pdf or .html, got {path.name!r}")
    if suffix == ".html":
        (picture.save if isinstance(picture, Html) else (picture if title else _untitled(picture)).write_html)(path)
        return path
    figure = picture.still if isinstance(picture, Html) else picture
    if figure is None:
        raise ValueError(f"path must end in .html for a picture made of HTML, got {path.name!r}")
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    paper = Paper(inches, height, font_size, dpi)
    (image,) = draw([(figure if title else _untitled(figure), paper)], suffix[1:])
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
    """Return the files of several figures, each at its size, drawn by one browser: "png", "svg" or "pdf"."""
    jobs = []
    for figure, paper in figures:
        fig, width, height, scale = laid_out(figure, paper)
        scale *= paper.dpi / CSS_DPI if kind == "png" else 1.0
        jobs.append((fig, {"format": kind, "width": width, "height": height, "scale": scale}))
    images = _draw_all(jobs)
    if kind == "png":
        images = [with_dpi(image, paper.dpi) for image, (_, paper) in zip(images, figures, strict=True)]
    return images


def still_svgs(figures: Sequence[go.Figure], n_opening: int = 0) -> list[str]:
    """Return SVGs as a page shows them, the first `n_opening` narrower; empty ones without kaleido or a browser."""
    jobs: list[tuple[go.Figure, dict[str, Any]]] = []
    for i, figure in enumerate(figures):
        layout: Any = figure.layout
        width = layout.width or (OPENING_WIDTH if i < n_opening else PAGE_WIDTH)
        sizes = {"width": width, "height": layout.height or NATURAL_HEIGHT}
        jobs.append((figure, {"format": "svg", **sizes}))
    try:
        return [image.decode() for image in _draw_all(jobs)] if jobs else []
    except Exception:  # no kaleido, no browser, or one that fails: the page's script draws its figures anyway
        return [""] * len(jobs)


def _draw_all(jobs: Sequence[tuple[go.Figure, dict[str, Any]]]) -> list[bytes]:
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
    """Lay a figure out for a paper; also return width, height and a pixel's size in a browser's pixels (1/96 inch)."""
    fig = go.Figure(fig)
    layout: Any = fig.layout
    letters = layout.font.size or layout.template.layout.font.size or 12
    inner, outer = layout.width, paper.width * CSS_DPI
    width = max(outer / (paper.font_size * PIXELS_A_POINT / letters), inner or 0)
    scale = outer / width
    _wrap_titles(fig, width)
    if paper.height is not None:
        height = paper.height * CSS_DPI / scale
    else:
        height = layout.height * (width / inner if inner else 1)
    return fig, width, height, scale


def _wrap_titles(fig: go.Figure, width: float) -> None:
    """Break the titles of the figure and of its panels into lines, and make the figure higher by the added lines."""
    layout: Any = fig.layout
    top, sides = layout.margin.t or 100, (layout.margin.l or 80) + (layout.margin.r or 80)
    if layout.title.text:
        size = layout.title.font.size or 17
        lines, more = _in_lines(layout.title.text, width - 20, size)
        fig.update_layout(title_text=lines)
        top += 1.3 * size * more
    titles = [a for a in layout.annotations if a.xref == a.yref == "paper" and not a.showarrow]
    places = sorted({a.x for a in titles})
    space = min((b - a for a, b in pairwise(places)), default=1.0) * (width - sides)
    size = min((a.font.size or 12 for a in titles), default=12)
    longest = max((len(_plain(word)) for a in titles for word in re.split(" |<br>", a.text)), default=1)
    size = min(size, space / (LETTER * longest))  # a word that does not fit gets smaller
    most = 0
    for annotation in titles:
        lines, more = _in_lines(annotation.text, space, size)
        annotation.update(text=lines, font_size=size)
        most = max(most, round(1.3 * size * more))
    fig.update_layout(margin_t=top + most, height=(layout.height or NATURAL_HEIGHT) + most)


def _in_lines(text: str, width: float, size: float) -> tuple[str, int]:
    """Break text into lines of a width in pixels; returns it with the number of added lines. Tags stay whole."""
    at_once, lines = width / (LETTER * size), []
    for part in text.split("<br>"):
        lines.append("")
        for word in part.split(" "):
            if lines[-1] and len(_plain(f"{lines[-1]} {word}")) > at_once:
                lines.append(word)
            else:
                lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines), len(lines) - text.count("<br>") - 1


def _plain(text: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", text))


def _untitled(fig: go.Figure) -> go.Figure:
    fig = go.Figure(fig)
    layout: Any = fig.layout
    if layout.title.text:
        size = layout.title.font.size or 17
        fig.update_layout(title_text=None, margin_t=max((layout.margin.t or 100) - 2 * size, 12))
    return fig


def with_dpi(png: bytes, dpi: float) -> bytes:
    """Add its size on paper to a PNG (chunk pHYs, in pixels per metre)."""
    per_metre = round(dpi / 0.0254)
    body = b"pHYs" + struct.pack(">IIB", per_metre, per_metre, 1)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    end = 8 + 4 + 4 + 13 + 4  # the signature and the header chunk
    return png[:end] + chunk + png[end:]
