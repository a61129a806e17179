"""A self-contained HTML page: text, tables and figures in one file that needs no network."""

import html
from collections.abc import Sequence

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
"""


def text(words: object) -> str:
    """Anything as escaped text."""
    return html.escape(str(words))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; every cell is escaped."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def plot(figure: go.Figure) -> str:
    """A plotly figure; the page brings plotly's source once."""
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True})


def section(title: str, words: str, *parts: str | Html) -> tuple[str, Html]:
    """A section: its title, and escaped words followed by parts that are HTML already, or pictures."""
    return title, joined(f"<p>{text(words)}</p>", *parts)


def page(title: str, lead: str, sections: Sequence[tuple[str, str | Html]]) -> str:
    """The whole document; a script that pictures share is in it once.

    Args:
        title: of the page.
        lead: a sentence under it.
        sections: titles, and bodies that are HTML already.
    """
    contents = [(name, joined(body)) for name, body in sections]
    anchors = [f"s{i}" for i in range(len(sections))]
    links = " ".join(f'<a href="#{a}">{text(name)}</a>' for a, (name, _) in zip(anchors, contents, strict=True))
    bodies = "".join(
        f'<section id="{a}"><h2>{text(name)}</h2>{content.body}</section>'
        for a, (name, content) in zip(anchors, contents, strict=True)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style><script>{get_plotlyjs()}</script>'
        f"{library(*(content for _, content in contents))}</head>"
        f"<body><h1>{text(title)}</h1><p>{text(lead)}</p><nav>{links}</nav>{bodies}</body></html>"
    )
