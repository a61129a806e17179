"""The page's pieces escape what they are given."""

from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page

from mechicl.viz import Html, attention_html
from mechicl.viz.elements import add_line, figure
from mechicl.viz.page import Section, page, table, text

TALL = 20  # figures: many screens
ATTACK = "<script>alert('x')</script>&\""


def test_every_cell_title_and_paragraph_is_escaped():
    html = page(ATTACK, ATTACK, [Section(ATTACK, ATTACK, table((ATTACK,), [(ATTACK,)]))])
    assert "<script>alert" not in html
    assert html.count(text(ATTACK)) == 8  # title twice, lead, link, heading, paragraph, two cells


def test_the_opening_stands_above_the_links_and_is_escaped():
    html = page("title", "lead", [Section("one", "words", "")], opening=Section(ATTACK, ATTACK, "<b>answer</b>"))
    assert "<script>alert" not in html
    assert html.index("<p>lead</p>") < html.index("<b>answer</b>") < html.index("<nav>") < html.index("<p>words</p>")
    assert 'href="#opening"' not in html
    assert 'id="opening"' not in page("title", "lead", [])


def drawing(name: str = "line", height: int = 400):
    fig = figure(name, "x", "y")
    add_line(fig, range(5), [i * i for i in range(5)], name, "#222222")
    return fig.update_layout(height=height)


def opened(browser: Browser, folder: Path, html: str, *, anchor: str = "", before: str = "", **options) -> Page:
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    shown = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True, **options).new_page()
    shown.on("pageerror", lambda error: pytest.fail(str(error)))
    if before:
        shown.add_init_script(before)
    shown.goto(path.as_uri() + anchor)
    return shown


def drawn(shown: Page) -> list[int]:
    """Numbers of the figures that are drawn."""
    return shown.evaluate("[...document.querySelectorAll('.figure[data-drawn=yes]')].map(each => +each.dataset.figure)")


def test_words_are_painted_first_and_figures_drawn_as_they_are_scrolled_to(tmp_path: Path, browser: Browser):
    html = page("title", "lead", [Section(f"{i}", "words", drawing(f"line {i}")) for i in range(TALL)])
    assert len(html.encode()) < 1.9e6
    shown = opened(browser, tmp_path, html)
    shown.wait_for_selector(".figure[data-drawn=yes]")
    shown.wait_for_timeout(300)
    assert 0 in drawn(shown)
    assert TALL - 1 not in drawn(shown)
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert shown.evaluate(paint) < shown.evaluate("performance.getEntriesByName('figure drawn')[0].startTime")
    assert shown.evaluate(paint) < 2000
    height = "document.documentElement.scrollHeight"
    before = shown.evaluate(height)
    shown.locator("section").last.scroll_into_view_if_needed()
    shown.wait_for_selector(f".figure[data-figure='{TALL - 1}'][data-drawn=yes] .main-svg")
    assert shown.evaluate(height) == before
    shown.evaluate("mechicl.drawAll()")
    assert drawn(shown) == list(range(TALL))
    assert shown.locator(".main-svg .scatterlayer path.js-line").count() == TALL
    assert shown.evaluate(height) == before
    shown.context.close()


def test_a_link_to_a_section_shows_its_figure_at_its_place(tmp_path: Path, browser: Browser):
    html = page("title", "lead", [Section(f"{i}", "words", drawing(f"line {i}")) for i in range(TALL)])
    shown = opened(browser, tmp_path, html, anchor="#s15")
    shown.wait_for_selector(".figure[data-figure='15'][data-drawn=yes]")
    box = shown.locator("#s15").bounding_box()
    assert box is not None
    assert abs(box["y"]) < 60
    assert 0 not in drawn(shown)
    shown.context.close()


def test_printing_draws_every_figure(tmp_path: Path, browser: Browser):
    html = page("title", "lead", [Section(f"{i}", "words", drawing(f"line {i}")) for i in range(TALL)])
    shown = opened(browser, tmp_path, html)
    shown.evaluate("mechicl.ready")
    printed = shown.pdf()
    assert drawn(shown) == list(range(TALL))
    assert len(printed) > len(opened(browser, tmp_path, page("title", "lead", [])).pdf())
    shown.context.close()


def test_without_scripts_or_with_an_old_browser_the_page_says_why_there_are_no_figures(
    tmp_path: Path, browser: Browser
):
    html = page("title", "lead", [Section("one", "words", drawing())])
    shown = opened(browser, tmp_path, html, java_script_enabled=False)
    box = shown.locator("noscript p").bounding_box()
    assert box is not None
    assert box["height"] > 15
    shown.context.close()
    shown = opened(browser, tmp_path, html, before="delete globalThis.DecompressionStream")
    shown.get_by_text("does not show the figures: it cannot unpack them").wait_for()
    shown.context.close()
    assert "<noscript>" not in page("title", "lead", [Section("one", "words", "no figure")])


def test_a_section_may_hold_several_things_in_order(tmp_path: Path, browser: Browser):
    parts = (drawing("first"), table(("a",), [("cell",)]), drawing("second"))
    shown = opened(browser, tmp_path, page("title", "lead", [], opening=Section("one", "words", parts)))
    shown.evaluate("mechicl.drawAll()")
    text = shown.locator("#opening").inner_text()
    assert text.index("first") < text.index("cell") < text.index("second")
    shown.context.close()


def test_attention_is_a_figure_and_brings_no_script_of_its_own(tmp_path: Path, browser: Browser):
    html = page("title", "lead", [Section("one", "words", attention_html(torch.eye(2)[None], ["first", "second"]))])
    assert "CircuitsVis" not in html
    shown = opened(browser, tmp_path, html)
    shown.evaluate("mechicl.drawAll()")
    assert shown.locator(".heatmaplayer image").count() == 1
    assert {"first", "second", "head 0"} <= set(shown.locator("svg text").all_text_contents())
    shown.context.close()


def test_pictures_of_one_page_share_one_script(tmp_path: Path, browser: Browser):
    pictures = [Html(f"<i id='i{i}'></i><script>window.draw('i{i}')</script>", "window.draw = draw_it") for i in (0, 1)]
    html = page("title", "lead", [Section(f"{i}", "", picture) for i, picture in enumerate(pictures)])
    assert html.count("window.draw = draw_it") == 1
    with_source = html.replace("draw_it", "(id) => { document.getElementById(id).textContent = 'drawn'; }")
    shown = opened(browser, tmp_path, with_source)
    assert shown.locator("i").all_inner_texts() == ["drawn", "drawn"]
    shown.context.close()
