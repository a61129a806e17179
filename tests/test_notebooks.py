"""The notebooks run, are committed with pictures, and work in JupyterLab."""

import base64
import io
import json
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image
from playwright.sync_api import expect
from traitlets.config import Config

from tests.browser import JupyterLab
from tests.pages import NEEDS_SMOLLM2
from tests.scripts import ANALYSES, import_script

PATHS = sorted(ANALYSES.glob("*.ipynb"))

NEEDS = {"function_vectors": NEEDS_SMOLLM2}

notebooks = import_script("notebooks")
RICH = (notebooks.PLOTLY, notebooks.WIDGET)


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """The kinds of a cell's outputs: streams by name, figures, widgets, attention pictures, texts and tables."""
    return [
        next((kind for kind in RICH if kind in output.get("data", {})), None)
        or ("attention" if set(output.get("data", {})) & {notebooks.STILL, notebooks.PNG} else None)
        or ("table" if "text/html" in output.get("data", {}) else output.get("name", output.output_type))
        for output in cell.outputs
    ]


def outputs_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def pictures_in(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The outputs with a PNG or an SVG."""
    return [output for output in outputs_of(notebook) if {notebooks.PNG, notebooks.SVG} & set(output.get("data", {}))]


def shades(png: bytes) -> int:
    """Count the colours of a picture that at least one pixel in 5,000 has."""
    with Image.open(io.BytesIO(png)) as image:
        colors = image.convert("RGB").getcolors(maxcolors=2**24) or []
        return sum(n > image.width * image.height / 5000 for n, _ in colors)


def test_the_notebooks_are_those_of_the_tutorials():
    names = ["attention_circuits", "does_it_run_newton", "first_tour", "function_vectors", "how_it_came_about",
             "icl_against_finetuning", "induction_heads", "interactive_patching"]  # fmt: skip
    assert [path.stem for path in PATHS] == names
    page = (ANALYSES.parent / "docs" / "tutorials" / "index.md").read_text()
    assert [name for name in names if name not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=NEEDS.get(path.stem, ())) for path in PATHS])
def test_a_notebook_runs_and_is_saved_with_the_outputs_that_it_makes(path):
    saved = nbformat.read(path, as_version=4)
    nbformat.validate(saved)
    ran = notebooks.settled(notebooks.run(path))
    for before, after in zip(saved.cells, ran.cells, strict=True):
        if before.cell_type == "code":
            assert before.execution_count == after.execution_count
            assert kinds(before) == kinds(after)
            assert "error" not in kinds(after)
    assert "var CircuitsVis=" not in path.read_text()
    assert str(Path.home()) not in path.read_text()


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_every_figure_of_a_committed_notebook_has_a_picture_that_is_not_blank(path):
    notebook = nbformat.read(path, as_version=4)
    for output in outputs_of(notebook):
        data = output.get("data", {})
        assert (notebooks.PLOTLY in data) == (notebooks.SVG in data)
        assert (notebooks.WIDGET in data or data.get("text/plain") == "Html()") == (notebooks.PNG in data)
        assert "<script" not in data.get("text/html", "")
        assert notebooks.STILL not in data
    shown = pictures_in(notebook)
    assert len(shown) >= 3
    for output in shown:
        if notebooks.SVG in output.data:
            assert output.data[notebooks.SVG].startswith("<svg")
            assert len(output.data[notebooks.SVG]) < 100_000
            continue
        png = base64.b64decode(output.data[notebooks.PNG])
        assert shades(png) >= 4
        assert len(png) < 100_000
        assert min(output.metadata[notebooks.PNG].values()) >= 200
    widgets = notebook.metadata.get("widgets", {}).get(notebooks.WIDGETS, {}).get("state", {})
    views = [
        output.data[notebooks.WIDGET]["model_id"]
        for output in outputs_of(notebook)
        if notebooks.WIDGET in output.get("data", {})
    ]
    assert [view for view in views if "_esm" not in widgets.get(view, {}).get("state", {})] == []
    assert path.stat().st_size < 1_500_000


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_a_page_that_runs_no_scripts_shows_every_picture(path, browser):
    notebook = nbformat.read(path, as_version=4)
    # everything that a page shows without scripts
    kinds = [kind for kind in HTMLExporter().config.NbConvertBase.display_data_priority if kind != notebooks.WIDGET]
    exporter = HTMLExporter(config=Config({"NbConvertBase": {"display_data_priority": kinds}}))
    html, _ = exporter.from_notebook_node(notebook)
    context = browser.new_context(java_script_enabled=False, offline=True, viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    page.set_content(html)
    images = page.locator(".jp-OutputArea img")
    assert images.count() == len(pictures_in(notebook))
    for image in images.all():
        box = image.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) >= 200
        assert shades(image.screenshot()) >= 4
    context.close()


def test_libraries_and_whatever_differs_between_runs_are_not_saved():
    cell, other = new_code_cell("picture"), new_code_cell("viz.init_notebook()")
    name = "0123456789abcdef0123456789abcdef"
    words = {
        "text/html": "<p>a table</p>",
        "text/plain": "<Thing at 0x7f9a245a3790>",
        notebooks.WIDGET: {"model_id": name},
    }
    cell.outputs = [new_output("display_data", words)]
    cell.metadata["execution"] = {"iopub.status.busy": "now"}
    other.outputs = [new_output("display_data", {"text/html": f"<script>{'x' * 200_000}</script>"})]
    notebook = new_notebook(cells=[cell, other])
    notebook.metadata["widgets"] = {notebooks.WIDGETS: {"state": {name: {"state": {"head": 1}}}}}
    saved = notebooks.settled(notebook)
    widget = "0" * 32
    expected = {"text/html": "<p>a table</p>", "text/plain": "<Thing>", notebooks.WIDGET: {"model_id": widget}}
    assert saved.cells[0].outputs[0].data == expected
    assert saved.metadata["widgets"][notebooks.WIDGETS]["state"] == {widget: {"state": {"head": 1}}}
    assert saved.cells[1].outputs == []
    assert "execution" not in saved.cells[0].metadata


def test_a_picture_is_drawn_again_only_if_its_data_changed(browser):
    def notebook(y: float) -> nbformat.NotebookNode:
        fig = json.loads(str(go.Figure(go.Scatter(y=[0, y])).to_json()))
        still = {"text/html": "<script>draw()</script>", notebooks.STILL: {"figure": fig}}
        cells = [new_code_cell("a", outputs=[new_output("display_data", {notebooks.PLOTLY: fig})])]
        return new_notebook(cells=[*cells, new_code_cell("b", outputs=[new_output("display_data", still)])])

    first = notebooks.with_pictures(notebook(1.0))
    figure, attention = notebooks.outputs_of(first)
    assert set(figure.data) == {notebooks.PLOTLY, notebooks.SVG}
    assert set(attention.data) == {notebooks.PNG}  # its script would be missing
    assert "<svg" in figure.data[notebooks.SVG]
    png = base64.b64decode(attention.data[notebooks.PNG])
    assert shades(png) >= 3
    with Image.open(io.BytesIO(png)) as image:
        assert attention.metadata[notebooks.PNG] == {"width": image.width // 2, "height": image.height // 2}
    figure.data[notebooks.SVG] = attention.data[notebooks.PNG] = "kept"
    for y, kept in ((1.0, True), (2.0, False)):
        figure, attention = notebooks.outputs_of(notebooks.with_pictures(notebook(y), first))
        assert (figure.data[notebooks.SVG] == "kept") == (attention.data[notebooks.PNG] == "kept") == kept


CLIPBOARD = """Promise.race([navigator.clipboard.readText(), new Promise((_, refuse) =>
    setTimeout(() => refuse(new Error('the clipboard did not answer in 30 s')), 30_000))])"""


# a component, a head and a click faster than the kernel answers
CHOOSE_AND_CLICK = """widget => {
    for (const [name, value] of [["component", "z"], ["head", "0"]]) {
        const select = widget.querySelector(`select[aria-label=${name}]`);
        select.value = value;
        select.dispatchEvent(new Event("change"));
    }
    widget.querySelector('.cell[data-layer="6"][data-pos="40"]').click();
}"""


@pytest.mark.slow
def test_interactive_patching_works_in_jupyterlab(jupyter_lab: JupyterLab):
    page = jupyter_lab.drive_notebook(ANALYSES / "interactive_patching.ipynb")
    canvas = page.locator("figure canvas").first
    canvas.wait_for()
    box = canvas.bounding_box()
    assert box is not None
    assert min(box["width"], box["height"]) > 50
    assert page.locator(".js-plotly-plot").count() == 1
    widget = page.locator(".mechicl-explorer:not(.mechicl-explorer-still *)")  # not its static picture
    shown, patches = widget.locator("tr[data-run=patched] .prediction"), widget.locator(".chip")
    widget.get_by_role("button", name="clear").click()
    expect(patches).to_have_count(0)
    before = shown.inner_text()
    assert before == widget.locator("tr[data-run=corrupted] .prediction").inner_text()
    cell = widget.locator('.cell[data-layer="6"][data-pos="40"]')
    cell.click()
    expect(shown).not_to_have_text(before)
    widget.get_by_role("button", name="undo").click()
    expect(shown).to_have_text(before)
    widget.evaluate(CHOOSE_AND_CLICK)
    widget.get_by_role("button", name="take out: z of layer 6, pos 40, head 0").wait_for()
    # keys act in the widget, and the notebook's own shortcuts do not
    cells, keys = page.locator(".jp-Notebook .jp-Cell"), page.keyboard
    active = "cells => cells.map((cell) => cell.classList.contains('jp-mod-active'))"
    before = cells.evaluate_all(active)
    cell.press("ArrowLeft")
    for key in ("ArrowUp", "ArrowDown", "Shift+ArrowLeft", "Shift+ArrowDown", "Enter"):
        keys.press(key)
    expect(patches).to_have_count(2)
    keys.press("Control+z")
    expect(patches).to_have_count(1)
    keys.press("Control+Shift+Z")
    expect(patches).to_have_count(2)
    assert cells.evaluate_all(active) == before
    assert page.locator(".jp-Notebook.jp-mod-editMode").count() == 0
    # the preview is computed between clicks, and what it shows can be saved and copied
    expect(widget.locator("progress")).to_be_hidden(timeout=120_000)
    with page.expect_download() as download:
        widget.get_by_role("button", name="save picture").click()
    assert shades(download.value.path().read_bytes()) >= 6
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    widget.get_by_role("button", name="copy as code").click()
    expect(widget.get_by_role("button", name="copied")).to_be_visible()
    assert 'from_clean("blocks.6.attn.hook_z", 40, 0)' in page.evaluate(CLIPBOARD)
