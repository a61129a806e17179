"""The notebooks run from top to bottom, are saved with their outputs, and work in a real JupyterLab."""

import importlib
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser import JupyterLab

ANALYSES = Path(__file__).parent.parent / "analyses"
PATHS = sorted(ANALYSES.glob("*.ipynb"))


def script(name: str) -> Any:
    """A script of `analyses/` as a module."""
    sys.path.insert(0, str(ANALYSES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ANALYSES))


notebooks = script("notebooks")


RICH = ("application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json", "text/html")


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell has put out: streams by name, data by its richest type."""
    return [
        next((kind for kind in RICH if kind in output.get("data", {})), output.get("name", output.output_type))
        for output in cell.outputs
    ]


def test_the_notebooks_are_those_that_the_readme_names():
    names = ["attention_circuits", "first_tour", "icl_against_finetuning", "induction_heads", "interactive_patching"]
    assert [path.stem for path in PATHS] == names
    readme = (ANALYSES.parent / "README.md").read_text()
    assert [name for name in names if f"analyses/{name}.ipynb" not in readme] == []


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_a_notebook_runs_and_is_saved_with_the_outputs_that_it_makes(path):
    saved = nbformat.read(path, as_version=4)
    nbformat.validate(saved)
    ran = notebooks.run(path)
    for before, after in zip(saved.cells, ran.cells, strict=True):
        if before.cell_type == "code":
            assert before.execution_count == after.execution_count
            assert kinds(before) == kinds(after)
            assert "error" not in kinds(after)
    assert path.stat().st_size < 1_000_000
    assert "var CircuitsVis=" not in path.read_text()
    assert str(Path.home()) not in path.read_text()


def test_libraries_are_left_out_of_what_is_saved_and_nothing_else_is():
    cell = nbformat.v4.new_code_cell("picture")
    small, large = "<script>draw()</script>", f"<script>{'x' * 200_000}</script>"
    cell.outputs = [nbformat.v4.new_output("display_data", {"text/html": f"<p>{small}{large}</p>", "text/plain": "p"})]
    cell.metadata["execution"] = {"iopub.status.busy": "now"}
    saved = notebooks.without_libraries(nbformat.v4.new_notebook(cells=[cell]))
    assert saved.cells[0].outputs[0].data == {"text/html": f"<p>{small}{notebooks.LEFT_OUT}</p>", "text/plain": "p"}
    assert "execution" not in saved.cells[0].metadata


def test_interactive_patching_works_in_jupyterlab(jupyter_lab: JupyterLab):
    page = jupyter_lab.drive_notebook(ANALYSES / "interactive_patching.ipynb")
    canvas = page.locator("figure canvas").first
    canvas.wait_for()
    box = canvas.bounding_box()
    assert box is not None
    assert min(box["width"], box["height"]) > 50
    assert page.locator(".js-plotly-plot").count() == 1
    shown = page.locator("tr[data-run=patched] .prediction")
    page.get_by_role("button", name="clear").click()
    page.wait_for_function("!document.querySelector('.patches button')")
    before = shown.inner_text()
    assert before == page.locator("tr[data-run=corrupted] .prediction").inner_text()
    page.locator('.cell[data-layer="6"][data-pos="40"]').click()
    changed = "before => document.querySelector('tr[data-run=patched] .prediction').innerText !== before"
    page.wait_for_function(changed, arg=before)
    page.get_by_role("button", name="undo").click()
    page.wait_for_function(
        "before => document.querySelector('tr[data-run=patched] .prediction').innerText === before", arg=before
    )
