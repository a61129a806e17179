"""The page's pieces escape what they are given."""

from mechicl.viz.page import frame, page, section, table, text

ATTACK = "<script>alert('x')</script>&\""


def test_every_cell_title_and_paragraph_is_escaped():
    html = page(ATTACK, ATTACK, [section(ATTACK, ATTACK, table((ATTACK,), [(ATTACK,)]))])
    assert "<script>alert" not in html
    assert html.count(text(ATTACK)) == 8  # title twice, lead, link, heading, paragraph, two cells


def test_a_frame_holds_a_document_as_an_attribute():
    html = frame('<p class="a">hello</p>', 100, 50)
    assert html.count("<") == 2
    assert "&lt;p class=&quot;a&quot;&gt;hello" in html
