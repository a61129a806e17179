"""Pictures as files at the sizes of a paper: PNG, SVG and PDF, drawn by the system's Chromium, and HTML."""

import asyncio
import base64
import json
import re
import struct
import zlib
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import plotly.graph_objects as go

from mechicl.viz.html import Html

WIDTHS = {"column": 3.25, "page": 6.75}  # inches
SUFFIXES = (".png", ".svg", ".pdf", ".html")
CSS_DPI = 96  # pixels of a browser in an inch
POINT = CSS_DPI / 72  # pixels of a browser in a point
NATURAL_HEIGHT = 450  # of a plotly figure that says none
LETTER = 0.58  # of its size, the width of a common letter
PATIENCE = 30  # seconds that an HTML picture may take to be drawn
NO_KALEIDO = "PNG, SVG and PDF need plotly's kaleido: pip install 'mechicl[figures]' (.html needs nothing)"
NO_BROWSER = (
    "PNG, SVG and PDF are drawn by Chromium or Chrome, and there is none here: install one (Debian: apt-get install "
    "chromium), or name it in the environment variable BROWSER_PATH (.html needs none)"
)
T = TypeVar("T")


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
    """Write a figure at the size that it has on paper, so that it goes there unscaled and its words can be read.

    A figure is laid out anew for its width: a narrow one has letters of the same size, on less room. The path's suffix
    says what is written: .png, .svg, .pdf, or .html, which stays interactive, fits its window and has no size.

    Args:
        picture: a plotly figure, a picture of attention, or a widget's `picture()` (made of HTML: not as .svg).
        path: of the file; its folder exists.
        width: in inches, or "column" (3.25) or "page" (6.75).
        height: in inches; by default the figure's own height in letters of this size, or its aspect where it has a
            width of its own.
        font_size: of the figure's common words, in points; titles are larger and small print is smaller, as drawn. They
            get smaller than that where a figure has a width of its own that would not fit.
        dpi: pixels to the inch of a .png.
        title: whether the figure's title is drawn; False where the caption says it.

    Returns:
        The path.

    Raises:
        ValueError: an unknown suffix or width, a size that is not positive, or a widget as .svg or with a height.
        ImportError: kaleido is not installed.
        RuntimeError: there is no Chromium or Chrome.

    Example:
        >>> viz.save(viz.plot(alignment), "alignment.pdf", width="column")
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: figures are written as {', '.join(SUFFIXES)}, not as {suffix or 'no suffix'!r}")
    inches = _inches(width)
    sizes = {"width": inches, "height": height, "font_size": font_size, "dpi": dpi}
    for name, size in sizes.items():
        if size is not None and not size > 0:
            raise ValueError(f"{name}={size}: a size is positive")
    if suffix == ".html":
        if isinstance(picture, Html):
            return picture.save(path)
        picture.write_html(path)
        return path
    drawn = still(picture)
    if isinstance(drawn, Html) and (suffix == ".svg" or height is not None):
        problem = "cannot be an SVG: write .png or .pdf" if suffix == ".svg" else "has its own height"
        raise ValueError(f"{path.name}: a picture made of HTML {problem}")
    if not title and not isinstance(drawn, Html):
        drawn = _untitled(drawn)
    (image,) = draw([(drawn, Paper(inches, height, font_size, dpi))], suffix[1:])
    path.write_bytes(image)
    return path


@dataclass(frozen=True)
class Paper:
    """What a picture is drawn on: sizes in inches, letters in points."""

    width: float
    height: float | None = None
    font_size: float = 7.0
    dpi: float = 300


def still(picture: go.Figure | Html) -> go.Figure | Html:
    """What paper gets of a picture: a figure, if there is one."""
    return picture.still if isinstance(picture, Html) and picture.still is not None else picture


def draw(pictures: Sequence[tuple[go.Figure | Html, Paper]], kind: str) -> list[bytes]:
    """Files of several pictures, each on its paper, drawn by one browser: "png", "svg" or "pdf".

    Raises:
        ImportError: kaleido is not installed.
        RuntimeError: there is no Chromium or Chrome, or a picture was not drawn in time.
    """
    try:
        import kaleido  # an optional extra
        from choreographer.errors import ChromeNotFoundError
    except ImportError as error:
        raise ImportError(NO_KALEIDO) from error

    async def drawn() -> list[bytes]:
        try:
            browser = kaleido.Kaleido(mathjax=False)  # else it asks a server for it
        except ChromeNotFoundError as error:
            raise RuntimeError(NO_BROWSER) from error
        async with browser:
            images = []
            for picture, paper in pictures:
                shown = still(picture)
                drawing = _draw_html if isinstance(shown, Html) else _draw_figure
                images.append(await drawing(browser, cast(Any, shown), kind, paper))
            return images

    return _wait_for(drawn())


# ---- plotly's figures ----


async def _draw_figure(browser: Any, fig: go.Figure, kind: str, paper: Paper) -> bytes:
    fig, width, height, scale = laid_out(fig, paper)
    more = paper.dpi / CSS_DPI if kind == "png" else 1.0
    options = {"format": kind, "width": width, "height": height, "scale": scale * more}
    image = await browser.calc_fig(fig, options)
    return with_dpi(image, paper.dpi) if kind == "png" else image


def laid_out(fig: go.Figure, paper: Paper) -> tuple[go.Figure, float, float, float]:
    """A figure for a paper, its width and height in the pixels in which it is laid out, and their size on paper.

    The last number is what such a pixel is in a browser's pixels (1/96 inch).
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
    """Put the title, and those of the panels, in as many lines as they need, on a figure as much higher."""
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
    """Words in lines of that many pixels, and how many more lines they have now; tags stay whole."""
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
    """A PNG that says how large it is on paper (its chunk pHYs, in pixels a metre)."""
    per_metre = round(dpi / 0.0254)
    body = b"pHYs" + struct.pack(">IIB", per_metre, per_metre, 1)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    end = 8 + 4 + 4 + 13 + 4  # the signature and the header chunk
    return png[:end] + chunk + png[end:]


# ---- HTML pictures ----

_FIT = """<style>
html, body { margin: 0; background: #fff } body { width: fit-content; font-family: system-ui, sans-serif }
body > *:first-child { margin-top: 0 !important } @page { margin: 0 }
</style>"""
_WAITING = "document.readyState !== 'complete' || document.querySelector('[data-waiting]') !== null"
_BOX = """JSON.stringify({width: document.body.getBoundingClientRect().width,
                         height: document.documentElement.scrollHeight})"""


async def _draw_html(browser: Any, picture: Html, kind: str, paper: Paper) -> bytes:
    letters = 13  # pixels, the common words of HTML pictures
    scale = paper.font_size * POINT / letters
    tab = await browser.create_tab(window=True)
    try:
        metrics = {"width": round(paper.width * CSS_DPI / scale), "height": 1, "mobile": False}
        await _command(tab, "Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, **metrics)
        await _load(tab, picture)
        box = json.loads(await _evaluate(tab, _BOX))
        scale = paper.width * CSS_DPI / box["width"]  # it may be narrower than the room that it was offered
        if kind == "pdf":
            size = {"paperWidth": paper.width, "paperHeight": box["height"] * scale / CSS_DPI}
            margins = {f"margin{side}": 0 for side in ("Top", "Bottom", "Left", "Right")}
            result = await _command(
                tab, "Page.printToPDF", printBackground=True, pageRanges="1", scale=scale, **size, **margins
            )
            return base64.b64decode(result["data"])
        more = scale * paper.dpi / CSS_DPI
        await _command(tab, "Emulation.setDeviceMetricsOverride", deviceScaleFactor=more, **metrics)
        return with_dpi(await _photograph(tab, box), paper.dpi)
    finally:
        await browser.close_tab(tab.target_id)


async def _load(tab: Any, picture: Html) -> None:
    """Put a picture into an empty tab, and wait until it is drawn and stays the same."""
    tree = await _command(tab, "Page.getFrameTree")
    document = f"<!doctype html><html>{_FIT}{picture.document()}</html>"
    await _command(tab, "Page.setDocumentContent", frameId=tree["frameTree"]["frame"]["id"], html=document)
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    before = b""
    while loop.time() < end:
        await asyncio.sleep(0.1)
        if await _evaluate(tab, _WAITING):
            continue
        now = await _photograph(tab, json.loads(await _evaluate(tab, _BOX)))
        if now == before:
            return
        before = now
    raise RuntimeError(f"an HTML picture was not drawn in {PATIENCE} s")


async def _photograph(tab: Any, box: dict[str, float]) -> bytes:
    clip = {"x": 0, "y": 0, "scale": 1, **box}
    result = await _command(tab, "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(result["data"])


async def _evaluate(tab: Any, expression: str) -> Any:
    result = await _command(tab, "Runtime.evaluate", expression=expression, returnByValue=True)
    return result["result"]["value"]


async def _command(tab: Any, name: str, **params: Any) -> dict[str, Any]:
    answer = await tab.send_command(name, params=params)
    if "error" in answer:
        raise RuntimeError(f"Chromium refused {name}: {answer['error']}")
    return answer["result"]


def _wait_for(job: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns; it runs in a thread of its own, since a notebook's has a loop already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, job).result()


def _inches(width: str | float) -> float:
    if isinstance(width, str):
        if width not in WIDTHS:
            raise ValueError(f"width {width!r} is not one of {', '.join(map(repr, WIDTHS))}, or a number of inches")
        return WIDTHS[width]
    return float(width)
