"""A self-contained HTML page: text, tables and figures in one file that needs no network."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from mechicl.viz.html import Html, joined, library

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
.opening { background: #f6f8fa; border-left: 4px solid #b9c6d3; border-radius: 4px; padding: 14px 20px;
           margin: 1.2em 0; }
.opening h2 { margin-top: 0; }
"""


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a page: title, explaining words, and a plotly figure, a picture, or HTML such as a `table`."""

    title: str
    words: str
    content: go.Figure | Html | str

    def html(self) -> str | Html:
        """The content as HTML; the page brings plotly's source once."""
        if not isinstance(self.content, go.Figure):
            return self.content
        config = {"displaylogo": False, "responsive": True}
        return self.content.to_html(full_html=False, include_plotlyjs=False, config=config)


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
    bodies = [joined(f"<p>{text(section.words)}</p>", section.html()) for section in sections]
    links = " ".join(f'<a href="#s{i}">{text(section.title)}</a>' for i, section in enumerate(sections))
    content = "".join(
        f'<section id="s{i}"><h2>{text(section.title)}</h2>{body.body}</section>'
        for i, (section, body) in enumerate(zip(sections, bodies, strict=True))
    )
    first = "" if opening is None else _opening(opening)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style><script>{get_plotlyjs()}</script>'
        f"{library(*bodies, *([] if opening is None else [joined(opening.html())]))}</head>"
        f"<body><h1>{text(title)}</h1><p>{text(lead)}</p>{first}<nav>{links}</nav>{content}</body></html>"
    )


def _opening(section: Section) -> str:
    body = joined(f"<p>{text(section.words)}</p>" if section.words else "", section.html())
    return f'<section class="opening" id="opening"><h2>{text(section.title)}</h2>{body.body}</section>'
