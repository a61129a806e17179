"""Draw the pictures of the documentation: `python docs/pictures.py [NAME ...]`.

Each picture is the `figure` that the code of a page makes, so that page and picture agree.
"""

import os
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from mechicl import viz  # noqa: E402  the repository's root has to be on the path first
from tests.pages import blocks, run  # noqa: E402

PICTURES = {"families": "index.md"} | {
    name: f"findings/{name}.md"
    for name in (
        "layers", "one-layer", "gd-plus-plus", "does-it-run", "inside-gpt2-8l", "query-side", "fine-tuning", "training",
        "layers-details", "five-layers", "conditioning", "known-answers", "known-answers-causes", "sweeps",
        "sweeps-of-layers", "sweeps-of-tokens", "clamped-induction", "strategies", "beyond-attention", "transience",
        "learning-coefficient", "similarity-of-errors", "theory", "grokking", "what-kind",
    )
} | {"softmax-sink": "findings/five-layers.md"}  # fmt: skip
"""The page whose code makes each picture."""
VARIABLES = {"softmax-sink": "sink_figure"}
"""The picture's variable in the page's code, where it is not `figure`."""
WIDTH = 7.0  # inches, of 96 pixels


def main(names: list[str]) -> None:
    """Run the pages and save their figures."""
    for name, page in PICTURES.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            figure = run(blocks(DOCS / page), page)[VARIABLES.get(name, "figure")]
            os.chdir(DOCS)  # a browser does not start in a folder that was removed
        path = DOCS / "images" / f"{name}.svg"
        viz.save(figure, path, width=WIDTH, font_size=9)
        print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
