"""The page's pieces escape what they are given."""

from pathlib import Path

import torch
from playwright.sync_api import Browser

from mechicl.viz import attention_html
from mechicl.viz.page import Section, page, table, text

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


def test_pictures_of_one_page_share_one_script_and_are_all_drawn(tmp_path: Path, browser: Browser):
    first, second = (attention_html(torch.eye(n)[None], [str(i) for i in range(n)]) for n in (2, 3))
    html = page(
        "title", "lead", [Section("one", "words", first), Section("two", "", second), Section("three", "words", first)]
    )
    assert html.count("var CircuitsVis=") == 1
    assert "var CircuitsVis=" not in page("title", "lead", [Section("one", "words", "")])
    path = tmp_path / "page.html"
    path.write_text(html, encoding="utf-8")
    shown = browser.new_page()
    errors: list[str] = []
    shown.on("pageerror", lambda error: errors.append(str(error)))
    shown.goto(path.as_uri())
    shown.wait_for_function("document.querySelectorAll('canvas').length === 6")  # a small and a large one each
    widths = shown.locator("canvas").evaluate_all("all => all.map((each) => each.getBoundingClientRect().width)")
    assert min(widths) > 50
    assert errors == []
    shown.close()
