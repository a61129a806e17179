"""A self-contained HTML page: text, tables and figures in one file that needs no network."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from mechicl.base.arguments import check_fields
from mechicl.viz.export import NATURAL_HEIGHT, Html, libraries, still_svgs

Content = go.Figure | Html | str
_HERE = Path(__file__).parent

_NO_SCRIPT = """
<noscript><p class="note">A script inside this page draws its figures: allow it to run to see them.</p></noscript>
"""


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a page: title, explanation, and a plotly figure, a picture, HTML such as a `table`, or several of them.

    A picture that has a `still` is drawn as that figure: the page needs no script but plotly's.

    Attributes:
        title: heading of the part.
        words: explanation below the heading, in which `backticks` mark code.
        content: what follows, one or several.
    """

    title: str
    words: str
    content: Content | Sequence[Content]

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def parts(self) -> Sequence[Content]:
        """The contents below the explanation, in order."""
        parts = [self.content] if isinstance(self.content, str | Html | go.Figure) else self.content
        return [part.still if isinstance(part, Html) and part.still is not None else part for part in parts]


def text(words: object) -> str:
    """Return anything as escaped text, with each interval on one line."""
    return html.escape(str(words)).replace(" ± ", "\u00a0±\u00a0")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as HTML; every cell is escaped."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in header)
    names = ["", *(f' data-name="{text(cell)}"' for cell in header[1:])]  # shown in each row on narrow pages
    cells = [[f"<td{name}>{text(cell)}</td>" for name, cell in zip(names, row, strict=True)] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, lead: str, sections: Sequence[Section], *, opening: Section | None = None) -> str:
    """Return a whole document as HTML: a title, a sentence under it, and sections with links to them.

    Figures are interactive; plotly's script (4.8 MB) is in the page once. If kaleido and Chromium or Chrome are
    installed, the page also contains an SVG of each figure, which is shown until the script replaces it, and if no
    script runs. Where panels would be narrower than 240 pixels, the script arranges them in fewer columns.

    Args:
        title: title of the document.
        lead: sentence under the title, the page's subject.
        sections: sections in order; each has a link on top of the page.
        opening: the first screen. Its title becomes the page's heading; `title` and `lead` are small print. None by
            default.

    Example:
        >>> html = page("Two models", "What they have in common.", [Section("Losses", "On 512 prompts.", figure)])
    """
    opened = [] if opening is None else [opening]
    parts = [part for section in (*opened, *sections) for part in section.parts]
    figures = [part for part in parts if isinstance(part, go.Figure)]
    n_opening = sum(isinstance(part, go.Figure) for section in opened for part in section.parts)
    stills = still_svgs(figures, n_opening)
    places = enumerate(stills)
    top = f"<h1>{text(title)}</h1><p>{text(lead)}</p>"
    if opening is not None:
        top = (
            f'<section id="opening"><p class="subject">{text(title)}</p>{_body(opening, places, "h1")}'
            f"<details><summary>The model and the measurements</summary><p>{text(lead)}</p></details></section>"
        )
    content = "".join(f'<section id="s{i}">{_body(section, places)}</section>' for i, section in enumerate(sections))
    links = " ".join(f'<a href="#s{i}">{text(section.title)}</a>' for i, section in enumerate(sections))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{(_HERE / "page.css").read_text(encoding="utf-8")}</style>'
        f"{libraries([part for part in parts if isinstance(part, Html)])}</head>"
        f"<body>{top}{'' if all(stills) else _NO_SCRIPT}<details><summary>Contents</summary>"
        f"<nav>{links}</nav></details>{content}{_script(figures)}</body></html>"
    )


def _body(section: Section, places: "enumerate[str]", tag: str = "h2") -> str:
    """Return heading, explanation and contents; a figure gets the next of the places, a number and an SVG."""
    words = re.sub("`([^`]+)`", r"<code>\1</code>", text(section.words))
    pieces = [f"<{tag}>{text(section.title)}</{tag}>", *([f"<p>{words}</p>"] if words else [])]
    for part in section.parts:
        if isinstance(part, go.Figure):
            number, svg = next(places)
            height = part.layout.height or NATURAL_HEIGHT  # type: ignore[attr-defined]
            pieces.append(
                f'<div class="figure" id="figure{number}" role="figure" aria-label="{text(section.title)}" '
                f'style="height:{height:g}px">{svg}</div>'
            )
        else:
            pieces.append(part.body if isinstance(part, Html) else part)
    return "".join(pieces)


def _script(figures: Sequence[go.Figure]) -> str:
    if not figures:
        return ""
    # a "</script>" in a label would end the script
    data = ",\n".join(str(figure.to_json()).replace("<", "\\u003c") for figure in figures)
    # The script is at the end and runs before the page counts as loaded, so a browser that prints it has every figure.
    drawing = (_HERE / "page.js").read_text(encoding="utf-8")
    return f"<script>{get_plotlyjs()}</script><script>const FIGURES = [{data}];\n{drawing}</script>"
