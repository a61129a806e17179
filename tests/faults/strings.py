"""Words that would like to be scripts, wherever a user's or a file's words reach a page: the browser runs none."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
from playwright.sync_api import Dialog, Page, sync_playwright

from mechicl import constructions, viz
from mechicl.algorithms import gradient_descent
from mechicl.analysis import PatchingSession, corrupt, match
from mechicl.checkpoints import save
from mechicl.learners import AlgorithmLearner
from mechicl.reports import Comparison, Row, Section, report, write_report
from mechicl.reports.sweep_page import write_sweep_page
from mechicl.statistics.grids import GridTable
from mechicl.tasks import LinearRegression, task_to_dict
from mechicl.viz.page import page, table
from tests.conftest import BROWSER_ARGS, BROWSERS
from tests.faults.part import Outcome, Part

TASK = LinearRegression(x_dim=2, n_context=4)
ATTACKS = {
    "a script": "<script>heard('script')</script>",
    "an end of a script": "</script><script>heard('end')</script>",
    "a picture": "<img src=x onerror=heard('img')>",
    "a picture in quotes": "\"><img src=x onerror=heard('quoted')>",
    "a picture in single quotes": "'><img src=x onerror=heard('single')>",
    "a drawing": "<svg onload=heard('svg')>",
    "a link": "<a href=\"javascript:heard('link')\" style='position:fixed;inset:0'>x</a>",
    "a frame": "<iframe srcdoc=\"<script>parent.heard('frame')</script>\"></iframe>",
    "a template": "${heard('template')}{{heard('braces')}}",
    "an entity": "&lt;img src=x onerror=heard('entity')&gt;",
    "a comment": "--><script>heard('comment')</script><!--",
    "a title": "</title><script>heard('title')</script>",
    "a style": "</style><img src=x onerror=heard('style')>",
    "an attribute": "\" autofocus onfocus=heard('focus') x=\"",
    "a remote picture": "<img src='https://example.com/x.png'>",
    "other directions": "\u202ereversed\u202c\u2066\u200b",
    "very long": "long " * 4000,
    "separators": "a\u2028b\u2029c\0d",
    "half of a pair": "x\ud800y",
    "TeX": "$\\href{javascript:heard('tex')}{x}$",
}

ALL = "all of them that are short"
SHORT = [name for name, words in ATTACKS.items() if len(words) < 200 and "\ud800" not in words]


def _construction() -> Any:
    return constructions.gradient_descent(x_dim=2, n_context=4, step_size=0.1, steps=2)


def _report(words: str, folder: Path) -> Path:
    five = AlgorithmLearner(gradient_descent, {"steps": [5], "step_size": 0.05})
    return report(five, TASK, folder, compare={words: five}, sections=["loss"], n_prompts=64, progress=False)


def _checkpoint(words: str, folder: Path) -> Path:
    record = {
        "command": words, "hardware": words, "versions": {words: words}, "steps_done": words, "seeds": [0],
        "name": words,
        "training": {"task": task_to_dict(TASK), "model": {words: words}, "steps": words}, "notes": {words: [words]},
    }  # fmt: skip
    saved = save(folder / "saved", _construction(), record)
    return write_report(saved, folder / "out", sections=["loss"], n_prompts=64, progress=False)


def _page(words: str, folder: Path) -> Path:
    figure = go.Figure(go.Scatter(x=[1, 2], y=[1, 2], name="line"))
    html = page(words, words, [Section(words, words, [table((words,), [(words,)]), figure])])
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8", errors="replace")
    return path


def _figure(words: str, folder: Path) -> Path:
    frame = pd.DataFrame({words: [1.0, 2.0, 1.0, 2.0], "kind": [words, words, "b", "b"], "loss": [1.0, 2.0, 3.0, 4.0]})
    fig = viz.lines(frame.assign(seed=0), x=words, value="loss", by="kind", title=words)
    return Path(viz.save(fig, folder / "figure.html"))


def _sweep(words: str, folder: Path) -> Path:
    frame = pd.DataFrame({words: ["a", words, "a", words], "seed": [0, 0, 1, 1], f"loss {words}": [1.0, 2.0, 1.1, 2.1]})
    return write_sweep_page(GridTable(frame, (words, "seed")), folder, title=words)


def _attention(words: str, folder: Path) -> Path:
    pattern = torch.softmax(torch.randn(2, 3, 3), -1)
    return viz.attention_html(pattern, [words, words, "c"], [words, "b"]).save(folder / "attention.html")


def _attention_figure(words: str, folder: Path) -> Path:
    pattern = torch.softmax(torch.randn(2, 3, 3), -1)
    return Path(
        viz.save(viz.attention_figure(pattern, [words, words, "c"], [words, "b"], title=words), folder / "a.html")
    )


def _widget(words: str, folder: Path) -> Path:
    prompts = TASK.sample(2, seed=0)
    session = PatchingSession(_construction(), prompts, corrupt(prompts, "labels"))
    explorer = viz.PatchingExplorer(session, labels=[words] * session.n_pos)
    return explorer.picture().save(folder / "widget.html")


def _comparison(words: str, folder: Path) -> Path:
    row = Row(words, published=words, measured=1.0, note=words)
    return Comparison(words, words, (row,), [Section(words, words, "")], {"notes": words}).write(folder, "page")


def _results(words: str, folder: Path) -> Path:
    learner = AlgorithmLearner(gradient_descent, {"steps": [0, 1, 2], "step_size": 0.1})
    trajectory = learner.trajectory(TASK.sample(8, seed=0))
    named = dataclasses.replace(trajectory, name=words)
    result = match(named, named, TASK.sample(8, seed=0))
    path = folder / "result.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8>{result._repr_html_()}{viz.plot(result).to_html()}", errors="replace"
    )
    return path


PLACES: dict[str, Callable[[str, Path], Path]] = {
    "names of learners in a report": _report, "the record of a checkpoint in a report": _checkpoint,
    "every word of a page": _page, "axes of a figure": _figure, "a sweep's page": _sweep,
    "tokens of an attention picture": _attention, "tokens of an attention figure": _attention_figure,
    "labels of the widget": _widget, "rows of a comparison": _comparison, "a result in a notebook": _results,
}  # fmt: skip
LISTENER = "window.heard = (what) => { (window.__heard = window.__heard || []).push(what) };"


class Strings(Part):
    """A listener in the page, and one on what it asks the network for."""

    name = "strings"
    bar = "hostile words in reports, pictures and widgets: the browser's listener hears nothing"
    n = len(PLACES) * (1 + len(ATTACKS))
    sample = 4

    def prepare(self) -> None:
        self.executable = next(filter(None, map(shutil.which, BROWSERS)), None)

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        place = list(PLACES)[number % len(PLACES)]
        attack = [ALL, *ATTACKS][number // len(PLACES) % (1 + len(ATTACKS))]
        words = f"{attack} in {place}"
        try:
            path = PLACES[place](ATTACKS.get(attack) or "".join(ATTACKS[each] for each in SHORT), folder)
        except (ValueError, TypeError) as error:
            return Outcome("a named error", True, f"{words}: {error}")
        except Exception as error:
            return Outcome("a raw error", False, f"{words}: {type(error).__name__}: {error}", place)
        if self.executable is None:
            return Outcome("no browser here: written, not opened", True, words)
        heard = self._heard(path)
        return Outcome("it was heard" if heard else "nothing was heard", not heard, f"{words}: {heard}", place)

    def _heard(self, path: Path) -> list[str]:
        heard: list[str] = []
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=self.executable, args=BROWSER_ARGS)
            shown = browser.new_context(viewport={"width": 1200, "height": 900}).new_page()
            shown.on("dialog", lambda dialog: _dismissed(dialog, heard))
            shown.on("request", lambda request: _asked(request.url, path, heard))
            shown.add_init_script(LISTENER)
            shown.goto(path.as_uri())
            self._look_around(shown)
            heard += shown.evaluate("window.__heard || []")
            browser.close()
        return heard

    def _look_around(self, shown: Page) -> None:
        shown.wait_for_timeout(150)
        for point in ((300, 200), (600, 300), (600, 450), (200, 450), (900, 350)):
            shown.mouse.move(*point)
            shown.mouse.click(*point)
        for _ in range(8):
            shown.keyboard.press("Tab")
        shown.wait_for_timeout(150)


def _asked(url: str, path: Path, heard: list[str]) -> None:
    """Note what a page asks for beside itself."""
    own = url.startswith(("data:", "blob:", "about:")) or url.split("#")[0] == path.as_uri()
    if not own:
        heard.append(f"asked for {url}")


def _dismissed(dialog: Dialog, heard: list[str]) -> None:
    heard.append(f"a dialog: {dialog.message}")
    dialog.dismiss()
