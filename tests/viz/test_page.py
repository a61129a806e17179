"""Pages escape their contents and show every figure; figures as files have their sizes on paper and their text."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, Page
from pypdf import PdfReader

from mechicl import viz
from mechicl.viz.attention import attention_html
from mechicl.viz.elements import Markup, add_line, figure, panels
from mechicl.viz.export import Html, Paper, laid_out, still_svgs
from mechicl.viz.page import Section, page, table, text
from tests.conftest import BROWSER_ARGS, BROWSERS

TALL = 20  # figures: many screens
ATTACK = "<script>alert('x')</script>&\""


def test_every_cell_title_and_paragraph_is_escaped():
    html = page(ATTACK, ATTACK, [Section(ATTACK, ATTACK, table((ATTACK,), [(ATTACK,)]))])
    assert "<script>alert" not in html
    assert html.count(text(ATTACK)) == 8  # title twice, lead, link, heading, paragraph, two cells


def test_the_opening_is_above_the_links_and_escaped_and_backticks_mark_code():
    section = Section("one", "`a < b` and `c`", "")
    html = page("title", "lead", [section], opening=Section(ATTACK, ATTACK, "<b>answer</b>"))
    assert "<script>alert" not in html
    code = "<p><code>a &lt; b</code> and <code>c</code></p>"
    assert html.index("<b>answer</b>") < html.index("<p>lead</p>") < html.index("<nav>") < html.index(code)
    assert html.count("<h1>") == 1
    assert 'href="#opening"' not in html
    assert 'id="opening"' not in page("title", "lead", [])


def drawing(name: str = "line", height: int = 400):
    fig = figure(name, "x", "y")
    add_line(fig, range(5), [i * i for i in range(5)], name, "#222222")
    return fig.update_layout(height=height)


def opened(browser: Browser, folder: Path, html: str, *, anchor: str = "", **options) -> Page:
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    shown = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True, **options).new_page()
    shown.on("pageerror", lambda error: pytest.fail(str(error)))
    shown.goto(path.as_uri() + anchor)
    return shown


def drawn(shown: Page) -> list[str]:
    """Return the ids of the figures that plotly has drawn."""
    return shown.evaluate("[...document.querySelectorAll('.figure:has(.main-svg path.js-line)')].map((f) => f.id)")


def many() -> str:
    return page("title", "lead", [Section(f"{i}", "words", drawing(f"line {i}")) for i in range(TALL)])


@pytest.fixture
def stills(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pages with an SVG for each figure, which other tests leave out."""
    monkeypatch.setattr("mechicl.viz.page.still_svgs", still_svgs)


def test_every_figure_is_drawn_when_the_page_is_loaded_and_links_to_sections_work(tmp_path: Path, browser: Browser):
    html = many()
    assert len(html.encode()) < 8e6
    assert html.count("Plotly.react(place") == 1
    shown = opened(browser, tmp_path, html, anchor="#s15")
    assert drawn(shown) == [f"figure{i}" for i in range(TALL)]
    box = shown.locator("#s15").bounding_box()
    assert box is not None
    assert abs(box["y"]) < 60
    shown.context.close()


def test_printing_shows_every_figure(tmp_path: Path, browser: Browser):
    """Headless Chromium prints a page without waiting for anything."""
    source, pdf = tmp_path / "page.html", tmp_path / "page.pdf"
    source.write_text(many(), encoding="utf-8")
    executable = next(filter(None, map(shutil.which, BROWSERS)), "")
    options = [f"--user-data-dir={tmp_path / 'profile'}", f"--print-to-pdf={pdf}", source.as_uri()]
    subprocess.run([executable, *BROWSER_ARGS, *options], check=True, timeout=120, capture_output=True)
    printed = " ".join(sheet.extract_text() for sheet in PdfReader(pdf).pages)
    assert [f"line {i}" in printed for i in range(TALL)] == [True] * TALL


def test_every_figure_is_an_svg_before_a_script_runs(tmp_path: Path, browser: Browser, stills: None):
    html = many()
    assert html.count("<svg class") == TALL
    still = opened(browser, tmp_path, html, java_script_enabled=False)
    assert still.locator(".figure > svg path.js-line").count() == TALL
    assert still.get_by_text("allow it to run").count() == 0
    box = still.locator("#figure3 > svg").bounding_box()
    shown = opened(browser, tmp_path, html)
    assert shown.locator(".figure > svg").count() == 0
    assert drawn(shown) == [f"figure{i}" for i in range(TALL)]
    live = shown.locator("#figure3 .main-svg").first.bounding_box()
    assert box is not None
    assert live is not None
    assert (box["width"], box["height"]) == (live["width"], live["height"])
    still.context.close()
    shown.context.close()


def test_without_kaleido_and_scripts_a_page_explains_why_it_is_empty(
    tmp_path: Path, browser: Browser, stills: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    html = page("title", "lead", [Section("one", "words", drawing())])
    assert "<svg class" not in html
    shown = opened(browser, tmp_path, html, java_script_enabled=False)
    box = shown.locator("noscript p").bounding_box()
    assert box is not None
    assert box["height"] > 15
    shown.context.close()
    assert "<noscript>" not in page("title", "lead", [Section("one", "words", "no figure")])


def test_labels_cannot_end_the_script_and_a_section_may_have_several_parts_in_order(tmp_path: Path, browser: Browser):
    parts = (drawing("first"), table(("a",), [("cell",)]), drawing(f"second</script>{ATTACK}"))
    shown = opened(browser, tmp_path, page("title", "lead", [], opening=Section("one", "words", parts)))
    assert drawn(shown) == ["figure0", "figure1"]
    text = shown.locator("#opening").inner_text()
    assert text.index("first") < text.index("cell") < text.index("second")
    shown.context.close()


def test_attention_is_a_figure_and_needs_no_second_script(tmp_path: Path, browser: Browser):
    html = page("title", "lead", [Section("one", "words", attention_html(torch.eye(2)[None], ["first", "second"]))])
    assert "CircuitsVis" not in html
    shown = opened(browser, tmp_path, html)
    assert shown.locator(".heatmaplayer image").count() == 1
    assert {"first", "second", "head 0"} <= set(shown.locator("svg text").all_text_contents())
    shown.context.close()


def test_pictures_of_one_page_share_one_script(tmp_path: Path, browser: Browser):
    script = "window.draw = (id) => { document.getElementById(id).textContent = 'drawn'; }"
    pictures = [Html(f"<i id='i{i}'></i><script>window.draw('i{i}')</script>", script) for i in (0, 1)]
    html = page("title", "lead", [Section(f"{i}", "", picture) for i, picture in enumerate(pictures)])
    assert html.count(script) == 1
    shown = opened(browser, tmp_path, html)
    assert shown.locator("i").all_inner_texts() == ["drawn", "drawn"]
    shown.context.close()


# ---- figures as files: their kinds, their sizes on paper, and their text ----
TITLE = "A title that has more words in it than one line of a column can hold"


def line() -> go.Figure:
    fig = figure(TITLE, "steps", "loss")
    return fig.add_scatter(x=[0, 1, 2], y=[1.0, 0.5, 0.25], name="trained")


def layout_of(fig: go.Figure) -> Any:
    return fig.layout


def export_opened(path: Path) -> Image.Image:
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
    image = export_opened(files / "line.png")
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
    image = export_opened(files / "line.png")
    assert float(page.mediabox.height) / float(page.mediabox.width) == pytest.approx(image.height / image.width, 0.01)


def test_html_is_interactive_and_needs_no_network(files):
    page = (files / "line.html").read_text()
    assert "Plotly.newPlot" in page
    assert TITLE in page
    assert not re.search(r'<(script|link)[^>]*(src|href)="https?:', page)


def test_attention_is_a_figure_on_paper_and_titles_may_be_left_out(files):
    assert "A title" not in viz.save(line(), files / "untitled.svg", title=False).read_text()
    assert TITLE not in viz.save(line(), files / "untitled.html", title=False).read_text()
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
    names = ["a panel with a long name", Markup("W<sub>KQ</sub> of another one"), "incomprehensibilities"]
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
