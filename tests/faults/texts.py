"""Texts that try to run scripts, in every place where a user's text reaches a page: the browser runs none."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
from playwright.sync_api import Dialog, sync_playwright

from mechicl import constructions, viz
from mechicl.algorithms import gradient_descent
from mechicl.analysis import PatchingSession, corrupt, match
from mechicl.checkpoints import save
from mechicl.learners import AlgorithmLearner
from mechicl.reports import Comparison, Row, Section, report
from mechicl.reports.sweep_page import write_sweep_page
from mechicl.statistics.grids import GridTable
from mechicl.tasks import LinearRegression, task_to_dict
from mechicl.viz.attention import attention_html
from mechicl.viz.page import page, table
from tests.conftest import BROWSER_ARGS, BROWSERS
from tests.faults.runner import Campaign, Outcome

TASK = LinearRegression(x_dim=2, n_context=4)
ATTACKS = {
    "a script": "<script>ran('script')</script>", "an end of a script": "</script><script>ran('end')</script>",
    "a picture": "<img src=x onerror=ran('img')>", "a picture in quotes": "\"><img src=x onerror=ran('quoted')>",
    "a picture in single quotes": "'><img src=x onerror=ran('single')>", "a drawing": "<svg onload=ran('svg')>",
    "a link": "<a href=\"javascript:ran('link')\" style='position:fixed;inset:0'>x</a>",
    "a frame": "<iframe srcdoc=\"<script>parent.ran('frame')</script>\"></iframe>",
    "a template": "${ran('template')}{{ran('braces')}}", "an entity": "&lt;img src=x onerror=ran('entity')&gt;",
    "a comment": "--><script>ran('comment')</script><!--", "a title": "</title><script>ran('title')</script>",
    "a style": "</style><img src=x onerror=ran('style')>", "an attribute": "\" autofocus onfocus=ran('focus') x=\"",
    "a remote picture": "<img src='https://example.com/x.png'>", "TeX": "$\\href{javascript:ran('tex')}{x}$",
    "other directions": "\u202ereversed\u202c\u2066\u200b", "very long": "long " * 4000,
    "separators": "a\u2028b\u2029c\0d", "half of a surrogate pair": "x\ud800y",
}  # fmt: skip
ATTACKS = {"all short ones": "".join(t for t in ATTACKS.values() if len(t) < 200 and "\ud800" not in t)} | ATTACKS
LISTENER = "window.ran = (what) => { (window.__ran = window.__ran || []).push(what) };"
CONSTRUCTION = constructions.gradient_descent(x_dim=2, n_context=4, step_size=0.1, steps=2)
PATTERN = torch.softmax(torch.arange(18.0).reshape(2, 3, 3), -1)
QUICK: dict[str, Any] = {"sections": ["loss"], "n_prompts": 64, "progress": False}


def _descent(*steps: int) -> AlgorithmLearner:
    return AlgorithmLearner(gradient_descent, {"steps": [*steps], "step_size": 0.05})


def _write(html: str, path: Path) -> Path:
    path.write_text(f"<!doctype html><meta charset=utf-8>{html}", encoding="utf-8", errors="replace")
    return path


def _checkpoint(text: str, folder: Path) -> Path:
    training = {"task": task_to_dict(TASK), "model": {text: text}, "steps": text}
    named: dict[str, Any] = dict.fromkeys(("command", "hardware", "name", "steps_done"), text)
    record = named | {"versions": {text: text}, "seeds": [0], "training": training, "notes": {text: [text]}}
    return report(save(folder / "saved", CONSTRUCTION, record), None, folder / "out", **QUICK)


def _page(text: str, folder: Path) -> Path:
    figure = go.Figure(go.Scatter(x=[1, 2], y=[1, 2], name="line"))
    return _write(page(text, text, [Section(text, text, [table((text,), [(text,)]), figure])]), folder / "page.html")


def _figure(text: str, folder: Path) -> Path:
    frame = pd.DataFrame({text: [1.0, 2.0, 1.0, 2.0], "kind": [text, text, "b", "b"], "loss": [1.0, 2.0, 3.0, 4.0]})
    figure = viz.lines(frame.assign(seed=0), x=text, value="loss", by="kind", title=text)
    return Path(viz.save(figure, folder / "figure.html"))


def _sweep(text: str, folder: Path) -> Path:
    frame = pd.DataFrame({text: ["a", text, "a", text], "seed": [0, 0, 1, 1], f"loss {text}": [1.0, 2.0, 1.1, 2.1]})
    return write_sweep_page(GridTable(frame, (text, "seed")), folder, title=text)


def _widget(text: str, folder: Path) -> Path:
    prompts = TASK.sample(2, seed=0)
    session = PatchingSession(CONSTRUCTION, prompts, corrupt(prompts, "labels"))
    explorer = viz.PatchingExplorer(session)
    explorer.state = explorer.state | {"labels": [text] * session.n_pos}
    return explorer.picture().save(folder / "widget.html")


def _comparison(text: str, folder: Path) -> Path:
    row = Row(text, published=text, measured=1.0, note=text)
    return Comparison(text, text, (row,), [Section(text, text, "")], {"notes": text}).write(folder, "page")


def _result(text: str, folder: Path) -> Path:
    named = dataclasses.replace(_descent(0, 1, 2).trajectory(TASK.sample(8, seed=0)), name=text)
    result = match(named, named, TASK.sample(8, seed=0))
    return _write(result._repr_html_() + viz.plot(result).to_html(), folder / "result.html")


PLACES: dict[str, Callable[[str, Path], Path]] = {
    "names of learners in a report": lambda text, folder: report(
        _descent(5), TASK, folder, compare={text: _descent(5)}, **QUICK
    ),
    "tokens of an attention picture": lambda text, folder: attention_html(PATTERN, [text, text, "c"]).save(
        folder / "attention.html"
    ),
    "tokens of an attention figure": lambda text, folder: Path(
        viz.save(viz.attention_figure(PATTERN, [text, text, "c"], [text, "b"]), folder / "a.html")
    ),
    "a checkpoint's record in a report": _checkpoint, "every text of a page": _page, "axes of a figure": _figure,
    "a sweep's page": _sweep, "labels of the widget": _widget, "rows of a comparison": _comparison,
    "a result in a notebook": _result,
}  # fmt: skip
"""Functions that write a page with a text in a folder, and return its path."""


class Texts(Campaign):
    """Every attack in every place; a listener in the page records scripts that run, and requests to the network."""

    name = "texts"
    bar = "hostile texts in reports, figures and widgets: no script runs, nothing is requested"
    n, sample = len(PLACES) * len(ATTACKS), 4

    def prepare(self) -> None:
        self.executable = next(filter(None, map(shutil.which, BROWSERS)), None)

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        place, attack = list(PLACES)[number % len(PLACES)], list(ATTACKS)[number // len(PLACES) % len(ATTACKS)]
        text = f"{attack} in {place}"
        try:
            path = PLACES[place](ATTACKS[attack], folder)
        except Exception as error:
            is_named = isinstance(error, ValueError | TypeError)
            kind = "a named error" if is_named else "a raw error"
            return Outcome(kind, is_named, f"{text}: {type(error).__name__}: {error}", place)
        if self.executable is None:
            return Outcome("written, but not opened: there is no browser", True, text)
        events = self._open(path)
        return Outcome("a script ran" if events else "no script ran", not events, f"{text}: {events}", place)

    def _open(self, path: Path) -> list[str]:
        """Open a page, click and press keys; return everything that the listener noticed."""
        events: list[str] = []

        def dismiss(dialog: Dialog) -> None:
            events.append(f"a dialog: {dialog.message}")
            dialog.dismiss()

        def note(url: str) -> None:
            if not (url.startswith(("data:", "blob:", "about:")) or url.split("#")[0] == path.as_uri()):
                events.append(f"requested {url}")

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=self.executable, args=BROWSER_ARGS)
            tab = browser.new_context(viewport={"width": 1200, "height": 900}).new_page()
            tab.on("dialog", dismiss)
            tab.on("request", lambda request: note(request.url))
            tab.add_init_script(LISTENER)
            tab.goto(path.as_uri())
            tab.wait_for_timeout(150)
            for point in ((300, 200), (600, 300), (600, 450), (200, 450), (900, 350)):
                tab.mouse.click(*point)
            for _ in range(8):
                tab.keyboard.press("Tab")
            tab.wait_for_timeout(150)
            events += tab.evaluate("window.__ran || []")
            browser.close()
        return events
