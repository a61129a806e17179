"""Figures as files: their kinds, their sizes on paper, and their text."""

import re
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser
from pypdf import PdfReader

from mechicl import viz
from mechicl.viz.attention import attention_html
from mechicl.viz.elements import figure, panels
from mechicl.viz.export import Paper, laid_out

TITLE = "A title that has more words in it than one line of a column can hold"


def line() -> go.Figure:
    fig = figure(TITLE, "steps", "loss")
    return fig.add_scatter(x=[0, 1, 2], y=[1.0, 0.5, 0.25], name="trained")


def layout_of(fig: go.Figure) -> Any:
    return fig.layout


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


@pytest.fixture(scope="module")
def files(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a line as PNG, SVG, PDF and HTML, and attention as PDF."""
    folder = tmp_path_factory.mktemp("figures")
    for suffix in ("png", "svg", "pdf", "html"):
        assert viz.save(line(), folder / f"line.{suffix}", width="column") == folder / f"line.{suffix}"
    attention = attention_html(torch.eye(3)[None], ["first", "second", "third"])
    viz.save(attention, folder / "attention.pdf", width="page", height=3.0)
    return folder


def test_a_png_has_the_pixels_of_its_width_and_records_its_size(files):
    image = opened(files / "line.png")
    assert image.format == "PNG"
    assert image.width == pytest.approx(3.25 * 300, abs=1)
    assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    assert len(image.convert("RGB").getcolors(maxcolors=10**7) or []) > 20
    assert image.convert("RGB").getpixel((1, 1)) == (255, 255, 255)


def test_an_svg_and_a_pdf_have_their_width_and_text_as_text(files):
    svg = (files / "line.svg").read_text()
    assert re.search(r'<svg[^>]* width="312(\.0+)?"', svg)  # 3.25 inches
    (page,) = PdfReader(files / "line.pdf").pages
    assert float(page.mediabox.width) == pytest.approx(3.25 * 72, abs=1)
    text = " ".join(page.extract_text().split())
    assert TITLE in text
    for word in ("steps", "loss"):
        assert word in text
        assert f">{word}</text>" in svg
    image = opened(files / "line.png")
    assert float(page.mediabox.height) / float(page.mediabox.width) == pytest.approx(image.height / image.width, 0.01)


def test_html_is_interactive_and_needs_no_network(files):
    page = (files / "line.html").read_text()
    assert "Plotly.newPlot" in page
    assert not re.search(r'<(script|link)[^>]*(src|href)="https?:', page)


def test_attention_is_a_figure_on_paper_and_titles_may_be_left_out(files):
    assert "A title" not in viz.save(line(), files / "untitled.svg", title=False).read_text()
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


def test_titles_are_broken_into_lines_and_lose_no_word():
    names = ["a panel with a long name", "W<sub>KQ</sub> of another one", "incomprehensibilities"]
    fig = panels(TITLE, names)
    before = layout_of(fig).height
    narrow, _, _, _ = laid_out(fig, Paper(3.25))
    assert layout_of(narrow).title.text.replace("<br>", " ") == TITLE
    assert layout_of(narrow).title.text.count("<br>") == 1
    assert [a.text.replace("<br>", " ") for a in layout_of(narrow).annotations] == names
    assert layout_of(narrow).annotations[0].text.count("<br>") >= 1
    assert layout_of(narrow).annotations[2].font.size < 13
    assert layout_of(narrow).margin.t > layout_of(fig).margin.t
    assert (layout_of(fig).height, layout_of(fig).title.text) == (before, TITLE)  # the figure itself stays


def test_without_kaleido_or_a_browser_the_error_names_the_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(ImportError, match=r"pip install 'mechicl\[figures\]'"):
        viz.save(line(), tmp_path / "line.pdf")
    assert viz.save(line(), tmp_path / "line.html").exists()
    monkeypatch.undo()
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match="install one"):
        viz.save(line(), tmp_path / "line.pdf")
