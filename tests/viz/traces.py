"""Read the drawn numbers from plotly's figures."""

from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, Page
from torch import Tensor

from mechicl.viz.page import Section, page


def lines(figure: Any, name: str) -> list[tuple[list, list]]:
    """Return places and values of all traces of a name."""
    return [(list(trace.x), list(trace.y)) for trace in figure.data if trace.name == name]


def heatmaps(figure: Any) -> list[Tensor]:
    """Return the numbers of every heatmap, `[y x]`."""
    return [torch.tensor(trace.z, dtype=torch.float64) for trace in figure.data if trace.type == "heatmap"]


def open_page(browser: Browser, folder: Path, *figures: Any) -> tuple[Page, list[str]]:
    """Open a page with figures in a browser; returns it with a list of its errors and network requests."""
    path = folder / "page.html"
    path.write_text(page("Pictures", "", [Section(f"{i}", "", figure) for i, figure in enumerate(figures)]))
    tab = browser.new_page(viewport={"width": 1200, "height": 900})
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    tab.goto(path.as_uri())
    return tab, problems
