"""Every picture of the reports on the shipped checkpoints: nothing empty, no overlaps, no empty captions.

`make test-all` draws one report of each kind, of some of its seeds, snapshots and prompts; `make pictures` draws all.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from mechicl import constructions, reports
from mechicl.analysis.behaviour import table_learners
from mechicl.checkpoints import Checkpoint, CheckpointError, Snapshots, available, load_checkpoint
from mechicl.reports import comparison, copying, descent, report, tables, texts
from mechicl.tasks import LinearRegression
from mechicl.viz.page import Section, page
from tests.pictures import section_faults, width_faults

QUICK = {  # a checkpoint of each kind of report, and of what reports draw differently
    "lsa-1l": "descent, with fine-tuning",
    "softmax-2h-sink": "descent, without weights to read it off",
    "lsa-2l-looped": "descent, with paths",
    "lstm-4l": "layers, without heads",
    "induction-2l": "tokens",
    "copy-2l": "model parts",
    "topics-3l": "texts",
    "table-regression": "tables",
}
N_PROMPTS = 200
N_SEEDS, N_SNAPSHOTS, N_MEASURED = 3, 8, 512  # of the quick reports: the same pictures of less
BYTES = 8e6  # of a report, without the SVGs


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> list[Section]:
    """The sections of every page that reports write during a test."""
    seen: list[Section] = []

    def remembered(title: str, lead: str, sections: Any, *, opening: Section | None = None) -> str:
        seen.extend([*([] if opening is None else [opening]), *sections])
        return page(title, lead, sections, opening=opening)

    monkeypatch.setattr(comparison, "page", remembered)
    return seen


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.pictures) for name in available()],
)
def test_every_picture_of_a_report_shows_what_it_says(
    name: str, sections: list[Section], tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
):
    if name in QUICK:
        _measure_less(monkeypatch)
    try:
        path = report(name, None, tmp_path, n_prompts=16 if QUICK.get(name) == "texts" else N_PROMPTS, progress=False)
    except CheckpointError as error:
        pytest.skip(f"there is no report: {error}")
    assert sections
    assert path.stat().st_size <= BYTES
    tab = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True).new_page()
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    faults = section_faults(sections) + width_faults(tab, path)
    tab.context.close()
    assert problems == []
    assert faults == []


def test_a_report_fits_narrow_and_wide_screens_and_its_first_screen_has_an_answer(tmp_path: Path, browser: Browser):
    model = constructions.gradient_descent(x_dim=3, n_context=6, step_size=0.8, steps=2)
    path = report(model, LinearRegression(x_dim=3, n_context=6), tmp_path, n_prompts=64, progress=False,
                  sections=["loss", "algorithm", "heads"])  # fmt: skip
    tab = browser.new_context(offline=True).new_page()
    assert width_faults(tab, path) == []
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.goto(path.as_uri())
    first = tab.locator("#opening .first")
    assert "behaves like" in tab.locator("h1").inner_text()
    assert first.locator(".js-plotly-plot").count() == 1
    assert first.locator("dt").count() == 3
    box = first.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 844
    assert tab.get_by_text("Not tested:").count() == 1
    tab.context.close()


def _measure_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer trainings, seeds, snapshots and prompts, for every picture that a report draws of many."""
    monkeypatch.setattr(reports, "load_checkpoint", _part_of)
    monkeypatch.setattr(texts, "LEARNING_RATES", (0.3,))
    monkeypatch.setattr(texts, "EPOCHS", (1,))
    for module, size in ((descent, "N_SHIFTED"), (copying, "_N_TUNING")):
        monkeypatch.setattr(module, size, N_MEASURED)
    for module, size, n in ((table_learners, "N_FITTED", 2), (tables, "N_IDENTIFY", 4), (tables, "N_PATCHED", 16)):
        monkeypatch.setattr(module, size, n)


def _part_of(name: str) -> Checkpoint:
    """A checkpoint with some of its seeds and snapshots, the first and the last among them."""
    whole = load_checkpoint(name)
    part = whole.select(range(min(N_SEEDS, len(whole.models))))
    if part.snapshots is None:
        return part
    steps, n = part.snapshots.steps, min(N_SNAPSHOTS, len(part.snapshots.steps))
    kept = sorted({round(i * (len(steps) - 1) / max(n - 1, 1)) for i in range(n)})
    weights = {name: tensor[kept] for name, tensor in part.snapshots.weights.items()}
    fewer = Snapshots(tuple(steps[i] for i in kept), weights)
    return dataclasses.replace(part, snapshots=fewer)


def test_each_kind_of_report_is_drawn_by_make_test_all():
    assert set(QUICK) <= set(available())
