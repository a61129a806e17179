"""Run the notebooks of this folder and save them with their outputs and static pictures: `make notebooks`.

A committed notebook is often read where no script runs: on a web page, or in a JupyterLab that does not trust it. So
every figure is saved with an SVG, every widget with a PNG, and attention pictures only as a PNG, because their script
has 1.3 MB. A picture is drawn again only if its data have changed, and whatever differs between runs (addresses, times,
random names of widgets) is left out, so that running a notebook again changes nothing.
"""

import argparse
import base64
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from PIL import Image
from playwright.sync_api import sync_playwright

from mechicl.viz.export import CSS_DPI, Html, Paper, draw

HERE = Path(__file__).parent
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGETS = "application/vnd.jupyter.widget-state+json"
STILL = "application/vnd.mechicl.still+json"  # in a running notebook only: what an HTML picture is drawn from
SVG, PNG = "image/svg+xml", "image/png"
LARGE = 100_000  # characters of a script beyond which it is a library
WIDTH = 900  # pixels, of a picture without a width
DENSITY = 2  # pixels of a picture in a pixel of the page
SHADES = 256  # of a picture's palette; rare colours stay, which a colour bar is made of

# What the kernel does before the first cell.
SETUP = f"""
import json
from mechicl.viz.explorer import PatchingExplorer
from mechicl.viz.export import Html

def still(picture):
    return {{"body": picture.body}} if picture.still is None else {{"figure": json.loads(picture.still.to_json())}}

def show(picture, **_):
    return {{"text/html": picture._repr_html_(), "text/plain": repr(picture), {STILL!r}: still(picture)}}

show_widget = PatchingExplorer._repr_mimebundle_

def show_both(widget, **options):
    data, metadata = show_widget(widget, **options)
    return {{**data, {STILL!r}: still(widget.picture())}}, metadata

Html._repr_mimebundle_ = show
PatchingExplorer._repr_mimebundle_ = show_both
"""


def run(path: Path, timeout: int = 1200) -> NotebookNode:
    """A notebook with fresh outputs.

    Raises:
        CellExecutionError: a cell failed; the message contains its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.pop("widgets", None)
    resources = {"metadata": {"path": str(path.parent)}}
    # what is printed at once or in parts is one output
    options: dict[str, Any] = {"store_widget_state": True, "coalesce_streams": True}
    client = NotebookClient(notebook, timeout=timeout, resources=resources, **options)
    client.reset_execution_trackers()
    with client.setup_kernel():
        notebook.cells.insert(0, new_code_cell(SETUP))
        client.execute_cell(notebook.cells[0], 0, store_history=False)
        notebook.cells.pop(0)
        for i, cell in enumerate(notebook.cells):
            client.execute_cell(cell, i)
        client.set_widgets_metadata()
    return notebook


def settled(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what differs from run to run, and without libraries."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            by_data = [(output, output.get("data", {})) for output in cell.outputs]
            cell.outputs = [o for o, data in by_data if len(data.get("text/html", "")) < LARGE or STILL in data]
        for output in cell.get("outputs", []):
            if "text/plain" in (data := output.get("data", {})):
                data["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", data["text/plain"])
    widgets = notebook.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    words = nbformat.writes(notebook)
    for i, name in enumerate(widgets):
        words = words.replace(name, f"{i:032x}")
    return nbformat.reads(words, as_version=4)


def with_pictures(notebook: NotebookNode, before: NotebookNode | None = None) -> NotebookNode:
    """The notebook with an SVG or a PNG for each output that is a picture; those of `before` with the same are kept.

    Raises:
        ImportError: kaleido is not installed.
        RuntimeError: there is no Chromium or Chrome.
    """
    saved = outputs_of(before) if before is not None else ()
    kept = {(output.metadata.get("drawn_from"), kind): output
            for output in saved for kind in (SVG, PNG) if kind in output.data}  # fmt: skip
    missing: dict[str, list[tuple[NotebookNode, go.Figure | Html]]] = {SVG: [], PNG: []}
    for output in outputs_of(notebook):
        picture = picture_of(output)
        if picture is None:
            continue
        words = json.dumps(picture.to_plotly_json() if isinstance(picture, go.Figure) else picture.body, default=str)
        digest = hashlib.sha256(words.encode()).hexdigest()[:16]
        if output.data.pop(STILL, None) is not None:
            output.data.pop("text/html", None)  # it needs the library
        output.metadata["drawn_from"] = digest
        kind = SVG if PLOTLY in output.data else PNG
        if (digest, kind) in kept:
            output.data[kind] = kept[digest, kind].data[kind]
            output.metadata |= kept[digest, kind].metadata
        else:
            missing[kind].append((output, picture))
    for output, image in _drawn(missing[SVG], "svg"):
        output.data[SVG] = image.decode()
    for output, image in _drawn(missing[PNG], "png"):
        small, width, height = _small(image)
        output.data[PNG] = base64.b64encode(small).decode()
        output.metadata[PNG] = {"width": width, "height": height}
    return notebook


def _drawn(missing: list[tuple[NotebookNode, go.Figure | Html]], kind: str) -> Iterator[tuple[NotebookNode, bytes]]:
    figures = [(output, picture) for output, picture in missing if isinstance(picture, go.Figure)]
    images = draw([(figure, _paper(figure)) for _, figure in figures], kind) if figures else []
    yield from zip((output for output, _ in figures), images, strict=True)
    for output, picture in missing:
        if isinstance(picture, Html):
            with ThreadPoolExecutor(1) as pool:  # where no event loop is running
                yield output, pool.submit(_photographed, picture).result()


def _photographed(picture: Html) -> bytes:
    """A PNG of a widget."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser_path = os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=browser_path) as browser:
        tab = browser.new_page(viewport={"width": WIDTH, "height": 1}, device_scale_factor=DENSITY)
        tab.set_content(f"<!doctype html><html><style>body {{ margin: 0 }}</style>{picture.document()}</html>")
        tab.wait_for_function("document.querySelector('[data-waiting]') === null")
        return tab.locator("body").screenshot()


def outputs_of(notebook: NotebookNode) -> Iterator[NotebookNode]:
    """All outputs that hold data: what is displayed, not what is printed."""
    for cell in notebook.cells:
        yield from (output for output in cell.get("outputs", []) if "data" in output)


def picture_of(output: NotebookNode) -> go.Figure | Html | None:
    """Return the figure in an output of a notebook that has run; None for texts and tables."""
    data = output.data
    if PLOTLY in data:
        return go.Figure({name: data[PLOTLY][name] for name in ("data", "layout")})
    if STILL in data:
        still = data[STILL]
        return go.Figure(still["figure"]) if "figure" in still else Html(still["body"])
    return None


def _paper(figure: go.Figure) -> Paper:
    """As large as in the notebook, in letters as large as they are there."""
    layout: Any = figure.layout
    letters = layout.font.size or 12
    return Paper((layout.width or WIDTH) / CSS_DPI, font_size=letters * 72 / CSS_DPI, dpi=DENSITY * CSS_DPI)


def _small(png: bytes) -> tuple[bytes, int, int]:
    """The picture with a palette, which is a third as long, and its width and height on the page."""
    with Image.open(io.BytesIO(png)) as image:
        small = image.convert("RGB").quantize(SHADES, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        file = io.BytesIO()
        small.save(file, "PNG", optimize=True)
        return file.getvalue(), round(image.width / DENSITY), round(image.height / DENSITY)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of notebooks; all by default")
    args = parser.parse_args(argv)
    paths = sorted(HERE.glob("*.ipynb"))
    for path in [path for path in paths if not args.names or path.stem in args.names]:
        before = nbformat.read(path, as_version=4)
        nbformat.write(with_pictures(settled(run(path)), before), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
