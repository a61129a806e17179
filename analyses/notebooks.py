"""Runs the notebooks of this folder from top to bottom and saves them with their outputs: `make notebooks`.

The script that attention pictures share (1.3 MB) and the widgets' own are left out of what is saved: they come back
when a notebook is run.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
SCRIPT = re.compile(r"<script>.*?</script>", re.DOTALL)
LARGE = 100_000  # characters of a script beyond which it is a library
LEFT_OUT = "<!-- a library was here; run this cell to have it back -->"


def run(path: Path, timeout: int = 300) -> NotebookNode:
    """A notebook with fresh outputs.

    Raises:
        CellExecutionError: a cell failed; the message holds its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    # what is printed at once or in parts is one output
    options: dict[str, Any] = {"store_widget_state": False, "coalesce_streams": True}
    NotebookClient(notebook, timeout=timeout, resources=resources, **options).execute()
    return notebook


def without_libraries(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what running it brings back: large scripts, times of execution."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data:
                data["text/html"] = SCRIPT.sub(lambda m: LEFT_OUT if len(m[0]) > LARGE else m[0], data["text/html"])
    return notebook


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of notebooks; all by default")
    args = parser.parse_args(argv)
    paths = sorted(HERE.glob("*.ipynb"))
    for path in [path for path in paths if not args.names or path.stem in args.names]:
        nbformat.write(without_libraries(run(path)), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
