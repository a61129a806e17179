"""A self-contained HTML page: text, tables and figures in one file that needs no network."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from mechicl.base.arguments import check_fields
from mechicl.viz.export import NATURAL_HEIGHT, Html, libraries, still_svgs

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
.figure > svg { max-width: 100%; height: auto; }
@media print { nav { display: none; } .figure { zoom: 0.6; break-inside: avoid; } }
"""
_NO_SCRIPT = """
<noscript><p class="note">A script inside this page draws its figures: allow it to run to see them.</p></noscript>
"""
# The script is at the end and runs before the page counts as loaded, so a browser that prints it has every figure.
_DRAW = """FIGURES.forEach((figure, i) => {
  const place = document.getElementById(`figure${i}`);
  place.replaceChildren(); // the still picture
  Plotly.newPlot(place, figure.data, figure.layout, { displaylogo: false, responsive: true });
});"""


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
    """Return anything as escaped text."""
    return html.escape(str(words))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as HTML; every cell is escaped."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, lead: str, sections: Sequence[Section], *, opening: Section | None = None) -> str:
    """Return a whole document as HTML: a title, a sentence under it, and sections with links to them.

    Figures are interactive; plotly's script (4.8 MB) is in the page once. If kaleido and Chromium or Chrome are
    installed, the page also contains an SVG of each figure, which is shown until the script replaces it, and if no
    script runs.

    Args:
        title: title of the document.
        lead: sentence under the title, the page's subject.
        sections: sections in order; each has a link on top of the page.
        opening: section in a quiet box above the links, to read first; none by default.

    Example:
        >>> html = page("Two models", "What they have in common.", [Section("Losses", "On 512 prompts.", figure)])
    """
    opened = [] if opening is None else [opening]
    parts = [part for section in (*opened, *sections) for part in section.parts]
    figures = [part for part in parts if isinstance(part, go.Figure)]
    stills = still_svgs(figures)
    places = enumerate(stills)
    top = "".join(f'<section id="opening">{_body(section, places)}</section>' for section in opened)
    content = "".join(f'<section id="s{i}">{_body(section, places)}</section>' for i, section in enumerate(sections))
    links = " ".join(f'<a href="#s{i}">{text(section.title)}</a>' for i, section in enumerate(sections))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>'
        f"{libraries([part for part in parts if isinstance(part, Html)])}</head>"
        f"<body><h1>{text(title)}</h1><p>{text(lead)}</p>{'' if all(stills) else _NO_SCRIPT}"
        f"{top}<nav>{links}</nav>{content}{_script(figures)}</body></html>"
    )


def _body(section: Section, places: "enumerate[str]") -> str:
    """Return heading, explanation and contents; a figure gets the next of the places, a number and an SVG."""
    words = re.sub("`([^`]+)`", r"<code>\1</code>", text(section.words))
    pieces = [f"<h2>{text(section.title)}</h2>", *([f"<p>{words}</p>"] if words else [])]
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
    return f"<script>{get_plotlyjs()}</script><script>const FIGURES = [{data}];\n{_DRAW}</script>"
