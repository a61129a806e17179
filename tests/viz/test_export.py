"""Figures as files: their kinds, their sizes on paper, the words in them, and errors that say what can be written."""

import re
import sys
from pathlib import Path
from typing import Any, cast

import plotly.graph_objects as go
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser
from pypdf import PdfReader

from mechicl import viz
from mechicl.viz.elements import figure, panels
from mechicl.viz.export import Paper, laid_out
from mechicl.viz.html import Html

WORDS = "A title that has more words in it than one line of a column can hold"


def line() -> go.Figure:
    fig = figure(WORDS, "steps", "loss")
    return fig.add_scatter(x=[0, 1, 2], y=[1.0, 0.5, 0.25], name="trained")


def attention() -> Html:
    return viz.attention_html(torch.eye(3)[None], ["first", "second", "third"])


def layout_of(fig: go.Figure) -> Any:
    return fig.layout


def shades(image: Image.Image) -> int:
    return len(image.convert("RGB").getcolors(maxcolors=10**7) or [])


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


@pytest.fixture(scope="module")
def files(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line as PNG, SVG, PDF and HTML, and attention as PDF."""
    folder = tmp_path_factory.mktemp("figures")
    for suffix in ("png", "svg", "pdf", "html"):
        assert viz.save(line(), folder / f"line.{suffix}", width="column") == folder / f"line.{suffix}"
    viz.save(attention(), folder / "attention.pdf", width="page", height=3.0)
    return folder


def test_a_png_has_the_pixels_of_its_width_and_says_its_size(files):
    image = opened(files / "line.png")
    assert image.format == "PNG"
    assert image.width == pytest.approx(3.25 * 300, abs=1)
    assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    assert shades(image) > 20
    corner = image.convert("RGB").getpixel((1, 1))
    assert corner == (255, 255, 255)


def test_an_svg_and_a_pdf_have_their_width_and_the_words_as_words(files):
    svg = (files / "line.svg").read_text()
    assert re.search(r'<svg[^>]* width="312(\.0+)?"', svg)  # 3.25 inches
    (page,) = PdfReader(files / "line.pdf").pages
    assert float(page.mediabox.width) == pytest.approx(3.25 * 72, abs=1)
    text = " ".join(page.extract_text().split())
    assert WORDS in text
    for word in ("steps", "loss"):
        assert word in text
        assert f">{word}</text>" in svg
    image = opened(files / "line.png")
    assert float(page.mediabox.height) / float(page.mediabox.width) == pytest.approx(image.height / image.width, 0.01)


def test_html_is_interactive_and_needs_no_network(files):
    page = (files / "line.html").read_text()
    assert "Plotly.newPlot" in page
    assert not re.search(r'<(script|link)[^>]*(src|href)="https?:', page)


def test_attention_is_a_figure_on_paper(files):
    (page,) = PdfReader(files / "attention.pdf").pages
    assert [float(page.mediabox.width), float(page.mediabox.height)] == pytest.approx([6.75 * 72, 3 * 72], abs=1)
    assert {"head", "second", "attention"} <= set(page.extract_text().split())


def test_a_narrower_figure_has_letters_of_the_same_size():
    for inches in (3.25, 6.75):
        fig, width, height, scale = laid_out(line(), Paper(inches, font_size=7))
        assert width * scale == pytest.approx(inches * 96)
        assert layout_of(fig).font.size * scale == pytest.approx(7 * 96 / 72)
        assert height * scale > 1.5 * 96
    fig = line().update_layout(width=1400, height=700)  # what does not fit is scaled as a whole
    _, width, height, scale = laid_out(fig, Paper(3.25))
    assert (width, height / width, scale) == pytest.approx((1400, 0.5, 3.25 * 96 / 1400), rel=0.05)
    _, _, height, scale = laid_out(line(), Paper(3.25, height=2.0))
    assert height * scale == pytest.approx(2 * 96)


def test_titles_take_as_many_lines_as_they_need_and_lose_no_word():
    names = ["a panel with a long name", "W<sub>KQ</sub> of another one", "incomprehensibilities"]
    fig = panels(WORDS, names)
    before = layout_of(fig).height
    narrow, _, _, _ = laid_out(fig, Paper(3.25))
    assert layout_of(narrow).title.text.replace("<br>", " ") == WORDS
    assert layout_of(narrow).title.text.count("<br>") == 1
    assert [a.text.replace("<br>", " ") for a in layout_of(narrow).annotations] == names
    assert layout_of(narrow).annotations[0].text.count("<br>") >= 1
    assert layout_of(narrow).annotations[2].font.size < 13
    assert layout_of(narrow).margin.t > layout_of(fig).margin.t
    assert (layout_of(fig).height, layout_of(fig).title.text) == (before, WORDS)  # the figure itself stays


def test_a_title_may_be_left_to_the_caption(files):
    path = viz.save(line(), files / "untitled.svg", title=False)
    assert "A title" not in path.read_text()


def test_what_cannot_be_written_says_what_can(tmp_path):
    with pytest.raises(ValueError, match=r"line.gif: figures are written as .png, .svg, .pdf, .html, not as '.gif'"):
        viz.save(line(), tmp_path / "line.gif")
    with pytest.raises(ValueError, match="width 'colum' is not one of 'column', 'page', or a number of inches"):
        viz.save(line(), tmp_path / "line.png", width="colum")
    for name in ("width", "height", "font_size", "dpi"):
        with pytest.raises(ValueError, match=f"{name}=-1(.0)?: a size is positive"):
            viz.save(line(), tmp_path / "line.png", **cast(Any, {name: -1}))
    with pytest.raises(ValueError, match=r"box.png: a picture made of HTML is written as \.html only"):
        viz.save(Html("<p>a box</p>"), tmp_path / "box.png")
    assert list(tmp_path.iterdir()) == []


def test_without_kaleido_or_a_browser_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(ImportError, match=r"pip install 'mechicl\[figures\]'"):
        viz.save(line(), tmp_path / "line.pdf")
    assert viz.save(line(), tmp_path / "line.html").exists()
    monkeypatch.undo()
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match="install one"):
        viz.save(line(), tmp_path / "line.pdf")
