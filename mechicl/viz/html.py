"""Pictures as pieces of HTML, and the scripts that they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

import plotly.graph_objects as go
from IPython.display import HTML, display

from mechicl.base.arguments import checked

_shown: set[str] = set()  # scripts that this kernel's notebook has


@dataclass(frozen=True)
class Html:
    """A picture as HTML; a notebook shows it, `save` writes it to a file, `page` puts it on a page.

    Attributes:
        body: the picture. An element that a script has not drawn yet has the attribute `data-waiting`.
        script: source of the library that the picture needs, the same for all such pictures; empty if it needs none.
        still: the same picture as a figure for paper and pages, if there is one.
    """

    body: str = field(repr=False)
    script: str = field(default="", repr=False)
    still: go.Figure | None = field(default=None, repr=False, compare=False)

    def _repr_html_(self) -> str:
        return self.body if self.script in _shown else f"{libraries([self])}{self.body}"

    def save(self, path: str | Path) -> Path:
        """Write a file that needs nothing else, and return its path."""
        path = Path(path)
        path.write_text(f"<!doctype html><html>{self.document()}</html>", encoding="utf-8")
        return path

    def document(self) -> str:
        """Return head and body of a document that needs nothing else."""
        return f'<head><meta charset="utf-8">{libraries([self])}</head><body>{self.body}</body>'


def libraries(pictures: Sequence[Html]) -> str:
    """Return the scripts that pictures need, each once, as HTML."""
    scripts = dict.fromkeys(picture.script for picture in pictures if picture.script)
    return "".join(f"<script>{script}</script>" for script in scripts)


@cache
def circuitsvis_source() -> str:
    """Return the script of circuitsvis from its package, fit for use inside a page: no network, no telemetry."""
    source = files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    source = "\n".join(line for line in source.splitlines() if not line.startswith("//# sourceMappingURL="))
    return source.replace("</script", "<\\/script")  # in a string of the source


@checked
def init_notebook() -> None:
    """Put the JavaScript of attention pictures (1.3 MB) into the notebook once, to keep its file small.

    Pictures shown after it contain only their own data and need the output of the cell that called this; without this
    call, each picture contains the script.

    Example:
        >>> viz.init_notebook()
        >>> viz.prompt_attention(model, prompts[:1])
    """
    source = circuitsvis_source()
    note = "The attention pictures below use the script in this cell's output."
    display(HTML(f"<script>{source}</script><small>{note}</small>"))
    _shown.add(source)
