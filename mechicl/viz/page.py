"""A self-contained HTML page: text, tables and figures in one file that needs no network."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import plotly.graph_objects as go

from mechicl.viz.html import Html, joined, library
from mechicl.viz.packing import ALPHABET, packed_figures, packed_plotly

Content = go.Figure | Html | str

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #222; background: #fff; max-width: 1100px; margin: 0 auto;
       padding: 24px 28px 80px; }
h1 { font-size: 1.7em; margin: 0.2em 0; } h2 { font-size: 1.2em; margin: 2.2em 0 0.3em; }
p { max-width: 46em; margin: 0.4em 0 0.8em; } .note { color: #555; font-size: 0.92em; }
table { border-collapse: collapse; margin: 1em 0; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid #ddd; vertical-align: top; }
th { font-weight: 600; border-bottom: 2px solid #999; } td:nth-child(3), td:nth-child(4) { white-space: nowrap; }
code { background: #f3f3f3; padding: 1px 4px; border-radius: 3px; }
nav a { margin-right: 1.2em; white-space: nowrap; } a { color: #1f6fb4; }
.scroll { overflow-x: auto; }
#opening { background: #f6f8fa; border-left: 4px solid #b9c6d3; border-radius: 4px; padding: 14px 20px;
           margin: 1.2em 0; }
#opening h2 { margin-top: 0; }
.figure { margin: 0.6em 0; overflow-x: auto; overflow-y: hidden; }
@media print { nav { display: none; } .figure { zoom: 0.6; break-inside: avoid; } }
"""
_NO_SCRIPT = """
<noscript><p class="note">A script inside this page draws its figures: allow it to run to see them.</p></noscript>
"""


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a page: title, explaining words, and a plotly figure, a picture, HTML such as a `table`, or several.

    A picture that has a `still` is drawn as that figure: the page needs no script but plotly's.
    """

    title: str
    words: str
    content: Content | Sequence[Content]

    @property
    def parts(self) -> Sequence[Content]:
        """What stands under the words, in order."""
        parts = [self.content] if isinstance(self.content, str | Html | go.Figure) else self.content
        return [part.still if isinstance(part, Html) and part.still is not None else part for part in parts]


def text(words: object) -> str:
    """Anything as escaped text."""
    return html.escape(str(words))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; every cell is escaped."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, lead: str, sections: Sequence[Section], *, opening: Section | None = None) -> str:
    """The whole document: a title, a sentence under it, and sections with links to them.

    Scripts that pictures share are in it once.

    Args:
        title: of the document.
        lead: what the page is about.
        sections: in order; each has a link on top of the page.
        opening: what to read first: a quiet box above the links.

    Example:
        >>> html = page("Two models", "What they have in common.", [Section("Losses", "On 512 prompts.", figure)])
    """
    figures: list[go.Figure] = []
    first = [] if opening is None else [_body(opening, figures)]
    bodies = [_body(section, figures) for section in sections]
    links = " ".join(f'<a href="#s{i}">{text(section.title)}</a>' for i, section in enumerate(sections))
    top = "".join(f'<section id="opening">{body.body}</section>' for body in first)
    content = "".join(f'<section id="s{i}">{body.body}</section>' for i, body in enumerate(bodies))
    no_script = _NO_SCRIPT if figures else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>{library(*first, *bodies)}</head>'
        f"<body><h1>{text(title)}</h1><p>{text(lead)}</p>{no_script}{top}<nav>{links}</nav>{content}"
        f"{_scripts(figures)}</body></html>"
    )


def _body(section: Section, figures: list[go.Figure]) -> Html:
    """Heading, words and contents. Figures are added to those of the page, and have a place in the text."""
    pieces: list[str | Html] = [f"<h2>{text(section.title)}</h2>"]
    if section.words:
        pieces.append(f"<p>{text(section.words)}</p>")
    for part in section.parts:
        if isinstance(part, go.Figure):
            height = part.layout.height or 450  # plotly's own, where there is none  # type: ignore[attr-defined]
            pieces.append(
                f'<div class="figure" data-figure="{len(figures)}" role="figure" aria-label="{text(section.title)}" '
                f'style="height:{height:g}px"></div>'
            )
            figures.append(part)
        else:
            pieces.append(part)
    return joined(*pieces)


def _scripts(figures: Sequence[go.Figure]) -> str:
    """What draws the figures, where there are some."""
    if not figures:
        return ""
    script = files("mechicl.viz").joinpath("page.js").read_text(encoding="utf-8")
    return (
        f'<script type="text/plain" id="figures">{packed_figures(figures)}</script>'
        f'<script type="text/plain" id="plotly">{packed_plotly()}</script>'
        f"<script>{script.replace('DIGITS_OF_BASE_85', ALPHABET)}</script>"
    )
